"""Logits in blocks: the likeliest tokens of each row, found without a sort of the vocabulary.

The maxima of blocks of 128 entries take one pass over the logits, the only one there is. The k
largest entries of a row lie in the k blocks whose maxima are largest, for each of those blocks has
an entry that comes before all of any other block. The same holds for smaller blocks within these,
so what is sorted in the end is k entries.

Entries are in a strict order: the larger one first, and of equal ones the one with the lower id. A
key of 64 bits holds both, the value in its high word, so that comparing keys compares by value and
then by id, and no two keys are equal. So the k first are the same ones on every device.

What MLX offers instead does not suit: `sort`, `argsort`, `partition`, `argpartition` and `topk` are
full merge sorts on Metal and CUDA (`Partition::eval_gpu` calls the sort there), and on the CPU
`partition` of 32 x 151,936 entries takes some 30 ms where the maxima take 2. Here they see a few
thousand entries a row at most, for any k up to 1,024. Sums and maxima are taken in two steps, of 8
entries and of 16: the first step's inner loop runs along memory, which a compiler makes vectors of.
"""

from __future__ import annotations

from math import e

import mlx.core as mx

SIZE = 128  # entries of a block

_FEW = 4096  # entries: as fast without blocks
_STEPS = (8, 16)  # of a reduction; their product is the size
_SIZES = (SIZE, 16, 4)  # of blocks within blocks
_WORTH = 2  # times as many blocks as are wanted must there be, or choosing among them saves nothing


class Blocks:
    """The logits of some rows.

    Args:
        logits: `(rows, vocabulary)`.

    `few` says that the vocabulary is so small that there is no use in blocks.
    """

    def __init__(self, logits: mx.array) -> None:
        self.vocabulary: int = logits.shape[-1]
        self.few = self.vocabulary <= _FEW
        logits = logits.astype(mx.float32)
        if not self.few and (surplus := -self.vocabulary % SIZE):
            logits = mx.pad(logits, [(0, 0), (0, surplus)], constant_values=-mx.inf)
        self.logits = logits  # (rows, width), padded to whole blocks with minus infinity
        self._maxima: mx.array | None = None

    @property
    def maxima(self) -> mx.array:
        """Of each block `(rows, blocks)`. NaN where one of its entries is."""
        if self._maxima is None:
            parts = self.logits.reshape(-1, *_STEPS).max(axis=1)
            self._maxima = parts.reshape(self.logits.shape[0], -1, _STEPS[1]).max(axis=-1)
        return self._maxima

    @property
    def highest(self) -> mx.array:
        """Each row's highest logit `(rows, 1)`; NaN where one of them is."""
        entries = self.logits if self.few else self.maxima
        return entries.max(axis=-1, keepdims=True)

    def log_total(self) -> mx.array:
        """The logarithm of the sum of each row's exponentials `(rows, 1)`. By powers: MLX's CPU
        back end takes a third of the time of its exp for them."""
        powers = mx.power(mx.array(e, dtype=mx.float32), self.logits - self.highest)
        sums = powers if self.few else sum_blocks(powers)
        return self.highest + mx.log(sums.sum(axis=-1, keepdims=True))

    def take(self, rows: mx.array) -> Blocks:
        """The rows at these indices alone."""
        taken = Blocks.__new__(Blocks)
        taken.vocabulary, taken.few = self.vocabulary, self.few
        taken.logits = self.logits[rows]
        taken._maxima = None if self.few else self.maxima[rows]
        return taken

    def likeliest(self) -> mx.array:
        """The id of each row's highest logit `(rows, 1)`: the lowest one where several are."""
        if self.few:
            return mx.argmax(self.logits, axis=-1, keepdims=True)
        block = mx.argmax(self.maxima, axis=-1)
        place = mx.argmax(take_blocks(self.logits, block[:, None], SIZE), axis=-1)
        return block[:, None] * SIZE + place

    def top(self, count: int) -> tuple[mx.array, mx.array]:
        """The first `count` entries of each row in order: ids and logits `(rows, count)`; all there
        are where `count` is more than the vocabulary."""
        count = min(count, self.vocabulary)
        width = self.logits.shape[-1]
        first: mx.array | None = None  # the blocks that are left, by the ids they begin with
        before = 0  # their size
        for size in _SIZES:
            if self.few or width < _WORTH * count * size:
                continue
            maxima, starts = self._divide(first, before, size)
            first, before = _read_keys(_choose(_make_keys(maxima, starts), count))[0], size
        keys = _choose(_make_keys(*self._divide(first, before, 1)), count)
        return _read_keys(mx.sort(keys, axis=-1)[:, ::-1])

    def _divide(self, first: mx.array | None, before: int, size: int) -> tuple[mx.array, mx.array]:
        """Blocks of `size` within those that begin with the ids `first` and have the size `before`,
        or within the row: their maxima and the ids they begin with `(rows, n)`."""
        rows, width = self.logits.shape
        if first is None:
            starts = mx.broadcast_to(
                mx.arange(0, width, size, dtype=mx.uint32), (rows, width // size)
            )
            if size == SIZE:
                return self.maxima, starts
            return _reduce(self.logits, size), starts
        entries = take_blocks(self.logits, first // before, before)
        starts = first[:, :, None] + mx.arange(0, before, size, dtype=mx.uint32)
        return _reduce(entries.reshape(rows, -1), size), starts.reshape(rows, -1)


def sum_blocks(values: mx.array) -> mx.array:
    """Sums `(rows, blocks)` of values `(rows, width)`."""
    parts = values.reshape(-1, *_STEPS).sum(axis=1)
    return parts.reshape(values.shape[0], -1, _STEPS[1]).sum(axis=-1)


def take_blocks(values: mx.array, blocks: mx.array, size: int) -> mx.array:
    """The values `(rows, n, size)` of the blocks `(rows, n)` of each row of `(rows, width)`."""
    rows, width = values.shape
    offsets = mx.arange(rows, dtype=mx.uint32)[:, None] * (width // size)
    return values.reshape(-1, size)[blocks + offsets]


def _reduce(values: mx.array, size: int) -> mx.array:
    """Maxima `(rows, n)` of each `size` values of `(rows, n * size)`."""
    return values if size == 1 else values.reshape(values.shape[0], -1, size).max(axis=-1)


def _choose(keys: mx.array, count: int) -> mx.array:
    """The `count` greatest keys of each row, in no order."""
    width = keys.shape[-1]
    return (
        keys if count >= width else mx.partition(keys, width - count, axis=-1)[:, width - count :]
    )


def _make_keys(values: mx.array, ids: mx.array) -> mx.array:
    """Keys that compare as values do, and of equal ones as ids do, turned round. (All that MLX runs
    on is little-endian.)"""
    return mx.stack([~ids, _flip(values + 0).view(mx.uint32)], axis=-1).view(mx.int64)[..., 0]


def _read_keys(keys: mx.array) -> tuple[mx.array, mx.array]:
    """Ids and values."""
    words = keys[..., None].view(mx.uint32)
    return ~words[..., 0], _flip(words[..., 1].view(mx.float32)).view(mx.float32)


def _flip(values: mx.array) -> mx.array:
    """Floats as integers that compare alike, or back: those below zero have all bits but the sign
    turned. (Zero is to have no sign.)"""
    bits = values.view(mx.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
