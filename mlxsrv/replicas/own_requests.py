"""Requests that the program makes of an app in its own process."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Message

from mlxsrv.web.security.guard import INTERNAL


async def request_of(
    app: ASGIApp, method: str, path: str, query: bytes, body: bytes = b""
) -> tuple[int, bytes]:
    """Make a request that was allowed before. Returns the status and the body of the answer."""
    messages = deque[Message]([{"type": "http.request", "body": body, "more_body": False}])
    answer: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.popleft()
        await asyncio.Event().wait()
        raise AssertionError("it waits until it is cancelled")

    async def send(message: Message) -> None:
        answer.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        INTERNAL: True,
    }
    await app(scope, receive, send)
    return answer[0]["status"], b"".join(each.get("body", b"") for each in answer[1:])
