"""Refusals: of bodies, models, routes, methods and prompts; each with its status and code."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.support.client import CHAT, COMPLETIONS, ask, chat, check_error, completion, refused
from tests.support.effort import often
from tests.support.fixtures import CONTEXT
from tests.support.wrong_bodies import ENDPOINTS, post_text, with_raw, wrong_param

# Bodies.


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "body", [b"", b" ", b"{", b'{"messages": [', b"hello", b"{'a': 1}", b"\xef\xbb\xbf{}", b"\x00"]
)
def test_a_body_that_is_not_json_is_refused(client: httpx.Client, path: str, body: bytes) -> None:
    refused(client.post(path, content=body), 400, "invalid_json")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "rest",
    [
        b",}",
        b"} {}",
        b"}]",
        b', "x": 01}',
        b', "x": "\n"}',
        b', "\xff": 1}',
        b', "x": "\xff"}',
        b', "model": "\xff"}',
    ],
    ids=repr,
)
def test_a_fault_after_a_fine_beginning_is_found(
    client: httpx.Client, path: str, rest: bytes
) -> None:
    start = b'{"messages": [{"role": "user"}], "prompt": "x", "max_tokens": 1'
    assert client.post(path, content=start + b"}").status_code == 200
    refused(client.post(path, content=start + rest), 400, "invalid_json")


@pytest.mark.parametrize("body", ["[]", "5", "null", '"hi"', "true", "[{}]"])
def test_a_body_that_is_no_object_is_refused(client: httpx.Client, body: str) -> None:
    error = refused(post_text(client, body), 400, "invalid_value")
    assert "object" in error["message"]


@pytest.mark.parametrize("field", ["unknown", "messages", "stop", "metadata", "logit_bias"])
def test_nesting_has_an_end(client: httpx.Client, field: str) -> None:
    response = post_text(client, with_raw(chat(), field, "[" * 100_000 + "]" * 100_000))
    assert response.status_code == 400, response.text
    check_error(
        response, response.json(), response.json()["error"]["code"], param=wrong_param(response)
    )


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "messages"), (COMPLETIONS, "prompt")], ids=["chat", "completion"]
)
def test_what_is_required_is_named(client: httpx.Client, path: str, field: str) -> None:
    refused(client.post(path, json={}), 400, "missing_required_parameter", param=field)


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
def test_too_large_a_body_is_refused(client: httpx.Client, chunked: bool) -> None:
    megabyte = b" " * 2**20
    content: Any = iter([megabyte] * 33) if chunked else megabyte * 33
    error = refused(client.post(CHAT, content=content), 413, "request_too_large")
    assert str(32 * 2**20) in error["message"]


# Models, routes, methods.


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unknown_model_is_named(client: httpx.Client, streaming: bool) -> None:
    body = chat(model="org/nome", stream=streaming)
    response = client.post(CHAT, json=body, headers={"Accept": "application/json"})
    error = refused(response, 404, "model_not_found", param="model")
    assert "org/nome" in error["message"]
    assert "org/name" in error["message"], "near names help"


@pytest.mark.parametrize("name", ["", "/etc", "../t", "/", "\0", "T"])
def test_a_model_is_never_a_path(client: httpx.Client, name: str) -> None:
    refused(client.post(CHAT, json=chat(model=name)), 404, "model_not_found", param="model")


def test_a_model_name_without_end_is_not_repeated(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat(model="m" * 1_000_000))
    error = refused(response, 404, "model_not_found", param="model")
    assert len(error["message"]) < 2000


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/page/nowhere"),
        ("GET", "/v1"),
        ("GET", "/nowhere"),
        ("GET", "/metrics"),
        ("GET", "/tokenize/x"),
        ("POST", "/v1/embeddings/x"),
        ("GET", "/api"),
        ("GET", "/%00"),
        ("GET", "/%ff"),
        ("OPTIONS", "/nowhere"),
    ],
)
def test_an_unknown_route_is_not_found(client: httpx.Client, method: str, path: str) -> None:
    refused(client.request(method, path), 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", CHAT, "POST"),
        ("DELETE", COMPLETIONS, "POST"),
        ("OPTIONS", CHAT, "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/t", "GET"),
        ("POST", "/health", "GET"),
    ],
)
def test_a_wrong_method_is_told_the_right_one(
    client: httpx.Client, method: str, path: str, allowed: str
) -> None:
    response = client.request(method, path)
    refused(response, 405, "method_not_allowed")
    assert allowed in re.split(r",\s*", response.headers["allow"])


# The context.


@pytest.mark.parametrize("streaming", [False, True])
def test_more_than_the_context_is_refused_with_the_numbers(
    client: httpx.Client, streaming: bool
) -> None:
    body = completion([5] * CONTEXT, stream=streaming)
    response = client.post(COMPLETIONS, json=body, headers={"Accept": "application/json"})
    error = refused(response, 400, "context_length_exceeded", param="prompt")
    assert error["message"].count(str(CONTEXT)) == 2


@pytest.mark.parametrize(
    "name", often(["max_tokens", "max_completion_tokens", "n_predict"], ["max_completion_tokens"])
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_limit_is_an_upper_bound(client: httpx.Client, path: str, name: str) -> None:
    """The context ends the answer where it has less room than may be used."""
    prompt: Any = [5] * (CONTEXT - 20)
    if path == CHAT:
        counted = ask(client, chat("sea " * 1000))["usage"]["prompt_tokens"]
        prompt = "sea " * (1000 * (CONTEXT - 50) // counted)
    body = ask(client, ENDPOINTS[path](prompt, **{"max_tokens": None, name: CONTEXT * 10}), path)
    assert body["usage"]["total_tokens"] == CONTEXT
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_prompt_that_fills_the_context_leaves_no_answer(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json=completion([5] * CONTEXT, max_tokens=1))
    refused(response, 400, "context_length_exceeded", param="prompt")


def test_the_context_can_be_filled_to_the_last_token(client: httpx.Client) -> None:
    body = ask(client, completion([5] * (CONTEXT - 3), max_tokens=3), COMPLETIONS)
    assert body["usage"]["total_tokens"] == CONTEXT


# The form of a refusal.


@pytest.mark.parametrize(
    "accept", [None, "*/*", "text/event-stream", "application/json, text/event-stream"]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_refused_stream_is_json_whatever_accept_says(
    client: httpx.Client, path: str, accept: str | None
) -> None:
    body = ENDPOINTS[path](stream=True, temperature=5)
    request = client.build_request("POST", path, json=body)
    del request.headers["accept"]
    if accept is not None:
        request.headers["accept"] = accept
    response = client.send(request)
    assert response.headers["content-type"] == "application/json"
    refused(response, 400, "invalid_value", param="temperature")


def test_a_stream_that_the_engine_refuses_is_json_too(client: httpx.Client) -> None:
    headers = {"Accept": "text/event-stream"}
    body = chat("x" * 5 * CONTEXT, stream=True)
    response = client.post(CHAT, json=body, headers=headers)
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.status_code == 400


# Request ids.


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/models", "/v1/models/nobody"])
@pytest.mark.parametrize("given", ["abc-123", "x" * 128, "with spaces; and=signs"])
def test_a_clients_request_id_is_kept(client: httpx.Client, path: str, given: str) -> None:
    response = client.get(path, headers={"X-Request-ID": given})
    assert response.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"\xc3\xa9", b"tab\there", b"\xff"])
def test_an_unusable_request_id_is_replaced(client: httpx.Client, given: bytes) -> None:
    response = client.get("/health", headers=[(b"X-Request-ID", given)])
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


def test_each_request_gets_an_id_of_its_own(client: httpx.Client) -> None:
    ids = {client.get(path).headers["x-request-id"] for path in ("/health", "/health", "/nowhere")}
    assert len(ids) == 3
