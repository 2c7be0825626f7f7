"""KV caches of models that no load has tried."""

from __future__ import annotations

from typing import Any

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.execution.batch_check import check_batching


def make_caches(model: Any, **more: Any) -> KVCacheFactory:
    """Make what a load makes. Only recurrent layers are tried: all others of `tests.support.tiny`
    do as their kinds promise.

    Args:
        model: one of mlx-lm's.
        more: arguments of KVCacheFactory.
    """
    caches = KVCacheFactory(model, **more)
    if caches.batched and not caches.pads:
        for _ in check_batching(model, caches):
            pass
    return caches
