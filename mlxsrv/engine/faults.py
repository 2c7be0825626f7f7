"""Errors of a slice of work: how they are told apart, logged and described.

For what happens to the rows of a slice that failed, see `execution/recovery`.
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
    """One slice of work that failed.

    It holds no exception: the traceback would keep all arrays of the pass alive.

    Args:
        reason: the error in one line.
        memory: there was not enough memory, so less work at once may do.
    """

    __slots__ = ("explained", "memory", "reason")

    def __init__(self, reason: str, *, memory: bool = False) -> None:
        self.reason = reason
        self.memory = memory
        # The cause is known, so the fault does not count against the rows of the slice. Where
        # memory was short, there were just too many of them.
        self.explained = memory

    def failed(self, job_id: int) -> Failed:
        """The event that ends the job which caused the fault."""
        if self.memory:
            return Failed(job_id, f"{OUT_OF_MEMORY}: {self.reason}", clear=OUT_OF_MEMORY)
        return Failed(job_id, self.reason)


def note(error: Exception, message: str) -> Fault:
    """Log the exception under `message` and make a fault of it."""
    _log.error(message, exc_info=error)
    return Fault(describe(error), memory=is_memory(error))


def is_memory(error: BaseException) -> bool:
    """Whether there was not enough memory."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(word in text for word in _MEMORY_WORDS)


def survivable(error: BaseException) -> bool:
    """Whether the thread may go on.

    A panic of Rust code is an error like others where it concerns an object of one row only; pyo3
    hides it from `except Exception`.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def describe(error: BaseException) -> str:
    """The error in one line, for a client and for the log."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"
