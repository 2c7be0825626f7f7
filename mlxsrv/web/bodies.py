"""Bodies of requests: read within bounds, and the names of the fields that were ignored."""

from __future__ import annotations

import logging
import re
from collections.abc import MutableMapping, Sequence
from urllib.parse import quote

from starlette.requests import Request
from starlette.types import Scope

from mlxsrv.errors import Overloaded, RequestTooLarge
from mlxsrv.logs import log
from mlxsrv.models.pool.clients import Turnover

_log = logging.getLogger("mlxsrv.web")

_SMALL = 64 * 1024  # bytes of a body
_LONGEST_HEADER = 2048
_LONGEST_NAME = 100  # in the log
_MOST_LOGGED = 1000
_INDEX = re.compile(r"\[\d+\]")


class BodyShare:
    """The part of the bound for all bodies that one request's body takes.

    `release` gives it back, and may be called more than once.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._bytes = 0

    @property
    def size(self) -> int:
        """The number of bytes that it has now."""
        return self._bytes

    def grow(self, size: int) -> None:
        """Make the share `size` bytes large. Raises Overloaded if it does not fit."""
        if size > self._bytes:
            self._bodies.take(size - self._bytes, large=size > _SMALL)
            self._bytes = size

    def release(self) -> None:
        taken, self._bytes = self._bytes, 0
        if taken:
            self._bodies.give_back(taken)


class Bodies:
    """The bound for all bodies that an app holds, from their first byte until they are tokens.

    A body that does not fit is refused at once, so no body waits for memory while it takes some. An
    eighth more is for small bodies only, so large ones cannot keep them out. The event loop owns
    it.

    Args:
        most: bytes that all bodies may have together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._turnover = Turnover()

    @property
    def held(self) -> int:
        """Bytes."""
        return self._turnover.held

    def share(self) -> BodyShare:
        return BodyShare(self)

    def take(self, size: int, *, large: bool) -> None:
        """Raises Overloaded."""
        most = self._most if large else self._most + self._most // 8
        missing = self.held + size - most
        if missing > 0:
            raise Overloaded(
                f"the bodies of other requests take up the {self._most} bytes that all may have "
                "together; try again",
                retry_after=self._turnover.seconds(missing),
            )
        self._turnover.borrow(size)

    def give_back(self, size: int) -> None:
        self._turnover.give_back(size)


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body. It counts for `Bodies` until the request is over or releases its share.

    Raises:
        RequestTooLarge: it has more than `limit` bytes, which Content-Length may already say.
        Overloaded: it does not fit beside the others.
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


def share_of(scope: Scope) -> BodyShare:
    """The share that the app gave the request."""
    share: BodyShare = scope["mlxsrv.body"]
    return share


_IGNORED = "X-Ignored-Params"


class IgnoredFields:
    """Fields of requests that have no effect here: named in a header, and each once in the log.

    An app has one; the event loop owns it.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def header(self, names: Sequence[str]) -> dict[str, str]:
        """The header that names these fields. Clients choose the names, and how many there are."""
        if not names:
            return {}
        quoted = [quote(name, safe="[]") for name in names]
        self._log(quoted)
        text = ", ".join(quoted)
        if len(text) > _LONGEST_HEADER:
            text = text[:_LONGEST_HEADER]
            text = text.rpartition(", ")[0] or text
        # A value must not begin or end with a space.
        return {_IGNORED: text.strip()}

    def add_to(self, headers: MutableMapping[str, str], names: Sequence[str]) -> None:
        """Name more fields in the header of a response."""
        for text in self.header(names).values():
            named = headers.get(_IGNORED)
            headers[_IGNORED] = f"{named}, {text}" if named else text

    def _log(self, names: Sequence[str]) -> None:
        for name in names:
            path = _INDEX.sub("[]", name[:_LONGEST_NAME])
            if len(self._logged) < _MOST_LOGGED and path not in self._logged:
                self._logged.add(path)
                log(_log, logging.INFO, "field ignored", name=path)
