"""One sampler for all rows of a batch.

Every parameter is a vector with one entry per row, so rows with different settings are drawn in the
same few array operations. Each row draws from its own random stream: the key of its n-th token is
(its seed, n) and nothing else; and how it is drawn depends on its own settings. So a row's text
depends neither on who shares the batch, and what they ask for, nor on when it joined.

The order is Hugging Face's and vLLM's: temperature, top-k, top-p over what top-k left, then min-p
relative to the likeliest token. Top-k keeps exactly k tokens, of equal logits those with the lowest
ids. Top-p keeps a token if those that are likelier weigh less than top-p; equal ones pass together.

There are four ways to draw, each exact, and none sorts the vocabulary:

- Temperature 0: the highest logit.
- With top-k: from the k first tokens in order, which `blocks` finds; all filters see only these. In
  a small vocabulary top-p is drawn like this too, from all tokens.
- Without top-k and top-p: from the sums of blocks, then from the one block. No exact weight of each
  token is needed for that. It is drawn in proportion to a weight that is as much or a little more,
  and kept with the probability that makes up for it; else again (rejection sampling, von Neumann
  1951). A straight line between the powers of two is that weight: it is at most 6 % more, and takes
  a CPU a tenth of the time of an exponential, for a float's bits, read as an integer, are its
  logarithm in such lines (Schraudolph 1999).
- With top-p alone: a token drawn from all is in the nucleus if those that are likelier weigh less
  than top-p; else the next is drawn from these, until one is (FlashInfer's way on GPUs:
  flashinfer.ai/2025/03/10/sampling.html). This takes the weights of all tokens, and a sum a try.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from math import exp, inf, log
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from mlxsrv.engine.sampling.blocks import (
    SIZE,
    Blocks,
    divide_rows,
    sum_blocks,
    sum_rows,
    take_blocks,
)
from mlxsrv.generation import Sampling

_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads close seeds over both words
_MASK = 0xFFFFFFFFFFFFFFFF

_AHEAD = 16  # of steps: one operation for each, not ten
_BELOW_ONE = 1 - 2**-20  # by more than sums of weights are rounded
_COLD = 1e-5  # a temperature below is greedy, for logits divided by less would overflow
_STEEP = 1 / 64  # a temperature below would need a power's base that is more than a float32 holds
_ROUNDING = 1e-5  # of sums of weights: 0.07 + 0.03 is to be no more than 1 - 0.9
_LEAST_TOP_P = 2**-20  # a smaller one keeps the likeliest token of any vocabulary, and no other

_TRIES = 8  # of rejection sampling: each fails less than once in 16 times
_NUMBERS = 3  # for a try: a block, a token in it, whether it stays
_SLACK = 1 + 2**-10  # by which lines are above the powers of two for all that rounding does to them
_CERTAIN = 2.0**-20  # tries that all fail are less likely; then it is the likeliest token
_MOST_ROUNDS = 40  # of one try each, of any top_p
_AT_ONCE = 10  # tries of a round from few weights: 0.2**10 is less than once in a million times
_MOST_NUMBERS = 100  # 10 rounds of 10, or 40 of 2
_GRID = 128
_ORDERED = 256  # a smaller top_k costs less to sort than to draw apart from other ones


class _Way(Enum):
    """How a row is drawn. Its own settings decide, never its neighbours."""

    GREEDY = "greedy"
    RANKED = "ranked"
    WHOLE = "whole"
    NUCLEUS = "nucleus"


class Sampler:
    """Draws the next token of each row. Made anew when rows join or leave.

    Few and small operations are the point: on a small model each costs as much as a layer.

    Args:
        rows: each row's parameters.
        drawn: how many tokens each row has drawn already.
        ahead: steps whose random numbers are drawn at once.
    """

    def __init__(self, rows: Sequence[Sampling], drawn: Sequence[int], ahead: int = _AHEAD) -> None:
        self._rows, self._drawn, self._ahead = rows, drawn, ahead
        self._groups: list[tuple[mx.array | slice | None, _Group]] | None = None  # by vocabulary
        self._places: mx.array | None = None  # of the rows in the groups' tokens, if they move

    def __call__(self, logits: mx.array) -> mx.array:
        """Token ids `(rows,)` for logits `(rows, vocabulary)`; advances each row's stream."""
        return self.draw(logits)[0]

    def draw(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """As a call, and each row's highest logit `(rows, 1)`: if it is not finite, one of them is
        NaN or infinite, or all are minus infinity, and the row's token means nothing."""
        return self.draw_from(Blocks(logits))

    def draw_from(self, blocks: Blocks) -> tuple[mx.array, mx.array]:
        """As `draw`."""
        groups = self._groups or self._divide(blocks.vocabulary)
        parts = [
            group.draw(blocks if members is None else blocks.take(members)).astype(mx.uint32)
            for members, group in groups
        ]
        tokens = (parts[0] if len(parts) == 1 else mx.concatenate(parts)).squeeze(-1)
        return tokens if self._places is None else tokens[self._places], blocks.highest

    def _divide(self, vocabulary: int) -> list[tuple[mx.array | slice | None, _Group]]:
        """Put rows that are drawn in one way together."""
        alike: dict[tuple[_Way, int], list[int]] = {}
        for i, row in enumerate(self._rows):
            way = _choose_way(row)
            count = _count_candidates(row) if way is _Way.RANKED else 0
            alike.setdefault((way, count if count >= _ORDERED else 0), []).append(i)
        groups: list[tuple[_Way, list[int]]] = []
        for (way, _), members in alike.items():
            wide = way in (_Way.WHOLE, _Way.NUCLEUS)  # through many operations on all entries
            parts = divide_rows(len(members), vocabulary) if wide else [slice(None)]
            groups += [(way, members[part]) for part in parts]
        order = [i for _, members in groups for i in members]
        if order != sorted(order):
            self._places = mx.array(np.argsort(order))
        self._groups = [
            (self._locate(members), self._make(way, members)) for way, members in groups
        ]
        return self._groups

    def _locate(self, members: Sequence[int]) -> mx.array | slice | None:
        """Where a group's rows are in the batch; None for all of it."""
        if len(members) == len(self._rows):
            return None
        first, last = members[0], members[-1]
        if last - first == len(members) - 1:
            return slice(first, last + 1)
        return mx.array(list(members))

    def _make(self, way: _Way, members: Sequence[int]) -> _Group:
        rows, drawn = [self._rows[i] for i in members], [self._drawn[i] for i in members]
        return _MAKERS[way](rows, drawn, self._ahead)


class _Greedy:
    """Rows that take the likeliest token."""

    def __init__(self, rows: Sequence[Sampling], drawn: Sequence[int], ahead: int) -> None:
        pass

    def draw(self, blocks: Blocks) -> mx.array:
        """Token ids `(rows, 1)`."""
        return blocks.likeliest()


class _Random:
    """Rows that are drawn in one way.

    Args:
        numbers: random numbers that each of their tokens takes; always as many, for what they are
            depends on that.
    """

    def __init__(
        self, rows: Sequence[Sampling], drawn: Sequence[int], ahead: int, numbers: int
    ) -> None:
        self._heat = _column([row.temperature for row in rows])
        self._base = _column([exp(1 / max(row.temperature, _STEEP)) for row in rows])
        steep = [max(row.temperature, _STEEP) / row.temperature for row in rows]
        self._scale = _column(steep) if any(each != 1 for each in steep) else None
        self._min_p = _column([row.min_p for row in rows])
        self._cuts_weight = any(row.min_p > 0 for row in rows)
        self._nucleus = _column(
            [1 - (1 - row.top_p) * (1 + _ROUNDING) if row.top_p < 1 else inf for row in rows]
        )
        cut = [row.top_p for row in rows if row.top_p < 1]
        self._rounds = max((_count_rounds(top_p, _AT_ONCE) for top_p in cut), default=0)
        self._uniforms = _Uniforms([row.seed for row in rows], drawn, ahead, numbers)

    def _weigh(self, blocks: Blocks) -> mx.array:
        """What each token weighs `(rows, width)`: `exp(logit / temperature)`, 1 for the likeliest,
        so min_p is a weight as it stands."""
        return self._raise(blocks.logits - blocks.highest)

    def _draw_from(self, weights: mx.array) -> mx.array:
        """A place `(rows, 1)` for weights `(rows, n)`, within top-p and min-p.

        A round draws some at once. Where all are outside of top-p, what weighs no more than the
        heaviest of them is outside too, and the next round draws from the rest.
        """
        left = _keep(weights, weights >= self._min_p) if self._cuts_weight else weights
        numbers = self._uniforms.next()
        if not self._rounds:
            return _invert(left, numbers[:, :1])
        limit = self._nucleus * sum_rows(weights)[:, None]
        drawn: list[mx.array] = []
        within: list[mx.array] = []
        for i in range(self._rounds):
            places = _invert(left, numbers[:, i * _AT_ONCE : (i + 1) * _AT_ONCE])
            reached = mx.take_along_axis(weights, places, axis=-1)
            drawn.append(places)
            within.append(_sum_heavier(weights, reached) < limit)
            left = _keep(left, weights > reached.max(axis=-1, keepdims=True))
        likeliest = mx.argmax(weights, axis=-1, keepdims=True)
        return _choose(mx.concatenate(drawn, axis=-1), mx.concatenate(within, axis=-1), likeliest)

    def _raise(self, lower: mx.array) -> mx.array:
        """Weights of logits less the highest one. By powers: MLX's CPU back end takes a third of
        the time of its exp for them."""
        return mx.power(self._base, lower if self._scale is None else lower * self._scale)


class _Ranked(_Random):
    """Rows with a top-k: all below `_ORDERED`, or all the same."""

    def __init__(self, rows: Sequence[Sampling], drawn: Sequence[int], ahead: int) -> None:
        super().__init__(rows, drawn, ahead, _MOST_NUMBERS)
        counts = [_count_candidates(row) for row in rows]
        self._most = max(counts)
        self._counts = None if min(counts) == self._most else mx.array(counts)[:, None]

    def draw(self, blocks: Blocks) -> mx.array:
        ordered = self._most < _ORDERED
        ids, values = (blocks.top if ordered else blocks.top_unordered)(self._most)
        weights = self._raise(values - blocks.highest)
        if self._counts is not None:
            weights = mx.where(mx.arange(ids.shape[-1]) < self._counts, weights, 0)
        token = mx.take_along_axis(ids, self._draw_from(weights), axis=-1)
        # Where logits are no numbers it may be of the padding, which has no embedding.
        return mx.minimum(token, blocks.vocabulary - 1)


class _Whole(_Random):
    """Rows with neither top-k nor top-p."""

    def __init__(self, rows: Sequence[Sampling], drawn: Sequence[int], ahead: int) -> None:
        super().__init__(rows, drawn, ahead, _TRIES * _NUMBERS)
        self._slope = _column([2.0**23 / log(2) / row.temperature for row in rows])
        self._least = _column(
            [row.temperature * log(row.min_p) if row.min_p > 0 else -inf for row in rows]
        )

    def draw(self, blocks: Blocks) -> mx.array:
        if blocks.few:
            return self._draw_from(self._weigh(blocks))
        lower = blocks.logits - blocks.highest
        lines = self._draw_lines(lower)
        numbers = self._uniforms.next().reshape(-1, _TRIES, _NUMBERS)
        drawn = _invert_blocks(lines, sum_blocks(lines), numbers[..., 0], numbers[..., 1])
        above = mx.take_along_axis(lines, drawn, axis=-1) * _SLACK
        weights = mx.exp(mx.take_along_axis(lower, drawn, axis=-1) / self._heat)
        token = _choose(drawn, numbers[..., 2] * above < weights, blocks.likeliest())
        # Where weights are no numbers it may be of the padding, which has no embedding.
        return mx.minimum(token, blocks.vocabulary - 1)

    def _draw_lines(self, lower: mx.array) -> mx.array:
        """A little more than the weights: straight lines between the powers of two. What min_p cuts
        off weighs nothing."""
        bits = mx.maximum(lower * self._slope, _LEAST_BITS).astype(mx.int32) + _ONE_BITS
        lines = bits.view(mx.float32)
        return _keep(lines, lower >= self._least) if self._cuts_weight else lines


class _Nucleus(_Random):
    """Rows with a top-p and no top-k."""

    def __init__(self, rows: Sequence[Sampling], drawn: Sequence[int], ahead: int) -> None:
        super().__init__(rows, drawn, ahead, _MOST_NUMBERS)
        self._wide_rounds = max(_count_rounds(row.top_p, 1) for row in rows)

    def draw(self, blocks: Blocks) -> mx.array:
        if blocks.few:
            return self._draw_from(self._weigh(blocks))
        weights = self._weigh(blocks)
        sums = sum_blocks(weights)
        limit = self._nucleus * sums.sum(axis=-1, keepdims=True)
        left = weights
        if self._cuts_weight:
            left = _keep(weights, weights >= self._min_p)
            sums = sum_blocks(left)
        numbers = self._uniforms.next()
        drawn: list[mx.array] = []
        within: list[mx.array] = []
        for i in range(self._wide_rounds):
            [first, second] = (numbers[:, 2 * i + j, None] for j in (0, 1))
            token = _invert_blocks(left, sums, first, second)
            left = _keep(left, left > mx.take_along_axis(weights, token, axis=-1))
            sums = sum_blocks(left)
            drawn.append(token)
            within.append(sums.sum(axis=-1, keepdims=True) < limit)
        tokens, passed = mx.concatenate(drawn, axis=-1), mx.concatenate(within, axis=-1)
        # Where weights are no numbers it may be of the padding, which has no embedding.
        return mx.minimum(_choose(tokens, passed, blocks.likeliest()), blocks.vocabulary - 1)


_Group: TypeAlias = _Greedy | _Ranked | _Whole | _Nucleus
_MAKERS: dict[_Way, type[_Group]] = {
    _Way.GREEDY: _Greedy,
    _Way.RANKED: _Ranked,
    _Way.WHOLE: _Whole,
    _Way.NUCLEUS: _Nucleus,
}

_ONE_BITS = 127 << 23  # of a float32 that is 1
_LEAST_BITS = -127.0 * 2**23  # as much less is a weight of 0


class _Uniforms:
    """Random numbers in [0, 1), drawn for some steps at once.

    Those of a row's n-th token come from the key (seed, n). They are so far below 1 that a part of
    a sum, rounded, is less than the sum.
    """

    def __init__(
        self, seeds: Sequence[int], drawn: Sequence[int], ahead: int, numbers: int
    ) -> None:
        self._seeds = mx.array([_seed_word(seed) for seed in seeds], dtype=mx.uint32)
        self._drawn = mx.array(list(drawn), dtype=mx.uint32)
        self._ahead = self._step = ahead
        self._shape = (numbers,)
        self._numbers = mx.zeros((0, 0, 0))

    def next(self) -> mx.array:
        """For each row's next token `(rows, numbers)`."""
        if self._step == self._ahead:
            self._numbers = self._draw()
            self._drawn = self._drawn + self._ahead
            self._step = 0
        self._step += 1
        return self._numbers[:, self._step - 1]

    def _draw(self) -> mx.array:
        """`(rows, steps, numbers)`"""
        counts = self._drawn[:, None] + mx.arange(self._ahead, dtype=mx.uint32)
        seeds = mx.broadcast_to(self._seeds[:, None], counts.shape)
        draw = mx.vmap(mx.vmap(lambda key: mx.random.uniform(shape=self._shape, key=key)))
        return draw(mx.stack([seeds, counts], axis=-1)) * _BELOW_ONE


def _choose_way(row: Sampling) -> _Way:
    if row.temperature < _COLD:
        return _Way.GREEDY
    if row.top_k > 0 or row.top_p < _LEAST_TOP_P:
        return _Way.RANKED
    return _Way.NUCLEUS if row.top_p < 1 else _Way.WHOLE


@lru_cache(maxsize=1024)
def _count_rounds(top_p: float, tries: int) -> int:
    """After how many rounds of so many tries one is in the nucleus, as good as certainly.

    Of tries from a mass of `1 + s` times the nucleus a share of `s / (1 + s)` fails. The mass
    outside that is left after one is any part of `s` with the same probability, and for single
    tokens it is less; after a round it is the least of its tries'. So with f(0, s) = 1 all n rounds
    fail with the probability f(n, s) = (s / (1 + s))^tries * E f(n - 1, least of the tries).
    """
    top_p = max(top_p, _LEAST_TOP_P)
    grid = np.geomspace(1e-9, max((1 - top_p) / top_p, 2e-9), _GRID)
    more = np.clip(1 - grid / grid[:, None], 0, 1) ** tries  # that the least is more
    chances = -np.diff(more, prepend=1, axis=-1)
    failed = np.ones_like(grid)
    for count in range(1, _MOST_ROUNDS + 1):
        # f grows with s, so to take it at the end of each step errs on the safe side.
        failed = (grid / (1 + grid)) ** tries * (chances @ failed)
        if failed[-1] < _CERTAIN:
            return count
    return _MOST_ROUNDS


def _count_candidates(row: Sampling) -> int:
    return 1 if row.top_p < _LEAST_TOP_P else row.top_k


def _column(values: Sequence[float]) -> mx.array:
    """`(rows, 1)`"""
    return mx.array(list(values), dtype=mx.float32)[:, None]


def _seed_word(seed: int) -> int:
    """64 bits of seed folded into the 32 that a key has room for beside the counter."""
    mixed = (seed & _MASK) * _MIX & _MASK
    return (mixed >> 32) ^ (mixed & 0xFFFFFFFF)


def _keep(values: mx.array, kept: mx.array) -> mx.array:
    """0 where they are not `kept`. MLX's CPU back end takes a fraction of `where`'s time for a
    product, and for bytes of booleans'."""
    return values * kept.view(mx.uint8)


def _invert(weights: mx.array, uniforms: mx.array) -> mx.array:
    """Inverse transform sampling: places `(rows, m)` for weights `(rows, n)` of any sum, by numbers
    `(rows, m)`.

    One cumulative sum and one random number a draw, where the Gumbel trick takes one for each entry
    of the vocabulary. The target stays below the total, so that rounding cannot choose an entry of
    weight zero behind the last one that counts; of weights that are no numbers it is any place.
    """
    cumulative = mx.cumsum(weights, axis=-1)[:, None]
    places = (cumulative <= uniforms[..., None] * cumulative[..., -1:]).sum(axis=-1)
    return mx.minimum(places, weights.shape[-1] - 1)


def _sum_heavier(weights: mx.array, least: mx.array) -> mx.array:
    """Sums `(rows, m)` of those weights `(rows, n)` that are more than each of `(rows, m)`."""
    heavier = _keep(weights[:, None], weights[:, None] > least[..., None])
    return sum_rows(heavier.reshape(-1, weights.shape[-1])).reshape(least.shape)


def _invert_blocks(
    weights: mx.array, sums: mx.array, blocks: mx.array, places: mx.array
) -> mx.array:
    """As `_invert`, by way of sums of blocks `(rows, blocks)`: ids `(rows, n)` for weights
    `(rows, width)`, by two numbers each `(rows, n)`."""
    cumulative = mx.cumsum(sums, axis=-1)[:, None]
    block = (cumulative <= blocks[..., None] * cumulative[..., -1:]).sum(axis=-1)
    block = mx.minimum(block, sums.shape[-1] - 1)
    inner = mx.cumsum(take_blocks(weights, block, SIZE), axis=-1)
    place = (inner <= places[..., None] * inner[..., -1:]).sum(axis=-1)
    return block * SIZE + mx.minimum(place, SIZE - 1)


def _choose(drawn: mx.array, passed: mx.array, likeliest: mx.array) -> mx.array:
    """The first of each row's tokens `(rows, tries)` that has `passed`, `(rows, 1)`. There is one,
    but for once in a million times: then it is the likeliest, which always passes."""
    first = mx.argmax(passed, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(drawn, first, axis=-1)
    return mx.where(passed.any(axis=-1, keepdims=True), chosen, likeliest)
