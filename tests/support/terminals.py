"""Programs on a terminal of their own, of which the test has the other end."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tests.support.serving import PATIENCE


class Terminal:
    """The terminal of a process.

    Args:
        descriptor: its other end.
    """

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self._process = process
        self._descriptor = descriptor
        self._unread = ""

    def write(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def until(self, text: str) -> str:
        """Wait for a text, and return what the process has written before it."""
        deadline = time.monotonic() + PATIENCE
        while text not in self._unread:
            ready, _, _ = select.select([self._descriptor], [], [], deadline - time.monotonic())
            assert ready, self._unread
            self._unread += os.read(self._descriptor, 1 << 16).decode()
        before, _, self._unread = self._unread.partition(text)
        return before

    def kill(self) -> None:
        """End the process as nothing that it does could."""
        self._process.kill()
        self._process.wait()

    def answer(self, line: str) -> str:
        """Write a line, and return all up to the next prompt."""
        self.write(line + "\n")
        return self.until("\n>>> ").partition("\n")[2]

    def status(self) -> int:
        """Read to the end, and return the exit status."""
        try:
            while os.read(self._descriptor, 1 << 16):
                pass
        except OSError:  # Linux, once nobody has the terminal
            pass
        return self._process.wait(PATIENCE)


@contextmanager
def on_terminal(command: Sequence[str], env: Mapping[str, str]) -> Iterator[Terminal]:
    """Start a program on a terminal; it is killed at the end."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
