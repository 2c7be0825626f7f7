"""One client's connection: uvicorn's, with limits of time and size, and refusals in our shape.

It overrides methods of uvicorn's protocol classes, which are not a public interface. Tested with
uvicorn 0.54, h11 0.16 and httptools 0.9.
"""

from __future__ import annotations

import asyncio
import http
import logging
import uuid
from collections import deque
from typing import Any

from mlxsrv.errors import InvalidHTTP, Overloaded, ServeError
from mlxsrv.logs import log
from mlxsrv.server.descriptors import most_connections
from mlxsrv.server.framing import Framing
from mlxsrv.web.app import App
from mlxsrv.web.security.headers import MOST_HEADER_BYTES
from mlxsrv.wire import openai
from mlxsrv.wire.sse import encode_json

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
except ImportError:
    # Two classes of one shape, of which mypy knows the first.
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol  # type: ignore[assignment]

_log = logging.getLogger("mlxsrv.server")


class Connection(Protocol):
    """uvicorn's connection, but a client has only so long, and so many bytes, for the head of a
    request, and hears in our shape of what is no HTTP. One that takes nothing of its answer for as
    long as a request may take is cut off: nothing else would end a write that waits for it.

    While the app has a request, its own limits hold. What is sent is framed before uvicorn's parser
    sees it. Only httptools calls `on_headers_complete`.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        app = self.config.app
        assert isinstance(app, App)
        self._patience = app.settings.body_timeout
        self._hurry: asyncio.TimerHandle | None = None
        self._most_stall = app.settings.stall_timeout
        self._stall: asyncio.TimerHandle | None = None
        self._framing = Framing(MOST_HEADER_BYTES)
        # Requests that are not answered yet, first come first. uvicorn's `cycle` is the last of
        # them. Only httptools reads a request before the one in front of it is answered.
        self._cycles: deque[Any] = deque()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            self._refuse(Overloaded("the server has as many connections as it can take"))
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn tells only the last, and the first is being answered
            cycle.disconnected = True
            cycle.message_event.set()
        self._cycles.clear()
        # uvicorn leaves it where the client has reset the connection, and it would hold on to this.
        self._unset_keepalive_if_required()
        self._relax()
        self._end_stall()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def on_response_complete(self) -> None:
        if self._cycles:
            self._cycles.popleft()
        super().on_response_complete()
        self._await_reader()

    def _await_reader(self, before: int | None = None) -> None:
        """Look from time to time whether less is unsent than `before`: nothing is added to it."""
        self._end_stall()
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent == before:
            self.transport.abort()
        elif unsent:
            self._stall = self.loop.call_later(self._most_stall, self._await_reader, unsent)

    def give_up(self) -> None:
        """Wait no more for a client that does not read: it has had its time to."""
        if self.flow.write_paused:
            self.transport.abort()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def data_received(self, data: bytes) -> None:
        try:
            for piece in self._framing.pieces(data):
                super().data_received(piece)
                if self.transport.is_closing():
                    return
        except ServeError as error:
            self._refuse(error)
        self._watch()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        if self.scope["http_version"] == "1.0":
            _end_by_closing(self.cycle)

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidHTTP(msg))

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._relax()
        elif self._hurry is None and not self.transport.is_closing():
            self._hurry = self.loop.call_later(self._patience, self.transport.close)

    def _relax(self) -> None:
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None

    def _refuse(self, error: ServeError) -> None:
        if self.transport.is_closing():
            return
        cycle = self._cycles[0] if self._cycles else self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_last_response(error))
        self.transport.close()


def _end_by_closing(cycle: Any) -> None:
    """Have httptools' cycle end a body by closing the connection, as HTTP/1.0 wants it: uvicorn
    would send such clients the sizes of chunks."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def send_unframed(message: Any) -> None:
        # As long as what comes: uvicorn checks the sum of it against Content-Length.
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unframed


def _last_response(error: ServeError) -> bytes:
    """A response that ends its connection, for a request that never reached the app."""
    body, request = encode_json(openai.error_response(error)), uuid.uuid4().hex
    log(_log, logging.INFO, "request refused", status=error.status, why=error.code, request=request)
    head = [
        f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: {request}",
        "connection: close",
        *([] if error.retry_after is None else [f"retry-after: {error.retry_after}"]),
    ]
    return "\r\n".join([*head, "", ""]).encode() + body
