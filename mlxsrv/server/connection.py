"""One client's connection: uvicorn's, with limits of time and size, and refusals in our own shape.

It overrides methods of uvicorn's class for h11, which is not a public interface. Tested with
uvicorn 0.54 and h11 0.16; `tests/server/test_connection.py` fails with others.
"""

from __future__ import annotations

import asyncio
import http
import logging
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxsrv.errors import Overloaded, ServeError
from mlxsrv.logs import log
from mlxsrv.server.descriptors import most_connections
from mlxsrv.server.lingering import LingeringTransport
from mlxsrv.server.request_parser import RequestParser
from mlxsrv.web.app import App
from mlxsrv.web.responses import last_refusal

_log = logging.getLogger("mlxsrv.server")


class Connection(H11Protocol):
    """uvicorn's connection, with limits on what the client may take.

    The head of a request must arrive in `body_timeout` seconds, and may have `MOST_HEADER_BYTES`.
    While the app has a request, the app's own limits hold. A client that reads nothing of its
    answer for `stall_timeout` seconds is cut off, because nothing else would end a write that waits
    for it. A client that still sends while the connection ends is read for a moment, so that it
    sees its answer (`LingeringTransport`). A request that is not HTTP, or in doubt
    (`RequestParser`), is refused in our own shape.

    Everything runs on the event loop.
    """

    conn: h11.Connection

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.conn = RequestParser()
        app = self.config.app
        assert isinstance(app, App)
        self._head_timeout = app.settings.body_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timeout = app.settings.stall_timeout
        self._stall_timer: asyncio.TimerHandle | None = None
        self._refused = False  # and nothing more is read

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._end = LingeringTransport(transport, self._may_send, self._head_timeout)
        super().connection_made(cast(asyncio.Transport, self._end))
        if len(self.connections) > most_connections():
            self._refuse(Overloaded("the server has as many connections as it can take"))
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn leaves this timer running after a reset, and the timer would keep this object.
        self._unset_keepalive_if_required()
        self._end_head_timer()
        self._end_stall_timer()
        self._end.stop_waiting()

    def _may_send(self) -> bool:
        """Whether the client may be in the middle of a request. Nobody waits for its rest where
        connections are short."""
        state = self.conn.their_state
        begun = state is h11.IDLE and self.conn.trailing_data[0] != b""
        unread = self._refused or begun or state is h11.SEND_BODY
        return unread and len(self.connections) <= most_connections()

    # Requests. h11 reads one when the one before it is answered.

    def data_received(self, data: bytes) -> None:
        after_last = self.conn.their_state is h11.MUST_CLOSE
        if self._end.discards(data) or self._refused or after_last:
            return
        super().data_received(data)
        self._watch_head()

    def handle_events(self) -> None:
        try:
            super().handle_events()
        except ServeError as error:  # of `RequestParser`
            self._refuse(error)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader()

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

    def _refuse(self, error: ServeError) -> None:
        """Read no more, answer with `error` if no answer has begun, then close."""
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            # It ends in the middle of its body. The app sees that now, not when the connection is
            # lost: that lingers, and nothing can be written while it does.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = last_refusal(error)
            identity = response.headers["x-request-id"]
            log(
                _log,
                logging.INFO,
                "request refused",
                status=error.status,
                why=error.code,
                request=identity,
            )
            # The old state is of a request that may be a HEAD or an upgrade: a body has no place.
            self.conn = h11.Connection(h11.SERVER)
            reason = http.HTTPStatus(error.status).phrase
            head = h11.Response(
                status_code=error.status, headers=response.raw_headers, reason=reason
            )
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()
