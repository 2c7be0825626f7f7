"""One sampler for all rows of a batch.

Every parameter is a vector with one entry per row, so rows with different settings, greedy ones
among them, are drawn in the same few array operations. Each row draws from its own random stream:
the key of its n-th token is (its seed, n) and nothing else, so a row's text does not depend on
who shares the batch or when it joined.

The order is that of OpenAI-compatible servers (vLLM's): temperature, top-k, top-p over what is
left, min-p relative to the likeliest token.

Top-p alone needs no sorted vocabulary: tokens are drawn without it until one is in the nucleus,
which is what a draw from the nucleus is. A token is if those that are likelier weigh less than
top-p, and at least so many of the draws are. (FlashInfer samples like this on GPUs:
flashinfer.ai/2025/03/10/sampling.html.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, exp, inf, log2

import mlx.core as mx

from mlxsrv.events import Sampling

_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads close seeds over both words
_MASK = 0xFFFFFFFFFFFFFFFF

_AHEAD = 64  # of steps: one operation for each, not ten
_TRIES = 16  # random numbers for each token
_MOST_TRIED = 2**26  # numbers: of more tries for so many rows and entries, memory is too dear
_CERTAIN = 16  # bits: that all tries miss is less likely than 2**-16
_BELOW_ONE = 1 - 2**-20  # by more than sums of weights are rounded


class Sampler:
    """Draws the next token of each row. Made anew when rows join or leave.

    Few and small operations are the point: on a small model each costs as much as a layer.

    Args:
        rows: each row's parameters.
        drawn: how many tokens each row has drawn already.
        ahead: steps whose random numbers are drawn at once.
    """

    def __init__(self, rows: Sequence[Sampling], drawn: Sequence[int], ahead: int = _AHEAD) -> None:
        cold = [row.temperature < _COLD for row in rows]
        self._greedy = all(cold)
        if self._greedy:
            return
        self._cold = mx.array(cold)[:, None] if any(cold) else None
        heats = [1.0 if row.temperature < _COLD else row.temperature for row in rows]
        self._base = _column([exp(1 / max(heat, _STEEP)) for heat in heats])[:, 0]
        steep = [max(heat, _STEEP) / heat for heat in heats]  # exactly 1 for all but a few
        self._scale = _column(steep)[:, 0] if any(heat < _STEEP for heat in heats) else None
        self._tail = _column([(1 - row.top_p) * (1 + _ROUNDING) for row in rows])
        self._top_k = mx.array([[[row.top_k or _EVERY]] for row in rows], dtype=mx.int32)
        self._cuts_rank = any(row.top_k > 0 for row in rows)
        self._cuts_weight = any(row.min_p > 0 for row in rows)
        self._min_p = _column([row.min_p for row in rows])
        # Of a row itself: what its neighbours need must not change what it draws.
        tries = [_count_tries(row) for row in rows]
        self._sorts = any(count > _TRIES for count in tries)
        self._tries = max((count for count in tries if count <= _TRIES), default=1)
        self._tried = mx.array([1 < count <= _TRIES for count in tries])[:, None]
        self._nucleus = _column(
            [1 - (1 - row.top_p) * (1 + _ROUNDING) if row.top_p < 1 else inf for row in rows]
        )
        self._seeds = mx.array([_seed_word(row.seed) for row in rows], dtype=mx.uint32)
        self._drawn = mx.array(list(drawn), dtype=mx.uint32)
        self._uniforms = mx.zeros((0, 0, 0, 0))
        self._ahead = self._step = ahead

    def __call__(self, logits: mx.array) -> mx.array:
        """Token ids `(rows,)` for logits `(rows, vocabulary)`; advances each row's stream."""
        return self.draw(logits)[0]

    def draw(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """As a call, and each row's highest logit `(rows, 1)`: if it is not finite, one of them is
        NaN or infinite, or all are minus infinity, and the row's token means nothing."""
        likeliest = mx.argmax(logits, axis=-1, keepdims=True)
        highest = mx.take_along_axis(logits, likeliest, axis=-1)
        tokens = likeliest if self._greedy else self._sample(logits, likeliest, highest)
        return tokens.squeeze(-1), highest

    def _sample(self, logits: mx.array, likeliest: mx.array, highest: mx.array) -> mx.array:
        """Token ids `(rows, 1)`."""
        lower = logits.astype(mx.float32) - highest
        if self._scale is not None:
            lower = lower * self._scale
        # exp(x / temperature), but powers take MLX's CPU back end half the time of its exp. The
        # likeliest token weighs 1, so min_p is a weight as it stands.
        weights = mx.expand_dims(mx.power(self._base, lower), 1)
        drawn = self._draw(weights, likeliest)
        return drawn if self._cold is None else mx.where(self._cold, likeliest, drawn)

    def _draw(self, weights: mx.array, likeliest: mx.array) -> mx.array:
        """Token ids `(rows, 1)`, each from what the row's filters leave of its weights
        `(rows, 1, vocabulary)`."""
        possible = weights
        if self._cuts_weight:
            possible = mx.where(weights < self._min_p, 0, weights)
        uniforms = self._next_uniforms()
        tried = weights.size * self._tries if self._tries > 1 else 0
        if not self._sorts and tried <= _MOST_TRIED:
            drawn = _invert(possible, uniforms)
            if self._tries == 1:
                return drawn.squeeze(-1)
            return _choose(drawn, self._within_nucleus(weights, drawn), likeliest)
        least = self._least_weight(weights)
        filtered = _invert(mx.where(possible < least, 0, possible), uniforms[:, :1]).squeeze(-1)
        if self._tries == 1:
            return filtered
        drawn = _invert(possible, uniforms)
        within = mx.take_along_axis(weights, drawn, axis=-1) >= least
        return mx.where(self._tried, _choose(drawn, within, likeliest), filtered)

    def _within_nucleus(self, weights: mx.array, drawn: mx.array) -> mx.array:
        """Whether each of the tokens `(rows, tries, 1)` is in its row's nucleus."""
        likelier = weights > mx.take_along_axis(weights, drawn, axis=-1)
        counted = likelier.view(mx.uint8).astype(mx.float32)  # a third of the time without the view
        total = weights.sum(axis=-1, keepdims=True)
        return counted @ weights.swapaxes(-1, -2) < self._nucleus * total

    def _least_weight(self, weights: mx.array) -> mx.array:
        """The smallest weight `(rows, 1, 1)` that top-k and top-p let pass.

        Only values are sorted, the lightest first: a token is in the nucleus if it and all lighter
        ones together weigh more than what top-p cuts off. The draw itself is in the vocabulary's
        order with and without filters, so that a row without them draws the same tokens beside a
        row that has some. Tokens of equal weight pass or fail together.
        """
        ranked = mx.sort(weights, axis=-1)
        mass = mx.cumsum(ranked, axis=-1)
        total = mass[:, :, -1:]
        last = ranked.shape[-1] - 1
        if self._cuts_rank:
            # What top-k cuts off is out before top-p counts.
            cut = mx.maximum(last + 1 - self._top_k, 0)
            below = mx.where(cut > 0, mx.take_along_axis(mass, mx.maximum(cut - 1, 0), axis=-1), 0)
            limit = below + self._tail * (total - below)
            first = mx.maximum((mass <= limit).sum(axis=-1, keepdims=True), cut)
        else:
            first = (mass <= self._tail * total).sum(axis=-1, keepdims=True)
        return mx.take_along_axis(ranked, mx.minimum(first, last), axis=-1)

    def _next_uniforms(self) -> mx.array:
        """Numbers in [0, 1) for each row's next token `(rows, tries, 1)`."""
        if self._step == self._ahead:
            self._uniforms = _uniforms(self._seeds, self._drawn, self._ahead)
            self._drawn = self._drawn + self._ahead
            self._step = 0
        step = self._step
        self._step += 1
        return self._uniforms[:, step, : self._tries]


def _count_tries(row: Sampling) -> int:
    """Of how many draws without top-p one is in the nucleus, as good as certainly: each misses it
    with a probability of 1 - top_p at most. More than `_TRIES` where the vocabulary is sorted."""
    if row.temperature < _COLD or (row.top_p >= 1 and row.top_k <= 0):
        return 1
    if row.top_k > 0 or row.top_p <= 0.5:
        return _TRIES + 1
    return max(2, ceil(_CERTAIN / -log2(1 - row.top_p)))


_COLD = 1e-5  # a temperature below is greedy, for logits divided by less would overflow
_STEEP = 1 / 64  # a temperature below would need a power's base that is more than a float32 holds
_ROUNDING = 1e-5  # of sums of weights: 0.07 + 0.03 is to be no more than 1 - 0.9
_EVERY = 0x7FFFFFFF  # top_k of a row that has none


def _column(values: list[float]) -> mx.array:
    """`(rows, 1, 1)`"""
    return mx.array(values, dtype=mx.float32)[:, None, None]


def _seed_word(seed: int) -> int:
    """64 bits of seed folded into the 32 that a key has room for beside the counter."""
    mixed = (seed & _MASK) * _MIX & _MASK
    return (mixed >> 32) ^ (mixed & 0xFFFFFFFF)


def _uniforms(seeds: mx.array, drawn: mx.array, steps: int) -> mx.array:
    """Numbers for the next steps of each row `(rows, steps, _TRIES, 1)`; those of a row's n-th
    token come from the key (seed, n). They are so far below 1 that a part of a sum, rounded, is
    less than the sum."""
    counts = drawn[:, None] + mx.arange(steps, dtype=mx.uint32)
    keys = mx.stack([mx.broadcast_to(seeds[:, None], counts.shape), counts], axis=-1)
    draw = mx.vmap(mx.vmap(lambda key: mx.random.uniform(shape=(_TRIES, 1), key=key)))
    return draw(keys) * _BELOW_ONE


def _invert(weights: mx.array, uniforms: mx.array) -> mx.array:
    """Inverse transform sampling: token ids `(rows, n, 1)` for weights `(rows, 1, vocabulary)` of
    any sum, one for each of the numbers `(rows, n, 1)`.

    One cumulative sum and one random number a draw, where the Gumbel trick takes one for each entry
    of the vocabulary. The target stays below the total, so that rounding cannot choose an entry of
    weight zero behind the last one that counts; of weights that are no numbers it is the first.
    """
    cumulative = mx.cumsum(weights, axis=-1)
    return (cumulative <= uniforms * cumulative[:, :, -1:]).sum(axis=-1, keepdims=True)


def _choose(drawn: mx.array, within: mx.array, likeliest: mx.array) -> mx.array:
    """The first of each row's draws `(rows, tries, 1)` that is `within` its filters `(rows, 1)`.
    There is one, but for once in 2**16 times: then it is the likeliest token, which always is."""
    first = mx.argmax(within, axis=1, keepdims=True)
    chosen = mx.take_along_axis(drawn, first, axis=1).squeeze(-1)
    return mx.where(within.any(axis=1), chosen, likeliest)
