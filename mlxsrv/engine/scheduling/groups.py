"""Groups: rows of about one length, which share KV cache arrays.

The arrays of a group have so many slots, one for each row, and so many columns, one for each token.
Every row has as many columns as the longest: one row of 30,000 tokens beside seven of 300 would
fill the memory of 240,000, all of it read at each step. A row like that gets a group of its own.
That has a cost at each step: another pass over the weights, or, where groups share passes, other
calls of attention. So groups are kept apart only while padding the rows of the shorter one to the
other's length would take more bytes than the weights have, or, where memory has a budget, more than
an eighth of that (`MemoryBudget`).

Slots and columns grow in steps, since arrays that grow are copied, and shrink when at most half is
used and rows have changed anyway. So the bytes are known before they are taken. Where memory is
short they grow by less, or shrink: see `Fit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import chain, combinations
from operator import attrgetter

import msgspec

from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.plans import RowGroup
from mlxsrv.engine.scheduling.row import Row

STEP = 256  # columns
GROWTH = STEP - 1
"""Tokens that the KV cache of a text has too many at most: mlx-lm's grows by STEP, from whatever
it has."""
_LENGTH = attrgetter("length")
_FEW, _MORE = 8, 4  # slots double up to so many; then they grow by so many


class Fit(Enum):
    """The spare room that arrays get when they change."""

    AMPLE = "ample"
    """They grow by more than is needed now, so that they seldom grow."""
    SPARING = "sparing"
    """They grow by what is needed now."""
    EXACT = "exact"
    """They also shrink to what is needed now, which copies all rows."""


_SPARING, _EXACT = Fit.SPARING, Fit.EXACT  # see `row` on members of enums


class Growth(msgspec.Struct, frozen=True):
    """A growth of rows, and of their arrays with them, for which bytes are counted.

    Attributes:
        tokens: of each row; no more than its job allows, unless `beyond_limits` is given.
        fit: how much room arrays have when they change.
        beyond_limits: a row also has room for tokens that its job does not allow, since they are
            proposed to others of its group.
    """

    tokens: int
    fit: Fit = Fit.AMPLE
    beyond_limits: bool = False


class _Shape(msgspec.Struct, frozen=True):
    """Rows of one group, and the room that their arrays have: `slots` rows of `columns` tokens."""

    rows: tuple[Row, ...]
    longest: Row
    slots: int = 0
    columns: int = 0

    def join(self, other: _Shape) -> _Shape:
        """The same with the rows of another group."""
        longest = max(self.longest, other.longest, key=_LENGTH)
        return _Shape(self.rows + other.rows, longest, self.slots, self.columns)

    def choose_room(self, growth: Growth, max_rows: int, *, changed: bool) -> tuple[int, int]:
        """The slots and the columns for these rows when they have grown.

        Args:
            growth: of each row.
            max_rows: rows that are decoded together, at most: more slots are of no use.
            changed: rows have, so that arrays are copied anyway.
        """
        longest, tokens, fit = self.longest, growth.tokens, growth.fit
        columns = longest.length + tokens
        if columns > longest.most_length and not growth.beyond_limits:  # or no other row has more
            grown = [(row.length + tokens, row.most_length) for row in self.rows]
            # `min` of the two would take twice as long, for each row in each round.
            columns = max([length if length < limit else limit for length, limit in grown])
        rows, slots, room = len(self.rows), self.slots, self.columns
        if fit is _EXACT:
            return rows, _round_up(columns)
        if rows > slots or (changed and 2 * rows <= slots):
            slots = rows if fit is _SPARING else min(_step_up(rows), max(max_rows, rows))
        if columns > room:
            room = _round_up(max(columns, 0 if fit is _SPARING else room + room // 8))
        elif changed and 2 * columns <= room:
            room = _round_up(columns)
        return slots, room


class _Group:
    """Rows in the order of their slots, and the room that their arrays have.

    Attributes:
        places: the row of each slot; None where one has left since the last plan.
        slots, columns: of the arrays.
    """

    __slots__ = ("columns", "places", "slots")

    def __init__(self, rows: Iterable[Row]) -> None:
        self.places: list[Row | None] = list(rows)
        self.slots = 0
        self.columns = 0

    @property
    def rows(self) -> list[Row]:
        return [*filter(None, self.places)]

    @property
    def shape(self) -> _Shape:
        rows = tuple(filter(None, self.places))
        return _Shape(rows, max(rows, key=_LENGTH), self.slots, self.columns)

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

    Attributes:
        count: of the rows.
        fit: how much room arrays have when they change next.
        padding: bytes of padding for which two groups are not kept apart.
        changes: grows when rows come or go.
        max_rows: as above.
    """

    def __init__(self, facts: TextFacts, max_rows: int) -> None:
        self.count = 0
        self.fit = Fit.AMPLE
        self.padding = facts.padding
        self.changes = 0
        self.max_rows = max_rows
        self._facts = facts
        self._absorbed = 0  # bytes of arrays whose rows have gone over to others
        self._groups: list[_Group] = []
        self._changed = False  # rows have
        self._rows: tuple[Row, ...] | None = ()  # None: to be listed anew

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all groups, in the order of the inputs."""
        if self._rows is None:
            self._rows = tuple(chain.from_iterable([group.rows for group in self._groups]))
        return self._rows

    @property
    def bytes(self) -> int:
        """Bytes of the KV caches, as they were planned last."""
        return (
            sum([self.measure(each.slots, each.columns) for each in self._groups]) + self._absorbed
        )

    @property
    def arrays(self) -> GroupArrays:
        """The arrays that there are."""
        shapes = [each.shape for each in self._groups]
        return GroupArrays(self, shapes, self._absorbed, self._changed)

    def measure(self, slots: int, columns: int) -> int:
        """Bytes of arrays with so much room."""
        return slots * self._facts.kv_bytes(columns) if slots else 0

    def join(self, rows: Sequence[Row]) -> None:
        """Take rows that were read together."""
        self._groups.append(_Group(rows))
        self.count += len(rows)
        self._unite()
        self._note_change()

    def remove(self, row: Row) -> None:
        """Drop a row, if it is there."""
        for group in self._groups:
            if row in group.places:
                group.places[group.places.index(row)] = None
                self.count -= 1
                self._groups = [group for group in self._groups if any(group.places)]
                self._unite()
                self._absorbed *= bool(self._groups)  # all arrays go with the last row
                self._note_change()
                return

    def close_up(self) -> None:
        """Have the rows in the order that they have in the next step."""
        for group in self._groups if self._changed else ():
            if None in group.places:
                self._rows = None
                group.close_up()

    def _note_change(self) -> None:
        self._changed = True
        self._rows = None
        self.changes += 1

    def take_changed(self, tokens: int = 1) -> tuple[RowGroup, ...] | None:
        """The groups, with room for a step of so many `tokens`; None if they are the same as at the
        last call."""
        self.close_up()
        self._absorbed, changed = 0, self._changed
        growth = Growth(tokens, self.fit, beyond_limits=True)
        for group in self._groups:
            room = group.shape.choose_room(growth, self.max_rows, changed=self._changed)
            changed |= room != (group.slots, group.columns)
            group.slots, group.columns = room
        self._changed = False
        if not changed:
            return None
        return tuple(
            [
                RowGroup(tuple([row.id for row in group.rows]), group.slots, group.columns)
                for group in self._groups
            ]
        )

    def _unite(self) -> None:
        """Merge groups that need not be apart, since rows have changed."""
        while len(self._groups) > 1:
            pair = self.find_close([group.shape for group in self._groups])
            if pair is None:
                return
            first, second = pair
            other = self._groups.pop(second)
            self._groups[first].absorb(other)
            self._absorbed += self.measure(other.slots, other.columns)

    def find_close(self, groups: Sequence[_Shape]) -> tuple[int, int] | None:
        """The places of the first two groups that need not be apart: their KV caches would grow by
        little if all rows were as long as the longest."""
        bytes = [self._facts.kv_bytes(group.longest.length) for group in groups]  # of its longest
        for one, other in combinations(range(len(groups)), 2):
            more = bytes[other] - bytes[one]
            shorter = groups[one if more > 0 else other]
            if abs(more) * len(shorter.rows) <= self.padding:
                return one, other
        return None


class GroupArrays(msgspec.Struct, frozen=True):
    """The arrays of the groups, now or after some rows have joined.

    Attributes:
        owner: has the groups that there are.
        groups: those that there would be.
        absorbed: bytes of arrays whose rows are copied into other arrays by the next step, and
            which are freed then.
        changed: rows have, since the last plan.
    """

    owner: Groups
    groups: list[_Shape]
    absorbed: int
    changed: bool

    def join(self, rows: Iterable[Row]) -> GroupArrays:
        """The same if these rows joined as well."""
        groups, absorbed = [*self.groups], self.absorbed
        for row in rows:
            groups.append(_Shape((row,), row))
            while (pair := self.owner.find_close(groups)) is not None:
                first, second = pair
                other = groups.pop(second)
                groups[first] = groups[first].join(other)
                absorbed += self.owner.measure(other.slots, other.columns)
        return GroupArrays(self.owner, groups, absorbed, True)

    def bytes_after(self, growth: Growth) -> int:
        """Bytes of the arrays once each row has grown."""
        taken, owner = self.absorbed, self.owner
        for group in self.groups:
            room = group.choose_room(growth, owner.max_rows, changed=self.changed)
            taken += owner.measure(*room)
        return taken
