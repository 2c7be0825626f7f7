"""Logits in blocks: the likeliest tokens of each row, found without a sort of the vocabulary.

The maxima of blocks of 128 entries take one pass over the logits, the only one there is. The k
largest entries of a row lie in the k blocks whose maxima are largest, for each of those blocks has
an entry that comes before all of any other block. The same holds for smaller blocks within these,
so what is sorted in the end is k entries.

Entries are in a strict order: the larger one first, and of equal ones the one with the lower id. A
key of 64 bits holds both, the value in its high word, so that comparing keys compares by value and
then by id, and no two keys are equal. (-0 comes after 0.)
So the k first are the same ones on every device.

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
_CACHED = 5 * 2**18  # entries: 8 rows of 151,936
_STEPS = (8, 16)  # of a reduction; their product is the size
_SIZES = (SIZE, 16)  # of blocks, and of blocks within these
_MANY = 4096  # entries a row, from which on there is use in choosing blocks of them first
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
        base = mx.array(e, dtype=mx.float32)
        sums = [
            _sum(mx.power(base, self.logits[part] - self.highest[part]), self.few)
            for part in divide_rows(*self.logits.shape)
        ]
        return self.highest + mx.log(mx.concatenate(sums))

    def take(self, rows: mx.array | slice) -> Blocks:
        """These rows alone."""
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
        before = width  # their size
        for size in _SIZES:
            # Where there is less to choose from, the entries themselves are as fast.
            many = width if first is None else count * before
            if self.few or many <= _MANY or width < _WORTH * count * size:
                continue
            keys = _first(self._key(first, before, size), count)
            first, before = self._read_ids(keys), size
        keys = mx.sort(_first(self._key(first, before, 1), count), axis=-1)[:, ::-1]
        ids = self._read_ids(keys)
        return ids, mx.take_along_axis(self.logits, ids, axis=-1)

    def _key(self, first: mx.array | None, before: int, size: int) -> mx.array:
        """The keys `(rows, n)` of the blocks of `size` within those that begin with the ids `first`
        and have the size `before`, or within the row.

        A block's is that of its first entry in order, as if that were its first by id: blocks do
        not overlap, so they compare alike.
        """
        rows, width = self.logits.shape
        if first is None:
            maxima = self._reduce_all(size)
            turned = mx.arange(width, 0, -size, dtype=mx.int64)
        else:
            entries = take_blocks(self.logits, first // before, before)
            maxima = _reduce(entries.reshape(rows, -1), size)
            turned = (width - first.astype(mx.int64))[:, :, None]
            if before > size:
                turned = turned - mx.arange(0, before, size, dtype=mx.int64)
            turned = turned.reshape(rows, -1)
        bits = maxima.view(mx.int32)
        # Floats below zero compare as integers do once all bits but the sign are turned.
        value = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        return (value.astype(mx.int64) << 32) | turned

    def _reduce_all(self, size: int) -> mx.array:
        """The maxima of all blocks of `size`."""
        if size == SIZE:
            return self.maxima
        maxima = _reduce(self.logits, size)
        if self._maxima is None and size > 1:
            self._maxima = _reduce(maxima, SIZE // size)
        return maxima

    def _read_ids(self, keys: mx.array) -> mx.array:
        """The ids `(rows, n)` in the low words of keys. (All that MLX runs on is little-endian.)"""
        return self.logits.shape[-1] - keys.view(mx.uint32)[:, ::2]


def divide_rows(rows: int, width: int) -> list[slice]:
    """The parts of `(rows, width)` to be taken one after another, where each is to go through many
    operations: on a CPU as much as its caches hold, on a GPU all at once. Larger arrays would be
    given back to the system, too, and each page of a new one costs as much as it is written."""
    if mx.default_device().type != mx.DeviceType.cpu:
        return [slice(0, rows)]
    step = max(_CACHED // width, 1)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _sum(values: mx.array, few: bool) -> mx.array:
    """`(rows, 1)`"""
    return (values if few else sum_blocks(values)).sum(axis=-1, keepdims=True)


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


def _first(keys: mx.array, count: int) -> mx.array:
    """The `count` greatest keys of each row, in no order."""
    width = keys.shape[-1]
    return (
        keys if count >= width else mx.partition(keys, width - count, axis=-1)[:, width - count :]
    )
