"""Logits in blocks: the likeliest tokens of each row, selected without a sort of the vocabulary.

The maxima of all blocks of 128 entries need one pass over the logits, and there is no other pass.
The k largest entries of a row lie in the k blocks with the largest maxima, because each of these
blocks has an entry that comes before all entries of any other block. Blocks are divided further: a
group of 16 is every 8th entry of a block, and a group of 4 is every 32nd, so groups nest. Selecting
groups of 16, then groups of 4 within these, then entries looks at a few thousand values each time.
Groups are strided so that the maxima of many groups are computed at once along memory.

Entries have a strict order: the larger one first; of equal ones the one with the lower id. (-0
comes after 0.) A key of 64 bits has the value in its high word and the id in its low word, so keys
compare by value and then by id, and no two keys are equal: every device selects the same entries. A
group's key has its maximum and its index. For equal maxima in different blocks this is the order of
ids. Groups of one block overlap in ids, so the last one may have the lowest id of equal entries:
therefore as many more groups are selected as a block has other groups.

MLX's own functions do not suit. `sort`, `argsort`, `partition`, `argpartition` and `topk` are full
merge sorts on Metal and CUDA (`Partition::eval_gpu` calls the sort). On the CPU `partition` of 32 x
151,936 entries takes 30 ms, and the maxima take 2. Here they get a few thousand entries a row for
any k up to 1,024. Sums are computed in two steps, because the inner loop of the first one runs
along memory and is vectorised.
"""

from __future__ import annotations

from math import e

import mlx.core as mx

SIZE = 128  # entries of a block

_SMALL = 4096  # entries: blocks would save nothing
_STRIPE = 32  # entries that are summed side by side
_STEPS = (8, 16)  # of the sum of a block
_SIZES = (SIZE, 16, 4)  # of groups; the largest is a block
_NEXT_SIZE = {SIZE: 16, 16: 4, 4: 1}  # the groups whose maxima a group's maximum is taken from
_WIDE = 4096  # entries a row: selecting groups first saves nothing for fewer
_WORTH = 2  # selecting groups saves nothing unless there are so many times more than are wanted


