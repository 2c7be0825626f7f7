"""The KV caches of the rows of a sub-batch, behind one interface: only this file calls their
layers.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from mlxsrv.engine.cache.attention_sinks import SinkCache
from mlxsrv.engine.cache.layer_cache import BatchLayer, Room
from mlxsrv.engine.cache.quantized import QuantizedCache
from mlxsrv.engine.cache.quantized_slots import QuantizedSlots
from mlxsrv.engine.cache.row_cache import (
    FULL,
    Layers,
    RowCache,
    list_layers,
    materialize_together,
)
from mlxsrv.engine.cache.rows import Rows
from mlxsrv.engine.cache.slots import RingSlots, Slots


class _States(BatchLayer):
    """The states of a recurrent layer. Each pass makes them anew, so they have no slots."""

    def __init__(self, empty: ArraysCache) -> None:
        self._view = ArraysCache(len(empty.cache))

    @property
    def view(self) -> ArraysCache:
        return self._view

    def arrange(self, sources: Sequence[Any], lengths: Sequence[int], room: Room) -> None:
        if list(sources) != [*range(self._view.batch_size)]:
            parts = zip(*[self._states(source) for source in sources], strict=True)
            self._view.cache = list(map(_stack, parts))

    def view_row(self, slot: int, tokens: int) -> ArraysCache:
        row = ArraysCache(len(self._view.cache))
        row.cache = self._states(slot)
        return row

    def _states(self, source: Any) -> list[mx.array | None]:
        """The states of a row."""
        if not isinstance(source, int):
            return list(source.cache)
        return [None if state is None else state[source : source + 1] for state in self._view.cache]


def _stack(states: Sequence[mx.array | None]) -> mx.array | None:
    """Stack a state of all rows `(rows, ...)`; zeros for rows that have none yet."""
    like = next((state for state in states if state is not None), None)
    if like is None:
        return None
    return mx.concatenate([mx.zeros_like(like) if s is None else s for s in states])


class _Several(BatchLayer):
    """Several KV caches that a layer has."""

    def __init__(self, members: Sequence[BatchLayer]) -> None:
        self.members = members

    @property
    def view(self) -> CacheList:
        return CacheList(*[member.view for member in self.members])

    def arrange(self, sources: Sequence[Any], lengths: Sequence[int], room: Room) -> None:
        for number, member in enumerate(self.members):
            each = [s if isinstance(s, int) else s.caches[number] for s in sources]
            member.arrange(each, lengths, room)

    def view_row(self, slot: int, tokens: int) -> CacheList:
        return CacheList(*[member.view_row(slot, tokens) for member in self.members])


class _Own(BatchLayer):
    """A KV cache of mlx-lm's own; None before there are rows."""

    def __init__(self) -> None:
        self._view: Any = None

    @property
    def view(self) -> Any:
        return self._view


class _Merged(_Own):
    """mlx-lm's cache of a left-padded batch: texts are read into it in one pass."""

    def arrange(self, sources: Sequence[Any], lengths: Sequence[int], room: Room) -> None:
        self._view = sources[0].merge(sources)

    def view_row(self, slot: int, tokens: int) -> Any:
        return self._view.extract(slot)


class _Lone(_Own):
    """The KV cache of the only row, of a kind that has no slots."""

    def arrange(self, sources: Sequence[Any], lengths: Sequence[int], room: Room) -> None:
        [source] = sources
        if not isinstance(source, int):
            self._view = source

    def view_row(self, slot: int, tokens: int) -> Any:
        return self._view


def _make(rows: Rows, empty: Any, *, reading: bool) -> BatchLayer:
    """The rows' KV caches of a layer, of which a row without tokens has the `empty` one."""
    kind = type(empty)
    if kind is CacheList:
        return _Several([_make(rows, member, reading=reading) for member in empty.caches])
    if kind is KVCache:
        return Slots(rows, empty)
    if kind is QuantizedCache:
        return QuantizedSlots(rows, empty)
    if kind in (RotatingKVCache, SinkCache):
        return _Merged() if reading else RingSlots(rows, empty)
    if kind is ArraysCache:
        return _Merged() if reading else _States(empty)
    return _Lone()


def _flatten(kinds: Iterable[BatchLayer]) -> Iterator[BatchLayer]:
    for kind in kinds:
        if isinstance(kind, _Several):
            yield from _flatten(kind.members)
        else:
            yield kind


def can_share(layers: Layers) -> bool:
    """Whether rows can be decoded together whose KV caches have these layers."""
    kinds = (*FULL, RotatingKVCache, SinkCache, ArraysCache)
    return all(type(layer) in kinds for layer in list_layers(layers))


