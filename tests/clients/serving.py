"""The server that the clients talk to: `python -m mlxsrv`, with the built-in model, as shipped.

It runs in the server's environment, which is not this one: `MLXSRV_PYTHON` says which.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PYTHON = os.environ.get("MLXSRV_PYTHON", str(ROOT / ".venv/bin/python"))

START = 100.0
"""Seconds that a server has to listen, on a machine that may be busy."""

STOP = 60.0
"""Seconds that a server has to end after it was asked to."""


@contextmanager
def serving(log: Path, *arguments: str) -> Iterator[str]:
    """A server on a free port, whose log goes to `log`; yields its URL."""
    command = [PYTHON, "-m", "mlxsrv", "--port", "0", "--log-format", "json", *arguments]
    options = {name: text for name, text in os.environ.items() if not name.startswith("MLXSRV_")}
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env=options, stderr=stderr)
    try:
        yield _url(process, log)
    finally:
        stop(process)


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where the server says it listens, waited for."""
    deadline = time.monotonic() + START
    while True:
        text = log.read_text("utf-8")
        for line in text.rpartition("\n")[0].splitlines():
            said = json.loads(line) if line.startswith("{") else {}
            if said.get("event") == "listening":
                return str(said["url"])
        assert process.poll() is None, f"the server ended:\n{text}"
        assert time.monotonic() < deadline, f"not listening after {START:g} s:\n{text}"
        time.sleep(0.02)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started here."""
    process.terminate()
    try:
        process.wait(STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
