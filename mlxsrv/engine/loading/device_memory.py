"""The device's memory: how much there is, and what it holds.

Used on the device thread only.
"""

from __future__ import annotations

import os

import mlx.core as mx

from mlxsrv.engine.events import Report


def working_memory() -> int:
    """The bytes of memory that MLX recommends to work in, else of all memory."""
    info = mx.device_info()
    memory = info.get("max_recommended_working_set_size") or info.get("memory_size")
    return int(memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def report() -> Report:
    """The use of the device's memory. Of the models nothing: the scheduler knows them."""
    return Report(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory(), {})
