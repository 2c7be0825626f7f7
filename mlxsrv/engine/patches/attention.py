"""The patch `attention`: attention over several groups of rows, in one pass of the model, and over
keys that are quantized behind a start.

mlx-lm's models call its function for attention with the keys and values of all rows as one array.
Rows of very different lengths have arrays of their own (see `scheduling.groups`), and one pass is
to serve them all. So where keys are those of several groups, the patched function calls mlx-lm's
once for each. Keys that are partly quantized are read by a function of our own, since mlx-lm's
reads keys that are all quantized. Elsewhere it calls mlx-lm's as it was called. Models import the
function by name, so it is replaced in each of their modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from mlxsrv.engine.cache.quantized import PartlyQuantized, attend_quantized
from mlxsrv.engine.cache.shared_layers import GroupParts
from mlxsrv.engine.patches.switch import enabled, log_applied

_Attention = Callable[..., mx.array]

_NAME = "scaled_dot_product_attention"
_MODELS = "mlx_lm.models."


def patch_attention() -> bool:
    """Patch the models of mlx-lm that have been imported. Returns whether the patch is enabled."""
    if not enabled("attention"):
        return False
    found = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(_MODELS) and module is not base
        if getattr(module, _NAME, None) is base.scaled_dot_product_attention
    ]
    for module in found:
        setattr(module, _NAME, _attend)
        kind = module.__name__.removeprefix(_MODELS)
        log_applied("attention", f"{kind} can attend to several groups of rows in one pass")
    return True


def _attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return what mlx-lm's function returns: `(rows, heads, tokens, head size)`."""
    if isinstance(keys, PartlyQuantized):
        return attend_quantized(queries, keys, values, scale, mask, sinks)
    if not isinstance(keys, GroupParts):
        attend: _Attention = base.scaled_dot_product_attention
        return attend(queries, keys, values, cache, scale, mask, sinks)
    parts = keys.layer.split(queries, keys, values, mask)
    return mx.concatenate(
        [_attend(q, k, v, part, scale, own, sinks) for q, k, v, part, own in parts]
    )
