"""Middleware of Serve's HTTP proxy: finds the key of each request's conversation.

Serve's router sees a request's headers and not its body, which goes to the replica apart. So the
key becomes the header that Serve itself reads as the session's (`X-Session-Id`). A client that
sends this header has chosen its own sessions. Only the request's body is held for this; what is
answered passes through as it comes.

It also refuses what Serve's proxy takes and this server does not: requests without a Host, and the
proxy's own list of routes, for which it asks no key.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxsrv.errors import InvalidHTTP, RouteNotFound, ServeError
from mlxsrv.replicas.beginnings import MOST_BODY, conversation_key, key_of_response
from mlxsrv.web.responses import last_refusal

SESSION = b"x-session-id"

# Seconds for a body. Then the replica is chosen without it, and refuses it if it is late.
_WAIT = 10.0
_ROUTES = "/-/routes"


def middlewares() -> list[Middleware]:
    """Return what `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` asks for."""
    return [Middleware(Front)]


class Front:
    """Adds the session's header to requests that belong to a conversation and have none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := _error(scope)) is not None:
            await last_refusal(error)(scope, receive, send)
            return
        if scope["type"] == "http" and not any(name == SESSION for name, _ in scope["headers"]):
            key = _key_of_path(scope["path"])
            if key is None and scope["method"] == "POST":
                body, receive = await _read_ahead(receive)
                key = None if body is None else conversation_key(body)
            if key is not None:
                scope = {**scope, "headers": [*scope["headers"], (SESSION, key.encode())]}
        await self._app(scope, receive, _with_one_id(send))


def _error(scope: Scope) -> ServeError | None:
    """Return why a request is refused here; None if it is not."""
    hosts = sum(name == b"host" for name, _ in scope["headers"])
    if hosts > 1 or (hosts == 0 and scope["http_version"] != "1.0"):
        return InvalidHTTP("a request has exactly one Host")
    return RouteNotFound("there is no such route") if scope["path"] == _ROUTES else None


def _key_of_path(path: str) -> str | None:
    """Return the key of a request for a stored response."""
    _, found, rest = path.partition("/responses/")
    return key_of_response(rest.partition("/")[0]) if found else None


async def _read_ahead(receive: Receive) -> tuple[bytes | None, Receive]:
    """Return the body, and a `receive` from which it can be read again; None if it is not whole
    within a time and a size."""
    messages: deque[Message] = deque()
    size, whole = 0, False
    try:
        async with asyncio.timeout(_WAIT):
            while not whole and size <= MOST_BODY:
                message = await receive()
                messages.append(message)
                if message["type"] != "http.request":
                    break
                size += len(message.get("body", b""))
                whole = not message.get("more_body", False)
    except TimeoutError:
        pass
    body = b"".join(message.get("body", b"") for message in messages) if whole else None

    async def receive_again() -> Message:
        return messages.popleft() if messages else await receive()

    return body, receive_again


def _with_one_id(send: Send) -> Send:
    """Return a `send` without the second request id: Serve's proxy adds the one that the replica
    has answered with already."""

    async def send_once(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message["headers"]
            ids = [header for header in headers if header[0].lower() == b"x-request-id"]
            rest = [header for header in headers if header[0].lower() != b"x-request-id"]
            message = {**message, "headers": [*rest, *ids[:1]]}
        await send(message)

    return send_once
