"""Two replicas are one server: real processes under Ray Serve, over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from ray.serve import Application

from mlxsrv.replicas.shared_file import shared_path
from tests.ray.conftest import KEYED, Cluster, wait_for

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
    metrics = httpx.get(f"{cluster.url}/metrics", headers=KEYED).text
    took = re.findall(r'prefix_cache_queries_total\{.*replica="(\w+)"\} (\S+)', metrics)
    assert {id for id, _ in took} == set(cluster.both())
    assert all(float(tokens) > 0 for _, tokens in took), "both have answered"


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


def test_what_one_replica_is_told_all_do(cluster: Cluster) -> None:
    def states(client: httpx.Client, path: str) -> list[Any]:
        answers = [client.get(path, headers=session).json()["data"] for session in SESSIONS]
        return [data for place, data in enumerate(answers) if data not in answers[:place]]

    with cluster.client() as client:
        sae = client.get("/api/saes").json()["data"][0]["id"]
        client.post(f"/api/saes/{sae}/attach", json={}).raise_for_status()
        client.post(
            "/api/saes/steering", json={"feature_idx": 7, "value": 2.0}, headers=SESSIONS[1]
        ).raise_for_status()
        [state] = states(client, "/api/saes/steering")
        assert "7" in json.dumps(state)
        client.post("/api/monitoring/configure", json={"enabled": True}).raise_for_status()
        for session in SESSIONS:
            asked = {"messages": [user("Hello")], "max_tokens": 4}
            client.post("/v1/chat/completions", json=asked, headers=session).raise_for_status()
        [history] = states(client, "/api/monitoring/history?limit=1000")
        assert len({entry["request_id"] for entry in history}) == len(SESSIONS)
        [statistics] = states(client, "/api/monitoring/statistics")
        assert statistics
        asked = {"k": 3, "metric": "count"}
        highest = sorted(statistics, key=lambda each: (-each["count"], each["feature_idx"]))[:3]
        for session in SESSIONS:
            top = client.post("/api/monitoring/statistics/top", json=asked, headers=session)
            assert top.json()["data"] == highest, "of all replicas together"
        client.post(f"/api/saes/{sae}/detach", json={}, headers=SESSIONS[2]).raise_for_status()
        [attached] = states(client, "/api/saes")
        assert attached[0]["attached_to"] == []


def test_the_state_is_told_of_all(cluster: Cluster) -> None:
    ids = set(cluster.both())
    answering = set()
    with cluster.client() as client:
        for session in SESSIONS:
            told = client.get("/health?verbose=1", headers=session).raise_for_status().json()
            answering.add(told["replica"])
            assert {told["replica"], *told["others"]} == ids
            for each in (told, *told["others"].values()):
                assert each["status"] == "ok"
                assert each["memory"]["weights"] > 0
            plain = client.get("/health", headers=session).json()
            assert plain.keys() == {"status"}
    assert answering == ids


def test_a_shared_file_that_fails_is_named_and_the_rest_goes_on(cluster: Cluster) -> None:
    path = shared_path(cluster.settings, "mlxsrv")
    asked = {"input": TURNS[0], "max_output_tokens": 4}
    with cluster.client() as client, closing(sqlite3.connect(path, isolation_level=None)) as file:
        client.post("/v1/responses", json=asked).raise_for_status()
        for table in ("owned_responses", "changes"):
            file.execute(f"ALTER TABLE {table} RENAME TO {table}_away")
        for session in SESSIONS:
            refused = client.post("/v1/responses", json=asked, headers=session)
            assert refused.status_code == 503, refused.text
            error = refused.json()["error"]
            assert error["code"] == "store_failed"
            assert path.name in error["message"]
            chat = {"messages": [user("Hello")], "max_tokens": 4}
            answer = client.post("/v1/chat/completions", json=chat, headers=session)
            assert answer.status_code == 200, answer.text
        file.execute("BEGIN IMMEDIATE")
        locked = client.get("/v1/models")
        file.execute("COMMIT")
        assert locked.status_code == 503, "no rate can be counted"
        assert "keeps it locked" in locked.json()["error"]["message"]
        for table in ("owned_responses", "changes"):
            file.execute(f"ALTER TABLE {table}_away RENAME TO {table}")
        for session in SESSIONS:
            answer = client.post("/v1/responses", json=asked, headers=session)
            assert answer.status_code == 200, answer.text


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

    async def run() -> None:
        async with cluster.async_client() as client:
            lines = stream(client, 1, LONG)
            while '"content":"' not in (line := await anext(lines)) or '"content":""' in line:
                pass
            told = (await client.get("/health?verbose=1")).raise_for_status().json()
            every = (told, *told["others"].values())
            assert sum(model["rows"] for each in every for model in each["models"]) == 1
            await ask(client, [user("Hello")], max_tokens=1)
            await lines.aclose()

    asyncio.run(run())


def test_a_replica_that_dies_takes_its_own_requests_only(cluster: Cluster) -> None:
    """It has answers that are not over by far, the other one has shorter ones."""
    victim, process = next(iter(cluster.both().items()))

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
                told = (await client.get("/health?verbose=1", headers=session)).json()
                dies = told["replica"] == victim
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


def test_the_documented_application_is_one(cluster: Cluster) -> None:
    text = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text("utf-8")
    [block] = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(block, names)
    assert isinstance(names["app"], Application)


def test_an_update_fails_no_request(cluster: Cluster) -> None:
    before = set(cluster.both())

    async def run() -> int:
        async with cluster.async_client() as client:
            settings = msgspec.structs.replace(cluster.settings, max_concurrency=16)
            update = asyncio.create_task(asyncio.to_thread(cluster.deploy, settings))
            count = 0
            while not update.done() or before & set(cluster.replicas()):
                await asyncio.gather(
                    *(ask(client, [user(f"Chat {count} {number}")]) for number in range(4))
                )
                count += 4
            await update
            return count

    assert asyncio.run(run()) > 0
    assert not before & set(cluster.both())
