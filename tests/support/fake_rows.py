"""The holdings of a FakeText: rows, texts that are being read, and kept prompts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.prompt_index import Tokens, as_tokens
from mlxsrv.generation.parameters import Steering


class IllegalWork(AssertionError):
    """A work that cannot be done, or would give a wrong text."""


def require(condition: object, *message: object) -> None:
    if not condition:
        raise IllegalWork(" ".join(map(str, message)))


class FakeRow:
    """A row as the runner has it.

    Attributes:
        fresh: it is fed the last token of its text next, or has no KV cache.
        over: it has ended with a token, or for a cause of its own.
        lost: its KV cache was lost in a fault.
    """

    __slots__ = ("_prompt", "drawn", "fresh", "id", "job", "lost", "over")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.id = job.id
        self.drawn: list[int] = []
        self.fresh = True
        self.over = False
        self.lost = False
        self._prompt = as_tokens(job.prompt)

    @property
    def length(self) -> int:
        return self._prompt.size + len(self.drawn)

    @property
    def held(self) -> int:
        """Tokens of its text in the KV cache of a row that is decoded, or may be."""
        return self.length - self.fresh

    @property
    def text(self) -> Tokens:
        return np.concatenate([self._prompt, as_tokens(self.drawn)]) if self.drawn else self._prompt

    def lose(self) -> None:
        self.fresh = self.lost = True


class FakePartialText:
    """A text that is being read, for one row or several."""

    def __init__(self, rows: list[FakeRow], done: int) -> None:
        self.rows = rows
        self.done = done
        self.tokens = rows[0].text
        self.steering = rows[0].job.steering


class FakeEntry(NamedTuple):
    """A kept prompt."""

    tokens: Tokens
    steering: Steering | None
    bytes: int
    cuts: bool
    round: int
