"""Slots of rows whose KV caches are quantized but for the first tokens: arrays of two kinds a
layer.

One has the columns of the first tokens, the other those of the later ones. The next token of
some rows of a pass may belong to one kind, that of others to the other. Then both are written, and
each has a spare column, which is never read: tokens that belong to the other kind go there.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxsrv.engine.cache.layer_cache import Room
from mlxsrv.engine.cache.quantized import BothSides, LaterTokens, QuantizedCache, pair_sides
from mlxsrv.engine.cache.rows import Rows
from mlxsrv.engine.cache.slots import Slots


class _Side(Slots):
    """The keys and values of each row's tokens from `begin` on, up to `end` if that is given."""

    def __init__(self, rows: Rows, empty: Any, begin: int, end: int | None) -> None:
        super().__init__(rows, empty)
        self._begin = begin
        self._end = end

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Write those of the rows' next tokens `(rows, heads, tokens, head size)` that belong
        here."""
        if self._held(self._rows.longest + keys.shape[2]) > self._held(self._rows.shortest):
            self.keys, self.values = self._add(self.keys, keys), self._add(self.values, values)

    def cut(self, tokens: int) -> tuple[Any, Any] | None:
        """The keys and values of rows with so many tokens at most; None if none of them is here."""
        slots, columns = len(self._rows), self._held(tokens)
        if not columns:
            return None
        return self._cut(self.keys, slots, columns), self._cut(self.values, slots, columns)

    def _held(self, tokens: int) -> int:
        end = tokens if self._end is None else min(tokens, self._end)
        return max(end - self._begin, 0)

    def _make_room(self, room: Room) -> Room:
        columns = self._held(room.columns)
        apart = self._begin > 0 if self._end is None else room.columns > self._end
        return Room(room.slots, columns + 1 if apart and columns else columns)

    def _write(self, array: mx.array, new: mx.array) -> mx.array:
        last = self._rows.longest + new.shape[2]
        if self._begin <= self._rows.shortest and self._held(last) == last - self._begin:
            return super()._write(array, new)
        return self._scatter(array, new)

    def _place(self, token: int) -> int:
        return token - self._begin

    def _places(self, tokens: int, free: int) -> mx.array:
        spare = self._room.columns - 1
        return self._rows.part_columns(self._begin, self._end, spare, tokens, free)


class _QuantizedSide(_Side):
    """The quantized tokens. Each array is three: weights, scales and biases."""

    def __init__(self, rows: Rows, empty: LaterTokens) -> None:
        super().__init__(rows, empty, empty.start, None)
        self._quantize = empty.quantize

    def _add(self, arrays: Any, new: mx.array) -> Any:
        parts = self._quantize(new)
        olds = arrays or [None] * len(parts)
        pairs = zip(olds, parts, strict=True)
        return tuple(super(_QuantizedSide, self)._add(*each) for each in pairs)

    def _cut(self, arrays: Any, slots: int, columns: int) -> Any:
        return tuple(array[:slots, :, :columns] for array in arrays)


class QuantizedSlots(BothSides, Slots):
    """The keys and values of one layer with full attention, quantized behind a start.

    Args:
        rows: those of the sub-batch.
        empty: the KV cache of this layer, of a row without tokens.

    Attributes:
        caches: the first tokens, and the later ones.
    """

    def __init__(self, rows: Rows, empty: QuantizedCache) -> None:
        super().__init__(rows, empty)
        self._kind = empty.later
        self.caches = (
            _Side(rows, empty.first, 0, empty.later.start),
            _QuantizedSide(rows, empty.later),
        )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self._require_room(keys.shape[2])
        self._rows.fed, self._written = keys.shape[2], self._rows.changes
        for side in self.caches:
            side.append(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        tokens = self._rows.longest + self._fed
        first, later = (side.cut(tokens) for side in self.caches)
        return pair_sides(first, later, self._kind)

    def empty(self) -> bool:
        return all(side.empty() for side in self.caches)

    @property
    def state(self) -> Any:
        return [side.state for side in self.caches]

    def arrange(self, sources: Sequence[Any], lengths: Sequence[int], room: Room) -> None:
        for number, side in enumerate(self.caches):
            each = [s if isinstance(s, int) else s.caches[number] for s in sources]
            side.arrange(each, lengths, room)
        self._room = room

    def view_row(self, slot: int, tokens: int) -> QuantizedCache:
        row = QuantizedCache(self._kind.start, self._kind.group_size, self._kind.bits)
        first, later = self.caches
        row.caches = (first.view_row(slot, tokens), later.view_row(slot, tokens))
        return row
