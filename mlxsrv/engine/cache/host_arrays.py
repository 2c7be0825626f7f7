"""KV caches as arrays of the host, to be written to files, and made of such arrays again.

Used on the device thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.quantized import FirstTokens, LaterTokens, QuantizedCache
from mlxsrv.engine.cache.row_cache import Layers, RowCache, list_layers
from mlxsrv.engine.storage.prompt_store import FetchedCache, HandedCache, HostArray
from mlxsrv.engine.storage.stored_file import CARRIERS, Columns


class SharedCache(NamedTuple):
    """A KV cache as the host sees it. Its `arrays` must live, and no other reference to them may be
    the last, until the host has done with it: then MLX writes elsewhere, not into them."""

    cache: HandedCache
    arrays: list[mx.array]


def describe_kind(caches: KVCacheFactory) -> str:
    """Describe the kinds of layers and the settings of a model's KV caches. Two models with the
    same description can use each other's arrays, if their weights are the same."""
    return f"{_describe(caches.make().layers)} {caches.settings}"


def _describe(layers: Layers) -> str:
    parts = (
        f"{type(layer).__name__}({_describe(list(layer.caches))})"
        if isinstance(layer, (CacheList, QuantizedCache))
        else type(layer).__name__
        for layer in layers
    )
    return ",".join(parts)


def share(cache: RowCache, *, cuts: bool) -> SharedCache:
    """Let the host see a KV cache. Nothing is copied, but for arrays of bfloat16 that are no whole
    buffers.

    Args:
        cache: it is computed, or being computed, which is waited for.
        cuts: all its layers are of kinds that can be cut anywhere.

    Raises:
        TypeError: it holds something that no file can.
    """
    found: list[mx.array] = []
    layers = None if cuts else [_encode_layer(layer, found) for layer in cache.layers]
    columns: tuple[Columns, ...] = ()
    if cuts:
        for layer in cache.layers:
            found += _list_arrays(layer, cache.tokens)
        columns = tuple(_find_columns(each) for each in _list_members(cache.layers))
    # References of our own: with them MLX does not write into these buffers any more.
    arrays = [copy.copy(array) for array in found]
    mx.eval(arrays)
    views = [_view(array, arrays) for array in list(arrays)]
    if cuts:
        pairs = zip(views, columns, strict=True)
        views = [view[..., : own.count(cache.tokens), :] for view, own in pairs]
    types = tuple(str(array.dtype).removeprefix("mlx.core.") for array in found)
    if not CARRIERS.keys() >= set(types):
        raise TypeError(f"arrays of {types} cannot be stored")
    return SharedCache(HandedCache(tuple(views), types, layers, columns), arrays)


def _list_members(layers: Layers) -> Iterator[Any]:
    """The layers that can be cut, each as often as it has arrays."""
    for layer in list_layers(layers):
        yield from [layer] * (6 if type(layer) is LaterTokens else 2)


def _find_columns(layer: Any) -> Columns:
    if type(layer) is LaterTokens:
        return Columns(begin=layer.start)
    return Columns(end=layer.max_size if type(layer) is FirstTokens else None)


def _list_arrays(layer: Any, tokens: int) -> list[mx.array]:
    """The arrays of a layer that can be cut."""
    if isinstance(layer, CacheList):
        return [array for each in layer.caches for array in _list_arrays(each, tokens)]
    if type(layer) is QuantizedCache:
        first, later = layer.caches
        return [*_list_arrays(first, tokens), *_list_later(first, later, tokens)]
    if layer.empty():  # the model does not use it
        return [mx.zeros((1, 1, _find_columns(layer).count(tokens), 0))] * 2
    return [layer.keys, layer.values]


def _list_later(first: FirstTokens, later: LaterTokens, tokens: int) -> list[mx.array]:
    """The six arrays of the quantized tokens. Before there are any they have no columns, but the
    right shapes and types, since a longer text may continue from this one."""
    if later.offset:
        return [*later.keys, *later.values]
    if first.empty():
        return [mx.zeros((1, 1, _find_columns(later).count(tokens), 0))] * 6
    like = [array[:, :, :1] for array in (first.keys, first.values)]
    return [part[:, :, :0] for array in like for part in later.quantize(array)]