class Blocks:
    """The logits of some rows.

    Attributes:
        vocabulary: entries of a row.
        small: the vocabulary is so small that blocks are of no use.
        logits: `(rows, width)`. A large vocabulary is padded to whole blocks with minus infinity.
        highest: each row's highest logit `(rows, 1)`; NaN if one of its logits is NaN.

    Args:
        logits: `(rows, vocabulary)`.
    """

    def __init__(self, logits: mx.array) -> None:
        self.vocabulary: int = logits.shape[-1]
        self.small = self.vocabulary <= _SMALL
        logits = logits.astype(mx.float32)
        if not self.small and (surplus := -self.vocabulary % SIZE):
            logits = mx.pad(logits, [(0, 0), (0, surplus)], constant_values=-mx.inf)
        self.logits = logits
        self._maxima: dict[int, mx.array] = {1: logits}  # by the size of the groups
        self.highest = (logits if self.small else self.maxima).max(axis=-1, keepdims=True)

    @property
    def maxima(self) -> mx.array:
        """The maximum of each block `(rows, blocks)`; NaN if one of its entries is NaN."""
        return self._reduce(SIZE)

    def log_total(self) -> mx.array:
        """Return the logarithm of the sum of each row's exponentials `(rows, 1)`. MLX's CPU back
        end computes powers in a third of the time of its exp."""
        base = mx.array(e, dtype=mx.float32)
        weights = mx.power(base, self.logits - self.highest)
        sums = weights if self.small else sum_blocks(weights)
        return self.highest + mx.log(sums.sum(axis=-1, keepdims=True))

    def select_rows(self, rows: mx.array | slice) -> Blocks:
        """Return the blocks of these rows."""
        taken = Blocks.__new__(Blocks)
        taken.vocabulary, taken.small = self.vocabulary, self.small
        taken._maxima = {size: maxima[rows] for size, maxima in self._maxima.items()}
        taken.logits, taken.highest = taken._maxima[1], self.highest[rows]
        return taken

    def likeliest(self) -> mx.array:
        """Return the id of each row's highest logit `(rows, 1)`; of equal ones the lowest id."""
        if self.small:
            return mx.argmax(self.logits, axis=-1, keepdims=True)
        block = mx.argmax(self.maxima, axis=-1)
        index = mx.argmax(take_blocks(self.logits, block[:, None], SIZE), axis=-1)
        return block[:, None] * SIZE + index

    def top(self, count: int) -> tuple[mx.array, mx.array]:
        """Return ids and logits `(rows, count)` of each row's first entries, in order. If `count`
        is more than the vocabulary, these are all entries."""
        return _decode(mx.sort(self._select(count), axis=-1)[:, ::-1])

    def top_unordered(self, count: int) -> tuple[mx.array, mx.array]:
        """Return what `top` does, in an order that depends on the row and on `count` only. MLX's
        CPU back end sorts 1,024 keys in a seventh of the time of selecting them."""
        return _decode(self._select(count))

    def _select(self, count: int) -> mx.array:
        """Return the keys `(rows, count)` of the first entries, unordered."""
        count = min(count, self.vocabulary)
        groups: mx.array | None = None  # the indices of the selected ones; None: all
        size = SIZE
        for smaller in self._choose_sizes(count):
            extra = SIZE // smaller - 1
            keys = _take_largest(self._make_keys(groups, size, smaller), count + extra)
            groups, size = _decode_indices(keys), smaller
        return _take_largest(self._make_keys(groups, size, 1), count)

    def _choose_sizes(self, count: int) -> list[int]:
        """Return the sizes of the groups to select in turn, before the entries."""
        entries = self.logits.shape[-1]
        sizes: list[int] = []
        for size in () if self.small else _SIZES:
            # Otherwise smaller groups, or the entries, are as fast.
            if entries > _WIDE and entries >= _WORTH * count * size:
                sizes.append(size)
                entries = count * size
        return sizes

    def _make_keys(self, groups: mx.array | None, size: int, smaller: int) -> mx.array:
        """Return the keys `(rows, n)` of groups of size `smaller`.

        Args:
            groups: indices of the groups of `size` to look into; None for all.
        """
        maxima = self._reduce(smaller)
        if groups is None:
            indices = mx.arange(maxima.shape[-1], dtype=mx.uint32)
        else:
            here, there = SIZE // size, SIZE // smaller  # groups a block
            first = groups + groups // here * (there - here)
            within = first[:, :, None] + mx.arange(0, there, here, dtype=mx.uint32)
            indices = within.reshape(first.shape[0], -1)
            maxima = mx.take_along_axis(maxima, indices, axis=-1)
        high = _order_bits(maxima.view(mx.int32)).view(mx.uint32)
        low = mx.broadcast_to(~indices, high.shape)
        # All that MLX runs on is little-endian.
        return mx.stack([low, high], axis=-1).view(mx.int64).squeeze(-1)

    def _reduce(self, size: int) -> mx.array:
        """Return the maxima of all groups of `size` `(rows, groups)`, block by block."""
        if size not in self._maxima:
            finer = _NEXT_SIZE[size]
            strided = self._reduce(finer).reshape(-1, size // finer, SIZE // size)
            self._maxima[size] = strided.max(axis=1).reshape(self.logits.shape[0], -1)
        return self._maxima[size]


def sum_blocks(values: mx.array) -> mx.array:
    """Return the sums of blocks `(rows, blocks)` of values `(rows, width)`."""
    parts = values.reshape(-1, *_STEPS).sum(axis=1)
    return parts.reshape(values.shape[0], -1, _STEPS[1]).sum(axis=-1)


def sum_rows(values: mx.array) -> mx.array:
    """Return sums `(..., 1)` of values `(..., width)`. Zeros at the end of rows do not change how
    a sum is rounded; the inner loop of the first step runs along memory and is vectorised."""
    if surplus := -values.shape[-1] % _STRIPE:
        values = mx.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, surplus)])
    striped = mx.unflatten(values, -1, (-1, _STRIPE))
    return striped.sum(axis=-2, keepdims=True).sum(axis=-1)


def take_blocks(values: mx.array, blocks: mx.array, size: int) -> mx.array:
    """Return the values `(rows, n, size)` of blocks `(rows, n)` of values `(rows, width)`."""
    rows, width = values.shape
    offsets = mx.arange(rows, dtype=mx.uint32)[:, None] * (width // size)
    return values.reshape(-1, size)[blocks + offsets]


def _order_bits(bits: mx.array) -> mx.array:
    """Turn floats' bits into integers that compare as the floats do, or back: below zero, all bits
    but the sign are flipped."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _decode(keys: mx.array) -> tuple[mx.array, mx.array]:
    """Return the indices and the values `(rows, n)` of keys."""
    return _decode_indices(keys), _order_bits(keys.view(mx.int32)[:, 1::2]).view(mx.float32)


def _decode_indices(keys: mx.array) -> mx.array:
    """Return the indices `(rows, n)` in the low words of keys."""
    return ~keys.view(mx.uint32)[:, ::2]


def _take_largest(keys: mx.array, count: int) -> mx.array:
    """Return the `count` largest keys of each row, unordered."""
    width = keys.shape[-1]
    return (
        keys if count >= width else mx.partition(keys, width - count, axis=-1)[:, width - count :]
    )
