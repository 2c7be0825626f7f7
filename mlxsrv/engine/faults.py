"""What becomes of an exception in a slice of a model's work.

An exception does not tell whose it is: a step is one pass for all rows. All that a row needs to go
on is on the host, so the rows of a failed step are read anew and tried alone, one after another,
until each is past the place where the step failed. Who fails alone is to blame, and ends; the
others go on where they were, with the same tokens as if nothing had been.

Used on the device thread only.
"""

from __future__ import annotations

import logging

from mlxsrv.engine.events import Failed

_log = logging.getLogger("mlxsrv.engine")

NOT_A_NUMBER = "the model computed NaN"
OUT_OF_MEMORY = "out of memory"

# As MLX's allocators, Metal, CUDA and C++ say it.
_MEMORY_WORDS = (
    "[malloc",
    "[metal::malloc",
    "unable to allocate",
    "out of memory",
    "outofmemory",
    "insufficient memory",
    "bad_alloc",
    "cudaerrormemoryallocation",
)


class Fault:
    """One slice that failed. `explained`: it is known why, so it does not count against its rows.
    Where memory was short, they were just too many.

    It holds no exception: the traceback would keep alive all arrays of the pass.
    """

    __slots__ = ("explained", "memory", "reason")

    def __init__(self, reason: str, *, memory: bool = False) -> None:
        self.reason = reason
        self.memory = memory
        self.explained = memory

    def end(self, job_id: int) -> Failed:
        """What the job that is to blame hears."""
        if self.memory:
            return Failed(job_id, f"{OUT_OF_MEMORY}: {self.reason}", clear=OUT_OF_MEMORY)
        return Failed(job_id, self.reason)


def note(error: Exception, what: str) -> Fault:
    """Log the exception and tell it from others."""
    _log.error(what, exc_info=error)
    return Fault(describe(error), memory=is_memory(error))


def is_memory(error: BaseException) -> bool:
    """Whether there was not enough memory, so that less work at once may do."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(word in text for word in _MEMORY_WORDS)


def survivable(error: BaseException) -> bool:
    """Whether the thread may go on. A panic of Rust code, which pyo3 hides from `except Exception`,
    is an error like others where it concerns an object of one row only."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def describe(error: BaseException) -> str:
    """What went wrong in one line, for a client and for the log."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"
