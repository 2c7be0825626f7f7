"""Layers of a pass that several groups of rows share.

Groups have arrays of their own, as long as their rows. All else that a model computes has a row for
each row of the pass, so one pass over the weights serves the rows of all groups. Only a layer's
KV cache is that of one group, and so is attention: it runs once for each group.

A model gets keys, values and masks as `GroupParts`, and hands them on to attention (see
`patches.attention`). A model that does anything else with them raises an error, for they are no
arrays: then its groups cannot share a pass.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from mlxsrv.engine.cache.row_cache import Layers
from mlxsrv.engine.cache.row_caches import RowCaches


def share_layers(groups: Sequence[RowCaches]) -> Layers:
    """The layers to call a model with for one pass over the rows of these groups, in their order.
    The caller counts what it feeds, group by group."""
    rows = _PassRows([group.lengths for group in groups])
    layers = [group.layers for group in groups]
    return [_share(rows, parts) for parts in zip(*layers, strict=True)]


def _share(rows: _PassRows, parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], CacheList):
        members = zip(*[part.caches for part in parts], strict=True)
        return CacheList(*[_share(rows, each) for each in members])
    if isinstance(parts[0], ArraysCache):
        return _SharedStates(rows, parts)
    return SharedLayer(rows, parts)


class GroupParts:
    """Keys, values or masks of each group. It is no sequence, so that no model takes it
    for one.

    Attributes:
        layer: the layer that they are of.
        each: by group.
    """

    __slots__ = ("each", "layer")

    def __init__(self, layer: SharedLayer, each: Sequence[Any]) -> None:
        self.layer = layer
        self.each = each


class _PassRows:
    """The rows of a pass: what is the same for all its layers."""

    def __init__(self, lengths: Sequence[Sequence[int]]) -> None:
        self.counts = list(map(len, lengths))
        self._lengths = [length for group in lengths for length in group]
        self._ends = list(accumulate(self.counts))[:-1]
        self._offsets: dict[int, mx.array] = {}

    def split(self, array: mx.array) -> list[mx.array]:
        """The rows of each group."""
        return list(mx.split(array, self._ends))

    def offset(self, more: int) -> mx.array:
        """`(rows,)`: how many tokens each row has seen, and so many `more`."""
        if more not in self._offsets:
            self._offsets[more] = mx.array([length + more for length in self._lengths])
        return self._offsets[more]


class SharedLayer:
    """The KV caches of one layer for a pass. mlx-lm's models call it as they call its KVCache.

    Args:
        rows: of the pass.
        parts: each group's KV cache.
    """

    def __init__(self, rows: _PassRows, parts: Sequence[Any]) -> None:
        self._rows = rows
        self._parts = parts
        self._fed = 0

    @property
    def offset(self) -> mx.array:
        """`(rows,)`: how many tokens each has seen."""
        return self._rows.offset(self._fed)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[GroupParts, GroupParts]:
        """Add keys and values `(rows, heads, tokens, head size)`. Returns all that there are."""
        self._fed = keys.shape[2]
        new = zip(self._parts, self._rows.split(keys), self._rows.split(values), strict=True)
        return self._join([part.update_and_fetch(*own) for part, *own in new])

    def keys_and_values(self) -> tuple[GroupParts, GroupParts]:
        return self._join([part.keys_and_values() for part in self._parts])

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> GroupParts:
        """The columns that each of a row's next N tokens may attend to."""
        return GroupParts(
            self, [part.make_mask(N, window_size, return_array) for part in self._parts]
        )

    def split(
        self, queries: mx.array, keys: GroupParts, values: GroupParts, mask: GroupParts
    ) -> Iterator[tuple[mx.array, Any, Any, Any, Any]]:
        """Each group's queries, keys, values, KV cache and mask, for attention. The queries
        of all are `(rows, heads, tokens, head size)`."""
        split = self._rows.split(queries)
        return zip(split, keys.each, values.each, self._parts, mask.each, strict=True)

    def _join(self, pairs: Sequence[tuple[Any, Any]]) -> tuple[GroupParts, GroupParts]:
        keys, values = zip(*pairs, strict=True)
        return GroupParts(self, keys), GroupParts(self, values)


class _SharedStates(ArraysCache):  # type: ignore[misc]  # mlx-lm has no types
    """The states of one recurrent layer for a pass."""

    def __init__(self, rows: _PassRows, parts: Sequence[ArraysCache]) -> None:
        super().__init__(0)
        self._rows = rows
        self._parts = parts

    def __getitem__(self, index: int) -> mx.array | None:
        """A state of all rows; zeros for groups that have none yet."""
        states = [part[index] for part in self._parts]
        like = next((state for state in states if state is not None), None)
        if like is None:
            return None
        return mx.concatenate(
            [
                mx.zeros((count, *like.shape[1:]), like.dtype) if state is None else state
                for state, count in zip(states, self._rows.counts, strict=True)
            ]
        )

    def __setitem__(self, index: int, states: mx.array) -> None:
        for part, own in zip(self._parts, self._rows.split(states), strict=True):
            part[index] = own
