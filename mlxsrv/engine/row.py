"""A row: one job on its way through the engine, and the states that it goes through.

    WAITING -> PREFILLING -> FRESH -> DECODING -> ENDED, or BROKEN

A row whose KV cache is lost in a fault is RECOVERING until its text is read anew; then it is FRESH
once more. A row may end at any time. `_NEXT` has all that may follow.

No MLX is imported here, so that what schedules rows needs no device. Used on the device thread
only.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from mlxsrv.engine.faults import Fault
from mlxsrv.engine.orders import Job
from mlxsrv.generation.outputs import FinishReason
from mlxsrv.generation.parameters import Constraint


class RowState(Enum):
    """How far a row has come."""

    WAITING = "waiting"
    """It is in the queue, and its prompt is not read."""
    PREFILLING = "prefilling"
    """Its prompt is being read."""
    FRESH = "fresh"
    """Its KV cache holds its text but for the last token, which is its next input."""
    DECODING = "decoding"
    """Its KV cache holds its text. Its next input is a token that is drawn and not delivered."""
    RECOVERING = "recovering"
    """Its KV cache was lost in a fault. Its text is to be read anew."""
    ENDED = "ended"
    """It has finished or failed, or was cancelled."""
    BROKEN = "broken"
    """It has failed because the model computed NaN, and its KV cache must not be kept."""


_NEXT = {
    RowState.WAITING: {RowState.PREFILLING, RowState.ENDED},
    # A slice that failed sends its rows back to the queue.
    RowState.PREFILLING: {RowState.FRESH, RowState.WAITING, RowState.ENDED, RowState.BROKEN},
    RowState.FRESH: {RowState.DECODING, RowState.RECOVERING, RowState.ENDED},
    RowState.DECODING: {RowState.RECOVERING, RowState.ENDED, RowState.BROKEN},
    RowState.RECOVERING: {RowState.FRESH, RowState.ENDED},
    RowState.ENDED: set[RowState](),
    RowState.BROKEN: set[RowState](),
}


class Place(NamedTuple):
    """Tokens of one row that a pass reads: `tokens` of them, from `position` on in the text that
    these `jobs` share."""

    jobs: tuple[int, ...]
    position: int
    tokens: int


class Row:
    """One job, and all that is needed to decode it from any token on.

    That is its text, its constraint and its seed: the random numbers of a token follow from its
    position. All of it is on the host, so a KV cache that is lost can be made anew.

    Args:
        job: what is asked.
        constraint: what the row may say; anything, unless given.
        steering: what is added to the row's hidden states: a `RowSteering`. Nothing here looks into
            it, for it holds arrays.
    """

    __slots__ = ("accepted_tokens", "constraint", "drawn", "faults", "job", "state", "steering")

    def __init__(
        self, job: Job, constraint: Constraint | None = None, steering: Any = None
    ) -> None:
        self.job = job
        self.constraint = constraint
        self.steering = steering
        self.state = RowState.WAITING  # changed by `enter` only
        self.drawn: list[int] = []  # tokens delivered
        self.accepted_tokens = 0  # how many of `drawn` the constraint has accepted
        self.faults: list[Fault] = []  # of slices that failed while the row was in them

    def enter(self, state: RowState) -> None:
        """Go on to `state`.

        Raises:
            RuntimeError: it may not follow the row's state.
        """
        if state not in _NEXT[self.state]:
            raise RuntimeError(
                f"row {self.job.id} is {self.state.value}, so it cannot be {state.value} next"
            )
        self.state = state

    @property
    def ended(self) -> bool:
        return self.state is RowState.ENDED or self.state is RowState.BROKEN

    @property
    def fresh(self) -> bool:
        """Whether the row's next input is the last token of its text, and not one that was drawn
        behind it. A row that has ended is not fresh, also in the step that ends it."""
        return self.state is not RowState.DECODING and not self.ended

    @property
    def seen(self) -> tuple[int, ...]:
        """The row's text: its prompt and the tokens delivered. A copy, once there are any."""
        return (*self.job.prompt, *self.drawn) if self.drawn else self.job.prompt

    @property
    def length(self) -> int:
        """Tokens of the row's text."""
        return len(self.job.prompt) + len(self.drawn)

    @property
    def last(self) -> int:
        """The last token of the row's text."""
        return self.drawn[-1] if self.drawn else self.job.prompt[-1]

    @property
    def place(self) -> Place:
        """The row's next input."""
        return Place((self.job.id,), self.length - self.fresh, 1)

    def finish_reason(self, token: int) -> FinishReason | None:
        """Why the row ends with `token`, which it has just been given; None if it goes on."""
        if token in self.job.end_tokens:
            return "stop"
        return "length" if len(self.drawn) >= self.job.max_tokens else None
