"""Starts the servers to be measured, one at a time, and stops them whatever happens."""

from __future__ import annotations

import compileall
import contextlib
import functools
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

START_TIMEOUT = 120.0
STOP_TIMEOUT = 15.0
_WITHOUT_OPENBLAS = (
    "import runpy, sys; sys.modules['scipy_openblas32'] = None; "
    "runpy.run_module('mlxsrv', run_name='__main__', alter_sys=True)"
)
_SOURCES = Path(__file__).parent.parent / "mlxsrv"


class Side(msgspec.Struct, frozen=True):
    """A server to measure: one that runs already at `url`, or one to start with `command`."""

    name: str
    url: str = ""
    command: tuple[str, ...] = ()
    """Lacks only the port."""


class Running(msgspec.Struct, frozen=True):
    """A server's process; `pid` is None where somebody else started it."""

    url: str
    pid: int | None = None
    started: float = 0.0
    """By `time.perf_counter`, before the process was made."""


class StartError(Exception):
    """A server did not come up; the message has the end of its log."""


def ours(model: Path, *options: str, openblas: bool = True) -> Side:
    """mlxsrv; as if the extra `blas` were not installed, unless with `openblas`."""
    # pip has compiled the peers' sources; a checkout's may not be, where writing bytecode is off.
    compileall.compile_dir(_SOURCES, quiet=1)
    run = ("-m", "mlxsrv") if openblas else ("-c", _WITHOUT_OPENBLAS)
    command = (sys.executable, *run, "--model", f"bench={model}", *options, "--port")
    return Side("mlxsrv", command=command)


def peer(model: Path) -> Side:
    command = (sys.executable, "-m", "mlx_lm.server", "--model", str(model), "--port")
    return Side("mlx_lm.server", command=command)


@functools.cache
def offers(option: str) -> bool:
    """Whether this mlxsrv has the command-line option."""
    command = [sys.executable, "-m", "mlxsrv", "--help"]
    usage = subprocess.run(
        command, capture_output=True, text=True, timeout=START_TIMEOUT, check=True
    )
    return option in usage.stdout.split()


@contextlib.contextmanager
def serve(side: Side) -> Iterator[Running]:
    """The side's server, ready for requests, for as long as the block runs."""
    if not side.command:
        yield Running(side.url)
        return
    with _spawn(side) as (running, process, log):
        if not _wait_until_healthy(running.url, process):
            raise StartError(f"{side.name} did not start:\n{_read_tail(log)}")
        yield running


@contextlib.contextmanager
def launch(side: Side) -> Iterator[Running]:
    """As `serve`, but the block begins as soon as the process does."""
    with _spawn(side) as (running, _, _):
        yield running


def exit_on_sigterm() -> None:
    """By default it would end this process without the `finally` that stops the servers."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT)


@contextlib.contextmanager
def _spawn(side: Side) -> Iterator[tuple[Running, subprocess.Popen[bytes], IO[bytes]]]:
    port = _find_free_port()
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen([*side.command, str(port)], stdout=log, stderr=log)
        try:
            yield Running(f"http://127.0.0.1:{port}", process.pid, started), process, log
        finally:
            stop(process)


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(OSError),  # not listening yet, or not ready: HTTP 503
            urllib.request.urlopen(f"{url}/health", timeout=5) as response,
        ):
            if response.status == 200:
                return True
        time.sleep(0.1)
    return False


def _read_tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read()[-2000:].decode(errors="replace")
