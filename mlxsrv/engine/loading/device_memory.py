"""The device's memory: how much there is, what it holds, and what MLX may do with it.

Used on the device thread only.
"""

from __future__ import annotations

import os

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from mlxsrv.engine.events import Report

_SHARE_OF_RAM = 5 / 6  # where MLX recommends nothing; the system and the process need the rest
_SHARE_CACHED = 0.05  # half of what `--memory-limit` leaves by default


def working_memory() -> int:
    """The bytes of memory that MLX recommends to work in, else most of all memory."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended:
        return int(recommended)
    return int(_SHARE_OF_RAM * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def set_limits(*, wire: bool, cached: int | None) -> None:
    """Tell MLX what it may do with memory. It holds for the process, until the next call.

    Args:
        wire: keep buffers wired, as far as MLX recommends it.
        cached: the most bytes of freed buffers that MLX keeps for later use. On Metal its own limit
            is beyond all memory. None: a small share, since a step takes about the buffers that
            the step before has freed; or the limit that there is, if that is less.
    """
    # With nothing under way: the limits must not change during an asynchronous evaluation.
    mx.synchronize()
    if wire:
        maybe_set_recommended_wired_limit()
    limit = int(_SHARE_CACHED * working_memory()) if cached is None else cached
    before = mx.set_cache_limit(limit)
    if cached is None and before < limit:
        mx.set_cache_limit(before)


def report() -> Report:
    """The use of the device's memory. Of the models nothing: the scheduler knows them."""
    return Report(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory(), {})
