"""Bodies of requests: read within bounds, and told what of them meant nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from urllib.parse import quote

from starlette.requests import Request
from starlette.types import Scope

from mlxsrv.errors import Overloaded, RequestTooLarge
from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.web")

_SMALL = 64 * 1024  # bytes of a body
_LONGEST_HEADER = 2048
_LONGEST_NAME = 100  # in the log
_MOST_LOGGED = 1000
_INDEX = re.compile(r"\[\d+\]")


class Share:
    """What one request's body takes of the bound for all. Ends with `release`, which may be called
    more than once."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._bytes = 0

    def grow(self, size: int) -> None:
        """Have room for `size` bytes in all. Raises Overloaded if there is none."""
        if size > self._bytes:
            self._bodies.take(size - self._bytes, large=size > _SMALL)
            self._bytes = size

    def release(self) -> None:
        taken, self._bytes = self._bytes, 0
        self._bodies.held -= taken


class Bodies:
    """The bound for all bodies that are held, from their first byte until they are tokens.

    Who finds no room is refused at once, so nobody waits for room while taking some. Small bodies
    have an eighth on top for themselves: no number of large ones keeps them out. Lives on the
    event loop, one for an app.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    def share(self) -> Share:
        return Share(self)

    def take(self, size: int, *, large: bool) -> None:
        """Raises Overloaded."""
        most = self._most if large else self._most + self._most // 8
        if self.held + size > most:
            raise Overloaded(
                f"the bodies of other requests take up the {self._most} bytes that there are for "
                "all; try again"
            )
        self.held += size


async def read_body(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be over `limit` bytes. It counts among all that
    are held until the request is over, or gives up its share.

    Raises:
        RequestTooLarge, Overloaded
    """
    share = share_of(request.scope)
    too_large = RequestTooLarge(f"the body is larger than {limit} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal():
        if int(declared) > limit:
            raise too_large
        share.grow(int(declared))
    body = bytearray()
    async for chunk in request.stream():
        share.grow(len(body) + len(chunk))
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def share_of(scope: Scope) -> Share:
    """The share that the app gave the request."""
    share: Share = scope["mlxsrv.body"]
    return share


class Ignored:
    """Fields of requests that mean nothing here: told in a header, and each once in the log.

    Lives on the event loop, one for an app.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def header(self, names: Sequence[str]) -> dict[str, str]:
        """The header that names these fields, whose names may be anything and any number."""
        if not names:
            return {}
        quoted = [quote(name, safe="[]") for name in names]
        self._log(quoted)
        text = ", ".join(quoted)
        if len(text) > _LONGEST_HEADER:
            text = text[:_LONGEST_HEADER]
            text = text.rpartition(", ")[0] or text
        # A value must not begin or end with a space.
        return {"X-Ignored-Params": text.strip()}

    def _log(self, names: Sequence[str]) -> None:
        for name in names:
            place = _INDEX.sub("[]", name[:_LONGEST_NAME])
            if len(self._logged) < _MOST_LOGGED and place not in self._logged:
                self._logged.add(place)
                log(_log, logging.INFO, "field ignored", name=place)
