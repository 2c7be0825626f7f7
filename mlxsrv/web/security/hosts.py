"""Host names: a defence against DNS rebinding.

A web page can make its own host name point to 127.0.0.1; the browser then takes this server for the
page's own origin. But the page's name stays in the Host header. So a server that listens on
loopback answers only to names of its own machine. An address in Host is always accepted, because
nobody can make an address point elsewhere.
"""

from __future__ import annotations

import ipaddress

from mlxsrv.errors import HostNotAllowed
from mlxsrv.settings import Settings
from mlxsrv.web.security.headers import RequestHeaders

# The last two are names by which a container knows the machine that it runs on.
_LOCAL_NAMES = ("localhost", "host.docker.internal", "host.containers.internal")


class AllowedHosts:
    """The host names that a request may be sent to.

    Args:
        local: the server listens on loopback only. The parent of a mounted app knows that, and may
            check Host itself.
    """

    def __init__(self, settings: Settings, *, local: bool) -> None:
        self._names = {*_LOCAL_NAMES, *(name.lower() for name in settings.allowed_host)}
        self._checked = (local or bool(settings.allowed_host)) and "*" not in self._names

    def check(self, headers: RequestHeaders) -> None:
        """Raises HostNotAllowed."""
        host = headers.get(b"host")
        if not self._checked or host is None:  # browsers always send Host
            return
        name = _host_name(host.decode("latin-1"))
        if name not in self._names and not name.endswith(".localhost") and not _is_address(name):
            raise HostNotAllowed(
                "this server listens on loopback and does not answer to the host name of this "
                "request; --allowed-host NAME allows another name"
            )


def _host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    name, colon, port = host.lower().rpartition(":")
    without_port = name if colon and port.isdecimal() else host.lower()
    return without_port.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
