"""The middleware of Serve's proxy finds a request's key and changes nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxsrv.replicas import front
from mlxsrv.replicas.beginnings import MOST_BODY, conversation_key

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
KEY = conversation_key(BODY)


async def echo(request: Request) -> Response:
    """The session that came, and the size of the body, with two ids of the request."""
    seen = {
        "session": request.headers.get("x-session-id"),
        "size": len(await request.body()),
    }
    answer = Response(json.dumps(seen))
    for id in ("replica's", "proxy's"):
        answer.headers.append("X-Request-Id", id)
    return answer


APP = front.Front(Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST"])]))


def ask(path: str, content: Any = None, **headers: str) -> Any:
    """Return what `echo` says of a request: a GET if it has no content."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(APP)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            method = "GET" if content is None else "POST"
            return await client.request(method, path, content=content, headers=headers)

    answer = asyncio.run(run())
    assert answer.headers.get_list("x-request-id") == ["replica's"]
    return answer.json()


async def in_parts(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def test_a_request_has_the_key_of_its_conversation() -> None:
    assert KEY is not None
    assert ask(CHAT, BODY) == {"session": KEY, "size": len(BODY)}
    assert ask(CHAT, in_parts([BODY[:9], b"", BODY[9:]])) == {"session": KEY, "size": len(BODY)}
    assert ask(CHAT, BODY, **{"X-Session-Id": "mine"})["session"] == "mine"
    assert ask(f"/v1/responses/resp_{KEY}ff/input_items")["session"] == KEY


def test_what_has_no_key_passes_as_it_is() -> None:
    assert ask("/v1/models")["session"] is None
    assert ask(CHAT, b"no JSON") == {"session": None, "size": 7}
    parts = [BODY, *(1024 * 1024 * b" " for _ in range(6))]
    size = sum(map(len, parts))
    assert size > MOST_BODY
    assert ask(CHAT, in_parts(parts)) == {"session": None, "size": size}


@pytest.mark.parametrize(
    ("version", "hosts", "path", "status"),
    [
        ("1.1", 1, CHAT, 200),
        ("1.1", 0, CHAT, 400),
        ("1.1", 2, CHAT, 400),
        ("1.0", 0, CHAT, 200),
        ("1.1", 1, "/-/routes", 404),
        ("1.1", 1, "/-/healthz", 200),
    ],
)
def test_what_only_the_proxy_would_take_is_refused(
    version: str, hosts: int, path: str, status: int
) -> None:
    headers = [(b"host", b"x")] * hosts
    scope = {
        "type": "http",
        "http_version": version,
        "method": "GET",
        "path": path,
        "query_string": b"",
        "headers": headers,
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(APP(scope, receive, send))
    assert sent[0]["status"] == status
    if status != 200:
        assert set(json.loads(sent[1]["body"])["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_late_passes_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_WAIT", 0.05)
    first = {"type": "http.request", "body": BODY[:9], "more_body": True}
    last = {"type": "http.request", "body": BODY[9:]}
    host = (b"host", b"x")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": CHAT,
        "headers": [host],
    }

    async def run() -> None:
        coming: asyncio.Queue[Any] = asyncio.Queue()
        coming.put_nowait(first)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert scope["headers"] == [host]
            coming.put_nowait(last)  # it has not come before a replica was chosen
            assert [await receive(), await receive()] == [first, last]
            await send({"type": "http.response.start", "status": 200, "headers": []})

        sent: asyncio.Queue[Any] = asyncio.Queue()
        await front.Front(app)(scope, coming.get, sent.put)
        assert sent.get_nowait()["status"] == 200

    asyncio.run(run())
