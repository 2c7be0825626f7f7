"""Answers of all replicas at once: which questions are asked, and what comes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxsrv.replicas.gathering import ReplicaQuestion, merged_statuses, question_of
from mlxsrv.replicas.waiting import results_in_time
from tests.support.replicas import Replicas, replicas

TOP = "/api/monitoring/statistics/top"
STATISTICS = "/api/monitoring/statistics"


def asked(method: str, path: str, query: bytes = b"", body: bytes = b"") -> ReplicaQuestion | None:
    scope = {"type": "http", "method": method, "path": path, "query_string": query}
    return question_of(scope, body) if merged_statuses(scope) else None


def test_what_all_replicas_are_asked() -> None:
    for method, path, query in (
        ("GET", "/health", b""),
        ("GET", "/health", b"verbose=0"),
        ("GET", "/health/live", b""),
        ("POST", "/v1/models", b""),
        ("DELETE", STATISTICS, b""),
        ("GET", TOP, b""),
        ("GET", "/v1/responses/resp_1", b""),
    ):
        assert asked(method, path, query) is None, path
    for path, query in (("/metrics", b""), (STATISTICS, b"features=1"), ("/health", b"verbose=1")):
        found = asked("GET", path, query)
        assert found is not None
        assert (found.path, found.query) == (path, query)
    found = asked("POST", TOP, body=b'{"model": "a b"}')
    assert found is not None
    assert (found.path, found.query) == (STATISTICS, b"model=a+b")


Work = Callable[[Replicas], Coroutine[Any, Any, None]]


def run(folder: Path, work: Work, count: int = 2, **settings: Any) -> None:
    async def all_of_it() -> None:
        async with replicas(folder, count, **settings) as running:
            await work(running)

    asyncio.run(all_of_it())


async def watch(running: Replicas) -> None:
    """Attach an SAE, watch it everywhere, and have each replica answer."""
    first = running.clients[0]
    id = (await first.get("/api/saes")).json()["data"][0]["id"]
    for path, change in ((f"/api/saes/{id}/attach", {}), ("/api/monitoring/configure", WATCHED)):
        (await first.post(path, json=change)).raise_for_status()
    for client in running.clients:
        body: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        (await client.post("/v1/chat/completions", json=body)).raise_for_status()


WATCHED = {"enabled": True, "top_k": 5}


@pytest.mark.slow
def test_what_is_watched_is_told_of_all_replicas(tmp_path: Path) -> None:
    async def work(running: Replicas) -> None:
        await watch(running)
        one = running.clients[0]
        path = "/api/monitoring/history"
        history = (await one.get(path, params={"limit": 1000})).json()["data"]
        times = [entry["timestamp"] for entry in history]
        assert times == sorted(times, reverse=True)
        assert len({entry["request_id"] for entry in history}) == 2, "of both replicas"
        for limit in (1, 3):
            limited = (await one.get(path, params={"limit": limit})).json()["data"]
            assert limited == history[:limit]
        statistics = (await one.get(STATISTICS)).json()["data"]
        for query in ("/", "?model=demo"):
            assert (await one.get(f"{STATISTICS}{query}")).json()["data"] == statistics
        ranked = sorted(statistics, key=lambda each: (-each["count"], each["feature_idx"]))
        for client in running.clients:
            told = await client.post(TOP, json={"k": 7, "metric": "count"})
            assert told.json() == {"success": True, "data": ranked[:7], "error": None}
            assert int(told.headers["content-length"]) == len(told.content)
        running.left_out = {1}
        alone = (await one.get(STATISTICS)).json()["data"]
        assert sum(each["count"] for each in alone) < sum(each["count"] for each in statistics)

    run(tmp_path, work)


def test_a_refusal_is_the_answer_as_it_is(tmp_path: Path) -> None:
    async def work(running: Replicas) -> None:
        client = running.clients[0]
        for body, status, code in (
            (b'{"k": 0}', 400, "invalid_value"),
            (b'{"k": ', 400, "invalid_json"),
            (b"\xff", 400, "invalid_json"),
            (b"[]", 400, "invalid_value"),
            (b"{}", 400, "sae_not_attached"),
        ):
            refused = await client.post(TOP, content=body)
            assert refused.status_code == status, body
            told = refused.json()
            assert (told["success"], told["error"]["code"]) == (False, code), body
        refused = await client.get("/api/monitoring/history", params={"limit": 0})
        assert refused.json()["error"]["code"] == "invalid_value"

    run(tmp_path, work)


def test_a_path_is_gathered_however_it_is_written(tmp_path: Path) -> None:
    async def work(running: Replicas) -> None:
        for path in ("/metrics", "/metrics/"):
            told = await running.clients[0].get(path)
            assert told.status_code == 200, path
            for id in "01":
                assert f'replica="{id}"' in told.text, path

    run(tmp_path, work, root_path="/proxied", metrics=True)


def test_who_is_late_or_fails_is_left_out_and_nobody_else() -> None:
    async def answer() -> str:
        return "well"

    async def fail() -> str:
        raise httpx.ConnectError("it has ended")

    async def hang() -> str:
        await asyncio.Event().wait()
        return "never"

    found = asyncio.run(results_in_time([hang(), answer(), fail(), answer()], 0.05))
    assert found == ["no answer within 0.05 s", "well", "ConnectError: it has ended", "well"]
