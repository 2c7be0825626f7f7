"""The decoder of one model, without the model: which rows share arrays, and what these take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.plans import Decode, RowGroup, count_fed
from mlxsrv.engine.scheduling.groups import STEP
from mlxsrv.engine.scheduling.prompt_index import Tokens, as_tokens
from mlxsrv.generation.parameters import Steering


class FakeGroup:
    """Rows that were read together, or that share arrays.

    Attributes:
        room: of the arrays; None while the rows have what was read only.
    """

    def __init__(self, rows: list[FakeRow], room: RowGroup | None = None) -> None:
        self.rows = rows
        self.room = room

    @property
    def ids(self) -> list[int]:
        return [row.id for row in self.rows]


class FakeDecoder:
    """The rows of one model that are read: those that are ready, and those that are decoded.

    Attributes:
        ready: groups of rows that were read together.
        groups: of rows that are decoded together.
        changed: rows have come or gone since the last step.
        lost: a release of this round has failed, so that its rows are lost.
        looked: rows and positions that the last step has looked at.
    """

    def __init__(self, facts: TextFacts) -> None:
        self.ready: list[FakeGroup] = []
        self.groups: list[FakeGroup] = []
        self.changed = False
        self.lost = False
        self.looked: list[tuple[int, int]] = []
        self._facts = facts

    @property
    def rows(self) -> list[FakeRow]:
        """The rows that are decoded."""
        return [row for group in self.groups for row in group.rows]

    @property
    def all_rows(self) -> list[FakeRow]:
        """All rows that are ready or decoded."""
        return [row for group in self._all() for row in group.rows]

    def remove(self, ids: Iterable[int]) -> None:
        gone, before = {*ids}, len(self.rows)
        self.ready = _without(self.ready, gone)
        self.groups = _without(self.groups, gone)
        self.changed |= before != len(self.rows)

    def abandon(self) -> None:
        """Lose all rows, and their arrays."""
        for row in self.rows:
            row.lose()
        self.groups = []
        self.looked = []

    def check_room(self, work: Decode) -> None:
        """Check that the groups have room for what the step writes."""
        tokens = count_fed(work.proposals)
        for group in self.groups:
            assert group.room is not None
            written = max(row.held for row in group.rows) + tokens
            most = group.room.columns
            require(written <= most, written, "tokens of a row in", most)

    # Bytes.

    @property
    def bytes(self) -> int:
        """Bytes of arrays, and of texts that are read and not in arrays yet."""
        return self._measure_groups(self._all())

    def measure(self, tokens: int) -> int:
        """Bytes of the KV cache of one row."""
        return self._facts.kv_bytes(-(-tokens // STEP) * STEP)

    def _all(self) -> list[FakeGroup]:
        return [*self.ready, *self.groups]

    def _measure_groups(self, groups: Sequence[FakeGroup]) -> int:
        arrays = sum(self._measure_room(group.room) for group in groups if group.room is not None)
        # Several rows may have one text.
        read = [row for group in groups if group.room is None for row in group.rows]
        texts = {row.text.tobytes(): row.held for row in read}
        return arrays + sum(map(self.measure, texts.values()))

    def _measure_room(self, room: RowGroup) -> int:
        return room.slots * self._facts.kv_bytes(room.columns)

    # Arranging.

    def arrange(self, groups: Sequence[RowGroup]) -> None:
        """Have the rows that are decoded be these. Arrays change layer by layer, so that takes no
        more than there was before, or is then."""
        rows = {row.id: row for row in self.all_rows}
        wanted = [row_id for group in groups for row_id in group.rows]
        require(len({*wanted}) == len(wanted), "a row twice:", wanted)
        left = [row.id for row in self.rows if row.id not in wanted]
        require(not left, "rows are left out:", left)
        require(rows.keys() >= {*wanted}, "rows", wanted, "of", [*rows])
        for each in groups:
            require(len(each.rows) <= each.slots, len(each.rows), "rows in", each.slots, "slots")
        self.groups = [FakeGroup([rows[row_id] for row_id in each.rows], each) for each in groups]
        self.ready = _without(self.ready, {*wanted})


def _without(groups: Iterable[FakeGroup], gone: set[int]) -> list[FakeGroup]:
    left = [FakeGroup([row for row in g.rows if row.id not in gone], g.room) for g in groups]
    return [group for group in left if group.rows]


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
