"""A job on its way through the engine. No MLX: scheduling can look at rows without a device.

Used on the device thread only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mlxsrv.engine.faults import Fault
from mlxsrv.engine.orders import Job
from mlxsrv.generation import Constraint, FinishReason


class Place(NamedTuple):
    """Tokens of one row that a pass reads: `tokens` of them from `position` of the text on, which
    is that of these `jobs`."""

    jobs: tuple[int, ...]
    position: int
    tokens: int


class Row:
    """A job that waits, is read or is decoded.

    Everything that is needed to decode it from any token on is here and on the host, so that its KV
    cache can be made anew: the tokens that it has seen, what may come next, and its seed, since the
    key of a token is its place.

    Args:
        job: what is asked.
        constraint: what the row may say; anything, unless given.
        steer: what is added to its hidden states, a `Steer` of the model's steerer. Arrays, which
            nothing here looks into.
    """

    __slots__ = (
        "accepted",
        "constraint",
        "drawn",
        "ended",
        "faults",
        "fresh",
        "job",
        "lost",
        "steer",
        "told",
        "trial",
    )

    def __init__(self, job: Job, constraint: Constraint | None = None, steer: Any = None) -> None:
        self.job = job
        self.constraint = constraint
        self.steer = steer
        self.drawn: list[int] = []  # tokens delivered
        self.accepted = 0  # tokens of them that its constraint knows of
        self.fresh = True  # its pending input is the last token that it has seen
        self.told = False  # its prompt is read, and who asked knows
        self.ended = False  # it is to be dropped
        self.lost = False  # its cache is of no use
        self.faults: list[Fault] = []  # slices that failed while it was in them
        self.trial: int | None = None  # tokens that it is to draw alone before it joins others

    @property
    def seen(self) -> tuple[int, ...]:
        """The prompt and the tokens delivered. Between two steps the row's KV cache holds all of
        them; while the row is fresh, all but the last. A copy, once a token is drawn."""
        return (*self.job.prompt, *self.drawn) if self.drawn else self.job.prompt

    @property
    def last(self) -> int:
        """The last token that it has seen."""
        return self.drawn[-1] if self.drawn else self.job.prompt[-1]

    @property
    def place(self) -> Place:
        """Where in its text the row's pending input is."""
        return Place((self.job.id,), len(self.job.prompt) + len(self.drawn) - self.fresh, 1)

    def restart(self) -> None:
        """Its cache is gone: it is to be read anew. The token that was drawn and not delivered is
        drawn again, with the same key."""
        self.fresh = self.told = True

    def finish(self, token: int) -> FinishReason | None:
        """Why the row ends with `token`, if it does."""
        if token in self.job.end_tokens:
            return "stop"
        return "length" if len(self.drawn) >= self.job.max_tokens else None
