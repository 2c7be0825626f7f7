"""Groups: rows of about one length, which share KV cache arrays and a pass of the model.

The arrays of a group have so many slots, one for each row, and so many columns, one for each token.
Every row has as many columns as the longest: one row of 30,000 tokens beside seven of 300 would
fill the memory of 240,000, all of it read at each step. A row like that gets a group of its own, at
the cost of another pass over the weights at each step. So groups are kept apart only while padding
them to one length would take more bytes than the weights have.

Slots and columns grow in steps, since arrays that grow are copied, and shrink when at most half is
used and rows have changed anyway. So the bytes are known before they are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple, Protocol

from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.plans import RowGroup
from mlxsrv.engine.scheduling.row import Row

STEP = 256  # columns
_FEW, _MORE = 8, 4  # slots double up to so many; then they grow by so many


class _Sized(Protocol):
    """A row, or one that may come."""

    @property
    def length(self) -> int: ...


class _Coming(NamedTuple):
    """A row that may come."""

    length: int


class _Group:
    """Rows in the order of their slots, and the room that their arrays have.

    Attributes:
        places: the row of each slot; None where one has left since the last plan.
        slots, columns: of the arrays.
    """

    __slots__ = ("columns", "places", "slots")

    def __init__(self, places: Iterable[_Sized | None], slots: int = 0, columns: int = 0) -> None:
        self.places = list(places)
        self.slots = slots
        self.columns = columns

    def copy(self) -> _Group:
        return _Group(self.places, self.slots, self.columns)

    @property
    def rows(self) -> list[_Sized]:
        return [row for row in self.places if row is not None]

    @property
    def longest(self) -> int:
        return max(row.length for row in self.rows)

    def absorb(self, other: _Group) -> None:
        """Take the rows of another group: first into the slots of those that have left."""
        coming = iter(other.rows)
        self.places = [row if row is not None else next(coming, None) for row in self.places]
        self.places += coming

    def close_up(self) -> None:
        """Have the last rows take the slots of those that have left: each costs its own copy."""
        while None in self.places:
            last = self.places.pop()
            if last is not None:
                self.places[self.places.index(None)] = last

    def fit(self, tokens: int, most: int, *, changed: bool) -> None:
        """Choose the room for so many tokens more of each row, and at most so many slots."""
        slots, columns = len(self.places), self.longest + tokens
        if slots > self.slots or (changed and 2 * slots <= self.slots):
            self.slots = min(_step_up(slots), max(most, slots))
        if columns > self.columns:
            self.columns = _round_up(max(columns, self.columns + self.columns // 8))
        elif changed and 2 * columns <= self.columns:
            self.columns = _round_up(columns)


def _real(group: _Group) -> list[Row]:
    return [row for row in group.places if isinstance(row, Row)]


def _step_up(rows: int) -> int:
    """The slots for so many rows."""
    if rows > _FEW:
        return -(-rows // _MORE) * _MORE
    return 1 << (rows - 1).bit_length()


def _round_up(columns: int) -> int:
    return -(-columns // STEP) * STEP


class Groups:
    """The rows that one decoder decodes, in the order of its inputs.

    Args:
        facts: of the model.
        max_rows: rows that are decoded together, at most.
    """

    def __init__(self, facts: TextFacts, max_rows: int) -> None:
        self._facts = facts
        self._max_rows = max_rows
        self._groups: list[_Group] = []
        self._changed = False  # rows have

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def rows(self) -> list[Row]:
        return [row for group in self._groups for row in _real(group)]

    @property
    def bytes(self) -> int:
        """Bytes of the KV caches, as they were planned last."""
        return sum(map(self._size, self._groups))

    def bytes_with(self, lengths: Iterable[int] = (), tokens: int = 1) -> int:
        """Bytes of the KV caches if rows of these lengths joined, once each row has so many
        `tokens` more."""
        groups = [group.copy() for group in self._groups]
        lengths = tuple(lengths)
        for length in lengths:
            groups.append(_Group([_Coming(length)]))
            self._unite(groups)
        changed = self._changed or bool(lengths)
        for group in groups:
            group.close_up()
            group.fit(tokens, self._max_rows, changed=changed)
        return sum(map(self._size, groups))

    def add(self, rows: Sequence[Row]) -> None:
        """Take rows that were read together."""
        self._groups.append(_Group(rows))
        self._unite(self._groups)
        self._changed = True

    def remove(self, row: Row) -> None:
        """Drop a row, if it is there."""
        for group in self._groups:
            if row in group.places:
                group.places[group.places.index(row)] = None
                self._groups = [group for group in self._groups if group.rows]
                self._unite(self._groups)
                self._changed = True
                return

    def clear(self) -> None:
        self._groups.clear()
        self._changed = True

    def take_changed(self, tokens: int = 1) -> tuple[RowGroup, ...] | None:
        """The groups, with room for a step of so many `tokens`; None if they are the same as at the
        last call."""
        before = [(group.slots, group.columns) for group in self._groups]
        for group in self._groups:
            group.close_up()
            group.fit(tokens, self._max_rows, changed=self._changed)
        grown = before != [(group.slots, group.columns) for group in self._groups]
        if not (self._changed or grown):
            return None
        self._changed = False
        return tuple(
            RowGroup(tuple(row.id for row in _real(group)), group.slots, group.columns)
            for group in self._groups
        )

    def _size(self, group: _Group) -> int:
        return group.slots * self._facts.kv_bytes(group.columns)

    def _unite(self, groups: list[_Group]) -> None:
        """Merge groups that need not be apart, since rows have changed."""
        while (pair := self._find_close(groups)) is not None:
            one, other = pair
            one.absorb(other)
            groups.remove(other)

    def _find_close(self, groups: list[_Group]) -> tuple[_Group, _Group] | None:
        """The first two groups that need not be apart."""
        pairs = combinations(groups, 2)
        return next((pair for pair in pairs if self._padding(*pair) <= self._facts.padding), None)

    def _padding(self, one: _Group, other: _Group) -> int:
        """Bytes by which the KV caches would grow if all rows were as long as the longest."""
        counts = [len(each.rows) for each in (one, other)]
        sizes = [self._facts.kv_bytes(each.longest) for each in (one, other)]
        together = max(sizes) * sum(counts)
        return together - sizes[0] * counts[0] - sizes[1] * counts[1]


def alone(row: Row, tokens: int) -> RowGroup:
    """The group of a row that is decoded alone, with room for so many tokens more."""
    return RowGroup((row.id,), 1, _round_up(row.length + tokens))
