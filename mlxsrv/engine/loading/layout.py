"""The layout of weights in memory, where the CPU multiplies by them."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear

from mlxsrv.engine.patches.openblas import bind_openblas


def lay_out_weights(model: Any, done: Container[int] = ()) -> None:
    """Prepare a model's float32 weights for fast multiplication, where the CPU is the device.

    With OpenBLAS installed there is nothing to prepare. Without it, weights of linear layers are
    kept by columns. Shapes and results stay as they are, to the bit: MLX multiplies by the
    transposed weight, and the reference BLAS of its Linux wheels does so 1.6 to 1.9 times as fast
    if that is contiguous, for it then adds up many columns at a time instead of one dot product
    after the other. OpenBLAS is slower with such weights.

    Args:
        model: any of MLX's modules; its weights are replaced in place.
        done: `id` of weights that are laid out already.
    """
    if mx.default_device() != mx.Device(mx.cpu) or bind_openblas():
        return
    for layer in model.modules():
        if not isinstance(layer, Linear) or layer.weight.dtype != mx.float32:
            continue
        if id(layer.weight) not in done:
            layer.weight = mx.contiguous(layer.weight.T).T
