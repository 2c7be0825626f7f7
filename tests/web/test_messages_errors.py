"""Anthropic's API where requests are refused or fail: types, statuses, pings and error events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import mlxsrv
from mlxsrv.errors import (
    ContextLengthExceeded,
    InsufficientMemory,
    InvalidRequest,
    ModelNotLoaded,
    Overloaded,
    ServeError,
    ShuttingDown,
)
from mlxsrv.wire.anthropic.errors import ERRORS
from tests.support.anthropic_streams import check_type, hear, read_events
from tests.support.client import Body, RawClient
from tests.support.fixtures import MAX_QUEUE, Folders
from tests.support.leaving import queued
from tests.support.schemas import as_sent
from tests.support.serving import Server, serving, wait_for

MESSAGES = "/v1/messages"
FOR_EVER = 900_000


def asking(text: str = "Tell me of the sea.", /, **fields: Any) -> Body:
    return {"max_tokens": 8, "messages": [{"role": "user", "content": text}], **fields}


def told(response: Any, status: int, kind: str, code: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    if kind != "request_too_large":  # in Anthropic's documents, and not in the SDK's types
        check_type(body, "ErrorResponse")
    assert body["request_id"] == response.headers["request-id"]
    assert body["error"]["details"] == {"error_code": code}
    assert body["error"]["type"] == kind
    return str(body["error"]["message"])


@contextmanager
def served(folders: Folders, **options: Any) -> Iterator[TestClient]:
    settings = mlxsrv.Settings(model=(f"t={folders.endless}",), hf_cache=False, **options)
    with TestClient(mlxsrv.create_app(settings)) as client:
        yield client


# Before a stream.


def test_the_guard_refuses_in_the_dialect_of_the_route(folders: Folders) -> None:
    with served(folders, api_key=("k",), rate_limit=4, max_body=4096) as client:
        missing = client.post(MESSAGES, json=asking())
        told(missing, 401, "authentication_error", "invalid_api_key")
        client.headers["x-api-key"] = "k"
        large = client.post(MESSAGES, json=asking("x" * 5000))
        told(large, 413, "request_too_large", "request_too_large")
        told(client.get(MESSAGES), 405, "invalid_request_error", "method_not_allowed")
        page = client.post(MESSAGES, json=asking(), headers={"origin": "https://page.example"})
        told(page, 403, "permission_error", "origin_not_allowed")
        for _ in range(2):
            assert client.post(MESSAGES, json=asking()).status_code == 200
        limited = client.post(MESSAGES, json=asking())
        told(limited, 429, "rate_limit_error", "rate_limit_exceeded")
        assert int(limited.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full"), 529, "overloaded_error"),
        (ShuttingDown("bye"), 529, "overloaded_error"),
        (ModelNotLoaded("no"), 500, "api_error"),
        (InsufficientMemory("no"), 500, "api_error"),
        (ServeError("a bug"), 500, "api_error"),
        (InvalidRequest("no", param="model"), 400, "invalid_request_error"),
    ],
)
def test_statuses_and_types(error: ServeError, status: int, kind: str) -> None:
    body = as_sent(ERRORS.body(error, "some-id"))
    assert ERRORS.status(error) == status
    assert body["error"]["type"] == kind
    assert body["error"]["message"] == error.message
    assert body["request_id"] == "some-id"


def test_a_prompt_without_numbers_keeps_its_own_words() -> None:
    assert as_sent(ERRORS.body(ContextLengthExceeded("no room"), "i"))["error"]["message"] == (
        "no room"
    )


def test_a_full_queue_is_an_overload(narrow: Server) -> None:
    with ExitStack() as stack, narrow.client() as client:
        running = stack.enter_context(RawClient(narrow, endless(), MESSAGES))
        running.until(b"content_block_delta")
        waiting: list[RawClient] = []
        for _ in range(MAX_QUEUE):
            waiting.append(stack.enter_context(RawClient(narrow, endless(), MESSAGES)))
            wait_for(lambda: queued(narrow) == len(waiting), why="it is queued behind the others")
        for each in waiting:
            assert each.until(b"event: ping\n").count(b"message_start") == 0
        response = client.post(MESSAGES, json=asking())
        told(response, 529, "overloaded_error", "overloaded")
        assert int(response.headers["retry-after"]) >= 1
        running.hang_up()
        waiting[0].until(b"event: message_start\n")


def endless() -> Body:
    return asking(max_tokens=FOR_EVER, stream=True, temperature=0)


# Within a stream.


def test_pings_and_then_an_error_event(folders: Folders, tmp_path: Path) -> None:
    options = ["--max-concurrency", "1", "--keepalive", "0.1", "--queue-timeout", "2"]
    with (
        serving(tmp_path, "--model", f"t={folders.endless}", *options) as server,
        RawClient(server, endless(), MESSAGES) as first,
        server.client() as client,
    ):
        first.until(b"content_block_delta")
        second = client.post(MESSAGES, json=endless())
        assert second.status_code == 200
        *pings, last = read_events(second.content)
        assert {ping["type"] for ping in pings} == {"ping"}
        assert last["error"]["type"] == "overloaded_error"
        assert last["error"]["details"] == {"error_code": "overloaded"}


def test_a_time_limit_ends_a_stream_as_a_limit_of_tokens_does(folders: Folders) -> None:
    with served(folders, request_timeout=1.5) as client:
        wait_for(
            lambda: client.post(MESSAGES, json=asking()).status_code == 200,
            why="the model is loaded",
        )
        heard = hear(client.post(MESSAGES, json=endless()).content)
        assert heard.message["stop_reason"] == "max_tokens"
        assert heard.message["content"]
        assert heard.message["usage"]["output_tokens"] > 1
