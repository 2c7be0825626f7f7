"""The listening socket."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator

from mlxsrv.settings import Settings

BACKLOG = 2048


class ListenError(Exception):
    """The server cannot listen on its address; the message says why in one line.

    Args:
        taken: the port, if something listens there already.
    """

    def __init__(self, message: str, taken: int | None = None) -> None:
        super().__init__(message)
        self.taken = taken


def bind(settings: Settings) -> socket.socket:
    """Return a socket that is bound to the address of the settings and does not listen yet.

    Raises:
        ListenError: the name is unknown, or the port is taken.
    """
    with _raising_listen_errors(settings):
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
        return listener


def listen(listener: socket.socket, settings: Settings) -> None:
    """Let clients connect; they wait until the app is there. Raises ListenError."""
    with _raising_listen_errors(settings):
        listener.listen(BACKLOG)


def is_loopback(listener: socket.socket) -> bool:
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _raising_listen_errors(settings: Settings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        taken = settings.port if error.errno == errno.EADDRINUSE else None
        remedy = "" if taken is None else "; --port 0 takes any free one"
        raise ListenError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}{remedy}", taken
        ) from None