class RowCaches:
    """The KV caches of the rows of a sub-batch.

    Args:
        empty: the layers of a row without tokens.
        reading: texts are read into them in one pass, and no row is decoded.
        alone: there is one row at a time.
        group_masks: masks have a dimension more, for queries in groups of heads.

    Attributes:
        layers: what the model is called with, after `arrange`. The caller counts what it feeds.
    """

    def __init__(
        self,
        empty: Layers,
        *,
        reading: bool = False,
        alone: bool = False,
        group_masks: bool = False,
    ) -> None:
        self.layers: Layers = []
        self._rows = Rows(group_masks=group_masks)
        # Where one layer has no slots, nobody shares it, so the row keeps all of its own.
        shared = not alone and can_share(empty)
        self._kinds = [
            _make(self._rows, layer, reading=reading) if shared else _Lone() for layer in empty
        ]
        flat = list(_flatten(self._kinds))
        self._merged = [kind for kind in flat if isinstance(kind, _Merged)]
        self._lone = [kind for kind in flat if isinstance(kind, _Lone)]
        self._slots: list[int] = []  # of each row

    @property
    def lengths(self) -> list[int]:
        """The number of tokens that each row has seen."""
        return [self._rows.lengths[slot] for slot in self._slots]

    def arrange(self, sources: Sequence[int | RowCache], slots: int, columns: int) -> None:
        """Set the rows, in this order; see `arrange_together`.

        Args:
            sources: for each row, the number that it has had, or the KV cache of a row that joins.
            slots: rows that the arrays have room for.
            columns: tokens of each row that the arrays have room for.
        """
        rows = [(self, each) if isinstance(each, int) else each for each in sources]
        arrange_together([Arrangement(self, rows, Room(slots, columns))])

    def drop_rows(self, numbers: Collection[int]) -> None:
        """Forget these rows. The others are to be arranged before the next pass."""
        self._slots = [slot for number, slot in enumerate(self._slots) if number not in numbers]
        self.layers = []

    def advance(self, tokens: int) -> None:
        """Note that a pass has fed so many tokens to each row."""
        self._rows.advance(tokens)

    def cut(self, surplus: Sequence[int]) -> None:
        """Forget the last tokens of each row, so many of each `(rows,)`."""
        self._rows.cut(surplus)
        for kind in self._lone:
            kind.view.trim(surplus[0])

    def prepare(self, tokens: Sequence[int]) -> None:
        """Get ready for a right-padded pass over so many tokens of each row."""
        padding = [max(tokens) - own for own in tokens]
        for kind in self._merged if any(padding) else ():
            kind.view.prepare(lengths=tokens, right_padding=padding)

    def finish(self, tokens: Sequence[int]) -> None:
        """Forget the padding of the pass, and wait until it is computed."""
        padding = [max(tokens) - own for own in tokens]
        for kind in self._merged if any(padding) else ():
            kind.view.finalize()
        self._rows.advance(max(tokens))
        self._rows.cut(padding)
        mx.eval([kind.view.state for kind in self._kinds])

    def view_row(self, number: int) -> RowCache:
        """The KV cache of one row, of views. While they live, MLX does not write in place."""
        slot, tokens = self._slots[number], self._rows.lengths[self._slots[number]]
        return RowCache([kind.view_row(slot, tokens) for kind in self._kinds], tokens, views=True)

    def move_out(self, views: Sequence[RowCache]) -> None:
        """Give these rows, which are views of `view_row`, arrays of their own, and drop all rows
        here. No more than one layer is there twice, whatever the rows take."""
        self.layers, self._merged, self._lone = [], [], []
        materialize_together(views, lambda: self._kinds.pop(0))
        self._kinds = []


class Arrangement(NamedTuple):
    """The rows that a sub-batch is to have, in this order, in arrays with this `room`. A row has
    been in a sub-batch, this one or another, under a number; or it joins with its own KV cache."""

    caches: RowCaches
    rows: Sequence[tuple[RowCaches, int] | RowCache]
    room: Room

    @property
    def lengths(self) -> list[int]:
        return [
            each.tokens if isinstance(each, RowCache) else each[0].lengths[each[1]]
            for each in self.rows
        ]

    @property
    def others(self) -> list[RowCaches]:
        """The other sub-batches from which rows come."""
        found = (each[0] for each in self.rows if not isinstance(each, RowCache))
        return [caches for caches in found if caches is not self.caches]

    def find_sources(self, layer: int) -> list[Any]:
        """Return what `BatchLayer.arrange` asks of each row. That of a KV cache that joins is taken
        out of it; what comes from another sub-batch are views."""
        found: list[Any] = []
        for each in self.rows:
            if isinstance(each, RowCache):
                source, each.layers[layer] = each.layers[layer], None
            else:
                caches, number = each
                slot = caches._slots[number]
                own, kind = caches is self.caches, caches._kinds[layer]
                source = slot if own else kind.view_row(slot, caches._rows.lengths[slot])
            found.append(source)
        return found


def arrange_together(wanted: Sequence[Arrangement]) -> None:
    """Set the rows of several sub-batches, layer by layer. So it takes what there was before or
    what there is then, whichever is more, and one layer beside.

    Rows may change from any sub-batch to any other. Those that are not `wanted` themselves lose all
    arrays, as KV caches that join do. Who takes rows out of others should come before these: then
    nobody has views of them any more when they are written.
    """
    stay = [each.caches for each in wanted]
    gone = [caches for each in wanted for caches in each.others if caches not in stay]
    lengths = [each.lengths for each in wanted]
    for caches in gone:
        caches.layers = []
    for layer in range(len(wanted[0].caches._kinds)):
        sources = [each.find_sources(layer) for each in wanted]
        for caches in gone:
            caches._kinds[layer] = _Lone()
        for each, rows, known in zip(wanted, sources, lengths, strict=True):
            each.caches._kinds[layer].arrange(rows, known, each.room)
            rows.clear()
    for each, known in zip(wanted, lengths, strict=True):
        each.caches._rows.replace(known)
        each.caches._slots = [*range(len(known))]
        each.caches.layers = [kind.view for kind in each.caches._kinds]
