"""Ends Python code that takes too long, in the thread that runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Any


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise TookTooLong in the block after so many seconds. `what` is named in the message.

    The clock is looked at between lines of Python, which makes them several times slower: a loop is
    ended, one long operation on strings or numbers is not.
    """
    end = monotonic() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if monotonic() > end:
            raise TookTooLong(f"{what} takes more than {seconds:g} s")
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)


class TookTooLong(ValueError):
    """The time of a `time_limit` was over."""
