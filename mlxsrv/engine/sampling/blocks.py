"""Logits in blocks: the likeliest tokens of each row, found without a sort of the vocabulary.

The maxima of blocks of 128 entries take one pass over the logits, the only one there is. The k
largest entries of a row lie in the k blocks whose maxima are largest, for each of those blocks has
an entry that comes before all of any other block. Blocks fall into combs: a comb of 16 is each 8th
entry of a block, a comb of 4 is each 32nd, so each comb is some of a larger one. Choosing combs of
16, then combs of 4 within these, then entries sees a few thousand of each. Entries of a comb lie
apart, so that the maxima of many combs are taken at once along memory.

Entries are in a strict order: the larger one first, and of equal ones the one with the lower id.
(-0 comes after 0.) A key of 64 bits holds both, the value in its high word, so that comparing keys
compares by value and then by id, and no two keys are equal. So the k first are the same ones on
every device. A comb's key has its maximum and its place. Of equal ones in different blocks that is
the order of ids, but combs of one block cross: of equal ones there the last may have the first id.
So as many more are chosen as a block has other combs, for no more than these can be wrongly before.

What MLX offers instead does not suit: `sort`, `argsort`, `partition`, `argpartition` and `topk` are
full merge sorts on Metal and CUDA (`Partition::eval_gpu` calls the sort there), and on the CPU
`partition` of 32 x 151,936 entries takes some 30 ms where the maxima take 2. Here they see a few
thousand entries a row at most, for any k up to 1,024. Sums are taken in two steps, of 8 entries and
of 16: the first step's inner loop runs along memory, which a compiler makes vectors of.
"""

from __future__ import annotations

from math import e

import mlx.core as mx

SIZE = 128  # entries of a block

