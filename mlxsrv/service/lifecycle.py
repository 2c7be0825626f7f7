"""The states of a request, what may follow what, and how long it may stay in each.

A reply, each of its choices and every other request that waits for a model have the states of
`State`, and change them through `follow` only, which looks them up in `FOLLOWS`. A reply with
several choices has the state of its most advanced unfinished choice. So it may go back: when one
choice has ended and the next waits for a row, the reply is queued again.

There are three time limits, because each has a different cause:

- `--queue-timeout`: the server has too much to do. The client should try again later (503).
- `--stall-timeout`: the engine does nothing for this request (504).
- `--request-timeout`: a bound on the whole request that the operator may set (504). It is off by
  default, since a prompt of 100,000 tokens takes long to read.

Time in which the request's model is downloaded or loaded does not count as time in a queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

import anyio

from mlxsrv.errors import DeadlineExceeded, Overloaded, ServeError
from mlxsrv.settings import Settings
from mlxsrv.states import follow


class State(Enum):
    WAITING = "waiting"
    """Waits for the files and the tokenizer of its model."""
    PREPARING = "preparing"
    """Its prompts become tokens, and its model is loaded."""
    QUEUED = "queued"
    """Stands in the line of its model, for a row and for memory."""
    SUBMITTED = "submitted"
    """Has a row. The engine still reads other prompts."""
    RUNNING = "running"
    """The engine reads its prompt or generates its tokens."""
    FINISHED = "finished"
    """The engine does no more for it. Its outputs may not have been read yet."""
    FAILED = "failed"
    """Ended with an error. Outputs from before the error can still be read."""
    CLOSED = "closed"
    """Over: it holds nothing, and nothing more is read from it."""


FOLLOWS: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREPARING, State.FAILED, State.CLOSED}),
    State.PREPARING: frozenset({State.QUEUED, State.FAILED, State.CLOSED}),
    # Queued or submitted may be followed by finished: the time of a request with several choices
    # is over, and the text of the first choices is its answer.
    State.QUEUED: frozenset({State.SUBMITTED, State.FINISHED, State.FAILED, State.CLOSED}),
    State.SUBMITTED: frozenset({State.RUNNING, State.FINISHED, State.FAILED, State.CLOSED}),
    State.RUNNING: frozenset(
        {State.QUEUED, State.SUBMITTED, State.FINISHED, State.FAILED, State.CLOSED}
    ),
    # An answer that is complete cannot fail any more.
    State.FINISHED: frozenset({State.CLOSED}),
    State.FAILED: frozenset({State.CLOSED}),
    State.CLOSED: frozenset(),
}
"""The states that may follow each state."""

ENDED = frozenset({State.FINISHED, State.FAILED, State.CLOSED})
"""The states in which a request takes no more of the engine."""


class Awaited(Protocol):
    """The model that a request waits for."""

    @property
    def progressing(self) -> bool:
        """Whether it is being downloaded or loaded."""

    @property
    def turn(self) -> int:
        """In how many seconds a request that comes now may have its turn."""


class Lifecycle:
    """The state of one request, and the time limits that apply in it. Used on the event loop.

    The owner must bring it to a state of ENDED, so that its timers end.

    Args:
        settings: have the time limits.
        heard: returns when the engine last sent anything to anybody, in the loop's time. A prompt
            that waits for its turn does not stall while the engine reads other prompts.
        expire: called with the error when a time limit has passed.
    """

    def __init__(
        self,
        settings: Settings,
        model: Awaited,
        heard: Callable[[], float],
        expire: Callable[[ServeError], None],
    ) -> None:
        self.state = State.WAITING
        self._loop = asyncio.get_running_loop()
        self._model = model
        self._heard = heard
        self._expire = expire
        self._queue_timeout = settings.queue_timeout
        self._stall_timeout = settings.stall_timeout
        self._queued = self._moved = self._loop.time()
        self._timer = self._arm()
        self._whole: asyncio.TimerHandle | None = None
        if settings.request_timeout:
            self._whole = self._loop.call_later(
                settings.request_timeout, self._expire_whole, settings.request_timeout
            )

    def may_enter(self, state: State) -> bool:
        """Whether `state` may follow the current state."""
        return state in FOLLOWS[self.state]

    def enter(self, state: State) -> None:
        """Change to `state`, or stay in it, and start its time limits.

        Raises:
            RuntimeError: `state` may not follow the current state.
        """
        before = self.state
        if state is not before:
            self.state = follow("a request", before, state, FOLLOWS)
        if state in ENDED:
            self._stop()
            return
        self._moved = self._loop.time()
        # Each wait starts with the full timeout. But going from QUEUED to SUBMITTED does not
        # restart it.
        if state is not before and not (before is State.QUEUED and state is State.SUBMITTED):
            self._queued = self._moved
        self._timer.cancel()
        self._timer = self._arm()

    def touch(self) -> None:
        """Note that the engine has read or generated something for the request."""
        self._moved = self._loop.time()

    def _stop(self) -> None:
        self._timer.cancel()
        if self._whole is not None:
            self._whole.cancel()
        # These hold the request, which holds this: without the circle it is freed at once, and not
        # when the garbage collector runs.
        self._expire, self._heard = _ignore, float

    def _arm(self) -> asyncio.TimerHandle:
        return self._loop.call_at(min(self._deadlines()), self._check)

    def _deadlines(self) -> tuple[float, float]:
        """When the request has queued too long, and when it has stalled."""
        never = float("inf")
        if self.state is State.RUNNING:
            return never, self._moved + self._stall_timeout
        queue = self._queued + self._queue_timeout
        if self.state is State.SUBMITTED:
            return queue, max(self._moved, self._heard()) + self._stall_timeout
        return queue, never

    def _check(self) -> None:
        now = self._loop.time()
        if self.state not in (State.SUBMITTED, State.RUNNING) and self._model.progressing:
            self._queued = now
        queue, stall = self._deadlines()
        if now < min(queue, stall):
            self._timer = self._arm()
        elif stall <= queue:
            self._expire(
                DeadlineExceeded(
                    f"the engine did nothing for this request for {self._stall_timeout:g} s "
                    "(--stall-timeout)"
                )
            )
        else:
            self._expire(
                Overloaded(
                    f"the request's turn did not come within {self._queue_timeout:g} s "
                    "(--queue-timeout); try again shortly",
                    retry_after=self._model.turn,
                )
            )

    def _expire_whole(self, seconds: float) -> None:
        self._expire(
            DeadlineExceeded(f"the request took longer than {seconds:g} s (--request-timeout)")
        )


class TimedWork(Lifecycle):
    """A block that ends when a time limit has passed, or when `end` is called."""

    def __init__(self, settings: Settings, model: Awaited, heard: Callable[[], float]) -> None:
        super().__init__(settings, model, heard, self.end)
        self._scope = anyio.CancelScope()
        self._error: ServeError | None = None

    def end(self, error: ServeError) -> None:
        """Cancel the block, which then raises `error`. Only the first error counts."""
        if self.may_enter(State.FAILED):
            super().enter(State.FAILED)
            self._error = error
            self._scope.cancel()

    def enter(self, state: State) -> None:
        """Change to `state`, from within the block.

        Raises:
            ServeError: the block was ended. Its task may take one more step before the
                cancellation reaches it, if what it waited for came at the same time.
        """
        if self._error is not None:
            raise self._error
        super().enter(state)

    def note_start(self) -> None:
        """Note that it has a row; called from the engine's callbacks."""
        if self._error is None:
            self.enter(State.SUBMITTED)

    def note_progress(self) -> None:
        """Note that the engine has done something for it; called from the engine's callbacks."""
        if self._error is None:
            self.enter(State.RUNNING)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Run the block. Raises the ServeError that ended it."""
        try:
            with self._scope:
                yield
        finally:
            super().enter(State.CLOSED)  # ends the timers
        if self._error is not None:
            raise self._error


def _ignore(error: ServeError) -> None:
    return
