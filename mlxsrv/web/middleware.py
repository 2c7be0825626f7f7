"""Middleware around every request: an id, a line in the log, and an answer even to a bug.

It is pure ASGI: Starlette's BaseHTTPMiddleware would put a task and a queue between a stream and
its client, and hide the disconnect.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxsrv.engine.faults import survivable
from mlxsrv.errors import ServeError
from mlxsrv.logs import log
from mlxsrv.service.observing import Observer, RequestEnded
from mlxsrv.web.observability.records import open_record
from mlxsrv.web.responses import refusal

_log = logging.getLogger("mlxsrv.access")

_ID_LENGTH = 128


def request_id(scope: Scope) -> str:
    """The id that the middleware gave the request."""
    identity: str = scope["mlxsrv.request_id"]
    return identity


class RequestLog:
    """Gives each request its id, logs one line at its end, informs the observers, and turns a bug
    into a 500."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = scope["mlxsrv.request_id"] = _accepted(Headers(scope=scope).get("x-request-id"))
        record = open_record(scope)
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
            pass  # it left while it sent its body, so nobody waits for an answer
        except BaseException as error:
            if not survivable(error):
                raise
            record.error = ServeError.code
            log(_log, logging.ERROR, "bug", traceback=True, request=identity)
            if status == 0:
                message = f"the server failed; its log says why under request id {identity}"
                await refusal(scope, ServeError(message))(scope, receive, send_with_id)
        finally:
            # Probes, and the two dozen files of the page, would hide the other lines.
            log(
                _log,
                logging.DEBUG if record.quiet else logging.INFO,
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status or None,
                seconds=time.monotonic() - record.begun,
                request=identity,
            )
            self._inform(record.end(scope, status, identity))

    def _inform(self, ended: RequestEnded) -> None:
        for observer in self._observers:
            try:
                observer.ended(ended)
            except Exception:  # such as an OpenTelemetry sampler's; the request is answered
                log(_log, logging.ERROR, "observer failed", traceback=True, request=ended.id)


def _accepted(given: str | None) -> str:
    """The client's own id if it is short and safe in a header and in a log; else a new one."""
    if given and len(given) <= _ID_LENGTH and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