_SHARED = 256  # entries to select, from which on a second stream saves more than it costs
_SECOND_STREAM = mx.new_thread_local_stream(mx.cpu)  # starts with its first use
_FEW = 4096  # entries: as fast without blocks
_CACHED = 5 * 2**18  # entries: 8 rows of 151,936
_STRIPE = 32
_STEPS = (8, 16)  # of a reduction; their product is the size
_SIZES = (SIZE, 16, 4)  # of combs; the largest is a block
_FINER = {SIZE: 16, 16: 4, 4: 1}  # whose maxima a size's are the maxima of
_MANY = 4096  # entries a row, from which on there is use in choosing combs of them first
_WORTH = 2  # times as many combs as are wanted must there be, or choosing among them saves nothing


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
        self._maxima: dict[int, mx.array] = {1: logits}  # by the size of combs

    @property
    def maxima(self) -> mx.array:
        """Of each block `(rows, blocks)`. NaN where one of its entries is."""
        return self._reduce(SIZE)

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
        if not self.few:
            self._reduce(SIZE)  # once for all parts
        taken._maxima = {size: maxima[rows] for size, maxima in self._maxima.items()}
        taken.logits = taken._maxima[1]
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
        return _read(mx.sort(self._select(count), axis=-1)[:, ::-1])

    def top_unordered(self, count: int) -> tuple[mx.array, mx.array]:
        """As `top`, in an order that depends on the row and on `count` alone. A sort of 1,024 takes
        MLX's CPU back end as long as a seventh of finding them."""
        return _read(self._select(count))

    def _select(self, count: int) -> mx.array:
        """The keys `(rows, count)` of the first entries, in no order.

        On a CPU the second half of the rows is taken by a second stream. MLX runs each CPU stream
        on a thread of its own, so another core can do that, and orders the streams by events: this
        half waits for the maxima, and whoever uses the result waits for both halves. All calls
        are made by the caller's thread, and only the result leaves the second stream. A GPU runs
        all rows side by side in one stream.
        """
        count, rows = min(count, self.vocabulary), self.logits.shape[0]
        if self.few or rows == 1 or count < _SHARED or not on_cpu():
            return self._select_alone(count)
        first, second = self.take(slice(rows // 2)), self.take(slice(rows // 2, rows))
        keys = first._select_alone(count)
        with mx.stream(_SECOND_STREAM):
            others = second._select_alone(count)
        return mx.concatenate([keys, others])

    def _select_alone(self, count: int) -> mx.array:
        """As `_select`, in the current stream."""
        combs: mx.array | None = None  # the places of those that are left; at first, all
        size = SIZE
        for smaller in self._choose_sizes(count):
            crossing = SIZE // smaller - 1
            keys = _first(self._key(combs, size, smaller), count + crossing)
            combs, size = _read_places(keys), smaller
        return _first(self._key(combs, size, 1), count)

    def _choose_sizes(self, count: int) -> list[int]:
        """The sizes of the combs to choose among, before the entries themselves."""
        entries = self.logits.shape[-1]
        sizes: list[int] = []
        for size in () if self.few else _SIZES:
            # Where there is less to choose from, smaller combs and entries are as fast.
            if entries > _MANY and entries >= _WORTH * count * size:
                sizes.append(size)
                entries = count * size
        return sizes

    def _key(self, combs: mx.array | None, size: int, smaller: int) -> mx.array:
        """The keys `(rows, n)` of the `smaller` combs within the combs of `size` at these places,
        or within the whole row."""
        maxima = self._reduce(smaller)
        if combs is None:
            places = mx.arange(maxima.shape[-1], dtype=mx.uint32)
        else:
            here, there = SIZE // size, SIZE // smaller  # combs a block
            first = combs + combs // here * (there - here)
            within = first[:, :, None] + mx.arange(0, there, here, dtype=mx.uint32)
            places = within.reshape(first.shape[0], -1)
            maxima = mx.take_along_axis(maxima, places, axis=-1)
        high = _turn(maxima.view(mx.int32)).view(mx.uint32)
        low = mx.broadcast_to(~places, high.shape)
        # All that MLX runs on is little-endian.
        return mx.stack([low, high], axis=-1).view(mx.int64).squeeze(-1)

    def _reduce(self, size: int) -> mx.array:
        """The maxima of all combs of `size` `(rows, combs)`, those of a block side by side."""
        if size not in self._maxima:
            finer = _FINER[size]
            crossed = self._reduce(finer).reshape(-1, size // finer, SIZE // size)
            self._maxima[size] = crossed.max(axis=1).reshape(self.logits.shape[0], -1)
        return self._maxima[size]


def on_cpu() -> bool:
    """Whether the current thread's arrays are computed on the CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def divide_rows(rows: int, width: int) -> list[slice]:
    """The parts of `(rows, width)` to be taken one after another, where each is to go through many
    operations: on a CPU as much as its caches hold, on a GPU all at once. Larger arrays would be
    given back to the system, too, and each page of a new one costs as much as it is written."""
    if not on_cpu():
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


def sum_rows(values: mx.array) -> mx.array:
    """Sums `(rows,)` of values `(rows, width)`: most of it along memory, as sums of blocks."""
    if values.shape[-1] % _STRIPE == 0:
        values = values.reshape(values.shape[0], -1, _STRIPE).sum(axis=1)
    return values.sum(axis=-1)


def take_blocks(values: mx.array, blocks: mx.array, size: int) -> mx.array:
    """The values `(rows, n, size)` of the blocks `(rows, n)` of each row of `(rows, width)`."""
    rows, width = values.shape
    offsets = mx.arange(rows, dtype=mx.uint32)[:, None] * (width // size)
    return values.reshape(-1, size)[blocks + offsets]


def _turn(bits: mx.array) -> mx.array:
    """Floats' bits as integers that compare as the floats do, and back: below zero all bits but the
    sign are turned."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _read(keys: mx.array) -> tuple[mx.array, mx.array]:
    """The places and values `(rows, n)` in keys."""
    return _read_places(keys), _turn(keys.view(mx.int32)[:, 1::2]).view(mx.float32)


def _read_places(keys: mx.array) -> mx.array:
    """The places `(rows, n)` in the low words of keys."""
    return ~keys.view(mx.uint32)[:, ::2]


def _first(keys: mx.array, count: int) -> mx.array:
    """The `count` greatest keys of each row, in no order."""
    width = keys.shape[-1]
    return (
        keys if count >= width else mx.partition(keys, width - count, axis=-1)[:, width - count :]
    )
