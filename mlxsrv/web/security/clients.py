"""Clients of this server: an API key is one, or the address and the user.

The guard notes the sender of each request, as far as the headers and the address say. The user
stands in the body, so the client is known only when that has been decoded.
"""

from __future__ import annotations

import ipaddress

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from mlxsrv.models.pool.clients import Client
from mlxsrv.web.security.api_keys import APIKey

_SENDER = "mlxsrv.sender"


class Sender(msgspec.Struct, frozen=True):
    """The sender of a request, without its user.

    Attributes:
        id: made of the key's digest or of the address; it is never shown.
        priority: the best that its requests may have, if its key has one.
        has_users: whether its users are clients of their own.
    """

    id: str
    priority: int | None
    has_users: bool


def note_sender(scope: Scope, key: APIKey | None, *, keys: int) -> None:
    """Note who sends a request.

    Args:
        key: that the request carries.
        keys: how many the server has. If all clients share one, it does not distinguish them.
    """
    priority = None if key is None else key.priority
    if key is not None and keys > 1:
        sender = Sender(f"key {key.digest.hex()}", priority, has_users=False)
    else:
        sender = Sender(f"address {client_address(scope)}", priority, has_users=True)
    scope[_SENDER] = sender


def client_of(request: Request, user: str | None = None, priority: int | None = None) -> Client:
    """Return the client of a request.

    Args:
        user: the client's name for its user, if the request gives one.
        priority: that the request asks for. It counts if the operator allows that, and can be no
            better than the priority of the key.
    """
    sender: Sender = request.scope[_SENDER]
    id = f"{sender.id} {user}" if user and sender.has_users else sender.id
    asked = priority if request.app.settings.allow_priority else None
    given = [number for number in (sender.priority, asked) if number is not None]
    return Client(id, max(given, default=0))


def client_address(scope: Scope) -> str:
    """The client's address; for IPv6 its network, in which it may have any number of addresses.
    Empty if there is none, as over a Unix socket."""
    host: str = scope["client"][0] if scope.get("client") else ""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.IPv6Network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host
