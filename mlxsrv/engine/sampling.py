"""One sampler for all rows of a batch.

Every parameter is a vector with one entry per row, so rows with different settings, greedy ones
among them, are drawn in the same few array operations. Each row draws from its own random stream:
the key of its n-th token is (its seed, n) and nothing else, so a row's text does not depend on
who shares the batch or when it joined.

The order is that of OpenAI-compatible servers (vLLM's): temperature, top-k, top-p over what is
left, min-p relative to the likeliest token.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxsrv.events import Sampling

_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads close seeds over both words
_MASK = 0xFFFFFFFFFFFFFFFF


class Sampler:
    """Draws the next token of each row. Made anew when rows join or leave.

    Args:
        rows: each row's parameters.
        drawn: how many tokens each row has drawn already.
    """

    def __init__(self, rows: Sequence[Sampling], drawn: Sequence[int]) -> None:
        self._greedy = all(row.temperature == 0 for row in rows)
        if self._greedy:
            return
        self._filtered = any(row.top_p < 1 or row.top_k > 0 or row.min_p > 0 for row in rows)
        self._mixed = any(row.temperature == 0 for row in rows)
        self._cold = mx.array([row.temperature == 0 for row in rows])
        self._ranked_out = any(row.top_k > 0 for row in rows)
        self._limited = mx.array([[row.top_p < 1 or row.top_k > 0] for row in rows])
        self._temperature = _column([row.temperature or 1.0 for row in rows])
        self._top_p = _column([row.top_p for row in rows])
        self._top_k = mx.array([[row.top_k or 0x7FFFFFFF] for row in rows], dtype=mx.int32)
        self._min_p = _column([row.min_p for row in rows])
        self._seeds = mx.array([_seed_word(row.seed) for row in rows], dtype=mx.uint32)
        self._drawn = mx.array(list(drawn), dtype=mx.uint32)

    def __call__(self, logits: mx.array) -> mx.array:
        """Token ids `(rows,)` for logits `(rows, vocabulary)`; advances each row's stream."""
        if self._greedy:
            return mx.argmax(logits, axis=-1)
        uniform = _uniform(mx.stack([self._seeds, self._drawn], axis=1))
        self._drawn = self._drawn + 1
        scaled = logits.astype(mx.float32) / self._temperature
        weights = mx.exp(scaled - scaled.max(axis=-1, keepdims=True))
        if self._filtered:
            weights = mx.where(weights >= self._least_weight(weights), weights, 0)
        drawn = _draw(weights, uniform)
        return mx.where(self._cold, mx.argmax(logits, axis=-1), drawn) if self._mixed else drawn

    def _least_weight(self, weights: mx.array) -> mx.array:
        """The smallest weight that each row's filters let pass, as a column; 0 without filters.

        Tokens of equal weight pass or fail together. Only values are sorted: the draw itself is in
        the vocabulary's order with and without filters, so that a row without them draws the same
        tokens beside a row that has some.
        """
        ranked = -mx.sort(-weights, axis=-1)
        if self._ranked_out:
            rank = mx.arange(ranked.shape[-1])
            ranked = mx.where(rank < self._top_k, ranked, 0)
        # A token is in the nucleus if those before it fall short of top_p; the first always is.
        before = mx.cumsum(ranked, axis=-1) - ranked
        nucleus = (before < self._top_p * ranked.sum(axis=-1, keepdims=True)) | (before == 0)
        least = mx.where(nucleus & (ranked > 0), ranked, mx.inf).min(axis=-1, keepdims=True)
        least = mx.where(self._limited, least, 0)
        return mx.maximum(least, self._min_p * ranked[:, :1])


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


def _seed_word(seed: int) -> int:
    """64 bits of seed folded into the 32 that a key has room for beside the counter."""
    mixed = (seed & _MASK) * _MIX & _MASK
    return (mixed >> 32) ^ (mixed & 0xFFFFFFFF)


def _uniform(keys: mx.array) -> mx.array:
    """One number in [0, 1) for each of the keys `(rows, 2)`, as a column."""
    return mx.vmap(lambda key: mx.random.uniform(key=key))(keys)[:, None]


def _draw(weights: mx.array, uniform: mx.array) -> mx.array:
    """Inverse transform sampling: token ids `(rows,)` for weights `(rows, n)` of any sum.

    One random number a row and one cumulative sum, where the Gumbel trick takes one random number
    for each entry of the vocabulary. The target stays below the total, so that rounding cannot
    choose an entry of weight zero behind the last one that counts.
    """
    cumulative = mx.cumsum(weights, axis=-1)
    target = uniform * cumulative[:, -1:] * (1 - 2**-20)
    return (cumulative <= target).sum(axis=-1)
