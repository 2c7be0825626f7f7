"""A connection that ends while its client may still send.

Where a socket is closed with bytes that nobody has read, the connection is reset, and a client that
is still sending its body then sees the reset and not the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_MOST_BYTES = 64 * 1024 * 1024
_QUIET_SECONDS = 2.0


class LingeringTransport:
    """A transport that closes in two steps if its client may still send. First the client sees the
    end of what was written, and what it sends is dropped. Then, when it has closed its side, has
    sent nothing for a while or has sent too much, the connection is closed.

    Args:
        transport: all but the end is left to it.
        may_send: whether the client may still send something that belongs to its request.
        seconds: the most that the first step takes.
    """

    def __init__(
        self, transport: asyncio.Transport, may_send: Callable[[], bool], seconds: float
    ) -> None:
        self._transport = transport
        self._may_send = may_send
        self._seconds = seconds
        self._lingers = False
        self._dropped = 0  # bytes
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._lingers or self._transport.is_closing()

    def close(self) -> None:
        """Begin the end. Where it has begun, end at once."""
        if self.is_closing() or not self._may_send():
            self._transport.close()
            return
        self._lingers = True
        try:
            self._transport.write_eof()
        except OSError:  # the client has reset the connection, and nobody has read that yet
            self._transport.close()
            return
        self._transport.resume_reading()  # which may be paused because the body was not read
        self._look(-1, asyncio.get_running_loop().time() + self._seconds)

    def discards(self, data: bytes) -> bool:
        """Whether what the client sends is dropped."""
        if self._lingers:
            self._dropped += len(data)
            if self._dropped > _MOST_BYTES:
                self._transport.close()
        return self._lingers

    def _look(self, before: int, until: float) -> None:
        """Close if nothing has come since the last look, at which `before` bytes were dropped."""
        loop = asyncio.get_running_loop()
        if self._dropped == before or loop.time() >= until:
            self._transport.close()
            return
        wait = min(_QUIET_SECONDS, until - loop.time())
        self._timer = loop.call_later(wait, self._look, self._dropped, until)

    def stop_waiting(self) -> None:
        """The connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
