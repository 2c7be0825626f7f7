"""Quantized keys and values, but for the first tokens of a text.

The first tokens of a text keep their keys and values as they are; those of each later one are
quantized when they come, each by itself. So the KV cache of a text does not depend on the slices in
which it was read, nor on the cached prompt that it begins with. mlx-lm quantizes all of a text once
it is longer than its start.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask

from mlxsrv.engine.cache.layer_cache import LayerCache

_STEP = 256  # columns by which arrays grow
_MOST_SCORES = 2**25  # of queries and keys, at once


class FirstTokens(KVCache):  # type: ignore[misc]  # mlx-lm has no types
    """The keys and values of a row's first `max_size` tokens, as they are."""

    def __init__(self, max_size: int) -> None:
        super().__init__()
        self.max_size = max_size


class LaterTokens(LayerCache):
    """The quantized keys and values of a row's tokens from the `start`-th on: three arrays each,
    weights, scales and biases; None before there are any."""

    def __init__(self, start: int, group_size: int, bits: int) -> None:
        self.start = start
        self.group_size = group_size
        self.bits = bits
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0

    def update(self, keys: mx.array, values: mx.array) -> None:
        """Add keys and values `(1, heads, tokens, head size)`."""
        new = [part for array in (keys, values) for part in self.quantize(array)]
        end = self.offset + keys.shape[2]
        arrays = [] if self.keys is None else [*self.keys, *self.values]
        if not arrays or end > arrays[0].shape[2]:
            arrays = self._grow(arrays, new, -(-end // _STEP) * _STEP)
        for array, part in zip(arrays, new, strict=True):
            array[:, :, self.offset : end] = part
        self.keys, self.values, self.offset = tuple(arrays[:3]), tuple(arrays[3:]), end

    def _grow(
        self, arrays: Sequence[mx.array], like: Sequence[mx.array], columns: int
    ) -> list[mx.array]:
        room = columns - self.offset
        free = [mx.zeros((*each.shape[:2], room, each.shape[3]), each.dtype) for each in like]
        if not arrays:
            return free
        held = [array[:, :, : self.offset] for array in arrays]
        return [mx.concatenate([*pair], axis=2) for pair in zip(held, free, strict=True)]

    def quantize(self, array: mx.array) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(array, group_size=self.group_size, bits=self.bits))

    def keys_and_values(self) -> tuple[Any, Any]:
        keys, values = (
            tuple(part[:, :, : self.offset] for part in arrays)
            for arrays in (self.keys, self.values)
        )
        return keys, values

    @property
    def state(self) -> Any:
        return self.keys, self.values, self.offset

    @state.setter
    def state(self, state: Any) -> None:
        self.keys, self.values, self.offset = state

    def empty(self) -> bool:
        return self.keys is None

    def is_trimmable(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else sum(part.nbytes for part in (*self.keys, *self.values))


class BothSides:
    """First tokens and later ones, where a model looks at a layer's keys itself: to have the next
    pass depend on them, as MiniMax M3 does.

    Attributes:
        caches: the two.
    """

    caches: tuple[Any, Any]

    @property
    def keys(self) -> list[mx.array]:
        found = [side.keys for side in self.caches if side.keys is not None]
        return [array for keys in found for array in (keys if type(keys) is tuple else [keys])]

    @keys.setter
    def keys(self, arrays: Sequence[mx.array] | None) -> None:
        left = iter(arrays or ())
        for side in self.caches if arrays else ():
            if type(side.keys) is tuple:
                side.keys = tuple(islice(left, len(side.keys)))
            elif side.keys is not None:
                side.keys = next(left)


class QuantizedCache(BothSides, LayerCache):
    """The KV cache of one layer and one row. mlx-lm's models call it as they call its KVCache.

    Args:
        start: tokens that are not quantized.
        group_size: numbers of keys or values that share a scale.
        bits: of a quantized number.
    """

    def __init__(self, start: int, group_size: int, bits: int) -> None:
        self.caches = (FirstTokens(start), LaterTokens(start, group_size, bits))

    @property
    def first(self) -> FirstTokens:
        first: FirstTokens = self.caches[0]
        return first

    @property
    def later(self) -> LaterTokens:
        later: LaterTokens = self.caches[1]
        return later

    @property
    def offset(self) -> int:
        return int(self.first.offset) + self.later.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Add keys and values `(1, heads, tokens, head size)`. Returns all that there are."""
        own = min(max(self.later.start - self.offset, 0), keys.shape[2])
        if own:
            self.first.update_and_fetch(keys[:, :, :own], values[:, :, :own])
        if own < keys.shape[2]:
            self.later.update(keys[:, :, own:], values[:, :, own:])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        first = None if self.first.empty() else self.first.keys_and_values()
        later = self.later.keys_and_values() if self.later.offset else None
        return pair_sides(first, later, self.later)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        mask: mx.array | str | None = create_attention_mask(
            N, self.offset, return_array, window_size
        )
        return mask

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = min(self.offset, n)
        later = min(self.later.offset, n)
        self.later.offset -= later
        self.first.trim(n - later)
        return n

    @property
    def nbytes(self) -> int:
        return int(self.first.nbytes) + self.later.nbytes

    @property
    def state(self) -> Any:
        return self.first.state, self.later.state


class PartlyQuantized:
    """Keys, or values, of the rows of a pass: the first tokens' as they are, then quantized ones.

    It is no array: a model that does anything but pass it to attention raises an error.

    Attributes:
        first: `(rows, heads, tokens, head size)`; None: there are none.
        later: three arrays.
        kind: how they are quantized.
    """

    __slots__ = ("first", "kind", "later")

    def __init__(
        self, first: mx.array | None, later: Sequence[mx.array], kind: LaterTokens
    ) -> None:
        self.first = first
        self.later = later
        self.kind = kind

    @property
    def heads(self) -> int:
        return self.later[0].shape[1]

    @property
    def tokens(self) -> int:
        return self.later[0].shape[2] + (0 if self.first is None else self.first.shape[2])

    def multiply(self, queries: mx.array) -> mx.array:
        """`(rows, heads, queries of a head, tokens, all tokens)`: keys times queries."""
        later = self._multiply(queries, transpose=True)
        if self.first is None:
            return later
        first = queries @ self.first[:, :, None].swapaxes(-1, -2)
        return mx.concatenate([first, later], axis=-1)

    def mix(self, weights: mx.array) -> mx.array:
        """Return the sum of the values, weighted: `(rows, heads, queries of a head, tokens,
        size)`."""
        if self.first is None:
            return self._multiply(weights, transpose=False)
        own = self.first.shape[2]
        mixed = weights[..., :own] @ self.first[:, :, None]
        return mixed + self._multiply(weights[..., own:], transpose=False)

    def _multiply(self, left: mx.array, *, transpose: bool) -> mx.array:
        weights, scales, biases = (part[:, :, None] for part in self.later)
        kind = self.kind
        return mx.quantized_matmul(
            left,
            weights,
            scales,
            biases,
            transpose=transpose,
            group_size=kind.group_size,
            bits=kind.bits,
        )


def pair_sides(first: Any, later: Any, kind: LaterTokens) -> tuple[Any, Any]:
    """Keys and values of first tokens and of later ones, either of which may be None."""
    if later is None:
        keys, values = first
        return keys, values
    keys, values = (
        PartlyQuantized(own, quantized, kind)
        for own, quantized in zip(first or (None, None), later, strict=True)
    )
    return keys, values


def attend_quantized(
    queries: mx.array,
    keys: PartlyQuantized,
    values: PartlyQuantized,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of `(rows, heads, tokens, head size)` queries.

    A long slice of a long text is done some queries at a time: all its scores, of which there are
    several copies at once, would take more memory than the KV cache.
    """
    rows, heads, tokens, _ = queries.shape
    if isinstance(mask, str):
        places = mx.arange(keys.tokens)
        mask = places[keys.tokens - tokens :, None] >= places
    most = max(_MOST_SCORES // (rows * heads * keys.tokens), 1)
    parts: list[mx.array] = []
    for begin in range(0, tokens, most):
        end = min(begin + most, tokens)
        some = queries[:, :, begin:end]
        if parts:  # or MLX would compute all parts at the same time
            some = mx.depends(some, parts[-1])
        own = mask if mask is None or mask.shape[-2] == 1 else mask[..., begin:end, :]
        parts.append(_attend(some, keys, values, scale, own, sinks))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _attend(
    queries: mx.array,
    keys: PartlyQuantized,
    values: PartlyQuantized,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    rows, heads, tokens, size = queries.shape
    shape = (rows, keys.heads, heads // keys.heads, tokens)
    scores = keys.multiply((queries * scale).reshape(*shape, size))
    if mask is not None:
        scores = _hide(scores, mask)
    if sinks is not None:  # each a token more, which has no value
        own = sinks.astype(scores.dtype).reshape(1, *shape[1:3], 1, 1)
        scores = mx.concatenate([mx.broadcast_to(own, (*shape, 1)), scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    mixed = values.mix(weights if sinks is None else weights[..., 1:])
    return mixed.reshape(rows, heads, tokens, -1)


def _hide(scores: mx.array, mask: mx.array) -> mx.array:
    """Scores of what the mask allows. It is for all heads, or for each query's head."""
    _, groups, each, *_ = scores.shape
    if mask.ndim > 2:
        mask = mask if mask.ndim == 4 else mask[None]
        shape = (groups, each) if mask.shape[1] == groups * each else (mask.shape[1], 1)
        mask = mask.reshape(mask.shape[0], *shape, *mask.shape[2:])
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return scores + mask
