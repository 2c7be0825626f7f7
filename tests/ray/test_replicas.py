"""Two replicas are one server: real processes under Ray Serve, over HTTP."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import ray
from ray.serve import Application

from tests.ray.conftest import KEYED, Cluster, counted, wait_for

CONVERSATIONS = 24
TURNS = ("Which endpoints do you serve?", "Tell me more.", "How do I stream?", "Thank you.")


async def ask(client: httpx.AsyncClient, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, **fields}
    answer: dict[str, Any] = (
        (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
    )
    return answer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@contextmanager
def one_process() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlxsrv", "--port", str(port), "--log-level", "error"]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.ConnectError:
            return False

    try:
        wait_for(healthy, "one process serves")
        yield url
    finally:
        process.terminate()
        process.wait(20)


async def converse(client: httpx.AsyncClient, number: int) -> tuple[int, list[str]]:
    """The cached tokens of a conversation, and its answers."""
    messages = [{"role": "system", "content": f"You are helper {number}. Be brief."}]
    cached, answers = 0, []
    for turn in TURNS:
        messages.append(user(turn))
        answer = await ask(client, messages)
        messages.append(answer["choices"][0]["message"])
        answers.append(messages[-1]["content"])
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, answers


async def converse_all(client: httpx.AsyncClient) -> list[tuple[int, list[str]]]:
    gate = asyncio.Semaphore(4)

    async def one(number: int) -> tuple[int, list[str]]:
        async with gate:
            return await converse(client, number)

    return await asyncio.gather(*map(one, range(CONVERSATIONS)))


def test_conversations_find_their_caches(cluster: Cluster) -> None:
    async def run(url: str) -> list[tuple[int, list[str]]]:
        async with httpx.AsyncClient(base_url=url, timeout=60, headers=KEYED) as client:
            return await converse_all(client)

    with one_process() as url:
        alone = asyncio.run(run(url))
    together = asyncio.run(run(cluster.url))
    assert [texts for _, texts in together] == [texts for _, texts in alone]
    assert sum(n for n, _ in together) >= 0.95 * sum(n for n, _ in alone) > 0
    read = "prefix_cache_queries_total"
    wait_for(lambda: counted(read) == set(cluster.both()), "both have answered")


def test_metrics_are_rays(cluster: Cluster) -> None:
    with cluster.client() as client:
        asked = {"messages": [user("Hello")], "max_tokens": 4}
        for session in cluster.at_each().values():
            client.post("/v1/chat/completions", json=asked, headers=session).raise_for_status()
        refused = client.get("/metrics")
        assert refused.status_code == 404
        assert "ray_mlxsrv_" in refused.json()["error"]["message"]

    both = set(cluster.both())
    for metric, labels in (
        ("ready", {}),
        ("time_to_first_token_seconds_sum", {"model_name": "demo"}),
        ("time_to_first_token_seconds_bucket", {"le": "+Inf"}),
    ):
        wait_for(lambda: counted(metric, **labels) == both, f"both have {metric}")  # noqa: B023


LONG = 4000
"""Tokens of an answer that is not over when a test looks at it."""

# Each session goes to the same replica; of so many, both have some.
SESSIONS = [{"x-session-id": str(number)} for number in range(12)]


def test_keys_are_asked_for_everywhere(cluster: Cluster) -> None:
    with cluster.client() as client:
        for session in SESSIONS:
            wrong = {**session, "authorization": "Bearer wrong"}
            assert client.get("/v1/models", headers=wrong).status_code == 401
            assert client.get("/v1/models", headers=session).status_code == 200


def test_the_proxy_takes_no_more_than_the_server_does(cluster: Cluster) -> None:
    with cluster.client() as client:
        routes = client.get("/-/routes")
        assert (routes.status_code, routes.json()["error"]["code"]) == (404, "not_found")
        assert client.get("/-/healthz").status_code == 200
        host, port = client.base_url.host, client.base_url.port or 80
    with socket.create_connection((host, port), timeout=60) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert raw.recv(1024).startswith(b"HTTP/1.1 400 ")


def test_what_one_replica_stores_all_have(cluster: Cluster) -> None:
    with cluster.client() as client:
        asked = {"input": TURNS[0], "max_output_tokens": 8}
        first = client.post("/v1/responses", json=asked).raise_for_status()
        id = first.json()["id"]
        assert first.headers["x-request-id"].count(",") == 0
        for session in SESSIONS:
            assert client.get(f"/v1/responses/{id}", headers=session).status_code == 200
            later = {**asked, "previous_response_id": id}
            answer = client.post("/v1/responses", json=later, headers=session)
            assert answer.status_code == 200, answer.text
        assert client.delete(f"/v1/responses/{id}", headers=SESSIONS[0]).status_code == 200
        for session in SESSIONS:
            assert client.get(f"/v1/responses/{id}", headers=session).status_code == 404


def test_a_response_is_followed_where_it_was_made(cluster: Cluster) -> None:
    with cluster.client() as client:
        for number in range(8):
            asked = {"input": f"Chat {number}. " + 20 * TURNS[0], "max_output_tokens": 8}
            first = client.post("/v1/responses", json=asked).raise_for_status().json()
            later = {**asked, "input": TURNS[1], "previous_response_id": first["id"]}
            usage = client.post("/v1/responses", json=later).raise_for_status().json()["usage"]
            assert usage["input_tokens_details"]["cached_tokens"] > 100, number


def test_a_change_of_one_replica_only_is_refused(cluster: Cluster) -> None:
    with cluster.client() as client:
        for session in cluster.at_each().values():
            for path, option in (
                ("/api/saes/demo/attach", "--attach-sae"),
                ("/api/saes/steering/enable", "--profile"),
                ("/api/profiles/deactivate", "--profile"),
                ("/api/monitoring/configure", "one process"),
            ):
                refused = client.post(path, json={}, headers=session)
                error = refused.json()["error"]
                assert (refused.status_code, error["code"]) == (409, "set_at_start")
                assert option in error["message"]
            [sae] = client.get("/api/saes", headers=session).raise_for_status().json()["data"]
            assert sae["attached_to"] == []


def test_health_is_of_the_replica_that_answers(cluster: Cluster) -> None:
    with cluster.client() as client:
        for id, session in cluster.at_each().items():
            health = client.get("/health?verbose=1", headers=session).raise_for_status().json()
            assert (health["replica"], health["status"]) == (id, "ok")
            assert health["memory"]["weights"] > 0
            assert client.get("/health", headers=session).json() == {"status": "ok"}


def counts(client: httpx.Client, session: dict[str, str]) -> bool:
    """Whether a replica counts; if not, it names the option."""
    answer = client.get("/v1/models", headers=session)
    if answer.status_code != 200:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_failed")
        assert "--rate-limit" in answer.json()["error"]["message"]
    return answer.status_code == 200


def test_the_counter_of_rates_comes_again(cluster: Cluster) -> None:
    with cluster.client() as client:
        for again in (True, False):
            name = f"mlxsrv-rates-mlxsrv-{cluster.settings.rate_limit}"
            ray.kill(ray.get_actor(name, namespace="serve"), no_restart=not again)
            for session in cluster.at_each().values():
                wait_for(partial(counts, client, session), "there is a counter again")


async def stream(
    client: httpx.AsyncClient, number: int, tokens: int, session: dict[str, str] | None = None
) -> AsyncGenerator[str]:
    body = {
        "messages": [user(f"Chat {number}: which endpoints are there?")],
        "max_tokens": tokens,
        "min_tokens": tokens,
        "stream": True,
    }
    path = "/v1/chat/completions"
    async with client.stream("POST", path, json=body, headers=session) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            yield line


def test_streams_are_not_buffered(cluster: Cluster) -> None:
    """The beginning of a stream is here while its end has not been generated."""
    sessions = cluster.at_each().values()

    async def run() -> None:
        async with cluster.async_client() as client:
            lines = stream(client, 1, LONG)
            while '"content":"' not in (line := await anext(lines)) or '"content":""' in line:
                pass
            healths = [
                (await client.get("/health?verbose=1", headers=session)).raise_for_status().json()
                for session in sessions
            ]
            assert sum(model["rows"] for each in healths for model in each["models"]) == 1
            await ask(client, [user("Hello")], max_tokens=1)
            await lines.aclose()

    asyncio.run(run())


def test_a_replica_that_dies_takes_its_own_requests_only(cluster: Cluster) -> None:
    """It has answers that are not over by far, the other one has shorter ones."""
    victim, process = next(iter(cluster.both().items()))
    asked = {"input": TURNS[0], "max_output_tokens": 8}
    with cluster.client() as client:
        session = cluster.at_each()[victim]
        stored = client.post("/v1/responses", json=asked, headers=session).raise_for_status()
        assert stored.headers["x-mlxsrv-replica"] == victim

    async def follow(lines: AsyncIterator[str], begun: asyncio.Event) -> str:
        last = "nothing"
        try:
            async for line in lines:
                begun.set()
                last = line or last
        except httpx.HTTPError as error:
            return type(error).__name__
        return last

    async def run() -> dict[bool, list[str]]:
        ends: dict[bool, list[str]] = {}
        async with cluster.async_client() as client, asyncio.TaskGroup() as group:
            running: dict[bool, list[asyncio.Task[str]]] = {True: [], False: []}
            begun = []
            for number, session in enumerate(SESSIONS):
                answer = await client.get("/health", headers=session)
                dies = answer.headers["x-mlxsrv-replica"] == victim
                lines = stream(client, number, LONG if dies else 300, session)
                begun.append(asyncio.Event())
                running[dies].append(group.create_task(follow(lines, begun[-1])))
            for each in begun:
                await each.wait()
            os.kill(process, signal.SIGKILL)
            for dies, tasks in running.items():
                ends[dies] = await asyncio.gather(*tasks)
            for number in range(4):
                await ask(client, [user(f"Next {number}")])
        return ends

    ends = asyncio.run(run())
    assert set(ends[False]) == {"data: [DONE]"}, "the other replica's go on"
    assert set(ends[True]) == {"RemoteProtocolError"}, "those of the one that died end at once"
    wait_for(lambda: victim not in cluster.replicas(), "the dead one is known")
    assert len(cluster.both()) == 2
    with cluster.client() as client:
        later = {**asked, "previous_response_id": stored.json()["id"]}
        client.post("/v1/responses", json=later).raise_for_status()


def test_the_documented_application_is_one(cluster: Cluster) -> None:
    text = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text("utf-8")
    [block] = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(block, names)
    assert isinstance(names["app"], Application)


def test_an_update_loses_no_request_and_no_response(cluster: Cluster) -> None:
    before = set(cluster.both())

    async def run() -> int:
        async with cluster.async_client() as client:
            begun = {"input": TURNS[0], "max_output_tokens": 4}
            first = (await client.post("/v1/responses", json=begun)).raise_for_status().json()
            stored = [first["id"]]
            settings = msgspec.structs.replace(cluster.settings, max_concurrency=16)
            update = asyncio.create_task(asyncio.to_thread(cluster.deploy, settings))
            count = 0
            while not update.done() or before & set(cluster.replicas()):
                await asyncio.gather(
                    *(ask(client, [user(f"Chat {count} {number}")]) for number in range(4))
                )
                count += 4
                later = {**begun, "previous_response_id": stored[-1]}
                answer = (await client.post("/v1/responses", json=later)).raise_for_status()
                if count < 100:  # the conversation fits the model
                    stored.append(answer.json()["id"])
            await update
            for id in stored:
                (await client.get(f"/v1/responses/{id}")).raise_for_status()
            return count

    assert asyncio.run(run()) > 0
    assert not before & set(cluster.both())
