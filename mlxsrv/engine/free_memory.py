"""Give free memory back to the system: below all rooms of the engine, since many do it."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress


def release_memory() -> None:
    """Give free buffers back to the system: MLX's, and on Linux the allocator's."""
    mx = sys.modules.get("mlx.core")
    if mx is None:  # there is no back end, so there are no buffers
        return
    mx.synchronize()  # a step under way holds on to its arrays
    mx.clear_cache()
    if sys.platform == "linux":
        # glibc keeps what is freed in pieces of up to 32 MB: on a CPU, that is all of a model.
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
