"""Requests that the tests send, and the ways in which they read the answers."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal

import httpx
import jsonschema
import msgspec

from tests.support.serving import PATIENCE, Server

Body = dict[str, Any]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_SCHEMAS = json.loads((Path(__file__).with_name("openai_schemas.json")).read_text("utf-8"))


def chat(text: Any = "Tell me of the sea.", /, **fields: Any) -> Body:
    """A short greedy chat; `fields` change it."""
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 8, "temperature": 0, **fields}


def completion(prompt: Any = "The quick brown fox", /, **fields: Any) -> Body:
    """A short greedy completion; `fields` change it."""
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}


def check_schema(body: object, name: str) -> None:
    """Fails unless `body` is what OpenAI's schema `name` describes."""
    schema = {"$ref": f"#/$defs/{name}", "$defs": _SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(body)


# Reading streams.


class Streamed(msgspec.Struct):
    """A stream that has been read to its end."""

    status: int
    headers: Mapping[str, str]
    chunks: list[Body]
    comments: int

    @property
    def content(self) -> str:
        return text_of(self.chunks)

    @property
    def reasoning(self) -> str:
        return text_of(self.chunks, "reasoning_content")

    @property
    def finish_reason(self) -> str:
        reasons = [c["finish_reason"] for chunk in self.chunks for c in chunk["choices"]]
        assert reasons.count(None) == len(reasons) - 1, "a stream has one finish_reason"
        return str(next(reason for reason in reasons if reason is not None))

    @property
    def usage(self) -> Body:
        [usage] = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return dict(usage)


def text_of(chunks: Iterable[Body], field: str = "content") -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get(field, "") for choice in choices
    )


def ask(client: httpx.Client, body: Body, path: str = CHAT, **headers: str) -> Body:
    """The body of an answer that is not streamed."""
    response = client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return dict(response.json())


def answer(body: Body) -> str:
    """The text of an answer that is not streamed."""
    [choice] = body["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def stream(client: httpx.Client, body: Body, path: str = CHAT, **headers: str) -> Streamed:
    """Ask for a stream and read it to its end, to the letter of the format."""
    response = client.post(path, json=body | {"stream": True}, headers=headers)
    return read_stream(response)


async def stream_async(client: httpx.AsyncClient, body: Body) -> Streamed:
    return read_stream(await client.post(CHAT, json=body | {"stream": True}))


def read_stream(response: httpx.Response) -> Streamed:
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8", response.text
    text = response.content.decode("utf-8")
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    comments = [event for event in events if event.startswith(":")]
    data = [event for event in events if not event.startswith(":")]
    # splitlines() is the widest idea of a line that a client may have
    assert all(event.splitlines() == [event] for event in events)
    assert all(event.startswith("data: ") for event in data)
    assert data.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in data]
    return Streamed(response.status_code, response.headers, chunks, len(comments))


# Reading errors.


def refused(response: httpx.Response, status: int, code: str, *, param: str | None = None) -> Body:
    """The error of a response that must be exactly such a refusal."""
    assert response.status_code == status, response.text
    return check_error(response, response.json(), code, param=param)


def check_error(
    response: httpx.Response, body: Body, code: str, *, param: str | None = None
) -> Body:
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    check_schema(body, "ErrorResponse")
    assert (error["code"], error["param"]) == (code, param), error["message"]
    assert error["type"] == (
        "server_error" if response.status_code >= 500 else "invalid_request_error"
    )
    assert error["message"]
    assert response.headers["x-request-id"]
    return dict(error)


# Clients that leave.

HangUp = Literal["fin", "rst"]
FIRST_CONTENT = rb'"content":"[^"]'
ROLE = rb'"role":"assistant"'


class RawClient:
    """One request on a socket of its own, so that a test can leave at any moment; perhaps with
    `more` behind it."""

    def __init__(
        self,
        server: Server,
        body: Body,
        path: str = CHAT,
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        more: bytes = b"",
    ) -> None:
        self.request = uuid.uuid4().hex
        self.data = b""
        self.socket = socket.create_connection(server.address, PATIENCE)
        content = json.dumps(body).encode()
        head = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            f"Content-Length: {len(content)}",
            f"X-Request-ID: {self.request}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self.socket.sendall("\r\n".join([*head, "", ""]).encode() + content + more)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.socket.close()

    def until(self, pattern: bytes, *, seconds: float = PATIENCE) -> bytes:
        """All that has come once it has `pattern`."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.data):
            more = self.read(seconds=max(deadline - time.monotonic(), 0.001))
            assert more, f"closed before {pattern!r} came: {self.data[-500:]!r}"
        return self.data

    def read(self, *, seconds: float = PATIENCE) -> bool:
        """Wait for more. Returns whether there is any, or the connection is closed."""
        self.socket.settimeout(seconds)
        part = self.socket.recv(65536)
        self.data += part
        return bool(part)

    @property
    def text(self) -> str:
        """The text of a streamed chat, as far as it has come."""
        found = re.findall(rb'"content":("(?:[^"\\]|\\.)*")', self.data)
        return "".join(map(json.loads, found))

    def hang_up(self, how: HangUp = "fin") -> None:
        if how == "rst":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def by_choice(streamed: Streamed) -> list[list[Body]]:
    """The chunks of each choice, in order of their index."""
    found: defaultdict[int, list[Body]] = defaultdict(list)
    for chunk in streamed.chunks:
        for choice in chunk["choices"]:
            found[choice["index"]].append(chunk | {"choices": [choice]})
    assert set(found) == set(range(len(found)))
    return [found[index] for index in range(len(found))]


def put_together(streamed: Streamed) -> Body:
    """The message that a stream's deltas make, to the letter of how they come."""
    message: Body = {"content": streamed.content, "reasoning": streamed.reasoning}
    made: list[Body] = []
    for chunk in streamed.chunks:
        for delta in chunk["choices"][0]["delta"].get("tool_calls", []):
            if "id" in delta:
                assert delta["index"] == len(made), "calls come one after the other"
                assert delta["type"] == "function"
                assert delta["function"]["name"]
                made.append({"id": delta["id"], "function": {**delta["function"]}})
            else:
                assert delta.keys() == {"index", "function"}
                assert delta["index"] == len(made) - 1
                assert delta["function"].keys() == {"arguments"}
                assert delta["function"]["arguments"]
                made[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return message | {"tool_calls": made}
