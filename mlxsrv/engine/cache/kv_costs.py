"""The bytes that KV caches take, known before they are taken.

Used on the device thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, make_prompt_cache

from mlxsrv.engine.cache.row_cache import list_layers
from mlxsrv.engine.events import KVCost


def find_costs(model: Any) -> tuple[KVCost, ...]:
    """The costs of a text that `model` reads into mlx-lm's own KV cache. Nothing is computed."""
    cache = make_prompt_cache(model)
    model(mx.array([[0, 0]]), cache=cache)  # two tokens, for one would be a decode step
    return sum_costs(cache)


def sum_costs(cache: Iterable[Any]) -> tuple[KVCost, ...]:
    """The costs of a row whose KV cache has these layers. They have seen a token or more; layers of
    one window are summed."""
    tokens: Counter[int] = Counter()  # bytes for each token, by window
    fixed = 0
    for layer in list_layers(cache):
        keys = getattr(layer, "keys", None)
        if keys is None:
            fixed += layer.nbytes
            continue
        # Quantized keys are three arrays, all with the tokens in the same place.
        length = (keys[0] if isinstance(keys, (tuple, list)) else keys).shape[-2]
        tokens[_find_window(layer)] += layer.nbytes // length
    costs = [KVCost(per_token, window) for window, per_token in sorted(tokens.items())]
    return (*costs, KVCost(0, fixed=fixed)) if fixed else tuple(costs)


def _find_window(layer: Any) -> int:
    """The most tokens that the layer holds after a step; 0: all."""
    if isinstance(layer, ChunkedKVCache):
        return int(layer.chunk_size) + 1  # it is cut to the chunk before each pass
    return int(getattr(layer, "max_size", None) or 0)
