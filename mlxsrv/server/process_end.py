"""The end of the process, at once or at a time that no thread can put off."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

INTERRUPTED = 130
"""The exit status of a process that Ctrl-C ends, as shells have it."""


def interrupt(*_: object) -> NoReturn:
    """End the process at once: the handler of SIGINT while nothing is under way that could be lost.

    An exception would go through half an import, and Python would wait for threads that import.
    """
    os.write(2, b"\n" * os.isatty(2) + b"mlxsrv: interrupted\n")  # behind the terminal's ^C
    os._exit(INTERRUPTED)


def call_at_end_of_input(stop: Callable[[], None]) -> None:
    """Call `stop` once standard input ends: no process holds the other end of its pipe any more,
    also if the last one was killed. The call is made by a thread of its own."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        stop()

    threading.Thread(target=watch, daemon=True).start()


class ProcessEnd:
    """Ends the process at a deadline.

    Python waits for its threads before it exits. A thread that tokenizes or renders a template
    cannot be stopped, and may take minutes. `os._exit` does not wait.
    """

    def __init__(self) -> None:
        self.status = 0
        self._deadline = math.inf  # by time.monotonic
        self._timer: threading.Timer | None = None

    def within(self, seconds: float) -> None:
        """End the process in `seconds` at the latest. An earlier deadline stays as it is."""
        deadline = time.monotonic() + seconds
        if deadline < self._deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._deadline, self._timer = deadline, threading.Timer(seconds, self.now)
            self._timer.daemon = True
            self._timer.start()

    def now(self) -> NoReturn:
        os._exit(self.status)
