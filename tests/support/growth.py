"""Whether work grows evenly with what it is about: measured, and the same on every machine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import thread_time

_TIMES = 16
_TRIES = 3


def assert_linear(work: Callable[[int], object], size: int) -> None:
    """Fail if work on sixteen times as much takes more than 64 times as long. What grows evenly
    takes about sixteen times as long, and what grows with the square 256 times.

    Only this thread's own time counts, and the least of some tries: others on the machine take what
    they want.

    Args:
        work: does it for a size, on this thread.
        size: the smaller one; work on it should take a millisecond or more.
    """
    small = least_seconds(lambda: work(size))
    large = least_seconds(lambda: work(_TIMES * size))
    assert large < 4 * _TIMES * small, f"{size}: {small:.4f} s, {_TIMES * size}: {large:.4f} s"


def least_seconds(work: Callable[[], object]) -> float:
    """Return the least of this thread's own seconds in some tries, which is more than nothing."""
    tried: list[float] = []
    gc.disable()  # a collection looks at all objects of the process
    try:
        for _ in range(_TRIES):
            begun = thread_time()
            work()
            tried.append(thread_time() - begun)
    finally:
        gc.enable()
    return max(min(tried), 1e-6)
