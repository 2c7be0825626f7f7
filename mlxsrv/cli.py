"""The command: `python -m mlxsrv`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http
import ipaddress
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import anyio
import uvicorn

from mlxsrv.commands import COMMANDS
from mlxsrv.engine.device import require_backend
from mlxsrv.errors import BackendMissing, HeadersTooLarge, InvalidHTTP, ServeError
from mlxsrv.logs import configure, log
from mlxsrv.settings import Settings, SettingsError, load_settings
from mlxsrv.web.app import App, create_app
from mlxsrv.web.security import MOST_HEADER_BYTES
from mlxsrv.wire import openai
from mlxsrv.wire.sse import encode_json

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
except ImportError:
    # Two classes of one shape, of which mypy knows the first.
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol  # type: ignore[assignment]

_log = logging.getLogger("mlxsrv.server")

_HTTPTOOLS = Protocol.__name__ == "HttpToolsProtocol"


_TICK_SECONDS = 1.0


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


class Connection(Protocol):
    """uvicorn's connection, but a client has only so long, and so many bytes, for the head of a
    request, and hears in our shape of what is no HTTP. One that takes nothing of its answer for as
    long as a request may take is cut off: nothing else would end a write that waits for it.

    While the app has a request, its own limits hold. Only httptools calls what begins with `on_`,
    and only h11 has limits of its own for what must come whole.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        app = self.config.app
        assert isinstance(app, App)
        self._patience = app.settings.body_timeout
        self._hurry: asyncio.TimerHandle | None = None
        self._most_stall = app.settings.request_timeout
        self._stall: asyncio.TimerHandle | None = None
        self._unparsed = 0  # bytes since the parser last made something of them
        self._data = b""  # what it parses now

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn leaves it where the client has reset the connection, and it would hold on to this.
        self._unset_keepalive_if_required()
        self._relax()
        self._end_stall()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_reader()

    def _await_reader(self, before: int | None = None) -> None:
        """Look from time to time whether less is unsent than `before`: nothing is added to it."""
        self._end_stall()
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent == before:
            self.transport.abort()
        elif unsent:
            self._stall = self.loop.call_later(self._most_stall, self._await_reader, unsent)

    def give_up(self) -> None:
        """Wait no more for a client that does not read: it has had its time to."""
        if self.flow.write_paused:
            self.transport.abort()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        self._data = data
        super().data_received(data)
        if _HTTPTOOLS and self._unparsed > MOST_HEADER_BYTES:
            self._refuse(_too_large())
        self._watch()

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Decline an upgrade, which is an offer, and answer the request as if it had made none.

        httptools takes what follows such a head for the other protocol, and so loses the body that
        Java's client and curl's send with theirs: it gets to read the head again, without it.
        """
        upgrade = sys.exception()
        if not _HTTPTOOLS or upgrade is None:
            return
        if not any(name == b"upgrade" for name, _ in self.headers):
            self._refuse(InvalidHTTP("this server is no proxy"))  # CONNECT
            return
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [method + b" " + self.url + b" HTTP/" + version]
        lines += [
            name + b": " + (_without_upgrade(value) if name == b"connection" else value)
            for name, value in self.headers
            if name != b"upgrade"
        ]
        rest = self._data[upgrade.args[0] :]
        self.parser = type(self.parser)(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"\r\n".join([*lines, b"", b""]) + rest)

    def send_400_response(self, msg: str) -> None:
        too_large = getattr(sys.exception(), "error_status_hint", 400) == 431
        self._refuse(_too_large() if too_large else InvalidHTTP(msg))

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._relax()
        elif self._hurry is None and not self.transport.is_closing():
            self._hurry = self.loop.call_later(self._patience, self.transport.close)

    def _relax(self) -> None:
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None

    def _refuse(self, error: ServeError) -> None:
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if not answering or not self.cycle.response_started:
            self.transport.write(_last_response(error))
        self.transport.close()


def _without_upgrade(connection: bytes) -> bytes:
    options = (option.strip() for option in connection.split(b","))
    return b", ".join(option for option in options if option.lower() != b"upgrade")


def _too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"headers are larger than {MOST_HEADER_BYTES} bytes")


def _last_response(error: ServeError) -> bytes:
    """A response that ends its connection, for a request that never reached the app."""
    body, request = encode_json(openai.error_response(error)), uuid.uuid4().hex
    log(_log, logging.INFO, "request refused", status=error.status, why=error.code, request=request)
    head = [
        f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: {request}",
        "connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


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
        listener.listen(2048)
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
