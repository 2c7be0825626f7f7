"""KV caches as arrays of the host, to be written to files, and made of such arrays again.

The arrays of a layer are named by the layer's place and their own. Layers that hold all tokens are
no more than their arrays; of others the state is noted, with arrays by their places in it.

Used on the device thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import count, takewhile
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.quantized import LaterTokens, QuantizedCache
from mlxsrv.engine.cache.row_cache import FULL, Layers, RowCache, list_layers
from mlxsrv.engine.storage.node_file import BFLOAT16, DTYPE_NAMES, HostArray, StoredNode
from mlxsrv.engine.storage.prompt_store import HandedCache


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


def share(cache: RowCache) -> SharedCache:
    """Let the host see a KV cache, which is computed, or being computed: that is waited for.
    Nothing is copied, but for arrays of bfloat16 that are no whole buffers.

    Raises:
        TypeError: it holds something that no file can.
    """
    found: dict[str, mx.array] = {}
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    states: list[Any] = []
    for number, layer in enumerate(list_layers(cache.layers)):
        own: list[mx.array] = []
        if type(layer) in FULL:
            own = _list_parts(layer)
            states.append(None)
            start = layer.start if type(layer) is LaterTokens else 0
            starts |= {_name(number, place): start for place in range(len(own))}
            ends |= {_name(number, place): layer.offset for place in range(len(own))}
        else:
            states.append(_encode(layer.state, own))
        # References of our own: with them MLX does not write into these buffers any more.
        found |= {_name(number, place): copy.copy(array) for place, array in enumerate(own)}
    arrays = [*found.values()]
    mx.eval(arrays)
    views = {name: _view(array, arrays) for name, array in found.items()}
    if not DTYPE_NAMES.keys() >= {view.dtype for view in views.values()}:
        types = ", ".join(sorted({str(array.dtype) for array in arrays}))
        raise TypeError(f"not all of its arrays can be stored: they are of {types}")
    views |= {name: views[name][..., :end, :] for name, end in ends.items()}
    return SharedCache(HandedCache(views, starts, states), arrays)


def _name(layer: int, place: int) -> str:
    return f"{layer}.{place}"


def _list_parts(layer: Any) -> list[mx.array]:
    """The arrays of a layer that holds all tokens: keys, then values."""
    if not layer.offset:
        return []
    if type(layer) is LaterTokens:
        return [*layer.keys, *layer.values]
    return [layer.keys, layer.values]


def _view(array: mx.array, arrays: list[mx.array]) -> HostArray:
    """The memory of an array. A copy that must be made is added to `arrays`."""
    if array.dtype != mx.bfloat16:
        return np.asarray(_buffer(array))
    if not _buffer(array).c_contiguous:
        array = mx.contiguous(array)
        mx.eval(array)
        arrays.append(array)
    return np.ndarray(array.shape, BFLOAT16, buffer=_buffer(array))


def _buffer(array: mx.array) -> memoryview:
    return memoryview(cast(Any, array))


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
    """Makes a KV cache of nodes that were read, a slice at a time.

    Args:
        caches: makes empty ones of the same kind.
        nodes: of one text, one behind the other. Their arrays are dropped when they are copied.
    """

    def __init__(self, caches: KVCacheFactory, nodes: Sequence[StoredNode]) -> None:
        self._empty = caches.make().layers
        self._nodes = nodes
        self._left = [*dict.fromkeys(name for node in nodes for name in node.arrays)]
        self._arrays: dict[str, mx.array] = {}

    @property
    def done(self) -> bool:
        return not self._left

    def go_on(self, limit: int) -> int:
        """Copy arrays until they have so many bytes: one at least. Returns their bytes."""
        copied, begun = 0, list[mx.array]()
        while self._left and copied < limit:
            name = self._left.pop()
            parts = [node.arrays.pop(name) for node in self._nodes if name in node.arrays]
            # Joined on the host: on the device each of a prompt's hundreds of nodes would be a
            # launch, in each layer.
            array = _copy(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2))
            self._arrays[name] = array
            copied += array.nbytes
            begun.append(array)
        mx.async_eval(begun)  # type: ignore[no-untyped-call]
        return copied

    def build(self) -> RowCache:
        """The KV cache.

        Raises:
            ValueError: the arrays are not those of such a KV cache.
        """
        layers, states = [*list_layers(self._empty)], self._nodes[-1].states
        try:
            for number, (layer, state) in enumerate(zip(layers, states, strict=True)):
                names = (_name(number, place) for place in count())
                own = [self._arrays[name] for name in takewhile(self._arrays.__contains__, names)]
                if type(layer) not in FULL:
                    layer.state = _decode(state, own)
                elif own:
                    _fill(layer, own)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"these are not the arrays of its KV cache: {error}") from None
        return RowCache(self._empty, sum(node.tokens.size for node in self._nodes))


def _copy(array: HostArray) -> mx.array:
    if array.dtype == BFLOAT16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def _fill(layer: Any, parts: list[mx.array]) -> None:
    """Give a layer that holds all tokens its arrays."""
    half = len(parts) // 2
    if type(layer) is LaterTokens:
        layer.keys, layer.values = tuple(parts[:half]), tuple(parts[half:])
    else:
        layer.keys, layer.values = parts
    layer.offset = parts[0].shape[-2]


def _decode(value: Any, arrays: list[mx.array]) -> Any:
    if isinstance(value, dict):
        return arrays[value["array"]]
    if isinstance(value, list):
        return [_decode(each, arrays) for each in value]
    return value
