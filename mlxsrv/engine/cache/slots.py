"""Slots: the keys and values of the rows of a sub-batch, written in place.

One layer has an array `(slots, heads, columns, head size)` of keys and one of values. A row has a
slot, and its tokens are in the columns that they have in mlx-lm's cache of one row: token i in
column i, or in a ring of columns where a layer has a window. So a row joins by a write into its
slot, it leaves without a copy of the others, rows may be cut by different numbers of tokens, and a
slot's contents are a KV cache of mlx-lm's. A mask says which columns a row has.

MLX writes in place only if nothing else holds the array's buffer: no view of it, and no operation
that the device has yet to run. So whoever takes a part out copies it, and waits for the copy.

Used on the device thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import starmap, zip_longest
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import RotatingKVCache

from mlxsrv.engine.cache.layer_cache import BatchLayer, LayerCache, Room
from mlxsrv.engine.cache.rows import Rows

_Pieces = list[tuple[int, int, mx.array]]
"""Keys or values `(1, heads, tokens, size)` of a row: the first column of each piece, the column
behind the last, and an array that begins with it."""


class Slots(LayerCache, BatchLayer):
    """The keys and values of one layer with full attention. mlx-lm's models call it as they call
    its KVCache.

    Args:
        rows: those of the sub-batch, in the order of their slots.
        empty: mlx-lm's KV cache of this layer, of a row without tokens.

    Attributes:
        keys, values: None before any row has a token.
    """

    def __init__(self, rows: Rows, empty: Any) -> None:
        self.keys: Any = None
        self.values: Any = None
        self._rows = rows
        self._empty = empty
        self._room = Room(0, 0)
        self._reach: list[int] = []  # columns of each slot that held something at the last change
        self._written = -1  # the state of the rows in which this layer was written last

    # Models call these.

    @property
    def offset(self) -> mx.array:
        """`(rows,)`: how many tokens each has seen."""
        rows = self._rows
        return rows.offset(rows.fed if self._written == rows.changes else 0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Add keys and values `(rows, heads, tokens, head size)`. Returns all keys and all values.

        Raises:
            RuntimeError: the arrays have too few columns.
        """
        rows, tokens = self._rows, keys.shape[2]
        columns = self._require_room(tokens)
        rows.fed, self._written = tokens, rows.changes
        self.keys, self.values = self._add(self.keys, keys), self._add(self.values, values)
        slots = len(rows.lengths)
        return self._cut(self.keys, slots, columns), self._cut(self.values, slots, columns)

    def keys_and_values(self) -> tuple[Any, Any]:
        slots, columns = len(self._rows), self._held(self._rows.longest + self._fed)
        return self._cut(self.keys, slots, columns), self._cut(self.values, slots, columns)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The columns that each of a row's next N tokens may attend to; None: all."""
        rows = self._rows
        if rows.shortest == rows.longest and window_size is None and not return_array:
            return None if N == 1 else "causal"
        return rows.mask(N, window_size)

    def empty(self) -> bool:
        return self.keys is None

    def size(self) -> int:
        return self._rows.longest

    @property
    def state(self) -> tuple[Any, Any]:
        return self.keys, self.values

    # Rows join and are freed.

    @property
    def view(self) -> Any:
        """The object that a model is called with."""
        return self

    def arrange(self, sources: Sequence[Any], lengths: Sequence[int], room: Room) -> None:
        """Set the rows: see `BatchLayer.arrange`. A KV cache of a row that joins loses its arrays.

        Arrays change one after the other, so no more than one of them is in memory twice.
        """
        room = self._make_room(room)
        held = list(map(self._held, lengths))
        joining = self._take_over(sources, lengths)
        stay = {slot: source for slot, source in enumerate(sources) if isinstance(source, int)}
        moves = {slot: source for slot, source in stay.items() if slot != source}
        # The array of an only row may also be a cached prompt's: `_rebuild` takes it over as it is.
        # So it must be copied before it is written.
        taken_over = room.slots == 1 and bool(joining)
        crossed = not moves.keys().isdisjoint(stay.values())
        fresh = self.empty() or room != self._room or crossed or taken_over
        reach = self._find_reach()
        arrays: list[Any] = self._arrays or [None] * max(map(len, joining.values()), default=0)
        self.keys = self.values = None
        come = [slot for slot, source in enumerate(sources) if not isinstance(source, int)]
        for number in range(len(arrays)) if fresh or moves or come else ():
            pieces = {slot: parts[number] for slot, parts in joining.items()}
            array, arrays[number] = arrays[number], None
            if fresh:
                array = _rebuild(array, room, stay, pieces, held)
            else:
                _refill(array, moves, pieces, held, reach, come)
            mx.eval(array)
            arrays[number] = array
            for parts in joining.values():
                parts[number] = []
        self._set(arrays)
        self._room = room
        if fresh:  # rows that stay are copied as one block, with what is behind the shorter ones
            self._reach = [room.columns if room.slots == 1 else max(held)] * room.slots
        else:
            self._reach = [
                held[slot] if slot in moves or slot in come else reached
                for slot, reached in enumerate(reach)
            ]

    def view_row(self, slot: int, tokens: int) -> Any:
        row = copy.deepcopy(self._empty)
        held = self._held(tokens)
        if held and self.keys is not None:

            def view(array: mx.array) -> mx.array:
                return array[slot : slot + 1, :, :held]

            row.keys, row.values = tree_map(view, self.keys), tree_map(view, self.values)
            self._set_length(row, tokens)
        return row

    # Inside.

    @property
    def _fed(self) -> int:
        """Tokens of each row that the pass under way has fed to this layer."""
        return self._rows.fed if self._written == self._rows.changes else 0

    @property
    def _arrays(self) -> list[mx.array]:
        return [*_flatten(self.keys), *_flatten(self.values)]

    def _set(self, arrays: Sequence[mx.array]) -> None:
        half = len(arrays) // 2
        if half:
            self.keys, self.values = (
                part[0] if half == 1 else tuple(part) for part in (arrays[:half], arrays[half:])
            )

    def _find_reach(self) -> list[int]:
        """The number of columns of each slot that may hold something."""
        reached = map(self._held, self._rows.reached)
        return list(starmap(max, zip_longest(self._reach, reached, fillvalue=0)))

    def _take_over(
        self, sources: Sequence[Any], lengths: Sequence[int]
    ) -> dict[int, list[_Pieces]]:
        """Pieces of each array of the joining rows, by slot. Their KV caches lose the arrays."""
        joining = {
            slot: self._split(source, lengths[slot])
            for slot, source in enumerate(sources)
            if not isinstance(source, int) and self._held(lengths[slot])
        }
        for source in sources:
            if not isinstance(source, int):
                source.keys = source.values = None
        return joining

    # Subclasses override these.

    def _held(self, tokens: int) -> int:
        """The columns of a row that has seen so many tokens."""
        return tokens

    def _make_room(self, room: Room) -> Room:
        """The room of this layer's arrays, if rows have this `room`."""
        return Room(room.slots, self._held(room.columns))

    def _require_room(self, tokens: int) -> int:
        """The columns of the rows with so many tokens more. Raises RuntimeError if the arrays have
        fewer."""
        columns = self._held(self._rows.longest + tokens)
        if columns > self._room.columns:
            raise RuntimeError(f"{columns} tokens of a row in {self._room.columns} columns")
        return columns

    def _add(self, arrays: Any, new: mx.array) -> Any:
        """Keys or values, and new ones `(rows, heads, tokens, size)`."""
        return self._write(_make(new, self._room) if arrays is None else arrays, new)

    def _cut(self, arrays: Any, slots: int, columns: int) -> Any:
        """The first slots and columns of keys or values."""
        return arrays[:slots, :, :columns]

    def _write(self, array: mx.array, new: mx.array) -> mx.array:
        """Write the rows' next tokens `(rows, heads, tokens, size)` into the array, in place."""
        rows, tokens = self._rows, new.shape[2]
        if rows.shortest == rows.longest:
            first = self._place(rows.longest)
            array[: len(rows.lengths), :, first : first + tokens] = new
            return array
        return self._scatter(array, new)

    def _scatter(self, array: mx.array, new: mx.array) -> mx.array:
        """The same, to columns that differ from row to row."""
        rows, tokens = self._rows, new.shape[2]
        free = self._room.slots - len(rows)
        if free:  # slots without a row are written, too: that takes half of what an index takes
            new = mx.pad(new, [(0, free), (0, 0), (0, 0), (0, 0)])
        return mx.put_along_axis(array, self._places(tokens, free), new, axis=2)

    def _place(self, token: int) -> int:
        """The column of a token."""
        return token

    def _places(self, tokens: int, free: int) -> mx.array:
        """`(rows + free, 1, tokens, 1)`: the columns of each row's next tokens; any of others."""
        return self._rows.columns(tokens, free)

    def _split(self, row: Any, tokens: int) -> list[_Pieces]:
        """Pieces of each array of mlx-lm's KV cache of a row."""
        held = self._held(tokens)
        return [[(0, held, part)] for part in (*_flatten(row.keys), *_flatten(row.values))]

    def _set_length(self, row: Any, tokens: int) -> None:
        """Set how many tokens mlx-lm's KV cache of a row has seen."""
        row.offset = self._held(tokens)


