"""Errors of a work item: how they are classified, logged and described."""

from __future__ import annotations

import logging

from mlxsrv.engine.outcomes import Fault

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


def note(error: BaseException, message: str) -> Fault:
    """Log the exception under `message` and make a fault of it.

    The fault does not hold the exception, whose traceback would keep all arrays of a pass alive.
    """
    _log.error(message, exc_info=error)
    return Fault(describe_error(error), memory=is_memory(error))


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


def describe_error(error: BaseException) -> str:
    """The error in one line, for a client and for the log."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"
