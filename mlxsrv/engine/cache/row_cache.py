"""The KV cache of one row.

Used on the device thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)

from mlxsrv.engine.cache.attention_sinks import SinkCache
from mlxsrv.engine.cache.quantized import FirstTokens, LaterTokens, QuantizedCache

Layers = list[Any]
"""An object of mlx-lm's for each layer of a model."""

FULL = (KVCache, FirstTokens, LaterTokens)
"""Kinds of layers that hold all tokens that they have seen, so they can be cut anywhere."""
_KNOWN = (*FULL, ArraysCache, ChunkedKVCache, RotatingKVCache, SinkCache)


def list_layers(layers: Iterable[Any]) -> Iterator[Any]:
    """The layers of a KV cache, in order. A layer made of several is replaced by its members."""
    for layer in layers:
        if isinstance(layer, (CacheList, QuantizedCache)):
            yield from list_layers(layer.caches)
        else:
            yield layer


def is_known(layer: Any) -> bool:
    """Whether the layer is of a kind whose arrays are known. Other kinds, such as deepseek_v41's
    own, are copied whole, and neither cut nor stored."""
    return type(layer) in _KNOWN


def count_bytes(layers: Iterable[Any]) -> int:
    """The bytes that layers have taken."""
    return sum(layer.nbytes for layer in layers)


class RowCache:
    """The KV cache of one row, or of a cached prompt.

    Args:
        layers: mlx-lm's object of each layer.
        tokens: how many tokens they have seen.
        views: their arrays may be views of larger ones.

    Attributes:
        tokens: how many tokens of a text it holds. The caller that runs a model with it sets this.
    """

    __slots__ = ("_views", "layers", "tokens")

    def __init__(self, layers: Layers, tokens: int = 0, *, views: bool = False) -> None:
        self.layers = layers
        self.tokens = tokens
        self._views = views

    @property
    def nbytes(self) -> int:
        return count_bytes(self.layers)

    @property
    def cuts(self) -> bool:
        """Whether it can be cut back to any earlier length."""
        return all(map(_cuts, list_layers(self.layers)))

    @property
    def state(self) -> list[Any]:
        """All its arrays, in nested lists and tuples with what else the layers note."""
        return [layer.state for layer in self.layers]

    def copy(self, tokens: int | None = None) -> RowCache:
        """Another one that holds the same, or the first `tokens` only. Arrays are shared until one
        of the two changes them: then that one copies what it holds.

        Raises:
            ValueError: it holds less, or cannot be cut back.
        """
        other = RowCache(copy.deepcopy(self.layers), self.tokens, views=self._views)
        if tokens is not None and tokens != self.tokens:
            other.cut(tokens)
            for layer in list_layers(other.layers):
                _shrink(layer)
        return other

    def materialize(self) -> None:
        """Copy arrays that are views, and wait until all are computed. Then it holds no memory but
        its own, and larger arrays can be written in place again."""
        if self._views:
            for layer in list_layers(self.layers):
                _own(layer)
            self._views = False
        mx.eval(self.state)

    def cut(self, tokens: int) -> None:
        """Forget what is behind the first `tokens`.

        Raises:
            ValueError: it holds less, or cannot be cut back.
        """
        surplus = self.tokens - tokens
        if surplus < 0 or (surplus and not self.cuts):
            raise ValueError(f"a KV cache of {self.tokens} tokens cannot be cut to {tokens}")
        for layer in self.layers if surplus else ():
            layer.trim(surplus)
        self.tokens = tokens


def materialize_together(caches: Sequence[RowCache], layer_done: Callable[[], object]) -> None:
    """Copy the arrays of views layer by layer, and wait for each layer; then call `layer_done`,
    which may drop what these are views of. So no more than one layer is there twice."""
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        for layer in list_layers(layers):
            _own(layer)
        mx.eval([layer.state for layer in layers])
        layer_done()
    for cache in caches:
        cache._views = False


def _shrink(layer: Any) -> None:
    """Let a layer refer only to the columns that it holds, so that no more is copied when it
    changes."""
    if type(layer) in FULL:
        layer.keys, layer.values = layer.keys_and_values() if layer.offset else (None, None)


def _own(layer: Any) -> None:
    """Replace a layer's arrays, which are views, by copies."""
    if isinstance(layer, ArraysCache):
        layer.cache = tree_map(_copy, layer.cache)
    elif is_known(layer) and not layer.empty():
        layer.keys, layer.values = tree_map(_copy, layer.keys_and_values())


def _copy(array: mx.array | None) -> mx.array | None:
    return None if array is None else array * 1


def _cuts(layer: Any) -> bool:
    if isinstance(layer, ChunkedKVCache):
        # mlx-lm calls it trimmable, but tokens that it has dropped do not come back.
        return bool(layer.start_position == 0)
    return is_known(layer) and bool(layer.is_trimmable())
