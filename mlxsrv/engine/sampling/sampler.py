"""One sampler for all rows of a batch.

Every parameter is a vector with one entry per row, so rows with different settings are drawn in the
same few array operations. Each row has its own random numbers: those of its n-th token depend on
its seed and on n only. Its own settings decide how it is drawn. So a row's text does not depend on
the other rows of the batch, nor on when the row joined it.

The filters apply in the order of Hugging Face and vLLM: temperature, top-k, top-p over what top-k
kept, then min-p relative to the likeliest token. Top-k keeps exactly k tokens; of equal logits the
lowest ids come first. Top-p keeps a token if the likelier tokens weigh less than top-p in sum, so
equal tokens are kept or dropped together.

There are three methods. All draw from the exact distribution, and none sorts the vocabulary:

- Greedy (temperature 0): the highest logit.
- Top-k: `blocks` selects the k candidates. Their weights are computed, and a token is drawn from
  these by inverse transform sampling. It is accepted if it is within top-p, which one comparison
  with all candidates shows. Several draws are made at once, and the first accepted one is taken: so
  candidates need no order (FlashInfer's method for GPUs: flashinfer.ai/2025/03/10/sampling.html). A
  small vocabulary without top-k is drawn from in the same way; all tokens are candidates.
- No top-k, large vocabulary: the same, but a token is drawn in two steps, first a block of tokens
  by the sums of blocks, then a token in it. Where a row has top-p, draws are made one at a time:
  after one that is rejected, only likelier tokens remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from math import exp, floor, inf, log
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlxsrv.engine.sampling.blocks import (
    SIZE,
    Blocks,
    sum_blocks,
    sum_rows,
    take_blocks,
)
from mlxsrv.generation.parameters import Sampling

_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads close seeds over both words
_MASK = 0xFFFFFFFFFFFFFFFF

_STEPS_AHEAD = 16  # random numbers are made for as many steps at once
_BELOW_ONE = 1 - 2**-20  # keeps a number times a sum below the sum, whatever rounding does
_COLD = 1e-5  # a lower temperature is greedy: logits divided by less would overflow
_STEEP = 1 / 64  # for a lower temperature, exp(1 / temperature) would overflow a float32
_ROUNDING = 1e-5  # relative error of sums of weights: 0.07 + 0.03 must not exceed 1 - 0.9
_LEAST_TOP_P = 2**-20  # a smaller one keeps the likeliest token only, in any vocabulary
_CERTAIN = 2.0**-20  # all draws of a token are rejected less often; it is the likeliest one then

_DRAWS = 10  # of a sampling round from few candidates: 0.2**10 is less than once in a million times
_MOST_ROUNDS = 40  # with one draw each, for any top_p
_MOST_SETS = 10  # of `_DRAWS` numbers: 10 rounds of 10 draws of one, or 40 single draws of two
_GRID = 128  # points of an integral
_ORDERED = 256  # candidates: sorting fewer costs less than a group for each top_k


class _Method(Enum):
    """The kind of draw of a row's tokens. Only its own settings decide it."""

    GREEDY = "greedy"
    TOP_K = "top_k"
    ALL = "all"
    """All tokens are candidates."""


