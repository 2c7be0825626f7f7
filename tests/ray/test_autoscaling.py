"""Replicas start when many requests are under way, and go when there are few, without a failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from itertools import count
from pathlib import Path

import httpx

from tests.ray.conftest import commanded

FLOOD = 24
"""Requests at once: six times what two replicas are there for."""

TOKENS = 400
OPTIONS = ("--max-replicas", "2", "--requests-per-replica", "4")
DELAYS = ("--upscale-delay", "1", "--downscale-delay", "5")
PATIENCE = 240.0
"""Seconds. Serve looks at the average of the last 30 s, of which it hears every 10 s."""


async def stream(client: httpx.AsyncClient, text: str, session: str | None = None) -> None:
    """Read a long answer, and see that it is whole."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": TOKENS,
        "min_tokens": TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {} if session is None else {"x-session-id": session}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == TOKENS


async def ask_until(
    done: Callable[[], Awaitable[bool]], asking: list[Callable[[int], Awaitable[None]]]
) -> int:
    """Have each of `asking` ask again and again until `done()`, which takes its time. All get their
    last answers. Returns how many there were."""
    over = asyncio.Event()

    async def go_on(ask: Callable[[int], Awaitable[None]]) -> int:
        for number in count():
            if over.is_set():
                return number
            await ask(number)
        raise AssertionError("it counts without end")

    async def watch() -> int:
        try:
            async with asyncio.timeout(PATIENCE):
                while not await done():
                    pass
        finally:
            over.set()
        return 0

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in (watch(), *map(go_on, asking))]
    return sum(task.result() for task in tasks)


SESSIONS = [str(number) for number in range(100)]
"""So many that each of two replicas gets some."""


async def serving(client: httpx.AsyncClient) -> dict[str, str]:
    """A session for each replica that serves, by the replicas' ids."""
    found: dict[str, str] = {}
    for session in SESSIONS:
        answer = await client.get("/health", headers={"x-session-id": session})
        found.setdefault(answer.raise_for_status().headers["x-mlxsrv-replica"], session)
    return found


async def answered(client: httpx.AsyncClient, sessions: Iterable[str]) -> int:
    """Return how many replicas have read prompts, of those that sessions lead to."""
    healths = [
        (await client.get("/health?verbose=1", headers={"x-session-id": each})).json()
        for each in sessions
    ]
    return sum(each["requests"]["prompt_tokens"] > 0 for each in healths)


def test_replicas_come_with_a_flood_and_go_with_it(tmp_path: Path) -> None:
    async def run(url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
            [first] = await serving(client)

            async def both_answer() -> bool:
                await asyncio.sleep(0.5)
                sessions = await serving(client)
                return len(sessions) == 2 == await answered(client, sessions.values())

            def flooding(client_number: int) -> Callable[[int], Awaitable[None]]:
                return lambda number: stream(client, f"Chat {client_number}, {number}.")

            assert await ask_until(both_answer, [flooding(n) for n in range(FLOOD)]) >= FLOOD
            sessions = await serving(client)
            assert first in sessions
            assert len(sessions) == 2

            async def one_is_left() -> bool:
                await asyncio.sleep(0.5)
                return len(await serving(client)) == 1

            def at(session: str) -> Callable[[int], Awaitable[None]]:
                return lambda number: stream(client, f"Later {session}, {number}.", session)

            # Each has requests when one of them has to go.
            assert await ask_until(one_is_left, [at(each) for each in sessions.values()]) >= 2
            await stream(client, "And then?")

    with commanded(tmp_path, "--replicas", "1", *OPTIONS, *DELAYS) as command:
        assert command.announced == "1 to 2 replicas"
        asyncio.run(run(command.url))
        command.stop()
