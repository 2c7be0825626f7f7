"""Rows that share a KV cache, decoded by one pass of the model.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlxsrv.engine.cache.row_cache import Layers, RowCache
from mlxsrv.engine.execution.launch import launch
from mlxsrv.engine.live_row import LiveRow
from mlxsrv.engine.outcomes import KeptPrompt
from mlxsrv.engine.plans import Keep
from mlxsrv.engine.steering.plan import SteeringPlan, forward

_ALIGN_AFTER = 64  # plain steps


class SubBatch:
    """Rows and their KV cache: that of a batch, or of one row where a model's cannot be merged.

    `plan` is the steering of its rows, to be made anew whenever they change.
    """

    __slots__ = ("_ragged_for", "batched", "cache", "plan", "rows")

    def __init__(self, rows: list[LiveRow], cache: Layers, *, batched: bool) -> None:
        self.rows = rows
        self.cache = cache
        self.batched = batched
        self.plan: SteeringPlan | None = None
        self._ragged_for: int | None = None  # plain steps since rows were cut apart

    def decode(self, model: Any, inputs: mx.array) -> mx.array:
        """Feed each row its input `(rows,)`. Returns logits `(rows, vocabulary)`, not evaluated."""
        if self._ragged_for is not None:
            self._align_in_time()
        logits: mx.array = forward(model, self.plan, inputs[:, None], self.cache)
        return logits[:, -1, :]

    def check(self, model: Any, tokens: mx.array) -> mx.array:
        """Feed each row tokens `(rows, n)`. Returns the logits behind each,
        `(rows, n, vocabulary)`, not evaluated."""
        logits: mx.array = forward(model, self.plan, tokens, self.cache)
        return logits

    def cut(self, surplus: Sequence[int]) -> None:
        """Forget the last tokens of each row, so many of each `(rows,)`."""
        for layer in self.cache if any(surplus) else ():
            if len(surplus) == 1:
                layer.trim(surplus[0])
            else:
                layer.cut(surplus)
                self._ragged_for = 0

    def _align_in_time(self) -> None:
        """Align rows that were cut apart and have been decoded plainly for long since. Such steps
        are slower by some hundredths, and a copy of the cache takes about as long as a step."""
        assert self._ragged_for is not None
        self._ragged_for += 1
        if self._ragged_for == _ALIGN_AFTER:
            self._ragged_for = None
            for layer in self.cache:
                layer.align()

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but those at `indices`, at least one, and have them in this order."""
        chosen = mx.array(list(indices))
        for layer in self.cache:
            layer.filter(chosen)
        self.rows = [self.rows[i] for i in indices]

    def absorb(self, other: SubBatch) -> None:
        """Append the other's rows."""
        for layer, joining in zip(self.cache, other.cache, strict=True):
            layer.extend(joining)
        self.rows = self.rows + other.rows

    def extract(self, index: int) -> RowCache:
        """The KV cache of one row alone."""
        row = self.rows[index]
        layers = [layer.extract(index) for layer in self.cache] if self.batched else self.cache
        # A row that is fresh, or not decoded yet, was not fed the last token of its text.
        return RowCache(layers, row.length - row.fresh)

    def snapshot(self, keeps: Mapping[int, Keep]) -> list[KeptCache]:
        """The KV caches of those rows, by id, that are to be kept and can be. They are launched,
        so that they do not refer to the arrays of the batch for longer than it takes."""
        found: list[KeptCache] = []
        for index, row in enumerate(self.rows):
            keep = keeps.get(row.id)
            if keep is None:
                continue
            kept = keep_cache(self.extract(index), keep)
            found += [] if kept is None else [kept]
        return found

    def remove(self, row_ids: Collection[int]) -> bool:
        """Drop these rows. Returns whether any is left; if not, the sub-batch is of no use."""
        left = [i for i, row in enumerate(self.rows) if row.id not in row_ids]
        if left and len(left) < len(self.rows):
            self.keep(left)
        return bool(left)


class KeptCache(NamedTuple):
    """The KV cache of one row, to be kept as `entry`."""

    entry: int
    cache: RowCache

    def describe(self) -> KeptPrompt:
        return KeptPrompt(self.entry, self.cache.nbytes, self.cache.cuts)


def keep_cache(cache: RowCache, keep: Keep) -> KeptCache | None:
    """Keep the KV cache of one row. The caller must not use it any more.

    Returns:
        None if it holds other tokens than those to be kept, and cannot be cut back to them.
    """
    try:
        cache.cut(keep.tokens)
    except ValueError:
        return None
    launch(cache.state)
    return KeptCache(keep.entry, cache)
