"""A time limit for Python code, in the thread that runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time
from types import FrameType
from typing import Any


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise TookTooLong inside the block after so many seconds of processor time; the message names
    `what`. On a busy machine the block takes longer, but it is not worse for that.

    The clock is read between lines of Python, which makes them several times slower. So a loop is
    ended, but not one long operation on strings or numbers.
    """
    end = thread_time() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if thread_time() > end:
            raise TookTooLong(f"{what} takes more than {seconds:g} s")
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)


class TookTooLong(ValueError):
    """A block took longer than its `time_limit`."""
