"""uvicorn's server, with a shutdown of our own.

The first signal begins the grace, in which running requests may finish; the second signal ends the
process. The process belongs to this server. An app that is mounted in another app ends only its own
work.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
from enum import Enum, auto
from types import FrameType

import anyio
import uvicorn

from mlxsrv.logs import log
from mlxsrv.server.connection import Connection
from mlxsrv.server.listening import BACKLOG
from mlxsrv.server.process_end import INTERRUPTED, ProcessEnd, interrupt
from mlxsrv.web.app import App

_log = logging.getLogger("mlxsrv.server")

_TICK_SECONDS = 1.0
_CLOSING_SECONDS = 8.0  # after the grace: last frames, connections, models, traces
_HURRY_SECONDS = 1.0  # from the second signal to the end of the process
_KEEP_ALIVE_SECONDS = 75
_CANCEL_SECONDS = 2

_ACCEPTED = 8
"""Connections that asyncio accepts in one turn of its loop, before any of them can be refused. It
must be less than the descriptors that connections leave free. uvicorn has one number for this and
for the backlog."""


class _Phase(Enum):
    """The phases of the server, each after the one above it. uvicorn's `should_exit` is true after
    the first signal."""

    SERVING = auto()  # also while running requests may finish
    HURRYING = auto()  # there was a second signal
    OVER = auto()


class Server(uvicorn.Server):
    """uvicorn's server, but it listens until running requests are over, so new ones get a 503.

    Args:
        tell_state: called when the models of the start are loaded, or could not be.
    """

    def __init__(self, app: App, tell_state: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_ACCEPTED,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_CANCEL_SECONDS,
            )
        )
        self._app = app
        self._tell_state = tell_state
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exiting = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self.early = False
        """The shutdown has begun before the models of the start were loaded."""
        self.end = ProcessEnd()
        self._phase = _Phase.SERVING

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # again, because the loop has set it to `_ACCEPTED`

    async def main_loop(self) -> None:
        """As uvicorn's, but signals wake it, so it does not look for them ten times a second. One
        tick a second remains, for the Date header."""
        self._loop = asyncio.get_running_loop()
        self._loading = asyncio.create_task(self._collect_after_load())
        while not await self.on_tick(0):
            settings = self._app.settings
            if (settings.exit_on_failure or settings.parallel) and self._app.failed:
                self.end.status = 3
                return
            with anyio.move_on_after(_TICK_SECONDS):
                await self._exiting.wait()

    async def _collect_after_load(self) -> None:
        """Turn the garbage collector on once the model is loaded, and exclude what is there by
        then: a full collection of that would hold up every stream for 50 ms."""
        try:
            await self._app.service.preload()
        finally:
            gc.freeze()
            gc.enable()
        self._tell_state()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        grace = self._app.settings.shutdown_grace
        log(_log, logging.INFO, "shutting down", grace=grace)
        self.end.within(grace + _CLOSING_SECONDS)
        self._draining = asyncio.create_task(self._app.drain())
        if self._phase is _Phase.HURRYING:
            self._leave()
        await asyncio.gather(self._draining, return_exceptions=True)
        for connection in self.server_state.connections:
            if isinstance(connection, Connection):
                connection.give_up()
        await super().shutdown(sockets)
        self._phase = _Phase.OVER
        if self.server_state.tasks:  # they wait for threads, and nothing needs their results
            log(_log, logging.WARNING, "ending", requests=len(self.server_state.tasks))
            self.end.now()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A signal handler runs between two bytecodes of the loop's thread. There, only
        # call_soon_threadsafe may touch the loop; it also wakes the loop.
        if self._phase is _Phase.OVER:  # uvicorn raises each signal again after the shutdown
            return
        if self._loading is None:  # nobody has been served
            if sig == signal.SIGINT:
                interrupt()
            self.end.now()
        if sig == signal.SIGINT and not self.should_exit:
            os.write(2, b"\n" * os.isatty(2))  # behind the terminal's ^C
        if not self._loading.done():
            self.early = True
            self.end.status = INTERRUPTED if sig == signal.SIGINT else 0
        if self.should_exit:
            self._phase = _Phase.HURRYING
            self.end.within(_HURRY_SECONDS)
        else:
            super().handle_exit(sig, frame)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave)

    def exit_once(self) -> None:
        """Shut down, unless that has begun. From any thread."""
        if not self.should_exit:
            self.handle_exit(signal.SIGTERM, None)

    def _leave(self) -> None:
        """Leave the main loop and, after a second signal, skip the rest of the grace."""
        self._exiting.set()
        if self._phase is _Phase.HURRYING and self._draining is not None:
            # A task that is cancelled before its first step never runs, and this one ends the
            # running requests with their last frames. So it is cancelled after that step.
            self._draining.get_loop().call_soon(self._draining.cancel)