def _view(array: mx.array, arrays: list[mx.array]) -> HostArray:
    """The memory of an array. A copy that must be made is added to `arrays`."""
    if array.dtype != mx.bfloat16:
        return np.asarray(_buffer(array))
    if not _buffer(array).c_contiguous:
        array = mx.contiguous(array)
        mx.eval(array)
        arrays.append(array)
    # NumPy has no bfloat16, and knows only by force that it is two bytes.
    return np.ndarray(array.shape, CARRIERS["bfloat16"], buffer=_buffer(array))


def _buffer(array: mx.array) -> memoryview:
    return memoryview(cast(Any, array))


def _encode_layer(layer: Any, arrays: list[mx.array]) -> Any:
    if isinstance(layer, (CacheList, QuantizedCache)):
        return {"list": [_encode_layer(each, arrays) for each in layer.caches]}
    return {"class": type(layer).__name__, "state": _encode(layer.state, arrays)}


def _encode(value: Any, arrays: list[mx.array]) -> Any:
    """A layer's state, with the number of an array in its place."""
    if isinstance(value, mx.array):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, (list, tuple)):
        return [_encode(each, arrays) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a layer's state has a {type(value).__name__}")


class CacheBuilder:
    """Makes a KV cache of arrays of the host, a slice at a time.

    Args:
        caches: makes empty ones of the same kind.
        fetched: the arrays. Each is dropped when it is copied.
        cuts: all layers are of kinds that can be cut anywhere.
    """

    def __init__(self, caches: KVCacheFactory, fetched: FetchedCache, *, cuts: bool) -> None:
        self._empty = caches.make().layers
        self._fetched = fetched
        self._cuts = cuts
        self._arrays: list[mx.array] = []

    @property
    def done(self) -> bool:
        return len(self._arrays) == len(self._fetched.types)

    def go_on(self, limit: int) -> int:
        """Copy arrays until they have so many bytes: one at least. Returns their bytes."""
        copied, first = 0, len(self._arrays)
        while not self.done and copied < limit:
            array = mx.array(self._fetched.arrays.pop(0))
            if self._fetched.types[len(self._arrays)] == "bfloat16":
                array = array.view(mx.bfloat16)
            copied += array.nbytes
            self._arrays.append(array)
        mx.async_eval(self._arrays[first:])  # type: ignore[no-untyped-call]
        return copied

    def build(self) -> RowCache:
        """The KV cache.

        Raises:
            ValueError: the arrays are not those of such a KV cache.
        """
        try:
            layers = self._fill() if self._cuts else self._decode()
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"these are not the arrays of its KV cache: {error}") from None
        return RowCache(layers, self._fetched.tokens)

    def _fill(self) -> Layers:
        """Layers that can be cut."""
        members = [*_list_members(self._empty)]
        if len(members) != len(self._arrays):
            raise ValueError(f"it has {len(self._arrays)} arrays, not {len(members)}")
        pairs = zip(members, self._arrays, strict=True)
        for layer, own in groupby(pairs, key=itemgetter(0)):
            arrays = [array for _, array in own]
            if any(array.nbytes for array in arrays):
                half = len(arrays) // 2
                layer.keys, layer.values = (
                    arrays if half == 1 else (tuple(arrays[:half]), tuple(arrays[half:]))
                )
                layer.offset = _find_columns(layer).count(self._fetched.tokens)
        return self._empty

    def _decode(self) -> Layers:
        encoded = self._fetched.layers
        if len(encoded) != len(self._empty):
            raise ValueError("it has another number of layers")
        pairs = zip(encoded, self._empty, strict=True)
        return [self._decode_layer(each, like) for each, like in pairs]

    def _decode_layer(self, encoded: Any, like: Any) -> Any:
        if isinstance(like, (CacheList, QuantizedCache)):
            for each, inner in zip(encoded["list"], like.caches, strict=True):
                self._decode_layer(each, inner)
            return like
        if encoded["class"] != type(like).__name__:
            raise ValueError(f"a layer is {encoded['class']}")
        like.state = self._decode_state(encoded["state"])
        return like

    def _decode_state(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._arrays[value["array"]]
        if isinstance(value, list):
            return [self._decode_state(each) for each in value]
        return value