class Sampler:
    """Draws the next token of each row. A new one is made when rows change.

    On a small model each array operation costs as much as a layer, so there are few.

    Args:
        rows: each row's parameters.
        drawn: how many tokens each row has drawn already.
        ahead: steps for which random numbers are made at once.
    """

    def __init__(
        self, rows: Sequence[Sampling], drawn: Sequence[int], ahead: int = _STEPS_AHEAD
    ) -> None:
        self._rows, self._drawn, self._ahead = rows, drawn, ahead
        self._groups: list[tuple[mx.array | slice | None, _Group]] | None = None
        self._order: mx.array | None = None  # of the rows in the groups' tokens; None: the same

    def __call__(self, logits: mx.array) -> mx.array:
        """Return token ids `(rows,)` for logits `(rows, vocabulary)`, and count a step."""
        return self.draw(logits)[0]

    def draw(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Return token ids `(rows,)`, and each row's highest logit `(rows, 1)`.

        If a row's highest logit is not finite, its token is meaningless: one of its logits is NaN
        or infinite, or all are minus infinity.
        """
        return self.draw_from(Blocks(logits))

    def draw_from(self, blocks: Blocks) -> tuple[mx.array, mx.array]:
        """Do the same as `draw` for logits in blocks."""
        groups = self._groups or self._divide()
        parts = [
            group.draw(blocks if members is None else blocks.select_rows(members)).astype(mx.uint32)
            for members, group in groups
        ]
        tokens = (parts[0] if len(parts) == 1 else mx.concatenate(parts)).squeeze(-1)
        return tokens if self._order is None else tokens[self._order], blocks.highest

    def _divide(self) -> list[tuple[mx.array | slice | None, _Group]]:
        """Group the rows that can be drawn in the same operations."""
        # Unordered candidates have an order that depends on their number: each number of them has
        # a group of its own, or a row's text would depend on the other rows' top_k.
        alike: dict[tuple[_Method, int], list[int]] = {}
        for i, row in enumerate(self._rows):
            method = _choose_method(row)
            count = _count_candidates(row) if method is _Method.TOP_K else 0
            alike.setdefault((method, count if count >= _ORDERED else 0), []).append(i)
        order = [i for members in alike.values() for i in members]
        if order != sorted(order):
            self._order = mx.array(np.argsort(order))
        self._groups = [
            (self._locate(members), self._make(method, members))
            for (method, _), members in alike.items()
        ]
        return self._groups

    def _locate(self, members: Sequence[int]) -> mx.array | slice | None:
        """Return the rows' indices in the batch; None for the whole batch."""
        if len(members) == len(self._rows):
            return None
        first, last = members[0], members[-1]
        if last - first == len(members) - 1:
            return slice(first, last + 1)
        return mx.array(list(members))

    def _make(self, method: _Method, members: Sequence[int]) -> _Group:
        rows, drawn = [self._rows[i] for i in members], [self._drawn[i] for i in members]
        return _GROUPS[method](rows, drawn, self._ahead)


class _Group(Protocol):
    """Rows that are drawn by one method."""

    def draw(self, blocks: Blocks) -> mx.array:
        """Return token ids `(rows, 1)`, and count a step."""


class _Greedy(_Group):
    """Rows with temperature 0."""

    def __init__(self, rows: Sequence[Sampling], drawn: Sequence[int], ahead: int) -> None:
        pass

    def draw(self, blocks: Blocks) -> mx.array:
        return blocks.likeliest()


class _Random(_Group):
    """Rows that are drawn at random by one method.

    Args:
        rows: their parameters.
        drawn: how many tokens each has drawn already.
        ahead: steps for which random numbers are made at once.
        numbers: random numbers of a token that the method needs, besides those of sampling rounds.
    """

    def __init__(
        self, rows: Sequence[Sampling], drawn: Sequence[int], ahead: int, numbers: int = 1
    ) -> None:
        self._temperatures = _column([row.temperature for row in rows])
        self._base = _column([exp(1 / max(row.temperature, _STEEP)) for row in rows])
        steep = [max(row.temperature, _STEEP) / row.temperature for row in rows]
        self._scale = _column(steep) if any(each != 1 for each in steep) else None
        self._min_p = _column([row.min_p for row in rows])
        self._has_min_p = any(row.min_p > 0 for row in rows)
        self._top_p = _column(
            [1 - (1 - row.top_p) * (1 + _ROUNDING) if row.top_p < 1 else inf for row in rows]
        )
        self._limit = self._top_p[:, None]
        cut = [row.top_p for row in rows if row.top_p < 1]
        self._rounds = max((_count_rounds(top_p, _DRAWS) for top_p in cut), default=0)
        self._draws = _count_draws(min(cut, default=1.0))
        numbers = max(numbers, self._rounds * _DRAWS)
        self._uniforms = _Uniforms([row.seed for row in rows], drawn, ahead, numbers)

    def _weigh(self, blocks: Blocks) -> mx.array:
        """Return weights `(rows, width)`: `exp(logit / temperature)`, scaled so that the likeliest
        token has 1. So min_p is the least weight that is kept."""
        return self._exponentiate(blocks.logits - blocks.highest)

    def _draw_filtered(self, weights: mx.array) -> mx.array:
        """Return the index `(rows, 1)` of a candidate that top-p and min-p keep.

        A sampling round draws several candidates, and the first one within top-p is taken. If none
        is, every candidate up to the heaviest drawn one is outside of top-p as well, and the next
        round draws from the rest. The number of rounds is fixed, so the host need not wait.

        Args:
            weights: `(rows, n)` of the candidates.
        """
        left = _zero_unless(weights, weights >= self._min_p) if self._has_min_p else weights
        numbers = self._uniforms.next()
        # Arrays are (rows, draws, candidates) from here on, so few operations only change shapes.
        weights, left = weights[:, None], left[:, None]
        if not self._rounds:
            return _draw_indices(left, numbers[0][:, :1]).squeeze(-1)
        limit = self._limit * sum_rows(weights)
        drawn: list[mx.array] = []
        within: list[mx.array] = []
        for i in range(self._rounds):
            indices = _draw_indices(left, numbers[i][:, : self._draws])
            reached = mx.take_along_axis(weights, indices, axis=-1)
            drawn.append(indices)
            within.append(_sum_heavier(weights, reached) < limit)
            if i + 1 < self._rounds:
                left = _zero_unless(left, weights > reached.max(axis=1, keepdims=True))
        likeliest = mx.argmax(weights, axis=-1, keepdims=True)
        return _take_accepted(
            mx.concatenate(drawn, axis=1), mx.concatenate(within, axis=1), likeliest
        ).squeeze(-1)

    def _exponentiate(self, lower: mx.array) -> mx.array:
        """Return weights for logits minus the highest one. MLX's CPU back end computes powers in a
        third of the time of its exp."""
        return mx.power(self._base, lower if self._scale is None else lower * self._scale)


class _TopK(_Random):
    """Rows with a top-k: each below `_ORDERED`, or all with the same one."""

    def __init__(self, rows: Sequence[Sampling], drawn: Sequence[int], ahead: int) -> None:
        super().__init__(rows, drawn, ahead)
        counts = [_count_candidates(row) for row in rows]
        self._most = max(counts)
        self._counts = None if min(counts) == self._most else mx.array(counts)[:, None]

    def draw(self, blocks: Blocks) -> mx.array:
        ordered = self._most < _ORDERED
        ids, values = (blocks.top if ordered else blocks.top_unordered)(self._most)
        weights = self._exponentiate(values - blocks.highest)
        if self._counts is not None:
            weights = mx.where(mx.arange(ids.shape[-1]) < self._counts, weights, 0)
        token = mx.take_along_axis(ids, self._draw_filtered(weights), axis=-1)
        # If logits are NaN it may be in the padding, which has no embedding.
        return mx.minimum(token, blocks.vocabulary - 1)


class _AllTokens(_Random):
    """Rows without top-k."""

    def __init__(self, rows: Sequence[Sampling], drawn: Sequence[int], ahead: int) -> None:
        self._single_rounds = max(_count_rounds(row.top_p, 1) for row in rows)
        super().__init__(rows, drawn, ahead, 2 * self._single_rounds)

    def draw(self, blocks: Blocks) -> mx.array:
        weights = self._weigh(blocks)
        if blocks.small:
            return self._draw_filtered(weights)
        left = _zero_unless(weights, weights >= self._min_p) if self._has_min_p else weights
        numbers = mx.concatenate(self._uniforms.next(), axis=1)
        if self._rounds:
            token = self._draw_within(weights, left, numbers, blocks.likeliest())
        else:
            token = _draw_by_blocks(left, sum_blocks(left), numbers[:, 0], numbers[:, 1])
        # If logits are NaN it may be in the padding, which has no embedding.
        return mx.minimum(token, blocks.vocabulary - 1)

    def _draw_within(
        self, weights: mx.array, left: mx.array, numbers: mx.array, likeliest: mx.array
    ) -> mx.array:
        """Return the id `(rows, 1)` of a token within top-p.

        Args:
            weights: `(rows, width)` of all tokens.
            left: the same, 0 for tokens that min-p excludes.
            numbers: random numbers `(rows, n, 1)`, two for each draw.
            likeliest: ids `(rows, 1)`, taken where no draw is within top-p.
        """
        sums = sum_blocks(weights)
        limit = self._top_p * sums.sum(axis=-1, keepdims=True)
        if left is not weights:
            sums = sum_blocks(left)
        drawn: list[mx.array] = []
        within: list[mx.array] = []
        for i in range(self._single_rounds):
            token = _draw_by_blocks(left, sums, numbers[:, 2 * i], numbers[:, 2 * i + 1])
            left = _zero_unless(left, left > mx.take_along_axis(weights, token, axis=-1))
            sums = sum_blocks(left)
            drawn.append(token)
            within.append(sums.sum(axis=-1, keepdims=True) < limit)
        tokens, passed = mx.concatenate(drawn, axis=-1), mx.concatenate(within, axis=-1)
        return _take_accepted(tokens, passed, likeliest)


_GROUPS: dict[_Method, type[_Greedy | _TopK | _AllTokens]] = {
    _Method.GREEDY: _Greedy,
    _Method.TOP_K: _TopK,
    _Method.ALL: _AllTokens,
}


class _Uniforms:
    """Random numbers in [0, 1), made for several steps at once.

    They come in sets of `_DRAWS`. The key of the i-th set of a row's n-th token is (seed, n, i): so
    their values do not depend on how many sets the other rows need. The numbers are so far below 1
    that a number times a sum of weights, rounded, is less than the sum.

    Args:
        seeds: of the rows.
        drawn: how many tokens each row has drawn already.
        ahead: steps for which numbers are made at once.
        numbers: how many a token needs at least.
    """

    def __init__(
        self, seeds: Sequence[int], drawn: Sequence[int], ahead: int, numbers: int
    ) -> None:
        self._seeds = mx.array([_seed_word(seed) for seed in seeds], dtype=mx.uint32)
        self._drawn = mx.array(list(drawn), dtype=mx.uint32)
        self._ahead = ahead
        self._sets = -(-numbers // _DRAWS)
        self._made: list[mx.array] = []  # those of the next step are the last

    def next(self) -> list[mx.array]:
        """Return the sets of numbers of each row's next token, each `(rows, _DRAWS, 1)`."""
        if not self._made:
            self._made = self._draw()[::-1]
            self._drawn = self._drawn + self._ahead
        return [self._made.pop() for _ in range(self._sets)]

    def _draw(self) -> list[mx.array]:
        """Return the sets of the next steps, step by step."""
        counts = self._drawn[:, None] + mx.arange(self._ahead, dtype=mx.uint32)
        numbers = counts[..., None] * _MOST_SETS + mx.arange(self._sets, dtype=mx.uint32)
        numbers = numbers.reshape(len(counts), -1)
        seeds = mx.broadcast_to(self._seeds[:, None], numbers.shape)
        draw = mx.vmap(mx.vmap(lambda key: mx.random.uniform(shape=(_DRAWS,), key=key)))
        drawn = draw(mx.stack([seeds, numbers], axis=-1)) * _BELOW_ONE
        # One operation for all sets; to take each step's from a large array would need several.
        return list(mx.split(drawn.reshape(len(counts), -1, 1), self._ahead * self._sets, axis=1))


def _choose_method(row: Sampling) -> _Method:
    if row.temperature < _COLD:
        return _Method.GREEDY
    if row.top_k > 0 or row.top_p < _LEAST_TOP_P:
        return _Method.TOP_K
    return _Method.ALL


@lru_cache(maxsize=1024)
def _count_rounds(top_p: float, draws: int) -> int:
    """Return after how many rounds a draw within top-p is as good as certain.

    Let the candidates outside of top-p weigh s times as much as those within. A draw is outside
    with probability s / (1 + s). The mass outside that is heavier than this draw is then uniform in
    [0, s] at most, and all n rounds fail with probability f(n, s) at most:

        f(0, s) = 1,  f(n, s) = (s / (1 + s))^draws * E[f(n - 1, least of `draws` uniform masses)]
    """
    top_p = max(top_p, _LEAST_TOP_P)
    grid = np.geomspace(1e-9, max((1 - top_p) / top_p, 2e-9), _GRID)
    more = np.clip(1 - grid / grid[:, None], 0, 1) ** draws  # probability of a greater least mass
    chances = -np.diff(more, prepend=1, axis=-1)
    failed = np.ones_like(grid)
    for count in range(1, _MOST_ROUNDS + 1):
        # f grows with s, so its value at the end of each interval is an upper bound.
        failed = (grid / (1 + grid)) ** draws * (chances @ failed)
        if failed[-1] < _CERTAIN:
            return count
    return _MOST_ROUNDS


def _count_draws(top_p: float) -> int:
    """Return the fewest draws of which one is within top-p as good as certainly; `_DRAWS` at most,
    and then there are several rounds."""
    outside = max(1 - top_p, _LEAST_TOP_P)
    return min(floor(log(_CERTAIN) / log(outside)) + 1, _DRAWS) if outside < 1 else _DRAWS


def _count_candidates(row: Sampling) -> int:
    """Return how many tokens a row with top-k is drawn from."""
    return 1 if row.top_p < _LEAST_TOP_P else row.top_k


def _column(values: Sequence[float]) -> mx.array:
    """Return one value per row `(rows, 1)`."""
    return mx.array(list(values), dtype=mx.float32)[:, None]


def _seed_word(seed: int) -> int:
    """Fold a seed of 64 bits into the 32 that a key has beside the counter."""
    mixed = (seed & _MASK) * _MIX & _MASK
    return (mixed >> 32) ^ (mixed & 0xFFFFFFFF)


def _zero_unless(values: mx.array, kept: mx.array) -> mx.array:
    """Return the values, but 0 where `kept` is false. MLX's CPU back end multiplies by bytes in a
    fraction of the time of `where`."""
    return values * kept.view(mx.uint8)


def _draw_indices(weights: mx.array, uniforms: mx.array) -> mx.array:
    """Draw by inverse transform sampling.

    This takes one cumulative sum, and one random number a draw; Gumbel noise would take a number
    for each entry. The target is less than the total, so rounding cannot select an entry of weight
    0 behind the last other one. NaN weights give any valid index.

    Args:
        weights: `(rows, 1, n)`, of any sum.
        uniforms: `(rows, m, 1)`, a number for each draw.

    Returns:
        Indices `(rows, m, 1)`.
    """
    cumulative = mx.cumsum(weights, axis=-1)
    indices = (cumulative <= uniforms * cumulative[..., -1:]).sum(axis=-1, keepdims=True)
    return mx.minimum(indices.view(mx.uint32), weights.shape[-1] - 1)


def _sum_heavier(weights: mx.array, least: mx.array) -> mx.array:
    """Return the sums of weights `(rows, 1, n)` above each of `least` `(rows, m, 1)`, in its shape.

    A product of matrices is faster with OpenBLAS, slower without, and may be rounded to 10 bits on
    CUDA (TF32).
    """
    return sum_rows(_zero_unless(weights, weights > least))


def _draw_by_blocks(
    weights: mx.array, sums: mx.array, for_block: mx.array, for_entry: mx.array
) -> mx.array:
    """Draw as `_draw_indices` does: first a block by the sums of blocks, then an entry in it.

    Args:
        weights: `(rows, width)`.
        sums: `(rows, blocks)` of them.
        for_block: numbers `(rows, m)`.
        for_entry: numbers `(rows, m)`.

    Returns:
        Indices `(rows, m)`.
    """
    cumulative = mx.cumsum(sums, axis=-1)[:, None]
    block = (cumulative <= for_block[..., None] * cumulative[..., -1:]).sum(axis=-1)
    block = mx.minimum(block, sums.shape[-1] - 1)
    inner = mx.cumsum(take_blocks(weights, block, SIZE), axis=-1)
    entry = (inner <= for_entry[..., None] * inner[..., -1:]).sum(axis=-1)
    return block * SIZE + mx.minimum(entry, SIZE - 1)


def _take_accepted(drawn: mx.array, accepted: mx.array, likeliest: mx.array) -> mx.array:
    """Return each row's first accepted draw `(rows, 1)` or `(rows, 1, 1)`.

    Less than once in a million times there is none. It is the likeliest token then, which every
    filter keeps.

    Args:
        drawn: `(rows, draws)` or `(rows, draws, 1)`.
        accepted: booleans of the same shape.
        likeliest: like the result.
    """
    first = mx.argmax(accepted, axis=1, keepdims=True)
    chosen = mx.take_along_axis(drawn, first, axis=1)
    return mx.where(accepted.any(axis=1, keepdims=True), chosen, likeliest)
