"""Totals of requests since the start and the last errors, as `/health?verbose=1` tells them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxsrv.engine.events import JobEvent
from mlxsrv.service.observing import Observer, Timing
from mlxsrv.web.observability.totals import Totals
from tests.support.client import (
    CHAT,
    COMPLETIONS,
    FIRST_CONTENT,
    RawClient,
    ask,
    chat,
    completion,
    refused,
    stream,
)
from tests.support.fixtures import Folders
from tests.support.serving import Server, serving, wait_for

FOR_EVER = 500_000


@pytest.fixture(scope="module")
def counting(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("counting")
    with serving(root, "--model", f"t={folders.endless}") as server:
        yield server


@pytest.fixture
def client(counting: Server) -> Iterator[httpx.Client]:
    with counting.client() as client:
        yield client


def told(client: httpx.Client) -> dict[str, Any]:
    return dict(client.get("/health?verbose=1").json())


def requests(client: httpx.Client) -> dict[str, Any]:
    return dict(told(client)["requests"])


def settled(client: httpx.Client, before: dict[str, Any], ended: int) -> dict[str, Any]:
    """The totals when so many more requests have ended: a client may have all of its answer before
    the server has counted it."""
    return wait_for(
        lambda: now if (now := requests(client))["ended"] >= before["ended"] + ended else None,
        why=f"{ended} more have ended",
    )


def more(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """The difference, but for the times to first tokens."""
    return {name: after[name] - before[name] for name in before if name != "ttft"}


def test_the_tokens_of_answers_are_added(client: httpx.Client) -> None:
    long = chat("The sea is wide, and the ships on it are small. " * 10)
    began = requests(client)
    ask(client, long)
    before = settled(client, began, 1)
    usages = [
        ask(client, long)["usage"],
        stream(client, chat(max_tokens=30)).usage,
        ask(client, completion(max_tokens=5, n=2), COMPLETIONS)["usage"],
    ]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 64
    assert more(before, settled(client, before, 3)) == {
        "ended": 3,
        "failed": 0,
        "prompt_tokens": sum(usage["prompt_tokens"] for usage in usages),
        "cached_tokens": cached,
        "completion_tokens": 8 + 30 + 10,
    }


def test_texts_that_were_embedded_are_added(client: httpx.Client) -> None:
    before = requests(client)
    answer = client.post("/v1/embeddings", json={"input": ["some words", "others"]}).json()
    added = more(before, settled(client, before, 1))
    assert added["ended"] == 1
    assert added["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert added["completion_tokens"] == 0


def test_the_times_to_first_tokens_are_those_of_the_last_replies(
    counting: Server, client: httpx.Client
) -> None:
    before = requests(client)
    for number in range(102):
        ask(client, chat(max_tokens=1), **{"X-Request-ID": f"short-{number}"})
    ttft = settled(client, before, 102)["ttft"]
    last = [counting.logged("stream end", request=f"short-{number}") for number in range(2, 102)]
    logged = sorted(line["ttft"] for line in last)
    assert ttft["replies"] == 100
    # The log rounds to four digits.
    assert ttft["median"] == pytest.approx((logged[49] + logged[50]) / 2, rel=2e-3)
    assert ttft["p95"] == pytest.approx(logged[94], rel=2e-3)


def test_looking_and_lists_count_nowhere(client: httpx.Client) -> None:
    before = requests(client)
    client.get("/v1/models")
    client.get("/health")
    assert more(before, requests(client)) == dict.fromkeys(more(before, before), 0)


def test_loading_and_unloading_as_ollama_does_count_nowhere(client: httpx.Client) -> None:
    before = requests(client)
    for path in ("/api/generate", "/api/chat", "/api/embed"):
        for keep_alive in (0, -1):  # later tests find it loaded
            asked = {"model": "t", "keep_alive": keep_alive, "stream": False}
            client.post(path, json=asked, timeout=60).raise_for_status()
    assert more(before, requests(client)) == dict.fromkeys(more(before, before), 0)
    refused = client.post("/api/generate", json={"model": "t", "prompt": 1})
    assert refused.status_code == 400
    assert more(before, requests(client))["failed"] == 1


def test_what_was_refused_is_told_without_its_text(client: httpx.Client) -> None:
    secret = "nobody-shall-read-this"
    before = requests(client)
    begun = datetime.now(UTC)
    headers = {"X-Request-ID": "refused-1"}
    answer = client.post(CHAT, json=chat(secret, model=secret), headers=headers)
    refused(answer, 404, "model_not_found", param="model")
    answer = client.post(CHAT, json=chat(secret, max_tokens="x"))
    refused(answer, 400, "invalid_value", param="max_tokens")
    client.get(f"/{secret}")
    settled(client, before, 2)
    state = told(client)
    assert secret not in str(state)
    assert more(before, state["requests"])["ended"] == 2
    assert more(before, state["requests"])["failed"] == 2
    nowhere, wrong, unknown = state["errors"][:3]
    time = datetime.fromisoformat(unknown.pop("time"))
    assert begun - timedelta(seconds=1) < time < datetime.now(UTC) + timedelta(seconds=1)
    assert unknown == {
        "method": "POST",
        "route": CHAT,
        "status": 404,
        "code": "model_not_found",
        "model": "",
        "request_id": "refused-1",
    }
    assert (wrong["status"], wrong["code"]) == (400, "invalid_value")
    assert (nowhere["route"], nowhere["code"]) == ("", "not_found")


def test_a_stream_that_fails_half_way_is_told_and_one_that_is_left_is_not(
    folders: Folders, tmp_path: Path
) -> None:
    options = ["--max-concurrency", "1", "--queue-timeout", "3", "--keepalive", "0.05"]
    with (
        serving(tmp_path, "--model", f"t={folders.endless}", *options) as server,
        server.client() as client,
        RawClient(server, chat(max_tokens=FOR_EVER, stream=True)) as running,
    ):
        running.until(FIRST_CONTENT)
        assert stream(client, chat()).finish_reason == "error"
        wait_for(lambda: told(client)["errors"], why="it is told")
        state = told(client)
        assert (state["requests"]["ended"], state["requests"]["failed"]) == (1, 1)
        [error] = state["errors"]
        assert (error["status"], error["code"], error["model"]) == (200, "overloaded", "t")
        running.hang_up()
        left = wait_for(
            lambda: state if (state := told(client))["requests"]["ended"] == 2 else None,
            why="the stream has ended",
        )
        assert left["requests"]["failed"] == 1
        assert left["requests"]["completion_tokens"] > 0
        assert left["errors"] == [error]


def test_only_the_last_errors_are_kept(client: httpx.Client) -> None:
    for number in range(25):
        client.get("/nowhere", headers={"X-Request-ID": f"lost-{number}"})
    wait_for(lambda: told(client)["errors"][0]["request_id"] == "lost-24", why="all are told")
    ids = [error["request_id"] for error in told(client)["errors"]]
    assert ids == [f"lost-{number}" for number in range(24, 4, -1)]


def test_without_verbose_nothing_is_told(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}


class Watching(Observer):
    """An observer that wants the times of tokens, as every one does that does not say otherwise."""


def test_nothing_is_called_for_a_token() -> None:
    def receive(event: JobEvent) -> None: ...

    assert Timing((Totals(),), "t", wanted=False).watch(receive) is receive
    assert Timing((Totals(), Watching()), "t", wanted=False).watch(receive) is not receive
    assert Timing((Totals(),), "t", wanted=True).watch(receive) is not receive
