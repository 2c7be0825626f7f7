"""One client's connection: uvicorn's, with limits of time and size, and refusals in our own shape.

It overrides methods of uvicorn's protocol classes, which are not a public interface. Tested with
uvicorn 0.54, h11 0.16 and httptools 0.9; `tests/server/test_connection.py` fails with others.
"""

from __future__ import annotations

import asyncio
import http
import logging
import uuid
from collections import deque
from typing import Any, cast

from mlxsrv.errors import InvalidHTTP, Overloaded, ServeError
from mlxsrv.logs import log
from mlxsrv.server.descriptors import most_connections
from mlxsrv.server.framing import Framing
from mlxsrv.server.lingering import LingeringTransport
from mlxsrv.web.app import App
from mlxsrv.web.security.headers import MOST_HEADER_BYTES
from mlxsrv.wire.openai.answers import error_response
from mlxsrv.wire.sse import encode_json

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
except ImportError:
    # The two classes have one shape; mypy knows the first one only.
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol  # type: ignore[assignment]

_log = logging.getLogger("mlxsrv.server")


class Connection(Protocol):
    """uvicorn's connection, with limits on what the client may take.

    The head of a request must arrive in `body_timeout` seconds, and may have `MOST_HEADER_BYTES`.
    While the app has a request, the app's own limits hold. A client that reads nothing of its
    answer for `stall_timeout` seconds is cut off, because nothing else would end a write that waits
    for it. A client that still sends while the connection ends is read for a moment, so that it
    sees its answer (`LingeringTransport`). `Framing` checks the bytes before uvicorn's parser sees
    them, and what is not HTTP is refused in our own shape.

    Everything runs on the event loop. Only httptools calls `on_headers_complete`.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        app = self.config.app
        assert isinstance(app, App)
        self._head_timeout = app.settings.body_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timeout = app.settings.stall_timeout
        self._stall_timer: asyncio.TimerHandle | None = None
        self._framing = Framing(MOST_HEADER_BYTES)
        self._refusal: ServeError | None = None  # nothing after it is read
        # Requests without a whole answer, the oldest first. uvicorn's `cycle` is the newest. Only
        # httptools reads a request before the one in front of it is answered.
        self._cycles: deque[Any] = deque()

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._end = LingeringTransport(transport, self._may_send, self._head_timeout)
        super().connection_made(cast(asyncio.Transport, self._end))
        if len(self.connections) > most_connections():
            self._refuse(Overloaded("the server has as many connections as it can take"))
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn tells only the newest, and the oldest has the app
            cycle.disconnected = True
            cycle.message_event.set()
        self._cycles.clear()
        # uvicorn leaves this timer running after a reset, and the timer would keep this object.
        self._unset_keepalive_if_required()
        self._end_head_timer()
        self._end_stall_timer()
        self._end.forget()

    def _may_send(self) -> bool:
        """Whether the client may be in the middle of a request. Nobody waits for its rest where
        connections are short."""
        unread = self._refusal is not None or not self._framing.at_rest
        return unread and len(self.connections) <= most_connections()

    # Requests.

    def data_received(self, data: bytes) -> None:
        if self._end.drop(data) or self._refusal is not None:
            return
        try:
            for piece in self._framing.pieces(data):
                super().data_received(piece)
                if self.transport.is_closing():
                    return
        except ServeError as error:
            self._refuse(error)
        self._watch_head()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        if self.scope["http_version"] == "1.0":
            _end_by_closing(self.cycle)

    def on_response_complete(self) -> None:
        if self._cycles:
            self._cycles.popleft()
        super().on_response_complete()
        self._watch_reader()
        self._send_refusal()

    def _watch_head(self) -> None:
        """Limit the time in which the next head arrives; none runs while a request is answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._head_timeout, self.transport.close)

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # A client that does not read.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall_timer()

    def _watch_reader(self, before: int | None = None) -> None:
        """Cut the client off if it has read nothing since the last look.

        Args:
            before: bytes that were unsent at the last look. Nothing has been added to them, since
                writing is paused or the answer is complete.
        """
        self._end_stall_timer()
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent == before:
            self.transport.abort()
        elif unsent:
            self._stall_timer = self.loop.call_later(
                self._stall_timeout, self._watch_reader, unsent
            )

    def _end_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def give_up(self) -> None:
        """At shutdown, cut off a client that does not read: it has had its time to."""
        if self.flow.write_paused:
            self.transport.abort()

    # Refusals.

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidHTTP(msg))

    def _refuse(self, error: ServeError) -> None:
        """Read no more; answer with `error` after the requests before it, then close."""
        self._refusal = error
        self._send_refusal()

    def _send_refusal(self) -> None:
        """Send the refusal if its turn has come: no whole request before it waits for an answer."""
        if self._refusal is None or self.transport.is_closing():
            return
        oldest = self._cycles[0] if self._cycles else self.cycle
        if oldest is not None and not oldest.response_complete:
            if not oldest.more_body:
                return
            # The request that is refused is the oldest one: it ends in the middle of its body. The
            # app is told now, for nothing can be written while the connection lingers.
            oldest.disconnected = True
            oldest.message_event.set()
            if oldest.response_started:
                self.transport.close()
                return
        self.transport.write(_last_response(self._refusal))
        self.transport.close()


def _end_by_closing(cycle: Any) -> None:
    """Make httptools' cycle end a body by closing the connection, as HTTP/1.0 wants it. uvicorn
    would send chunks, which such clients do not know."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def send_unframed(message: Any) -> None:
        # uvicorn checks what is sent against Content-Length, so the expected length is set again
        # before each message.
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unframed


def _last_response(error: ServeError) -> bytes:
    """A response that ends its connection, for a request that never reached the app."""
    body, request = encode_json(error_response(error)), uuid.uuid4().hex
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
