"""The device's memory: how much there is, what it holds, and what MLX may do with it.

Used on the device thread only.
"""

from __future__ import annotations

import os

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from mlxsrv.engine.events import Report
from mlxsrv.engine.working_memory import find_working_memory

_SHARE_CACHED = 0.05  # half of what `--memory-limit` leaves by default


def working_memory() -> int:
    """The bytes of memory that MLX can work in, those that it has taken included."""
    return find_working_memory(
        mx.device_info(),
        held=mx.get_active_memory() + mx.get_cache_memory(),
        ram=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def set_limits(*, wire: bool, cached: int | None) -> None:
    """Tell MLX what it may do with memory. It holds for the process, until the next call.

    Args:
        wire: keep buffers wired, as far as Metal recommends it.
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
