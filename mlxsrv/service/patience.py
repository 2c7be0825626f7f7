"""How long a request may wait for its turn, stand still, and take in all.

Three clocks, for each tells of something else: a server that has too much to do, which a client
should ask again later (503); an engine that does nothing for this request (504); and a bound of the
operator's own (504), off by default: a prompt of 100,000 tokens may take its time while it is read.

Time in which the request's model is fetched or loaded is nobody's queue and does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

import anyio

from mlxsrv.errors import DeadlineExceeded, Overloaded, ServeError
from mlxsrv.settings import Settings


class Stage(Enum):
    QUEUED = auto()
    """It waits for others: for the tokenizer, for room, for a row."""
    SUBMITTED = auto()
    """It has a row; the engine has not begun with it, for others are before it."""
    BEGUN = auto()
    """The engine reads it, or draws its tokens."""


def _ignore(error: ServeError) -> None:
    return


class Patience:
    """The clocks of one request. Lives on the event loop; whoever makes it must `close` it.

    Args:
        settings: say how long.
        lapse: is told the error of the clock that ran out, each time that one does.
        loading: whether the request waits for its model to be fetched or loaded.
        heard: when the engine last told anybody of anything, by the loop's clock. A prompt that
            waits for its turn does not stand still while the engine reads those before it.
    """

    def __init__(
        self,
        settings: Settings,
        lapse: Callable[[ServeError], None],
        *,
        loading: Callable[[], bool],
        heard: Callable[[], float],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._lapse = lapse
        self._loading = loading
        self._heard = heard
        self._queue = settings.queue_timeout
        self._stall = settings.stall_timeout
        self._stage = Stage.QUEUED
        self._queued = self._moved = self._loop.time()
        self._timer = self._arm()
        self._whole = settings.request_timeout or None
        self._end = None if self._whole is None else self._loop.call_later(self._whole, self._over)

    def enter(self, stage: Stage) -> None:
        """The request is at this stage from now on. It may come back to an earlier one: some of
        its choices are over, and others wait for a row."""
        self._moved = self._loop.time()
        if stage is Stage.QUEUED or (stage is Stage.SUBMITTED and self._stage is Stage.BEGUN):
            self._queued = self._moved
        self._stage = stage
        self._timer.cancel()
        self._timer = self._arm()

    def move(self) -> None:
        """The engine has read or drawn something for it."""
        self._moved = self._loop.time()

    def close(self) -> None:
        self._timer.cancel()
        if self._end is not None:
            self._end.cancel()
        # What it tells holds on to it: a circle would outlive its request until garbage is sought.
        self._lapse, self._loading, self._heard = _ignore, bool, float

    def _arm(self) -> asyncio.TimerHandle:
        queue, stall = self._ends()
        return self._loop.call_at(min(queue, stall), self._look)

    def _ends(self) -> tuple[float, float]:
        """When it will have queued too long, and stood still too long."""
        never = float("inf")
        match self._stage:
            case Stage.QUEUED:
                return self._queued + self._queue, never
            case Stage.SUBMITTED:
                moved = max(self._moved, self._heard())
                return self._queued + self._queue, moved + self._stall
            case Stage.BEGUN:
                return never, self._moved + self._stall

    def _look(self) -> None:
        now = self._loop.time()
        if self._stage is Stage.QUEUED and self._loading():
            self._queued = now
        queue, stall = self._ends()
        if now < min(queue, stall):
            self._timer = self._arm()
        elif stall <= queue:
            self._lapse(
                DeadlineExceeded(
                    f"nothing was read or drawn for {self._stall:g} s (--stall-timeout)"
                )
            )
        else:
            self._lapse(
                Overloaded(
                    f"its turn did not come within the {self._queue:g} s that a request may queue "
                    "(--queue-timeout); try again shortly"
                )
            )

    def _over(self) -> None:
        self._lapse(
            DeadlineExceeded(
                f"not within the {self._whole:g} s a request may take (--request-timeout)"
            )
        )


class Bounded:
    """A piece of work in one task, which ends when a clock runs out or `end` is called.

    Args: as those of Patience.
    """

    def __init__(
        self, settings: Settings, *, loading: Callable[[], bool], heard: Callable[[], float]
    ) -> None:
        self._scope = anyio.CancelScope()
        self._error: ServeError | None = None
        self.patience = Patience(settings, self.end, loading=loading, heard=heard)

    def end(self, error: ServeError) -> None:
        """The first error counts."""
        self._error = self._error or error
        self._scope.cancel()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Raises the ServeError with which the block was ended."""
        try:
            with self._scope:
                yield
        finally:
            self.patience.close()
        if self._error is not None:
            raise self._error
