"""The rows of a sub-batch, and what their lengths make the same for all layers of a pass.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

_AHEAD = 256  # columns


class Rows:
    """The rows of a sub-batch: what is the same for all layers.

    Args:
        group_masks: masks are `(rows, 1, 1, tokens, columns)`, for models that give each head of
            keys its queries in a dimension of their own.

    Attributes:
        lengths: how many tokens each row has seen.
        longest, shortest: the most and the least of these.
        reached: the most tokens that each has had since the rows were set, those cut off included.
        changes: how many times the lengths have changed.
        fed: tokens of each row that the pass under way feeds; 0 before its first layer.
    """

    def __init__(self, *, group_masks: bool = False) -> None:
        self._group_masks = group_masks
        self.lengths: list[int] = []
        self.longest = self.shortest = 0  # each layer of each pass asks for them
        self.reached: list[int] = []
        self.changes = 0
        self.fed = 0
        # Made once for all layers of a pass.
        self._made: dict[tuple[object, ...], mx.array] = {}
        self._offsets: dict[int, mx.array] = {}
        self._numbers = mx.arange(0)

    def __len__(self) -> int:
        return len(self.lengths)

    def replace(self, lengths: Sequence[int]) -> None:
        """Set the lengths of other rows, in the order of their slots."""
        self.reached = list(lengths)
        self._change(lengths)

    def advance(self, tokens: int) -> None:
        """Note that a pass has fed so many tokens to each row."""
        self._change([length + tokens for length in self.lengths])
        self.reached = list(map(max, self.reached, self.lengths))

    def cut(self, surplus: Sequence[int]) -> None:
        """Forget the last tokens of each row, so many of each."""
        self._change([length - less for length, less in zip(self.lengths, surplus, strict=True)])

    def _change(self, lengths: Sequence[int]) -> None:
        self.lengths, self.fed = list(lengths), 0
        self.longest, self.shortest = max(self.lengths, default=0), min(self.lengths, default=0)
        self.changes += 1
        self._made.clear()
        self._offsets.clear()

    # Arrays for the layers of a pass.

    def offset(self, more: int = 0) -> mx.array:
        """`(rows,)`: how many tokens each row has seen, and so many `more`."""
        found = self._offsets.get(more)
        if found is None:
            found = self._offsets[more] = mx.array([length + more for length in self.lengths])
        return found

    def columns(self, tokens: int, free: int) -> mx.array:
        """The columns of each row's next tokens, `(rows + free, 1, tokens, 1)`. The `free` slots
        behind the rows' have any columns."""

        def make() -> mx.array:
            begins = mx.array([*self.lengths, *[0] * free])[:, None, None, None]
            return begins if tokens == 1 else begins + mx.arange(tokens)[:, None]

        return self._once(("columns", tokens, free), make)

    def part_columns(
        self, begin: int, end: int | None, spare: int, tokens: int, free: int
    ) -> mx.array:
        """Do the same for an array that holds only the tokens from `begin` on, and before `end` if
        it is given. All other tokens have the column `spare`."""

        def make() -> mx.array:
            places = self.columns(tokens, free)
            here = places >= begin
            if end is not None:
                here = here & (places < end)
            return mx.where(here, places - begin, spare)

        return self._once(("part", begin, end, spare, tokens, free), make)

    def ring_columns(self, first: int, size: int, free: int) -> mx.array:
        """The column of each row's next token in a ring, `(rows + free, 1, 1, 1)`. There are `size`
        columns. Those from `first` on are written again and again; the `first` ones are never
        overwritten. The `free` slots behind the rows' have any columns."""

        def make() -> mx.array:
            places = self.columns(1, free)
            return mx.where(places < size, places, first + (places - first) % (size - first))

        return self._once(("ring", first, size, free), make)

    def mask(self, tokens: int, window: int | None) -> mx.array:
        """`(rows, 1, tokens, columns)`: which columns each of a row's next tokens may attend to."""

        def make() -> mx.array:
            queries = self.columns(tokens, 0)
            keys = self._count(self.longest + tokens)
            mask = keys <= queries
            mask = mask if window is None else mask & (queries < keys + window)
            return mask[:, None] if self._group_masks else mask

        return self._once(("mask", tokens, window), make)

    def ring_mask(self, columns: int, first: int, size: int, window: int | None) -> mx.array:
        """`(rows, 1, 1, columns)`: which columns of a ring each row's next token may attend to."""

        def make() -> mx.array:
            keys = self._count(columns)
            mask = keys <= self.columns(1, 0)
            if window is None:
                return mask
            age = (self.ring_columns(first, size, 0) - keys) % (size - first)
            return mask & ((age < window) | (keys < first))

        return self._once(("ring mask", columns, first, size, window), make)

    def _count(self, end: int) -> mx.array:
        """`(end,)`: 0, 1, 2 and so on; made once for many steps."""
        if self._numbers.size < end:
            self._numbers = mx.arange(end + _AHEAD)
        return self._numbers[:end]

    def _once(self, key: tuple[object, ...], make: Callable[[], mx.array]) -> mx.array:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
        return found
