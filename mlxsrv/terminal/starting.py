"""The server that a command asks: one that runs, or one that is started for the command alone."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from mlxsrv.connect.url import KEY_VARIABLE
from mlxsrv.logs import sized
from mlxsrv.settings import Settings, options
from mlxsrv.terminal.client import NoServer, RequestFailed, ServerClient, client_of
from mlxsrv.terminal.screen import StatusLine

_LOOK = 0.1
"""Seconds between two looks at a server that loads."""

_OF_THE_ADDRESS = ("host", "port", "api_key", "api_key_file", "model")
"""Options that say which server is asked, and for which model."""

_END = 10.0
"""Seconds beyond `--shutdown-grace` after which a server that does not end is killed."""


class StartedServer:
    """A server process of this command's own, on a free port of this machine.

    Args:
        arguments: options for it.
        key: that its clients must have, unless the options say another.
    """

    def __init__(self, arguments: Sequence[str], key: str) -> None:
        own = ("--host", "127.0.0.1", "--port", "0", "--log-format", "json", "--log-level", "info")
        # In a group of its own: Ctrl-C is for this command, which may want the server to live on.
        # This process alone holds the other end of its input, so it ends with this process,
        # whatever ends that.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlxsrv", *arguments, *own, "--stop-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,
            env={**os.environ, KEY_VARIABLE: key},
        )
        self._lines: deque[str] = deque(maxlen=20)
        self._url: str | None = None
        self._listens = threading.Event()
        threading.Thread(target=self._read_log, daemon=True).start()

    def url(self) -> str:
        """Wait until it listens. Raises RequestFailed if it ends instead."""
        self._listens.wait()
        if self._url is None:
            raise self.failure()
        return self._url

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def failure(self) -> RequestFailed:
        """The error for a server that has ended: its last line says why."""
        status = self._process.wait()
        said = [line for line in self._lines if line.startswith("mlxsrv: ")]
        why = said[-1].removeprefix("mlxsrv: ") if said else "\n".join(self._lines)
        return RequestFailed(why or f"the server ended with status {status}")

    def stop_within(self, grace: float) -> None:
        """End it, and wait until it has ended."""
        self._process.terminate()
        try:
            self._process.wait(grace + _END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _read_log(self) -> None:
        """Find the address, and keep the last lines: a pipe that nobody reads would fill up."""
        assert self._process.stderr is not None
        with self._process.stderr as log:
            for line in log:
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                if self._url is None and '"listening"' in text:
                    self._url = json.loads(text)["url"]
                    self._listens.set()
        self._listens.set()


@contextmanager
def running_server(
    settings: Settings, flags: Mapping[str, Any], *, url: str | None, model: str | None = None
) -> Iterator[tuple[ServerClient, str]]:
    """The server at the address of the settings; where none runs, one that is started with these
    options and stopped at the end. It is ready. Then the name of the model to ask.

    Args:
        flags: the options that the settings are made of, as they were given.
        url: an address where a server must run already.
        model: the model that the command names; else it is that of `--model`, or the default one.

    Raises:
        RequestFailed: there is no server, or it cannot load its model.
        SettingsError: the model that the command names can be none.
    """
    if client := _find_running(settings, url):
        _tell_what_has_no_effect(flags, client.url)
        with StatusLine() as line:
            _wait_until_ready(client, line)
        flagged = (flags.get("model") or ["default"])[0]
        yield client, model or flagged.partition("=")[0]
        return
    arguments = as_arguments(flags)
    if model is not None:
        model, option = _as_option(settings, model)
        arguments += ["--model", option]
    with _ended_by_signals(), StatusLine() as line:
        line.show("starting a server")
        # With a key, it is for this command alone.
        key = settings.api_key[0] if settings.api_key else secrets.token_urlsafe()
        started = StartedServer(arguments, key)
        try:
            client = ServerClient(started.url(), key, known=True)
            _wait_until_ready(client, line, started)
            line.clear()
            yield client, model or "default"
        except RequestFailed:
            if started.has_ended:
                raise started.failure() from None
            raise
        finally:
            started.stop_within(settings.shutdown_grace)


def _find_running(settings: Settings, url: str | None) -> ServerClient | None:
    """The server at the address, if one runs there. Raises RequestFailed if it must, and does
    not."""
    if url is None and not settings.port:
        return None
    client = client_of(settings, url)
    try:
        client.health()
    except RequestFailed as error:
        if url is not None:
            raise
        if not isinstance(error, NoServer):
            print(f"mlxsrv: {error.message}; another server is started", file=sys.stderr)
        return None
    return client


def _tell_what_has_no_effect(flags: Mapping[str, Any], url: str) -> None:
    """Name the options that are for a server that is started: this one runs already."""
    given = (option for option in options() if flags.get(option.name) is not None)
    late = [option.flag for option in given if option.name not in _OF_THE_ADDRESS]
    if late:
        these = ", ".join(late)
        told = f"a server runs at {url} already, so these options change nothing: {these}"
        print(f"mlxsrv: {told}", file=sys.stderr)


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Write the server's options that `Arguments` has read as arguments again."""
    arguments = ["--config", flags["config"]] if flags.get("config") else []
    for option in options():
        value = flags.get(option.name)
        if value is None:
            continue
        if option.switch:
            arguments.append(option.flag if value else option.flag.replace("--", "--no-", 1))
        else:
            for each in value if option.repeatable else [value]:
                arguments += [option.flag, str(each)]
    return arguments


def _as_option(settings: Settings, name: str) -> tuple[str, str]:
    """The name by which to ask for a model that is named so, which may be by its path, and a
    `--model` that serves it alone. Raises SettingsError."""
    # Imported here: only a server that is started needs to know what is on the disk.
    from mlxsrv.models.catalogue.catalogue import Catalogue, named_models

    catalogue = Catalogue(settings)
    catalogue.scan()
    entry = catalogue.answering(name)
    if entry is None:
        return named_models([name])[0].name, name
    adapter = f"+{entry.source.adapter}" if entry.source.adapter else ""
    return name, f"{name}={entry.source.place}{adapter}"


def _wait_until_ready(
    client: ServerClient, line: StatusLine, started: StartedServer | None = None
) -> None:
    """Wait for the default model, and show its progress. Raises RequestFailed."""
    # To those without a key a server with keys says no more than its status.
    while (state := client.health(verbose=True))["status"] != "ok":
        if state["status"] == "failed" and started is not None:
            raise RequestFailed(state.get("reason", "the model could not be loaded"))
        if state["status"] != "loading":
            return  # the request will say what is wrong, or succeed
        line.show(_progress(state))
        time.sleep(_LOOK)


def _progress(state: Mapping[str, Any]) -> str:
    for doing, kind in (("downloading", "download"), ("loading", "load")):
        if arrived := state.get(kind):
            share = arrived["completed"] / max(arrived["total"], 1)
            return f"{doing} the model: {share:.0%} of {sized(arrived['total'])}"
    return "loading the model"


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that what was started is stopped."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
