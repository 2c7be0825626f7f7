"""Groups: rows of about one length, which share KV cache arrays.

A row of n tokens is in the *class* that n rounds up to: so many columns it needs, one for each
token. The bytes of that class are what the row takes of the memory budget, whatever was before and
whoever is beside it.

The arrays of a group have slots, one for each row, and as many columns as its longest row needs.
They take more than their rows need, where there is memory for it (`slack`):

- *Padding.* Each group costs something at each step: a pass over the weights or, where groups share
  passes, calls of attention. So groups are merged, from the longest down, while padding the shorter
  rows takes no more bytes than a pass reads of weights.
- *Spare slots.* Slots grow in steps, for arrays that grow are copied. They shrink, as columns do,
  when at most half is used and rows have changed anyway.

Where memory is short there is less slack, or none. So no row waits
because a group has spare room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.plans import RowGroup
from mlxsrv.engine.scheduling.row import Row

STEP = 256  # columns
GROWTH = STEP - 1
"""The most unused columns of a text's KV cache: mlx-lm's grows by STEP, from whatever it has."""
NEXT = 2
"""Tokens for which each row always has room: of the next step, and one more to end with."""
_FEW, _MORE = 8, 4  # slots double up to so many; then they grow by so many
_UNBOUNDED = 1 << 62  # bytes


def round_up(tokens: int) -> int:
    """The class of a row with so many tokens, in columns. Classes are STEP apart, and above 16
    steps a sixteenth to an eighth."""
    step = 1 << max((tokens - 1).bit_length() - 4, STEP.bit_length() - 1)
    return -(-tokens // step) * step


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

    @property
    def rows(self) -> list[Row]:
        return [*filter(None, self.places)]

    def place(self, rows: Sequence[Row]) -> list[Row | None]:
        """The places of these rows: those that were here keep theirs, the others come into the
        slots of those that have left, or behind them. The last ones take slots that are still
        empty: each costs its own copy."""
        here = {*rows}
        places = [row if row in here else None for row in self.places]
        coming = iter([row for row in rows if row not in {*places}])
        places = [row if row is not None else next(coming, None) for row in places]
        places += coming
        while None in places:
            last = places.pop()
            if last is not None:
                places[places.index(None)] = last
        return places


def _step_up(rows: int) -> int:
    """The slots for so many rows."""
    if rows > _FEW:
        return -(-rows // _MORE) * _MORE
    return 1 << (rows - 1).bit_length()


class Groups:
    """The rows that are decoded together, in the order of the inputs.

    Args:
        facts: of the model.
        max_rows: rows that are decoded together, at most.
        proposed: tokens that may be proposed to a row in a step, for which each row has room.

    Attributes:
        count: of the rows.
        changes: grows when rows come or go.
        max_rows: as above.
    """

    def __init__(self, facts: TextFacts, max_rows: int, proposed: int = 0) -> None:
        self.count = 0
        self.changes = 0
        self.max_rows = max_rows
        self._facts = facts
        self._proposed = proposed
        self._groups: list[_Group] = []
        self._coming: list[Row] = []  # rows that are in no group yet
        self._planned: list[_Group] | None = None  # those of the next step, where they are decided
        self._changed = False  # rows have come or gone since the last plan
        self._left = 0  # steps that no row outgrows its arrays, at least
        self._rows: tuple[Row, ...] | None = ()  # None: to be listed anew

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all groups, in the order of the inputs of the last plan; then those that have
        come since."""
        if self._rows is None:
            groups = [group.rows for group in self._groups]
            self._rows = tuple(chain(*groups, self._coming))
        return self._rows

    # Bytes.

    def columns(self, row: Row, tokens: int = NEXT) -> int:
        """The class of a row with room for so many tokens more, as far as its job allows them."""
        return round_up(min(row.length + tokens, row.most_length) + self._proposed)

    def count_bytes(self, rows: Iterable[Row], tokens: int = NEXT) -> int:
        """The bytes that these rows need, with room for so many tokens more of each."""
        taken, sizes = 0, dict[int, int]()
        for row in rows:
            columns = self.columns(row, tokens)
            if columns not in sizes:
                sizes[columns] = self._facts.kv_bytes(columns)
            taken += sizes[columns]
        return taken

    @property
    def bytes(self) -> int:
        """Bytes of the arrays, as they were planned last."""
        return self._measure(self._groups)

    @property
    def growth(self) -> int:
        """Bytes by which the arrays grow with the next step."""
        return 0 if self._planned is None else self._measure(self._planned) - self.bytes

    def _measure(self, groups: Iterable[_Group]) -> int:
        return sum([group.slots * self._facts.kv_bytes(group.columns) for group in groups])

    # Rows.

    def join(self, rows: Sequence[Row]) -> None:
        """Take rows whose texts are read."""
        self._coming += rows
        self.count += len(rows)
        self._note_change()

    def remove(self, row: Row) -> None:
        """Drop a row, if it is there."""
        if row in self._coming:
            self._coming.remove(row)
        else:
            group = next((group for group in self._groups if row in group.places), None)
            if group is None:
                return
            group.places[group.places.index(row)] = None
            self._groups = [group for group in self._groups if any(group.places)]
        self.count -= 1
        self._note_change()

    def _note_change(self) -> None:
        self._changed = True
        self._planned = self._rows = None
        self.changes += 1

    # Planning.

    @property
    def stale(self) -> bool:
        """Whether the next step needs other arrays: rows have come or gone, or one has outgrown its
        own."""
        if self._changed:
            return True
        if self._left < 0:
            spare = [
                group.columns - min(row.length + NEXT, row.most_length) - self._proposed
                for group in self._groups
                for row in group.rows
            ]
            self._left = min(spare, default=0) // (1 + self._proposed)
        return self._left < 0

    def arrange(self, slack: int) -> int:
        """Decide about the arrays of the next step.

        Args:
            slack: bytes that they may take beyond what their rows need.

        Returns:
            How many they take beyond that.
        """
        needed = self.count_bytes(self.rows)
        self._planned = None
        self._changed &= self.count > 0  # there is no step of no rows
        if not self.stale and (more := self.bytes - needed) <= slack:
            return more
        self._planned = self._form(max(slack, 0))
        return self._measure(self._planned) - needed

    def take_changed(self) -> tuple[RowGroup, ...] | None:
        """The groups of the next step; None if they are the same as at the last call."""
        if self._planned is None and self.stale:
            self.arrange(_UNBOUNDED)
        planned, self._planned = self._planned, None
        self._left -= 1
        if planned is None:
            return None
        self._groups, self._coming = planned, []
        self._changed, self._rows, self._left = False, None, -1
        return tuple(
            [
                RowGroup(tuple([row.id for row in group.rows]), group.slots, group.columns)
                for group in planned
            ]
        )

    def _form(self, slack: int) -> list[_Group]:
        """Form the groups of all rows, and choose the room of their arrays. Each goes on with the
        arrays of the group that had the most of its rows, unless another goes on with these. The
        longest come first: rows change into longer groups, and these take them before the arrays of
        shorter ones are written."""
        left, formed = [*self._groups], list[_Group]()
        slack //= 2  # so that it is not used up soon, and arrays change once more
        parts, padding = self._merge(slack)
        slack -= padding
        for rows, columns in parts:
            shared = [len({*group.places} & {*rows}) for group in left]
            before = _Group([])
            if any(shared):
                before = left.pop(shared.index(max(shared)))
            formed.append(_Group(before.place(rows), before.slots, before.columns))
            slack -= self._fit(formed[-1], columns, slack)
        return formed

    def _merge(self, most: int) -> tuple[list[tuple[list[Row], int]], int]:
        """The rows of each group, and the columns that they need, the longest first; and the bytes
        of padding, at most `most`."""
        taken = 0
        classes: dict[int, list[Row]] = {}
        for row in self.rows:
            classes.setdefault(self.columns(row), []).append(row)
        found = [(classes[columns], columns) for columns in sorted(classes, reverse=True)]
        while len(found) > 1:
            sizes = [self._facts.kv_bytes(columns) for _, columns in found]
            padding = [
                len(rows) * (wide - own)
                for (rows, _), (wide, own) in zip(found[1:], pairwise(sizes), strict=True)
            ]
            least = min(padding)
            if least > min(self._facts.padding, most - taken):
                break
            place = padding.index(least)
            rows, _ = found.pop(place + 1)
            found[place][0].extend(rows)
            taken += least
        return found, taken

    def _fit(self, group: _Group, columns: int, slack: int) -> int:
        """Choose the room of a group whose rows need so many columns. Returns its bytes
        beyond what its rows need."""
        rows, slots, room = len(group.places), group.slots, group.columns
        each = self._facts.kv_bytes(columns)
        if rows > slots or 2 * rows <= slots:
            slots = min(_step_up(rows), max(self.max_rows, rows))
        if columns > room or 2 * columns <= room:
            room = columns
        if slots * self._facts.kv_bytes(room) - rows * each > slack:
            room = columns
            slots = min(slots, rows + slack // each) if each else slots
        group.slots, group.columns = slots, room
        return slots * self._facts.kv_bytes(room) - rows * each
