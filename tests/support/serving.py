"""Real servers for the tests: `python -m mlxsrv` in a process, any ASGI app in a thread."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import httpx
import uvicorn

from tests.support.warm import WarmProcess, WarmStart

PATIENCE = 60.0
"""Seconds that a test waits for anything, on a machine that may be busy."""

DATED = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d \w+ "
"""A regular expression for the beginning of a line of a log in text."""

Line = dict[str, Any]
Process = subprocess.Popen[bytes] | WarmProcess
T = TypeVar("T")


def wait_for(what: Callable[[], T | None], *, seconds: float = PATIENCE, why: str) -> T:
    """The first true value of `what()`; fails with `why` if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {why}"
        time.sleep(0.02)
    return value


def environment() -> dict[str, str]:
    """This process's, without options of the server, without the developer's models, and without
    what mlx-lm sets when it is imported: a server does not inherit it."""
    foreign = ("MLXSRV_", "PYTEST_CURRENT_TEST", "TRANSFORMERS_NO_ADVISORY_WARNINGS")
    own = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return own | {"HF_HUB_CACHE": "/nonexistent"}


_ENVIRONMENT = environment()
"""As it was when this was imported, before any test has changed it."""


@cache
def _warm_start() -> WarmStart:
    """Return the only one of this process."""
    return WarmStart(_ENVIRONMENT)


class Server:
    """A running `python -m mlxsrv`.

    Args:
        process: the server.
        log: what it writes to stderr.
    """

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self._log = log

    @cached_property
    def url(self) -> str:
        return wait_for(self._announced, why="the server listens")

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def _announced(self) -> str | None:
        assert self.process.poll() is None, self.log_text()
        found = re.search(r'http://[^\s"]+(?=[\s"])', self.log_text())
        return found and found[0]

    def log_text(self) -> str:
        return self._log.read_text("utf-8")

    def log(self, event: str, **fields: Any) -> list[Line]:
        """The JSON lines of `event` that have these fields, in order."""
        complete = self.log_text().rpartition("\n")[0].splitlines()
        lines = [json.loads(line) for line in complete if line.startswith("{")]
        wanted = {"event": event, **fields}.items()
        return [line for line in lines if wanted <= {k: str(v) for k, v in line.items()}.items()]

    def logged(self, event: str, **fields: Any) -> Line:
        """The first such line, waited for."""
        return wait_for(lambda: self.log(event, **fields), why=f"{event} {fields} is logged")[0]

    def client(self, **options: Any) -> httpx.Client:
        # No certificates: to read all that a system has takes 20 ms, and the server speaks no TLS.
        return httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False, **options)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_status(self, *, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)


@contextmanager
def serving(
    folder: Path,
    *arguments: str,
    log_format: str = "json",
    variables: Mapping[str, str] = MappingProxyType({}),
    descriptors: int | None = None,
    module: str = "mlxsrv",
    cold: bool = False,
) -> Iterator[Server]:
    """A server on a free port.

    Args:
        folder: takes its log.
        arguments: its options.
        variables: what is added to its environment.
        descriptors: how many it may have open; as many as this process, unless given.
        module: what is run with the options.
        cold: start it as a user does. Else it may be forked from a process that has imported what
            servers import, which takes a sixth of the time.
    """
    options = ("--port", "0", "--log-format", log_format, *arguments)
    own = {**environment(), **variables}
    with (folder / "log").open("wb") as stderr:
        process: Process
        if cold or descriptors or sys.platform != "linux" or own != _ENVIRONMENT:
            limit = f"ulimit -n {descriptors} &&" if descriptors else ""
            shell = ["sh", "-c", f'{limit} exec "$@"', "sh"]
            command = [*shell, sys.executable, "-m", module, *options]
            process = subprocess.Popen(command, stderr=stderr, env=own)
        else:
            process = _warm_start().run(module, options, stderr.fileno())
    server = Server(process, folder / "log")
    try:
        yield server
    finally:
        server.close()


serving_faulty = partial(serving, module="tests.support.faulty")
"""A server whose model fails at certain tokens."""


@contextmanager
def hosted(app: Any, *, root_path: str = "") -> Iterator[str]:
    """`app` under uvicorn in a thread; yields its URL."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=5,
        root_path=root_path,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive(), why="uvicorn starts")
            assert server.started
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()