class RingSlots(Slots):
    """The keys and values of one layer with a window: of each row's last tokens, and perhaps of the
    first ones. Decode steps write it; longer passes are mlx-lm's own cache's."""

    def __init__(self, rows: Rows, empty: RotatingKVCache) -> None:
        super().__init__(rows, empty)
        self._size = int(empty.max_size)
        self._first = int(empty.keep)  # columns in front of the ring

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | None:
        """The columns that each row's next token may attend to; None: all."""
        rows, columns = self._rows, self._held(self._rows.longest + 1)
        window = None if window_size is None or window_size >= self._size else window_size
        if window is None and not return_array and self._held(rows.shortest + 1) == columns:
            return None
        return rows.ring_mask(columns, self._first, self._size, window)

    def _held(self, tokens: int) -> int:
        return min(tokens, self._size)

    def _require_room(self, tokens: int) -> int:
        if tokens > 1:
            raise RuntimeError(f"{tokens} tokens at once for a layer with a window")
        return super()._require_room(tokens)

    def _place(self, token: int) -> int:
        first, size = self._first, self._size
        return token if token < size else first + (token - first) % (size - first)

    def _places(self, tokens: int, free: int) -> mx.array:
        return self._rows.ring_columns(self._first, self._size, free)

    def _split(self, row: Any, tokens: int) -> list[_Pieces]:
        first, ring = min(tokens, self._first), self._held(tokens) - min(tokens, self._first)
        begin = self._place(tokens - ring)
        fit = min(ring, self._size - begin)
        parts: list[_Pieces] = []
        for array in (row.keys, row.values):
            ordered = row._temporal_order(array)
            last = ordered[:, :, ordered.shape[2] - ring :]
            pieces = [
                (0, first, ordered[:, :, :first]),
                (begin, begin + fit, last[:, :, :fit]),
                (first, first + ring - fit, last[:, :, fit:]),
            ]
            parts.append([piece for piece in pieces if piece[0] < piece[1]])
        return parts

    def _set_length(self, row: Any, tokens: int) -> None:
        row.offset, row._idx = tokens, self._place(tokens)


