"""The process that listens on a port of this machine: which one, what it runs, and its end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path

import msgspec

_PROC = Path("/proc")
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
_LOOK = 0.1
"""Seconds between two looks at a process, where the system cannot say when it ends."""


class ListeningProcess(msgspec.Struct, frozen=True):
    """A process of this user's that listens on a port."""

    pid: int
    started: tuple[str, ...]
    """Its program and arguments, as it was started."""

    def __str__(self) -> str:
        """Shown as `process 42: python -m http.server`."""
        words = (word for argument in self.started for word in argument.split())
        return f"process {self.pid}: {' '.join(words):.100}"

    @property
    def is_server(self) -> bool:
        """Whether it is `mlxsrv` or `python -m mlxsrv`: not a program that mounts the app, nor one
        that has the name as an argument, such as a folder that it shows."""
        program, *arguments = self.started
        if Path(program).name.lower().startswith("python"):
            what = [*dropwhile(lambda each: each.startswith("-") and each != "-m", arguments)]
            program = what[1] if what[:1] == ["-m"] and what[1:] else "".join(what[:1])
        return Path(program).name == "mlxsrv"

    def end_and_wait(self) -> None:
        """Ask it to end, and wait until it has."""
        with suppress(ProcessLookupError):
            if hasattr(os, "pidfd_open"):
                self._end_on_linux()
            else:
                self._require_same()
                os.kill(self.pid, signal.SIGTERM)
                while True:  # until there is no such process
                    os.kill(self.pid, 0)
                    time.sleep(_LOOK)

    def _end_on_linux(self) -> None:
        """A process that its parent has not waited for still has its number: only this tells."""
        descriptor = os.pidfd_open(self.pid)
        try:
            # Behind the opening: from then on the descriptor means one process, whatever becomes of
            # its number.
            self._require_same()
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            select.select([descriptor], [], [])
        finally:
            os.close(descriptor)

    def _require_same(self) -> None:
        """Raise ProcessLookupError if its number is another process's by now: it has ended."""
        if _command(self.pid) != self.started:
            raise ProcessLookupError


def listening_process(port: int) -> ListeningProcess | None:
    """The process that listens on a port; None if there is none, or if it is another user's."""
    pids = _linux_listeners(port) if sys.platform == "linux" else _lsof_listeners(port)
    for pid in pids:
        if started := _command(pid):
            return ListeningProcess(pid, started)
    return None


def _linux_listeners(port: int) -> Iterator[int]:
    sockets = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for process in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if process.stat().st_uid == os.getuid():
                links = (os.readlink(each) for each in (process / "fd").iterdir())
                if not sockets.isdisjoint(links):
                    yield int(process.name)


def _lsof_listeners(port: int) -> Iterator[int]:
    user = str(os.getuid())
    found = _output("lsof", "-a", "-u", user, "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-t")
    yield from map(int, found.split())


def _command(pid: int) -> tuple[str, ...]:
    if sys.platform != "linux":
        return tuple(_output("ps", "-o", "command=", "-p", str(pid)).split())
    with suppress(OSError):  # it has ended
        whole = (_PROC / str(pid) / "cmdline").read_bytes().removesuffix(b"\0")
        return tuple(os.fsdecode(each) for each in whole.split(b"\0") if whole)
    return ()


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""
