"""Runs what may hang or crash in a process of its own, within limits of time and memory.

Compiling some grammars of a kilobyte takes minutes, and others overflow the compiler's stack, which
no thread survives. A client's template is a program. `sandbox_process.py` is the other end.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import msgspec

from mlxsrv.errors import Overloaded

_SECONDS = 5
"""Processor time: how busy the machine is must not decide what is good."""

_PATIENCE = 120.0
"""Seconds until it is given up all the same."""

_TRIES = 2  # a process that others end is started again, once

_PROCESS = Path(__file__).with_name("sandbox_process.py")

# Signals by which a process ends itself. All others come from outside.
_CRASHES = frozenset(
    {
        *(signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT),
        *(signal.SIGILL, signal.SIGFPE, signal.SIGTRAP),
    }
)

T = TypeVar("T")


class TooMuch(ValueError):
    """It takes too long, or crashes. The message is for the client."""


def run_apart(script: Path, request: object, *, type: type[T], library: str, crash: str) -> T:
    """Run a script of ours in a process of its own; return its answer, decoded.

    Args:
        script: reads one JSON value from stdin, and writes the answer as another to stdout.
        library: the package that it imports, besides the standard library.
        crash: the reason that a client is given if it crashes.

    Raises:
        TooMuch: it takes too long, or crashes.
        Overloaded: the system ended it, as it does where memory is short.
    """
    spec = find_spec(library)
    assert spec is not None  # its callers have imported it
    assert spec.origin is not None
    arguments = [str(script), str(Path(spec.origin).parents[1]), str(_SECONDS)]
    for _ in range(_TRIES):
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(_PROCESS), *arguments],
                input=msgspec.json.encode(request),
                capture_output=True,
                timeout=_PATIENCE,
                process_group=0,  # what a terminal sends to the server is not for it
            )
        except subprocess.TimeoutExpired:
            raise TooMuch(f"takes more than {_PATIENCE:.0f} s") from None
        if done.returncode == -signal.SIGXCPU:
            raise TooMuch(f"takes more than {_SECONDS} s of processor time")
        if -done.returncode in _CRASHES:
            raise TooMuch(crash)
        if done.returncode > 0 or (done.returncode == 0 and not done.stdout):
            raise RuntimeError(f"{script.stem} failed: {done.stderr.decode(errors='replace')}")
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout, type=type)
    raise Overloaded(
        "the system has ended the process that tries grammars and templates, as it does where "
        "memory is short; try again later"
    )