def _flatten(arrays: Any) -> list[mx.array]:
    """The arrays of keys or values: three if they are quantized."""
    if arrays is None:
        return []
    return list(arrays) if isinstance(arrays, (tuple, list)) else [arrays]


def _make(like: mx.array, room: Room) -> mx.array:
    return mx.zeros((room.slots, like.shape[1], room.columns, like.shape[3]), like.dtype)


def _rebuild(
    old: mx.array | None,
    room: Room,
    stay: Mapping[int, int],
    joining: Mapping[int, _Pieces],
    held: Sequence[int],
) -> mx.array:
    """Return a new array `(slots, heads, columns, size)` of this room.

    Args:
        old: the array before; None if no row had tokens.
        room: of the new one.
        stay: for each slot of a row that stays, the slot that it had.
        joining: the pieces of rows that join, by slot.
        held: columns that each slot's row has.
    """
    like = old if old is not None else next(iter(joining.values()))[0][2]
    if old is None and room.slots == 1 and like.shape[2] == room.columns:
        return like  # of the only row: it needs no copy
    array = _make(like, room)
    if old is not None:
        block = next((n for n in range(len(held) + 1) if stay.get(n) != n), len(held))
        columns = max(held[:block], default=0)
        array[:block, :, :columns] = old[:block, :, :columns]
        for slot, source in stay.items():
            if slot >= block:
                array[slot : slot + 1, :, : held[slot]] = old[source : source + 1, :, : held[slot]]
    _put(array, joining)
    return array


def _refill(
    array: mx.array,
    moves: Mapping[int, int],
    joining: Mapping[int, _Pieces],
    held: Sequence[int],
    reach: Sequence[int],
    come: Sequence[int],
) -> None:
    """Change some slots of an array, in place.

    Args:
        array: `(slots, heads, columns, size)`.
        moves: slots whose row comes from another slot, which is the value.
        joining: the pieces of rows that join, by slot.
        held: columns that each slot's row has.
        reach: columns of each slot that may hold something now; those behind `held` are cleared.
        come: slots of rows that join, those without tokens included.
    """
    # Copies, for a view would hold the array's buffer.
    moved = {
        slot: array[source : source + 1, :, : held[slot]] * 1 for slot, source in moves.items()
    }
    mx.eval(moved)
    _put(array, {slot: [(0, held[slot], part)] for slot, part in moved.items()})
    _put(array, joining)
    for slot in (*moves, *come):
        # A column that is masked counts nothing, unless it is not a number.
        if held[slot] < reach[slot]:
            array[slot : slot + 1, :, held[slot] : reach[slot]] = 0


def _put(array: mx.array, rows: Mapping[int, _Pieces]) -> None:
    for slot, pieces in rows.items():
        for begin, end, piece in pieces:
            array[slot : slot + 1, :, begin:end] = piece[:, :, : end - begin]
