"""The bytes that KV caches take, known before they are taken.

Used on the device thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, make_prompt_cache

from mlxsrv.engine.cache.quantized import FirstTokens, LaterTokens
from mlxsrv.engine.cache.row_cache import Layers, count_bytes, is_known, list_layers
from mlxsrv.engine.events import KVCost

# Lengths at which layers of an unknown kind are measured: beyond the windows that they may have,
# and with as many tokens as can be left over where some are summed up in one.
_SHORT, _LONG = 4095, 8191
_FEW = 16  # tokens, behind which a layer of states is as large as it gets


def find_costs(model: Any, make: Callable[[], Layers] | None = None) -> tuple[KVCost, ...]:
    """The costs of a text that `model` reads into the layers that `make` makes: mlx-lm's own,
    unless given. Nothing is computed."""
    make = make or partial(make_prompt_cache, model)
    starts = [each.start for each in list_layers(make()) if type(each) is LaterTokens]
    layers = [*list_layers(_feed(model, make(), max(starts, default=0) + _FEW))]
    costs = _sum_costs(filter(is_known, layers))
    if all(map(is_known, layers)):
        return costs
    return (*costs, _measure(model, make))


def _feed(model: Any, layers: Layers, tokens: int) -> Layers:
    model(mx.zeros((1, tokens), dtype=mx.uint32), cache=layers)
    return layers


def _measure(model: Any, make: Callable[[], Layers]) -> KVCost:
    """The cost of the layers of unknown kinds: a line through two lengths. It is above what shorter
    rows take, where the layers have windows."""
    short, long = (
        count_bytes(
            layer for layer in list_layers(_feed(model, make(), tokens)) if not is_known(layer)
        )
        for tokens in (_SHORT, _LONG)
    )
    fixed = max(short - (long - short) * _SHORT // (_LONG - _SHORT), 0)
    return KVCost(-((short - long) // (_LONG - _SHORT)), fixed=fixed)


def _sum_costs(layers: Iterable[Any]) -> tuple[KVCost, ...]:
    """The costs of layers that have seen some tokens; those of one window are summed."""
    tokens: Counter[tuple[int, int]] = Counter()  # bytes for each token, by window and first ones
    fixed = 0
    for layer in layers:
        keys = getattr(layer, "keys", None)
        if keys is None:
            fixed += count_bytes([layer])
            continue
        # Quantized keys are three arrays, all with the tokens in the same place.
        length = (keys[0] if isinstance(keys, (tuple, list)) else keys).shape[-2]
        each = layer.nbytes // length
        if type(layer) is FirstTokens:
            tokens[0, layer.max_size] += each
        else:
            tokens[_find_window(layer), 0] += each
        if type(layer) is LaterTokens and layer.start:
            tokens[0, layer.start] -= each  # which the first tokens do not take
    costs = [
        KVCost(per_token, window, first=first)
        for (window, first), per_token in sorted(tokens.items())
    ]
    return (*costs, KVCost(0, fixed=fixed)) if fixed else tuple(costs)


def _find_window(layer: Any) -> int:
    """The most tokens that the layer holds after a step; 0: all."""
    if isinstance(layer, ChunkedKVCache):
        return int(layer.chunk_size) + 1  # it is cut to the chunk before each pass
    return int(getattr(layer, "max_size", None) or 0)
