"""Rows of about one length, decoded by one pass of the model.

mlx-lm's batch caches are as long as their longest row, for every row: one row of 30,000 tokens
beside seven of 300 would fill the memory of 240,000, all of it read at each step, and its joining
would copy as much. A row like that gets a sub-batch of its own, at the cost of another pass over
the weights at each step. So sub-batches are kept apart only while padding them to one length would
take more bytes than the weights have.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import mlx.core as mx

from mlxsrv.engine.cache.prompt_cache import Cache
from mlxsrv.engine.row import Row
from mlxsrv.engine.steering.plan import SteeringPlan, forward


class SubBatch:
    """Rows and their KV cache: that of a batch, or of one row where a model's cannot be merged.

    `plan` is the steering of its rows, to be made anew whenever they change.
    """

    __slots__ = ("cache", "plan", "rows")

    def __init__(self, rows: list[Row], cache: Cache) -> None:
        self.rows = rows
        self.cache = cache
        self.plan: SteeringPlan | None = None

    def decode(self, model: Any, inputs: mx.array) -> mx.array:
        """Feed each row its input `(rows,)`. Returns logits `(rows, vocabulary)`, not evaluated."""
        logits: mx.array = forward(model, self.plan, inputs[:, None], self.cache)
        return logits[:, -1, :]

    def check(self, model: Any, tokens: mx.array) -> mx.array:
        """Feed the only row tokens `(n,)`. Returns the logits behind each, `(n, vocabulary)`."""
        logits: mx.array = forward(model, self.plan, tokens[None], self.cache)
        return logits[0]

    def cut(self, tokens: int) -> None:
        """Forget the last tokens that the rows were fed."""
        if tokens:
            for layer in self.cache:
                layer.trim(tokens)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but those at `indices`, at least one."""
        chosen = mx.array(list(indices))
        for layer in self.cache:
            layer.filter(chosen)
        self.rows = [self.rows[i] for i in indices]

    def absorb(self, other: SubBatch) -> None:
        """Append the other's rows."""
        for layer, joining in zip(self.cache, other.cache, strict=True):
            layer.extend(joining)
        self.rows += other.rows

    def extract(self, index: int) -> Cache:
        """The KV cache of one row alone."""
        return [layer.extract(index) for layer in self.cache]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.cache)


def find_close(sub_batches: Sequence[SubBatch], padding: int) -> tuple[SubBatch, SubBatch] | None:
    """The first two sub-batches that would need no more than `padding` bytes of it to be one."""
    return next((pair for pair in combinations(sub_batches, 2) if _padding(*pair) <= padding), None)


def _padding(one: SubBatch, other: SubBatch) -> int:
    """Bytes by which the KV caches would grow if all rows were as long as the longest."""
    longest = max(one.nbytes / len(one.rows), other.nbytes / len(other.rows))
    together = longest * (len(one.rows) + len(other.rows))
    return int(together) - one.nbytes - other.nbytes
