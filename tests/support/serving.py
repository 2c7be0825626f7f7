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
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import httpx
import uvicorn

PATIENCE = 20.0
"""Seconds that a test waits for anything, on a machine that may be busy."""

Line = dict[str, Any]
T = TypeVar("T")


def wait_for(what: Callable[[], T | None], *, seconds: float = PATIENCE, why: str) -> T:
    """The first true value of `what()`; fails with `why` if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {why}"
        time.sleep(0.02)
    return value


def environment() -> dict[str, str]:
    """This process's, without options of the server and without the developer's models."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MLXSRV_")}
    return own | {"HF_HUB_CACHE": "/nonexistent"}


class Server:
    """A running `python -m mlxsrv`; its log is read from what it writes to stderr."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        log: Path,
        log_format: str,
        variables: Mapping[str, str],
        descriptors: int | None = None,
    ) -> None:
        self._log = log
        limit = f"ulimit -n {descriptors} &&" if descriptors else ""
        command = ["sh", "-c", f'{limit} exec "$@"', "sh", sys.executable, "-m", "mlxsrv"]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, *arguments, "--log-format", log_format],
                stderr=stderr,
                env={**environment(), **variables},
            )

    @cached_property
    def url(self) -> str:
        return wait_for(self._announced, seconds=60, why="the server listens")

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
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **options)

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
) -> Iterator[Server]:
    """A server on a free port; `folder` takes its log, `variables` are added to its environment.
    It may have so many `descriptors` open, or as many as this process."""
    options = ("--port", "0", *arguments)
    server = Server(options, folder / "log", log_format, variables, descriptors)
    try:
        yield server
    finally:
        server.close()


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
