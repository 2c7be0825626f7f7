"""Rows that share KV cache arrays, and the passes of the model that decode them.

Used on the device thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import mlx.core as mx

from mlxsrv.engine.cache.layer_cache import Room
from mlxsrv.engine.cache.row_cache import RowCache
from mlxsrv.engine.cache.row_caches import Arrangement, RowCaches, arrange_together
from mlxsrv.engine.cache.shared_layers import share_layers
from mlxsrv.engine.live_row import LiveRow
from mlxsrv.engine.outcomes import KeptPrompt
from mlxsrv.engine.plans import Keep, RowGroup
from mlxsrv.engine.steering.plan import SteeringPlan, forward


class ReadyRow(NamedTuple):
    """A row whose text is read but for the last token. The KV cache is its own."""

    row: LiveRow
    cache: RowCache


class SubBatch:
    """Rows and their KV caches."""

    __slots__ = ("caches", "rows")

    def __init__(self, caches: RowCaches) -> None:
        self.rows: list[LiveRow] = []
        self.caches = caches

    def view_rows(self, row_ids: Collection[int]) -> dict[int, ReadyRow]:
        """Return those of these rows that it has, by id, with KV caches that are views of its
        arrays."""
        return {
            row.id: ReadyRow(row, self.caches.view_row(number))
            for number, row in enumerate(self.rows)
            if row.id in row_ids
        }

    def snapshot(self, keeps: Mapping[int, Keep], going: Collection[int]) -> list[KeptCache]:
        """Copy the KV caches of the rows of `keeps`, but for those that cannot be cut as asked.

        Args:
            going: the rows that are dropped next, those of `keeps` included. If these are all, the
                KV caches are moved out layer by layer, and no row can be used here any more.
        """
        kept = [
            KeptCache(keep.entry, cache)
            for number, row in enumerate(self.rows)
            if (keep := keeps.get(row.id)) is not None
            and _try_cut(cache := self.caches.view_row(number), keep)
        ]
        if all(row.id in going for row in self.rows):
            self.caches.move_out([each.cache for each in kept])
        for each in kept:
            each.cache.materialize()
        return kept

    def drop_rows(self, row_ids: Collection[int]) -> bool:
        """Drop these rows. Returns whether any is left, which is then to be arranged."""
        gone = {number for number, row in enumerate(self.rows) if row.id in row_ids}
        if gone:
            self.caches.drop_rows(gone)
            self.rows = [row for row in self.rows if row.id not in row_ids]
        return bool(self.rows)


def regroup(
    there: Sequence[SubBatch],
    groups: Sequence[RowGroup],
    joining: Mapping[int, ReadyRow],
    make: Callable[[], RowCaches],
) -> list[SubBatch]:
    """Form the sub-batches of these groups. Each goes on with the arrays of the one that had the
    most of its rows, unless another goes on with these.

    Args:
        there: the sub-batches before. Those with which none goes on lose their arrays.
        groups: of rows that are there, and of rows that are `joining`, by id.
        make: makes KV caches without rows.
    """
    places = {row.id: (batch, number) for batch in there for number, row in enumerate(batch.rows)}
    left, formed = [*there], list[SubBatch]()
    arrangements: list[Arrangement] = []
    all_rows: list[list[LiveRow]] = []
    for group in groups:
        found = Counter(id(places[row_id][0]) for row_id in group.rows if row_id in places)
        batch = max(left, key=lambda each: found[id(each)], default=None)
        if batch is None or not found[id(batch)]:
            batch = SubBatch(make())
        else:
            left.remove(batch)
        formed.append(batch)
        rows, sources = list[LiveRow](), list[tuple[RowCaches, int] | RowCache]()
        for row_id in group.rows:
            if row_id in places:
                other, number = places[row_id]
                rows.append(other.rows[number])
                sources.append((other.caches, number))
            else:
                rows.append(joining[row_id].row)
                sources.append(joining[row_id].cache)
        all_rows.append(rows)
        arrangements.append(Arrangement(batch.caches, sources, Room(group.slots, group.columns)))
    arrange_together(arrangements)
    for batch, rows in zip(formed, all_rows, strict=True):
        batch.rows = rows
    return formed


class Pass:
    """Sub-batches that one pass of the model decodes. It is made anew whenever rows change.

    Args:
        sub_batches: one, or several of a model that can share passes.
        plan: the steering of their rows.
    """

    __slots__ = ("_sub_batches", "plan", "rows")

    def __init__(self, sub_batches: Sequence[SubBatch], plan: SteeringPlan | None) -> None:
        self._sub_batches = sub_batches
        self.plan = plan
        self.rows = [row for each in sub_batches for row in each.rows]

    def next_logits(self, model: Any, inputs: mx.array) -> mx.array:
        """Feed each row its input `(rows,)`. Returns logits `(rows, vocabulary)`, not evaluated."""
        return self.find_logits(model, inputs[:, None])[:, -1, :]

    def find_logits(self, model: Any, tokens: mx.array) -> mx.array:
        """Feed each row tokens `(rows, n)`. Returns the logits behind each,
        `(rows, n, vocabulary)`, not evaluated."""
        caches = [each.caches for each in self._sub_batches]
        layers = caches[0].layers if len(caches) == 1 else share_layers(caches)
        logits: mx.array = forward(model, self.plan, tokens, layers)
        for each in caches:
            each.advance(tokens.shape[1])
        return logits

    def cut(self, surplus: Sequence[int]) -> None:
        """Forget the last tokens of each row, so many of each `(rows,)`."""
        left = iter(surplus)
        for each in self._sub_batches:
            each.caches.cut(list(islice(left, len(each.rows))))


class KeptCache(NamedTuple):
    """A KV cache that becomes the cached prompt `entry`."""

    entry: int
    cache: RowCache

    def describe(self) -> KeptPrompt:
        return KeptPrompt(self.entry, self.cache.nbytes, self.cache.cuts)


def keep_cache(cache: RowCache, keep: Keep) -> KeptCache | None:
    """Cut the KV cache of a row to the tokens to be cached. The caller must not use it any more.

    Returns:
        None if it holds other tokens than those to be kept, and cannot be cut back to them.
    """
    if not _try_cut(cache, keep):
        return None
    cache.materialize()
    return KeptCache(keep.entry, cache)


def _try_cut(cache: RowCache, keep: Keep) -> bool:
    try:
        cache.cut(keep.tokens)
    except ValueError:
        return False
    return True
