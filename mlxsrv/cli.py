"""The command: `python -m mlxsrv`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

import anyio
import uvicorn

from mlxsrv.commands import COMMANDS
from mlxsrv.connection import Connection
from mlxsrv.descriptors import raise_limit
from mlxsrv.engine.device import require_backend
from mlxsrv.errors import BackendMissing, ServeError
from mlxsrv.logs import configure, log
from mlxsrv.settings import Settings, SettingsError, load_settings
from mlxsrv.web.app import App, create_app

_log = logging.getLogger("mlxsrv.server")

_TICK_SECONDS = 1.0

_BACKLOG = 2048
_ACCEPTED = 8
"""Connections that asyncio accepts in one turn of its loop, where they cannot be refused yet: fewer
than the descriptors that connections leave. uvicorn knows one number for this and the backlog."""


class Server(uvicorn.Server):
    """uvicorn, but it listens until running requests are over, so that new ones hear a 503."""

    def __init__(self, app: App, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exiting = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self.failed = False  # the engine, and the process is to end with it
        self._loading: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # again: the loop has set it to `_ACCEPTED`

    async def main_loop(self) -> None:
        """As uvicorn's, but woken by signals and not ten times a second to look for them; once a
        second remains, for the Date header."""
        self._loop = asyncio.get_running_loop()
        self._loading = asyncio.create_task(self._collect_after_load())
        while not await self.on_tick(0):
            self.failed = self._app.settings.exit_on_failure and self._app.failed
            if self.failed:
                return
            with anyio.move_on_after(_TICK_SECONDS):
                await self._exiting.wait()

    async def _collect_after_load(self) -> None:
        """Look for garbage from now on, but not among what all imports and the load have left: a
        full collection of that would hold up every stream for 50 ms."""
        await self._app.service.preload()
        gc.freeze()
        gc.enable()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log(_log, logging.INFO, "shutting down", grace=self._app.settings.shutdown_grace)
        self._draining = asyncio.create_task(self._app.drain())
        await asyncio.gather(self._draining, return_exceptions=True)
        for connection in self.server_state.connections:
            if isinstance(connection, Connection):
                connection.give_up()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Signal handlers run between two bytecodes of the loop's thread, where nothing of the loop
        # may be touched but through call_soon_threadsafe, which also wakes it.
        if self._draining is None or self._draining.done():
            super().handle_exit(sig, frame)
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._exiting.set)
        else:
            # A second Ctrl-C ends the grace.
            self._draining.get_loop().call_soon_threadsafe(self._draining.cancel)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command; without one, serve until a signal.

    Exit status: 0 after a shutdown or when the command has done its work, 1 if it could not, 2 for
    a wrong setting, 3 if the engine failed under `--exit-on-failure`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = COMMANDS.get(arguments[0]) if arguments else None
    try:
        if command is None:
            _serve(arguments)
        command(arguments[1:])
    except SettingsError as error:
        _fail(2, str(error))
    except ServeError as error:
        _fail(1, error.message)
    sys.exit(0)


def _serve(arguments: Sequence[str]) -> NoReturn:
    """Serve until a signal. Raises SettingsError."""
    gc.disable()  # until the model is there: imports make no garbage, and looking for it costs 6 %
    settings = load_settings(arguments)
    configure(settings.log_level, settings.log_format)
    raise_limit()
    try:
        require_backend()
    except BackendMissing as error:
        _fail(1, error.message)
    with _address(settings):
        listener = _bind(settings)
    local = _is_loopback(listener)
    app = create_app(settings, local=local)
    with _address(settings):
        # Only now: a client that connects from here on waits for the app, and is not refused.
        listener.listen(_BACKLOG)
    # transformers would write lines of its own beside ours, about prompts we refuse ourselves.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    log(_log, logging.INFO, "listening", url=url, model=app.default_model, keys=app.keys)
    if not local and not app.keys:
        why = "whoever can reach this address can use the server; --api-key-file FILE asks for keys"
        log(_log, logging.WARNING, "no api key", why=why)
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_ACCEPTED,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
    )
    server = Server(app, config)
    # uvicorn handles signals only while it runs, and raises them again once it has shut down, when
    # they have been obeyed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    server.run(sockets=[listener])
    sys.exit(3 if server.failed else 0)


@contextlib.contextmanager
def _address(settings: Settings) -> Iterator[None]:
    """What goes wrong with the address is one line."""
    try:
        yield
    except OSError as error:
        _fail(1, f"cannot listen on {settings.host}:{settings.port}: {error.strerror}")


def _bind(settings: Settings) -> socket.socket:
    """A socket that has the address and does not listen yet. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.setblocking(False)
    return listener


def _is_loopback(listener: socket.socket) -> bool:
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _fail(status: int, message: str) -> NoReturn:
    print(f"mlxsrv: {message}", file=sys.stderr)
    sys.exit(status)
