"""A row as the runner has it: its tokens, and the live objects that no plan could carry.

No MLX is imported here; `steering` holds arrays, and nothing here looks into it. Used on the device
thread only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mlxsrv.engine.orders import Job
from mlxsrv.generation.parameters import Constraint


class Place(NamedTuple):
    """Tokens of one row that a pass reads: `tokens` of them, from `position` on in the text that
    these `jobs` share."""

    jobs: tuple[int, ...]
    position: int
    tokens: int


class LiveRow:
    """One job, and all that is needed to decode it from any token on.

    That is its text, its constraint and its seed: the random numbers of a token follow from its
    position. All of it is on the host, so a KV cache that is lost can be made anew.

    Args:
        job: what is asked.
        constraint: what the row may say; anything, unless given.
        steering: what is added to the row's hidden states: a `RowSteering`.

    Attributes:
        drawn: the tokens that were delivered.
        accepted_tokens: how many of `drawn` the constraint has accepted.
        fresh: its next input is the last token of its text, and not one that was drawn behind it.
    """

    __slots__ = ("accepted_tokens", "constraint", "drawn", "fresh", "job", "steering")

    def __init__(
        self, job: Job, constraint: Constraint | None = None, steering: Any = None
    ) -> None:
        self.job = job
        self.constraint = constraint
        self.steering = steering
        self.drawn: list[int] = []
        self.accepted_tokens = 0
        self.fresh = True

    @property
    def id(self) -> int:
        return self.job.id

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
