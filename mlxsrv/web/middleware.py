"""What every request gets: an id, a line in the log, and an answer even to a bug.

Pure ASGI: Starlette's BaseHTTPMiddleware would put a task and a queue between a stream and its
client, and hide the disconnect.
"""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxsrv.errors import ServeError
from mlxsrv.logs import log
from mlxsrv.web.responses import error_response

_log = logging.getLogger("mlxsrv.access")

_ID_LENGTH = 128


def request_id(scope: Scope) -> str:
    """The id that the middleware gave the request."""
    known: str = scope["mlxsrv.request_id"]
    return known


class RequestLog:
    """Gives each request its id, logs one line at its end, and turns a bug into a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = scope["mlxsrv.request_id"] = _accepted(Headers(scope=scope).get("x-request-id"))
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = identity
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # it left while sending its body: there is nobody to answer
        except Exception:
            _log.exception("a bug: request %s failed", identity)
            if status == 0:
                message = f"the server failed; its log says why under request id {identity}"
                await error_response(ServeError(message))(scope, receive, send_with_id)
        finally:
            log(
                _log,
                logging.INFO,
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status or None,
                seconds=time.perf_counter() - started,
                request=identity,
            )


def _accepted(given: str | None) -> str:
    """The client's own id, if it is short and harmless in a header and a log; else a new one."""
    if given and len(given) <= _ID_LENGTH and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
