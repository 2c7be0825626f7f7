"""Attention sinks: bounded KV caches that keep the first tokens.

A model attends to the first tokens of a text whatever they say, and writes nonsense when they are
gone (Xiao et al. 2023, "attention sinks"). mlx-lm's cache of one row keeps four of them, but
that of a batch drops them. So where prompts are read together, they are kept apart, in front of the
window of the last tokens. A row attends to those that have left the window. Rows that decode have
slots.

A token attends to the first tokens and to the last before it, whether it was read or drawn. In
mlx-lm, what a token of a long prompt attends to depends on the slices in which it is read.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache

from mlxsrv.engine.cache.layer_cache import LayerCache

KEPT = 4


class SinkCache(RotatingKVCache):  # type: ignore[misc]  # mlx-lm has no types
    """The KV cache of one layer and one row: its first `KEPT` tokens and its last, `max_size` in
    all."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size, keep=KEPT)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """`(N, cached + N)`: the tokens that each of the next N may attend to."""
        last = self.max_size - KEPT
        if N == 1 or self.offset + N <= last:
            return super().make_mask(N, window_size, return_array)
        cached = min(self.offset, self.max_size - 1)
        places = mx.arange(cached + N)
        places = mx.where(places < KEPT, places, places + self.offset - cached)
        own = mx.arange(self.offset, self.offset + N)[:, None]
        return (places <= own) & ((places < KEPT) | (places > own - last))

    @classmethod
    def merge(cls, caches: Sequence[SinkCache]) -> BatchSinkCache:
        return BatchSinkCache(caches)


class BatchSinkCache(LayerCache):
    """The KV cache of one layer for rows whose prompts are read together. Its methods are those of
    mlx-lm's batch caches."""

    def __init__(self, caches: Sequence[SinkCache]) -> None:
        self._window = BatchRotatingKVCache.merge(list(map(_window, caches)))
        # (rows, heads, KEPT, head size) each; None before any row has seen a token
        self._keys: Any = None
        self._values: Any = None
        self._shortest = min(cache.offset for cache in caches)  # tokens of a row, at least
        self._padding = 0  # padding of the prompts that are being read, at most
        used = [cache for cache in caches if not cache.empty()]
        if used:
            self._keys = mx.concatenate([_first(c, c.keys, used[0].keys) for c in caches])
            self._values = mx.concatenate([_first(c, c.values, used[0].values) for c in caches])

    @property
    def max_size(self) -> int:
        return int(self._window.max_size) + KEPT

    @property
    def offset(self) -> mx.array:
        """`(rows,)`: how many tokens each has seen."""
        offset: mx.array = self._window.offset
        return offset

    @property
    def state(self) -> Any:
        return self._window.state, self._keys, self._values

    def empty(self) -> bool:
        return bool(self._window.empty())

    def is_trimmable(self) -> bool:
        return False

    def size(self) -> int:
        return int(self._window.size())

    def prepare(
        self, *, lengths: Sequence[int] | None = None, right_padding: Sequence[int] | None = None
    ) -> None:
        self._window.prepare(lengths=lengths, right_padding=right_padding)
        self._padding = max(right_padding or (0,))

    def finalize(self) -> None:
        self._window.finalize()
        self._shortest -= self._padding
        self._padding = 0

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """`(rows, 1, N, KEPT + window)`: the tokens that each of a row's next N may attend to."""
        window: mx.array = self._window.make_mask(N, window_size, return_array)
        positions = self.offset[:, None] + mx.arange(N)
        sinks = mx.arange(KEPT) <= positions[:, None, :, None] - self._window.max_size
        return mx.concatenate([sinks, window], axis=-1)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add keys and values `(rows, heads, tokens, head size)`. Returns all keys and values to
        attend to."""
        if self._keys is None:
            self._keys, self._values = _zeros(keys), _zeros(values)
        if self._shortest < KEPT:
            self._keys = self._catch(self._keys, keys)
            self._values = self._catch(self._values, values)
        self._shortest += keys.shape[2]
        keys, values = self._window.update_and_fetch(keys, values)
        return (
            mx.concatenate([self._keys, keys], axis=2),
            mx.concatenate([self._values, values], axis=2),
        )

    def _catch(self, sinks: mx.array, new: mx.array) -> mx.array:
        """The sinks `(rows, heads, KEPT, head size)`, filled in where the new tokens are among a
        row's first."""
        # Padding that is taken for a token is overwritten when the token of that position comes.
        places = mx.arange(KEPT) - self.offset[:, None]
        among = (places >= 0) & (places < new.shape[2])
        places = mx.clip(places, 0, new.shape[2] - 1)[:, None, :, None]
        return mx.where(among[:, None, :, None], mx.take_along_axis(new, places, axis=2), sinks)

    def extract(self, idx: int) -> SinkCache:
        row = SinkCache(self.max_size)
        if self._keys is None:
            return row
        window = self._window.extract(idx)
        sinks = min(window.offset, KEPT)
        # The window may hold more than its size: older tokens, and in front of them the padding
        # of a row whose slice was shorter than another's. Neither may stand for a first token.
        last = min(window.offset - sinks, window.max_size)
        start = window.keys.shape[2] - last
        row.keys = _join(self._keys[idx : idx + 1, :, :sinks], window.keys[:, :, start:])
        row.values = _join(self._values[idx : idx + 1, :, :sinks], window.values[:, :, start:])
        row.offset = window.offset
        row._idx = row.keys.shape[2]
        return row


def _window(cache: SinkCache) -> RotatingKVCache:
    """The last tokens of a row, as a cache of mlx-lm's."""
    window = RotatingKVCache(cache.max_size - KEPT)
    length = min(cache.offset, window.max_size)
    if length:
        window.keys = cache._temporal_order(cache.keys)[..., -length:, :]
        window.values = cache._temporal_order(cache.values)[..., -length:, :]
        window.offset = cache.offset
        window._idx = length
    return window


def _first(cache: SinkCache, kept: Any, like: mx.array) -> mx.array:
    """Keys or values of the first tokens of a row; zeros for those that it has not seen."""
    if cache.offset == 0:
        return _zeros(like[:1])
    first = cache._temporal_order(kept)[..., : min(KEPT, cache.offset), :]
    return mx.pad(first, [(0, 0), (0, 0), (0, KEPT - first.shape[2]), (0, 0)])


def _zeros(like: mx.array) -> mx.array:
    return mx.zeros((*like.shape[:2], KEPT, like.shape[3]), like.dtype)


def _join(sinks: mx.array, window: mx.array) -> mx.array:
    return mx.contiguous(mx.concatenate([sinks, window], axis=2))
