"""When the task that reads a reply goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def _never() -> bool:
    return False


class Wakeup:
    """Wakes the one task that reads a reply, when something has come or nothing has for long.

    Used on the event loop. `close` ends its timer.

    Args:
        interval: seconds of silence after which a keep-alive is due.
        may_keep_alive: returns whether one may be sent yet: it opens a stream with status 200.
    """

    def __init__(self, interval: float, may_keep_alive: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._interval = interval
        self._may_keep_alive = may_keep_alive
        self._keepalive_due = False
        self._waiter: asyncio.Future[None] | None = None
        self._last_read = self._loop.time()
        # One timer for all reads: a timer a read would cost as much as the read itself.
        self._timer = self._loop.call_later(interval, self._check)

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for the next `wake`. The caller has found nothing to read."""
        self._waiter = self._loop.create_future()
        await self._waiter

    def note_read(self) -> None:
        """Note that the task has something to send."""
        self._last_read = self._loop.time()

    def take_keepalive(self) -> bool:
        """Return whether a keep-alive is due; if so it counts as sent."""
        due, self._keepalive_due = self._keepalive_due, False
        return due

    def close(self) -> None:
        self._timer.cancel()
        self._may_keep_alive = _never  # it may hold the reply, which holds this

    def _check(self) -> None:
        now = self._loop.time()
        if now >= self._last_read + self._interval:
            self._keepalive_due = self._may_keep_alive()
            self._last_read = now
            self.wake()
        self._timer = self._loop.call_at(self._last_read + self._interval, self._check)
