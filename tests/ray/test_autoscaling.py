"""Replicas start when many requests are under way, and go when there are few, without a failure."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

import httpx

from tests.ray.conftest import commanded

FLOOD = 24
"""Requests at once: six times what two replicas are there for."""

TOKENS = 400
OPTIONS = ("--max-replicas", "2", "--requests-per-replica", "4", "--metrics")
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


async def serving(client: httpx.AsyncClient, session: str = "0") -> tuple[str, set[str]]:
    """The replica that a session leads to, and the others."""
    headers = {"x-session-id": session}
    told = (await client.get("/health?verbose=1", headers=headers)).raise_for_status().json()
    return told["replica"], set(told["others"])


async def answered(client: httpx.AsyncClient) -> set[str]:
    """The replicas that have read prompts."""
    metrics = (await client.get("/metrics")).raise_for_status().text
    found = re.findall(r'prefix_cache_queries_total\{.*replica="(\w+)"\} (\S+)', metrics)
    return {id for id, tokens in found if float(tokens) > 0}


async def session_at_each(client: httpx.AsyncClient) -> dict[str, str]:
    """A session for each of two replicas, by the replicas' ids."""
    found: dict[str, str] = {}
    for number in range(100):
        replica, _ = await serving(client, str(number))
        found.setdefault(replica, str(number))
        if len(found) == 2:
            return found
    raise AssertionError(f"all sessions lead to {found}")


def test_replicas_come_with_a_flood_and_go_with_it(tmp_path: Path) -> None:
    async def run(url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
            first, others = await serving(client)
            assert not others

            async def both_answer() -> bool:
                await asyncio.sleep(0.5)
                return len(await answered(client)) == 2

            def flooding(client_number: int) -> Callable[[int], Awaitable[None]]:
                return lambda number: stream(client, f"Chat {client_number}, {number}.")

            assert await ask_until(both_answer, [flooding(n) for n in range(FLOOD)]) >= FLOOD
            sessions = await session_at_each(client)
            assert first in sessions

            async def one_is_left() -> bool:
                await asyncio.sleep(0.5)
                return not (await serving(client))[1]

            def at(session: str) -> Callable[[int], Awaitable[None]]:
                return lambda number: stream(client, f"Later {session}, {number}.", session)

            # Each has requests when one of them is told to go.
            assert await ask_until(one_is_left, [at(each) for each in sessions.values()]) >= 2
            await stream(client, "And then?")

    with commanded(tmp_path, "--replicas", "1", *OPTIONS, *DELAYS) as command:
        assert command.announced == "1 to 2 replicas"
        asyncio.run(run(command.url))
        command.stop()
