"""The watchdog: reports slices of the device thread's work that take too long.

The device thread stores the slice that it begins, in one assignment and without a lock. The event
loop reads it from time to time while it waits for the thread. So the watchdog needs no thread of
its own, and no timer while there is no work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.engine")

_LOOKS = 4  # within the time that a slice may take
_LONGEST = 1.0  # seconds between two looks at a slice that has been reported


class Slice(NamedTuple):
    """A piece of work that nothing interrupts."""

    since: float
    """When it began, by `time.monotonic`."""
    what: str
    model: str


class Clock:
    """The slice that the device thread is in: written by that thread, read by any.

    A Slice is never changed, and replacing it is one assignment: a reader sees the old or the new.
    """

    def __init__(self) -> None:
        self.slice: Slice | None = None

    def begin(self, what: str, model: str = "") -> None:
        self.slice = Slice(monotonic(), what, model)

    def stop(self) -> None:
        self.slice = None


class Watchdog:
    """Reports each slice that takes longer than `timeout` seconds, once. Used on one event loop.

    Args:
        clock: the device thread's.
        loop: the event loop.
        timeout: seconds; None reports nothing.
        waiting: returns whether the loop waits for the device thread.
        others: describes what the other ranks do; returns "" where there are none.
    """

    def __init__(
        self,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        timeout: float | None,
        waiting: Callable[[], bool],
        others: Callable[[], str] = str,
    ) -> None:
        self._clock = clock
        self._loop = loop
        self._timeout = timeout
        self._waiting = waiting
        self._others = others
        self._timer: asyncio.TimerHandle | None = None
        self.reported: Slice | None = None

    @property
    def stalled(self) -> float:
        """Seconds that the current slice has taken, if that is too long; else 0."""
        current = self._clock.slice
        seconds = 0.0 if current is None else monotonic() - current.since
        return seconds if self._timeout is not None and seconds > self._timeout else 0.0

    def wake(self) -> None:
        """Start looking: the loop waits for the device thread from now on."""
        if self._timer is None and self._timeout is not None:
            self._timer = self._loop.call_later(self._interval(self._timeout), self._look)

    def _interval(self, timeout: float) -> float:
        return min(timeout / _LOOKS, _LONGEST) if self.reported else timeout / _LOOKS

    def _look(self) -> None:
        self._timer = None
        self.look()
        if self._waiting() or self.reported is not None:
            self.wake()

    def look(self) -> None:
        """Report a slice that takes too long, or the end of one that was reported."""
        current = self._clock.slice
        if self.reported is not None and self.reported is not current:
            self._log_slice("slow step ended", self.reported)
            self.reported = None
        if self.reported is None and current is not None and self.stalled:
            self._log_slice("slow step", current)
            self.reported = current

    def _log_slice(self, event: str, slow: Slice) -> None:
        seconds = monotonic() - slow.since
        log(
            _log,
            logging.WARNING,
            event,
            model=slow.model or None,
            what=slow.what,
            seconds=seconds,
            ranks=self._others() or None,
        )

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
