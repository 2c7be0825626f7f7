"""Limits on requests: how slow, how large, how deep, and how many of everything."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.client import CHAT, COMPLETIONS, ask, chat, completion, refused
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, Server, serving, wait_for
from tests.support.tiny import write_model

LIMIT = 64 * 1024
"""Bytes of headers."""


@pytest.fixture(scope="module")
def hurried(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that waits a second for a request to arrive."""
    folder = tmp_path_factory.mktemp("hurried")
    with serving(folder, "--model", f"t={folders.plain}", "--body-timeout", "1") as server:
        yield server


class Answer:
    """The bytes that came on a connection until it was closed."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        head, _, self.body = data.partition(b"\r\n\r\n")
        self.head = head.decode("latin-1").lower()
        self.statuses = [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]

    def error(self) -> dict[str, Any]:
        assert re.search("x-request-id: [0-9a-f]{32}", self.head)
        assert "content-type: application/json" in self.head
        body = json.loads(self.body)
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return dict(body["error"])


def send(server: Server, *parts: bytes, pause: float = 0) -> Answer:
    """Send the parts, then read until the server closes."""
    with socket.create_connection(server.address, PATIENCE) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except OSError:
                break
            time.sleep(pause)
        received = b""
        try:
            while part := connection.recv(65536):
                received += part
        except ConnectionResetError:
            pass
    return Answer(received)


def head(*lines: str, path: str = CHAT, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


BODY = json.dumps(chat()).encode()
CLOSING = head("Connection: close", path="/health", method="GET")


def well(server: Server) -> None:
    with server.client() as client:
        assert ask(client, chat())
    assert "Traceback" not in server.log_text()


def send_all(
    server: Server, cases: Sequence[tuple[bytes, ...]], *, pause: float = 0
) -> list[Answer]:
    """Each case on a connection of its own, all at once."""
    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(lambda parts: send(server, *parts, pause=pause), cases))


# Slow. A connection that the server never closed would be an error of the socket here.

LONG = json.dumps(chat(max_tokens=900)).encode()
BYTES = [BODY[i : i + 1] for i in range(5)]
SLOW: dict[str, tuple[bytes, ...]] = {
    "body": (head(f"Content-Length: {len(BODY)}"), *BYTES),
    "chunks": (
        head("Transfer-Encoding: chunked"),
        *[b"1\r\n" + byte + b"\r\n" for byte in BYTES],
    ),
    "of the management": (head("Content-Length: 2", path="/api/profiles"), b"{"),
    "nothing": (),
    "half a line": (b"P", b"O", b"S", b"T", b" "),
    "half a head": (head()[:-2], b"A", b": ", b"b"),
    "second head": (head(path="/health", method="GET") + b"GET /v1", *[b"x"] * 5),
    "refused body": (head("Content-Length: 999", "Origin: http://evil.example"), *[b"x"] * 5),
    "answer": (head(f"Content-Length: {len(LONG)}", "Connection: close") + LONG,),
}


@pytest.fixture(scope="module")
def slow(hurried: Server) -> dict[str, Answer]:
    return dict(zip(SLOW, send_all(hurried, [*SLOW.values()], pause=0.3), strict=True))


def test_a_slow_body_is_a_408(slow: dict[str, Answer]) -> None:
    for what in ("body", "chunks", "of the management"):
        assert slow[what].statuses == [408]
        assert "1 s" in slow[what].body.decode()
        assert "connection: close" in slow[what].head
    error = slow["body"].error()
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_timeout")


def test_a_slow_head_is_no_request(slow: dict[str, Answer], hurried: Server) -> None:
    for what in ("nothing", "half a line", "half a head"):
        assert slow[what].data == b""
    well(hurried)


def test_a_second_head_and_a_refused_body_must_hurry_too(slow: dict[str, Answer]) -> None:
    assert len(slow["second head"].statuses) == 1
    assert slow["refused body"].statuses == [403]


def test_an_answer_may_take_longer_than_the_question(slow: dict[str, Answer]) -> None:
    assert slow["answer"].statuses == [200]


# Large.


LARGE: dict[str, tuple[bytes, bytes]] = {
    "path": (b"GET /", b"x"),
    "header": (head()[:-2] + b"X: ", b"x"),
    "headers": (head()[:-2], b"X: y\r\n"),
    "trailer": (head("Transfer-Encoding: chunked") + b"0\r\nX: ", b"x"),
    "trailers": (head("Transfer-Encoding: chunked") + b"0\r\n", b"X: y\r\n"),
    "chunk extension": (head("Transfer-Encoding: chunked") + b"1;", b"x"),
}


def test_a_head_has_an_end(hurried: Server) -> None:
    cases = [(start, more * (LIMIT // len(more) + 9)) for start, more in LARGE.values()]
    for what, answer in zip(LARGE, send_all(hurried, cases, pause=0.05), strict=True):
        assert answer.statuses == [431], (what, answer.data)
        assert answer.error()["code"] == "headers_too_large", what
    well(hurried)


@pytest.mark.parametrize("size", [LIMIT - 1024, LIMIT + 1024])
def test_headers_up_to_the_limit_are_fine(hurried: Server, size: int) -> None:
    answer = send(
        hurried,
        head("X-Long: " + "x" * size, "Connection: close", path="/v1/models", method="GET"),
    )
    assert answer.statuses == [200 if size < LIMIT else 431]
    if size > LIMIT:
        assert answer.error()["code"] == "headers_too_large"


# Ambiguous.

SMUGGLED = head("X-Smuggled: yes", path="/v1/models", method="GET")


AMBIGUOUS = [
    [f"Content-Length: {len(BODY)}", "Content-Length: 0"],
    ["Content-Length: 0", f"Content-Length: {len(BODY)}"],
    ["Content-Length: 0", "Transfer-Encoding: chunked"],
    ["Transfer-Encoding: chunked", f"Content-Length: {len(BODY)}"],
    ["Transfer-Encoding: chunked, identity"],
    ["Transfer-Encoding: xchunked"],
    ["Content-Length: +5"],
    ["Content-Length: -1"],
    ["Content-Length: 0x10"],
    ["Content-Length : 5"],
    ["Content-Length: 5,5,6"],
    ["X: a\rContent-Length: 5"],
    ["X: a\x00b"],
    ["Bad Name: x"],
    [": x"],
]


def test_what_can_be_read_in_two_ways_is_no_request(hurried: Server) -> None:
    cases = [(head(*lines) + b"0\r\n\r\n" + SMUGGLED,) for lines in AMBIGUOUS]
    for lines, answer in zip(AMBIGUOUS, send_all(hurried, cases), strict=True):
        assert answer.statuses == [400], (lines, answer.data)
        assert answer.error()["code"] == "invalid_http", lines
    well(hurried)


def test_pipelined_requests_are_answered_in_turn(hurried: Server) -> None:
    one = head(f"Content-Length: {len(BODY)}") + BODY
    assert send(hurried, one + one + CLOSING).statuses == [200, 200, 200]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_no_request_is_refused_after_the_requests_before_it(
    hurried: Server, streaming: bool
) -> None:
    body = json.dumps(chat(stream=streaming, max_tokens=60)).encode()
    first = head(f"Content-Length: {len(body)}") + body
    models = head(path="/v1/models", method="GET")
    got = send(hurried, first + models + b"no request\r\n\r\n" + models)
    assert got.statuses == [200, 200, 400]
    answers = got.data.split(b"HTTP/1.1 ")[1:]
    assert (b"data: [DONE]" if streaming else b'"finish_reason":"length"') in answers[0]
    assert b'"object":"list"' in answers[1]
    assert b'"invalid_http"' in answers[2]


def test_a_body_that_breaks_off_is_refused_in_its_own_place(hurried: Server) -> None:
    body = head(f"Content-Length: {len(BODY)}") + BODY
    got = send(hurried, body + head("Transfer-Encoding: chunked") + b"no size\r\n")
    assert got.statuses == [200, 400]
    assert got.data.endswith(b'"code":"invalid_http"}}')


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "h2c, websocket", "x"])
def test_an_upgrade_is_not_taken_up(hurried: Server, protocol: str) -> None:
    lines = [f"Upgrade: {protocol}", "Connection: Upgrade, HTTP2-Settings, close"]
    length = f"Content-Length: {len(BODY)}"
    cases = [
        (head(*lines, path="/v1/models", method="GET"),),
        # As Java's client sends it: the body follows the offer.
        (head(*lines, "HTTP2-Settings: AAMAAABkAAQ", length) + BODY,),
        (head(*lines, length), BODY[:9], BODY[9:]),
        (
            head(*lines, "Transfer-Encoding: chunked") + b"%x\r\n%b\r\n" % (len(BODY), BODY),
            b"0\r\n\r\n",
        ),
    ]
    for answer in send_all(hurried, cases, pause=0.05):
        assert answer.statuses == [200], answer.data
        assert "connection: close" in answer.head
    well(hurried)


def test_a_connection_is_kept_though_its_upgrade_is_declined(hurried: Server) -> None:
    offer = head("Upgrade: h2c", "Connection: upgrade", f"Content-Length: {len(BODY)}") + BODY
    assert send(hurried, offer + offer + CLOSING).statuses == [200, 200, 200]


# What a server refuses by itself: test_request_parser.py has all of it, this that it is asked.
UNCLEAR: dict[str, tuple[bytes, int, str]] = {
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    "two hosts": (head("Host: localhost", path="/health", method="GET"), 400, "invalid_http"),
    "folded": (head("A: b\r\n c", path="/health", method="GET"), 400, "invalid_http"),
    "bare LF": (b"GET /health HTTP/1.1\nHost: localhost\n\n", 400, "invalid_http"),
    "version": (b"GET /health HTTP/3.9\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
    "target": (head(path="health", method="GET"), 400, "invalid_http"),
    "fragment": (head(path="/health#x", method="GET"), 400, "invalid_http"),
    "no text": (b"GET /\xe9 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
    "proxy": (head(path="evil.example:443", method="CONNECT") + b"x" * 99, 400, "invalid_http"),
    "method": (head("Connection: close", path="/health", method="FOO"), 405, "method_not_allowed"),
    "old chunks": (
        head("Transfer-Encoding: chunked").replace(b"1.1", b"1.0") + b"0\r\n\r\n",
        400,
        "invalid_http",
    ),
    "URL": (
        head("Connection: close", path="http://evil.example/health", method="GET"),
        403,
        "host_not_allowed",
    ),
}


def test_what_is_in_doubt_is_refused_in_its_turn(hurried: Server) -> None:
    whole = send_all(hurried, [(data,) for data, *_ in UNCLEAR.values()])
    for (name, (_, status, code)), answer in zip(UNCLEAR.items(), whole, strict=True):
        assert answer.statuses == [status], (name, answer.data)
        assert answer.error()["code"] == code, name
    pipelined = send_all(
        hurried,
        [(head(path="/v1/models", method="GET"), data) for data, *_ in UNCLEAR.values()],
        pause=0.2,
    )
    for name, answer in zip(UNCLEAR, pipelined, strict=True):
        assert answer.statuses == [200, UNCLEAR[name][1]], (name, answer.data)
    well(hurried)


def test_nothing_is_read_after_the_last_request(hurried: Server) -> None:
    last = head(f"Content-Length: {len(LONG)}", "Connection: close") + LONG
    answer = send(hurried, last, b"\x00no request", pause=0.05)
    assert answer.statuses == [200]
    well(hurried)


def test_a_refused_connection_that_lingers_does_not_disturb_the_end(
    folders: Folders, tmp_path: Path
) -> None:
    with serving(tmp_path, "--model", f"t={folders.plain}") as server:
        refused = [
            head("Transfer-Encoding: chunked") + b"no size\r\n",
            head(path="/health#x", method="GET"),
            head(path="/health", method="GET") + b"no request\r\n\r\n",
        ]
        with ExitStack() as stack:
            for data in refused:
                connection = socket.create_connection(server.address, PATIENCE)
                stack.enter_context(connection).sendall(data)
            wait_for(lambda: len(server.log("request refused")) == len(refused), why="all are")
            server.signal(signal.SIGTERM)
            assert server.exit_status() == 0
        assert "Traceback" not in server.log_text()


def test_a_url_as_target_is_its_path(hurried: Server) -> None:
    url = "http://localhost/v1/models?x=/y"
    whole = head("Connection: close", path=url, method="GET").replace(b"Host: l", b"Host: evil.l")
    cut = [whole[i : i + 1] for i in range(len(whole))]
    for answer in send_all(hurried, [(whole,), tuple(cut)]):
        assert answer.statuses == [200], answer.data
        assert b'"object":"list"' in answer.body


def test_trailers_are_no_headers(hurried: Server) -> None:
    chunks = b"%x\r\n%b\r\n0\r\nX-Request-ID: trailing\r\nOrigin: http://evil.example\r\n\r\n"
    body = chunks % (len(BODY), BODY)
    answer = send(hurried, head("Transfer-Encoding: chunked", "Connection: close") + body)
    assert answer.statuses == [200]
    assert "trailing" not in answer.head


@pytest.mark.parametrize("streaming", [False, True])
def test_http_1_0_gets_a_body_that_ends_with_the_connection(
    hurried: Server, streaming: bool
) -> None:
    body = json.dumps(chat(stream=streaming)).encode()
    for lines in ([], ["Connection: keep-alive"]):
        request = head(*lines, f"Content-Length: {len(body)}").replace(b"HTTP/1.1", b"HTTP/1.0")
        answer = send(hurried, request + body)
        assert answer.statuses == [200]
        assert "transfer-encoding" not in answer.head
        assert "connection: close" in answer.head
        if streaming:
            assert answer.body.startswith(b"data: {")
            assert answer.body.endswith(b"\n\ndata: [DONE]\n\n")
            events = answer.body.removesuffix(b"\n\n").split(b"\n\n")
            assert all(event.startswith(b"data: ") for event in events)
        else:
            assert json.loads(answer.body)["choices"]
    answer = send(hurried, head(path="/health", method="HEAD").replace(b"1.1", b"1.0"))
    assert (answer.statuses, answer.body) == ([200], b"")


def test_garbage_is_refused_in_our_shape(hurried: Server) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"\x00" * 99):
        answer = send(hurried, garbage)
        assert answer.statuses == [400]
        assert answer.error()["code"] == "invalid_http"
    well(hurried)


# Deep.

CHATS: dict[str, str] = {
    "metadata": "@",
    "tools": '[{"type": "function", "function": {"name": "f", "parameters": {"a": @}}}]',
    "response_format": '{"type": "json_schema", "json_schema": '
    '{"name": "x", "schema": {"properties": {"a": @}}}}',
    "guided_json": '{"type": "object", "properties": {"a": @}}',
    "chat_template_kwargs": '{"enable_thinking": @}',
    "tool_choice": "@",
    "stop": "@",
    "steering": '{"1": @}',
    "logit_bias": '{"1": @}',
}


@pytest.mark.parametrize("depth", [60, 500, 985, 100_000])
@pytest.mark.parametrize("field", CHATS)
def test_nesting_is_refused_or_harmless_wherever_it_is(
    client: httpx.Client, field: str, depth: int
) -> None:
    for start, end in (("[", "]"), ('{"a":', "}")):
        nested = start * depth + "1" + end * depth
        rest = json.dumps(chat())
        body = f'{rest[:-1]}, "{field}": {CHATS[field].replace("@", nested)}}}'
        response = client.post(CHAT, content=body)
        assert response.status_code in (200, 400), response.text
        assert depth < 100_000 or response.status_code == 400


@pytest.mark.parametrize("depth", [500, 985, 100_000])
def test_nesting_within_strings_is_refused_or_harmless(client: httpx.Client, depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": nested}}
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    for body in (chat(messages=history), chat(guided_json=nested)):
        assert client.post(CHAT, json=body).status_code in (200, 400)


# Many.

MANY: list[tuple[str, int, Any]] = [
    ("messages", 10_000, {"role": "user", "content": "x"}),
    ("tools", 1000, {"type": "function", "function": {"name": "f"}}),
    ("stop", 16, "x"),
]


@pytest.mark.parametrize(("field", "most", "item"), MANY, ids=[field for field, *_ in MANY])
def test_there_are_only_so_many(client: httpx.Client, field: str, most: int, item: Any) -> None:
    response = client.post(CHAT, json=chat(**{field: [item] * (most + 1)}))
    assert str(most) in refused(response, 400, "invalid_value", param=field)["message"]
    response = client.post(CHAT, json=chat(**{field: [item] * most}))
    assert f"length <= {most}" not in response.text


@pytest.mark.parametrize(
    ("field", "most"), [("logit_bias", 4096), ("steering", 1000), ("chat_template_kwargs", 100)]
)
def test_keys_are_only_so_many(client: httpx.Client, field: str, most: int) -> None:
    response = client.post(CHAT, json=chat(**{field: {str(i): 1 for i in range(most + 1)}}))
    assert str(most) in refused(response, 400, "invalid_value", param=field)["message"]


def test_parts_and_calls_are_only_so_many(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "x"}] * 10_001
    calls = [{"function": {"name": "f"}}] * 1001
    for field, value in {"content": parts, "tool_calls": calls}.items():
        response = client.post(CHAT, json=chat(messages=[{"role": "assistant", field: value}]))
        refused(response, 400, "invalid_value", param=f"messages[0].{field}")


@pytest.mark.parametrize("field", ["stop", "user"])
def test_texts_are_only_so_long(client: httpx.Client, field: str) -> None:
    response = client.post(CHAT, json=chat(**{field: "x" * 1001}))
    refused(response, 400, "invalid_value", param=field)
    assert client.post(CHAT, json=chat(**{field: "x" * 1000})).status_code == 200


def test_prompts_are_only_so_many(client: httpx.Client) -> None:
    error = refused(
        client.post(COMPLETIONS, json=completion(["x"] * 129)), 400, "invalid_value", param="prompt"
    )
    assert "128" in error["message"]


def test_a_schema_is_only_so_large(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"description": "x" * 2**18}}}
    error = refused(
        client.post(CHAT, json=chat(guided_json=schema)), 400, "invalid_value", param="guided_json"
    )
    assert str(2**18) in error["message"] or "256" in error["message"]


def test_tokens_to_spell_are_only_so_many(client: httpx.Client) -> None:
    response = client.post("/detokenize", json={"tokens": [1] * (2**20 + 1)})
    refused(response, 400, "invalid_value", param="tokens")


def test_the_log_names_refusals_that_never_were_requests(hurried: Server) -> None:
    answer = send(hurried, b"no http\r\n\r\n")
    given = re.search("x-request-id: ([0-9a-f]+)", answer.head)
    assert given
    line = hurried.logged("request refused", request=given[1])
    assert (line["status"], line["why"]) == (400, "invalid_http")


def test_an_answer_without_a_limit_may_use_the_context(tmp_path: Path) -> None:
    """In each dialect; or what the operator sets."""
    folder = write_model(tmp_path / "short", "qwen3", plain=True, max_position_embeddings=120)
    text = [{"role": "user", "content": "Hi"}]
    with serving(tmp_path, "--model", f"t={folder}") as server, server.client() as client:
        chats, messages = (
            client.post(path, json={"model": "t", "messages": text}).json()["usage"]
            for path in (CHAT, "/v1/messages")
        )
        responses = client.post("/v1/responses", json={"model": "t", "input": "Hi"}).json()
        ollama = {"model": "t", "messages": text, "stream": False}
        told = client.post("/api/chat", json=ollama).json()
    assert chats["total_tokens"] == 120
    assert messages["input_tokens"] + messages["output_tokens"] == 120
    assert responses["usage"]["total_tokens"] == 120
    assert responses["incomplete_details"] == {"reason": "max_output_tokens"}
    assert told["prompt_eval_count"] + told["eval_count"] == 120
    bounded = ("--model", f"t={folder}", "--default-max-tokens", "5")
    with serving(tmp_path, *bounded) as server, server.client() as client:
        assert ask(client, chat(max_tokens=-1))["usage"]["completion_tokens"] == 5
