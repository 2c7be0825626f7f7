"""Pooling: one vector for a text, from the hidden states at its tokens."""

from __future__ import annotations

import mlx.core as mx

from mlxsrv.engine.embedding.encoders.load import load_dense
from mlxsrv.formats.pooling import Pooling, PoolingConfig


class Pooler:
    """Pools, applies dense layers and normalizes, as a model's PoolingConfig says.

    Raises:
        ValueError: a layer that the config names cannot be loaded.
    """

    def __init__(self, config: PoolingConfig) -> None:
        self._config = config
        self._dense = [load_dense(folder) for folder in config.dense]

    def __call__(self, hidden: mx.array, mask: mx.array) -> mx.array:
        """`(rows, length, width)` and its mask `(rows, length)` to `(rows, width)` in float32."""
        vectors = pool(hidden, mask, self._config.pooling)
        for layer in self._dense:
            vectors = layer(vectors)
        if self._config.normalize:
            vectors /= mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return vectors


def pool(hidden: mx.array, mask: mx.array, pooling: Pooling) -> mx.array:
    """One vector for each row, computed as sentence-transformers does.

    Args:
        hidden: `(rows, length, width)`.
        mask: `(rows, length)`, false at padding, which is on the right.
        pooling: how tokens are combined.

    Returns:
        `(rows, width)` in float32.
    """
    lengths = mask.sum(axis=1, keepdims=True)
    if pooling == "cls":
        return hidden[:, 0].astype(mx.float32)
    if pooling == "last":
        last = mx.take_along_axis(hidden, lengths[..., None] - 1, axis=1)
        return last[:, 0].astype(mx.float32)
    hidden = hidden.astype(mx.float32)
    if pooling == "max":
        return mx.where(mask[..., None], hidden, -mx.inf).max(axis=1)
    if pooling == "weightedmean":
        weights = mx.where(mask, mx.arange(1, mask.shape[1] + 1)[None], 0)
    else:
        weights = mask
    weights = weights.astype(mx.float32)
    # Padding is set to zero, not multiplied by zero: it may be infinite or NaN.
    summed = (mx.where(mask[..., None], hidden, 0) * weights[..., None]).sum(axis=1)
    count = weights.sum(axis=1, keepdims=True)
    return summed / (mx.sqrt(count) if pooling == "mean_sqrt_len" else count)
