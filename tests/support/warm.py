"""Servers that start in a sixth of the time: forked from a process that has imported what they
import.

Most of a server's start is imports, and the tests start a hundred servers. `WarmStart` keeps one
process, `python -m tests.support.warm`, which imports what does not need MLX, and forks for every
server. The fork runs a module as `python -m` does, and ends as any process does. MLX and all code
that uses it are imported by the fork: what MLX makes on import is bound to a thread.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from mlxsrv.engine.patches.imports import patch_imports

_MOST = 1 << 20
"""Bytes of a request: arguments and environment."""


class WarmProcess:
    """A forked process, as far as subprocess.Popen's methods are needed.

    Args:
        status: the end of a socket that brings the exit status.
    """

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._read(0)

    def wait(self, seconds: float) -> int:
        """The exit status. Raises TimeoutExpired."""
        status = self._read(seconds)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", seconds)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, seconds: float) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            self.returncode = int(self._status.recv(16))
            self._status.close()
        return self.returncode


class WarmStart:
    """The process that forks, started when it is first needed.

    Args:
        environment: of the process, and of all that come of it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=self.environment,
            )
        atexit.register(self._close)

    def run(self, module: str, arguments: Sequence[str], stderr: int) -> WarmProcess:
        """Start `python -m module` with these arguments, which writes its errors to this file."""
        ours, theirs = socket.socketpair()
        request = {"module": module, "arguments": [*arguments], "folder": os.getcwd()}
        with theirs:
            fds = [stderr, theirs.fileno()]
            socket.send_fds(self._control, [json.dumps(request).encode()], fds)
            pid = int(self._control.recv(16))
        return WarmProcess(pid, ours)

    def _close(self) -> None:
        self._control.close()
        self._process.wait(10)


# In the process that forks.


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    control = socket.socket(fileno=int(sys.argv[1]))
    _preload()
    if (asked := _fork_for_each(control)) is not None:
        sys.argv[1:] = asked["arguments"]
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


def _preload() -> None:
    """Import what a server imports, but for MLX and all that imports it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    patch_imports()
    for name in ("mlxsrv.commands", "mlxsrv.server.serve"):
        import_module(name)
    transformers = import_module("transformers")
    for name in ("AutoTokenizer", "PreTrainedTokenizerFast"):
        getattr(transformers, name)  # which imports it
    gc.freeze()  # or each fork copies all of it where the collector looks at it


def _fork_for_each(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns in the forks, with the request; here when no more can come."""
    children: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for file, _ in poll.poll():
            if file in children:
                poll.unregister(file)
                os.close(file)
                _reap(*children.pop(file))
                continue
            data, files, _, _ = socket.recv_fds(control, _MOST, 2)
            if not data:
                return None
            asked: dict[str, Any] = json.loads(data)
            pid = os.fork()
            if not pid:
                _become(asked["folder"], files, [control.detach(), *children])
                return asked
            os.close(files[0])
            end = os.pidfd_open(pid)
            children[end] = pid, socket.socket(fileno=files[1])
            poll.register(end, select.POLLIN)
            control.send(str(pid).encode())


def _reap(pid: int, status: socket.socket) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with status, suppress(OSError):  # nobody may ask any more
        status.send(str(code).encode())


def _become(folder: str, files: Sequence[int], others: Sequence[int]) -> None:
    """Be a process as a shell starts it, with one file for its errors and no more."""
    os.dup2(files[0], 2)
    for file in (*files, *others):
        os.close(file)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    main()
