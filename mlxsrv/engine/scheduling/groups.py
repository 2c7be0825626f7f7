"""Groups: rows of about one length, which share KV cache arrays and a pass of the model.

The arrays of a group have so many slots, one for each row, and so many columns, one for each token.
Every row has as many columns as the longest: one row of 30,000 tokens beside seven of 300 would
fill the memory of 240,000, all of it read at each step. A row like that gets a group of its own, at
the cost of another pass over the weights at each step. So groups are kept apart only while padding
them to one length would take more bytes than the weights have.

Slots and columns grow in steps, since arrays that grow are copied, and shrink when at most half is
used and rows have changed anyway. So the bytes are known before they are taken. Where memory is
short they grow by less, or shrink: see `Fit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import chain, combinations
from operator import attrgetter

from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.plans import RowGroup
from mlxsrv.engine.scheduling.row import Row

STEP = 256  # columns
_LENGTH = attrgetter("length")
_FEW, _MORE = 8, 4  # slots double up to so many; then they grow by so many


class Fit(Enum):
    """The amount of room that arrays have when they change."""

    AMPLE = "ample"
    """They grow by more than is needed now, so that they seldom grow."""
    SPARING = "sparing"
    """They grow by what is needed now."""
    EXACT = "exact"
    """They also shrink to what is needed now, which copies all rows."""


class _Group:
    """Rows in the order of their slots, and the room that their arrays have.

    Attributes:
        places: the row of each slot; None where one has left since the last plan.
        slots, columns: of the arrays.
    """

    __slots__ = ("columns", "places", "slots")

    def __init__(self, places: Iterable[Row | None], slots: int = 0, columns: int = 0) -> None:
        self.places = list(places)
        self.slots = slots
        self.columns = columns

    def copy(self) -> _Group:
        return _Group(self.places, self.slots, self.columns)

    @property
    def rows(self) -> list[Row]:
        return [*filter(None, self.places)]

    @property
    def longest(self) -> int:
        length: int = max(map(_LENGTH, filter(None, self.places)))
        return length

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

    def reach(self, tokens: int) -> int:
        """Tokens of the row that is the longest once each has so many more, or all that its job
        allows."""
        first = max(self.rows, key=_LENGTH)
        if first.length + tokens <= first.most_length:  # so no other row has more
            return first.length + tokens
        return max(min(row.length + tokens, row.most_length) for row in self.rows)

    def fit(self, columns: int, most: int, fit: Fit, *, changed: bool) -> None:
        """Choose the room for rows of so many tokens, and at most so many slots."""
        slots = len(self.places)
        if fit is Fit.EXACT:
            self.slots, self.columns = slots, _round_up(columns)
            return
        if slots > self.slots or (changed and 2 * slots <= self.slots):
            self.slots = slots if fit is Fit.SPARING else min(_step_up(slots), max(most, slots))
        if columns > self.columns:
            more = 0 if fit is Fit.SPARING else self.columns + self.columns // 8
            self.columns = _round_up(max(columns, more))
        elif changed and 2 * columns <= self.columns:
            self.columns = _round_up(columns)


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
        fit: how much room arrays have when they change next.
        padding: bytes of padding for which two groups are not kept apart.
        rows: of all groups, in the order of the inputs.
        changes: grows when rows come, go, or change places.
    """

    def __init__(self, facts: TextFacts, max_rows: int) -> None:
        self.fit = Fit.AMPLE
        self.padding = facts.padding
        self.rows: tuple[Row, ...] = ()
        self.changes = 0
        self._facts = facts
        self._max_rows = max_rows
        self._absorbed = 0  # bytes of arrays whose rows have gone over to others
        self._groups: list[_Group] = []
        self._changed = False  # rows have

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def bytes(self) -> int:
        """Bytes of the KV caches, as they were planned last."""
        return sum(map(self._size, self._groups)) + self._absorbed

    def bytes_with(
        self,
        rows: Iterable[Row] = (),
        tokens: int = 1,
        fit: Fit = Fit.AMPLE,
        *,
        bounded: bool = False,
    ) -> int:
        """Bytes of the KV caches if these rows joined, once each row has so many `tokens` more.

        Arrays whose rows go over to others count until the step after.

        Args:
            rows: that join.
            tokens: of each row.
            fit: how much room arrays have when they change.
            bounded: no row has more tokens than its job allows.
        """
        groups = [group.copy() for group in self._groups]
        absorbed, changed = self._absorbed, self._changed
        for row in rows:
            groups.append(_Group([row]))
            absorbed += self._unite(groups)
            changed = True
        for group in groups:
            group.close_up()
            columns = group.reach(tokens) if bounded else group.longest + tokens
            group.fit(columns, self._max_rows, fit, changed=changed)
        return sum(map(self._size, groups)) + absorbed

    def bound(self, rows: Sequence[Row], tokens: int) -> int:
        """Bytes that `bytes_with` does not exceed for these rows, or some of them, and so many
        `tokens`. This looks at the length of each row only."""
        lengths = [max(each.columns, each.longest) for each in self._groups]
        longest = max([*lengths, *(row.length for row in rows)], default=0) + tokens
        # However rows are grouped, there are at most three slots more than a group has rows, and
        # two for each row that is alone.
        slots = sum(max(each.slots, len(each.places)) + _MORE for each in self._groups)
        most = (slots + 2 * len(rows)) * self._facts.kv_bytes(_round_up(longest))
        return most + (self.bytes if len(self._groups) > 1 else self._absorbed)

    def add(self, rows: Sequence[Row], room: RowGroup | None = None) -> None:
        """Take rows that were read together; or one that was decoded alone, in arrays with this
        `room`."""
        slots, columns = (0, 0) if room is None else (room.slots, room.columns)
        self._groups.append(_Group(rows, slots, columns))
        self._absorbed += self._unite(self._groups)
        self._note_change()

    def remove(self, row: Row) -> None:
        """Drop a row, if it is there."""
        for group in self._groups:
            if row in group.places:
                group.places[group.places.index(row)] = None
                self._groups = [group for group in self._groups if group.rows]
                self._absorbed += self._unite(self._groups)
                self._absorbed *= bool(self._groups)  # all arrays go with the last row
                self._note_change()
                return

    def close_up(self) -> None:
        """Have the rows in the order that they have in the next step."""
        if self._changed:
            for group in self._groups:
                group.close_up()
            self._list_rows()

    def clear(self) -> None:
        self._groups.clear()
        self._absorbed = 0
        self._note_change()

    def _note_change(self) -> None:
        self._changed = True
        self._list_rows()

    def _list_rows(self) -> None:
        self.rows = tuple(chain.from_iterable(group.rows for group in self._groups))
        self.changes += 1

    def take_changed(self, tokens: int = 1) -> tuple[RowGroup, ...] | None:
        """The groups, with room for a step of so many `tokens`; None if they are the same as at the
        last call."""
        before = [(group.slots, group.columns) for group in self._groups]
        self.close_up()
        for group in self._groups:
            group.fit(group.longest + tokens, self._max_rows, self.fit, changed=self._changed)
        self._absorbed = 0
        grown = before != [(group.slots, group.columns) for group in self._groups]
        if not (self._changed or grown):
            return None
        self._changed = False
        return tuple(
            RowGroup(tuple(row.id for row in group.rows), group.slots, group.columns)
            for group in self._groups
        )

    def _size(self, group: _Group) -> int:
        return group.slots * self._facts.kv_bytes(group.columns)

    def _unite(self, groups: list[_Group]) -> int:
        """Merge groups that need not be apart, since rows have changed. Returns the bytes of arrays
        that are left without rows."""
        absorbed = 0
        while (pair := self._find_close(groups)) is not None:
            one, other = pair
            one.absorb(other)
            absorbed += self._size(other)
            groups.remove(other)
        return absorbed

    def _find_close(self, groups: list[_Group]) -> tuple[_Group, _Group] | None:
        """The first two groups that need not be apart."""
        pairs = combinations(groups, 2)
        return next((pair for pair in pairs if self._padding(*pair) <= self.padding), None)

    def _padding(self, one: _Group, other: _Group) -> int:
        """Bytes by which the KV caches would grow if all rows were as long as the longest."""
        counts = [len(each.rows) for each in (one, other)]
        sizes = [self._facts.kv_bytes(each.longest) for each in (one, other)]
        together = max(sizes) * sum(counts)
        return together - sizes[0] * counts[0] - sizes[1] * counts[1]


def alone(row: Row, tokens: int) -> RowGroup:
    """The group of a row that is decoded alone, with room for so many tokens more."""
    return RowGroup((row.id,), 1, _round_up(row.length + tokens))
