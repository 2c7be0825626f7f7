"""The interface of one layer's KV cache: below the files that implement it, so it has its own.

A model of mlx-lm's calls these objects as it calls mlx-lm's caches, which prescribe the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Room(NamedTuple):
    """The size of a layer's arrays: rows (slots), and tokens of each row (columns)."""

    slots: int
    columns: int


class LayerCache(Protocol):
    """One layer's KV cache, of one row or of several."""

    @property
    def state(self) -> Any:
        """All its arrays, in nested lists and tuples; for `mx.eval`, and for files."""

    def empty(self) -> bool:
        """Whether no row has a token yet."""


class BatchLayer(Protocol):
    """One layer's KV caches of the rows of a sub-batch."""

    @property
    def view(self) -> Any:
        """The object that a model is called with."""

    def arrange(self, sources: Sequence[Any], lengths: Sequence[int], room: Room) -> None:
        """Set the rows, in this order.

        Args:
            sources: for each row, the slot that it has had (int), or mlx-lm's KV cache of a row
                that joins, which must not be used any more.
            lengths: the tokens that each row has seen.
            room: of the arrays from now on.
        """

    def view_row(self, slot: int, tokens: int) -> Any:
        """mlx-lm's KV cache of the row in this slot, which has seen so many tokens. Its arrays may
        be views of the layer's."""
