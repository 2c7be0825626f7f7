"""The command: `python -m mlxsrv`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

import anyio
import uvicorn

from mlxsrv.commands import COMMANDS
from mlxsrv.engine.backend import require_backend
from mlxsrv.errors import BackendMissing, ServeError
from mlxsrv.logs import configure, log
from mlxsrv.server.connection import Connection
from mlxsrv.server.descriptors import raise_limit
from mlxsrv.settings import Settings, SettingsError, load_settings
from mlxsrv.web.app import App, create_app

_log = logging.getLogger("mlxsrv.server")

_TICK_SECONDS = 1.0
_CLOSING_SECONDS = 8.0  # after the grace: last frames, connections, models, traces
_THREADS_SECONDS = 1.0  # after all that, for threads to come to their end
_HURRY_SECONDS = 1.0  # from the second signal to the end of the process


class End:
    """The end of the process, which no thread can put off.

    Python waits for its threads, and one that tokenizes or renders cannot be stopped: it may take a
    minute, or for ever. The operating system does not wait.
    """

    def __init__(self) -> None:
        self.status = 0
        self._at = math.inf  # by monotonic
        self._timer: threading.Timer | None = None

    def within(self, seconds: float) -> None:
        """Have the process end in `seconds` at the latest; a later end than is set is not."""
        at = time.monotonic() + seconds
        if at < self._at:
            if self._timer is not None:
                self._timer.cancel()
            self._at, self._timer = at, threading.Timer(seconds, self.now)
            self._timer.daemon = True
            self._timer.start()

    def now(self) -> NoReturn:
        os._exit(self.status)


_BACKLOG = 2048
_ACCEPTED = 8
"""Connections that asyncio accepts in one turn of its loop, where they cannot be refused yet: fewer
than the descriptors that connections leave. uvicorn knows one number for this and the backlog."""


class Server(uvicorn.Server):
    """uvicorn, but it listens until running requests are over, so that new ones hear a 503.

    The first signal begins the grace, the second one ends the process. The process is its own:
    mounted in another app, mlxsrv ends nothing but its work.
    """

    def __init__(self, app: App, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exiting = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self.end = End()
        self._hurried = False  # by a second signal
        self._over = False

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
            if self._app.settings.exit_on_failure and self._app.failed:
                self.end.status = 3
                return
            with anyio.move_on_after(_TICK_SECONDS):
                await self._exiting.wait()

    async def _collect_after_load(self) -> None:
        """Look for garbage from now on, but not among what all imports and the load have left: a
        full collection of that would hold up every stream for 50 ms."""
        try:
            await self._app.service.preload()
        finally:
            gc.freeze()
            gc.enable()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        grace = self._app.settings.shutdown_grace
        log(_log, logging.INFO, "shutting down", grace=grace)
        self.end.within(grace + _CLOSING_SECONDS)
        self._draining = asyncio.create_task(self._app.drain())
        if self._hurried:
            self._obey()
        await asyncio.gather(self._draining, return_exceptions=True)
        for connection in self.server_state.connections:
            if isinstance(connection, Connection):
                connection.give_up()
        await super().shutdown(sockets)
        self._over = True
        if self.server_state.tasks:  # they wait for threads, and nobody waits for them
            log(_log, logging.WARNING, "ending", requests=len(self.server_state.tasks))
            self.end.now()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Signal handlers run between two bytecodes of the loop's thread, where nothing of the loop
        # may be touched but through call_soon_threadsafe, which also wakes it.
        if self._over:  # uvicorn raises each again once it has been obeyed
            return
        if self.should_exit:
            self._hurried = True
            self.end.within(_HURRY_SECONDS)
        else:
            super().handle_exit(sig, frame)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._obey)

    def _obey(self) -> None:
        """Leave the main loop; after a second signal what is left of the grace, too."""
        self._exiting.set()
        if self._hurried and self._draining is not None:
            # Not before it has begun: it ends what runs, with last frames, only then.
            self._draining.get_loop().call_soon(self._draining.cancel)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command; without one, serve until a signal.

    Exit status: 0 after a shutdown, even if a second signal cut it short, or when the command has
    done its work, 1 if it could not, 2 for a wrong setting, 3 if the engine failed under
    `--exit-on-failure`.
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
    log(_log, logging.INFO, "listening", url=url, model=app.default_model, keys=app.key_count)
    if not local and not app.key_count:
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
    server.end.within(_THREADS_SECONDS)
    sys.exit(server.end.status)


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
