"""Bodies of requests: read within bounds, and told what of them meant nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from urllib.parse import quote

from starlette.requests import Request

from mlxsrv.errors import RequestTooLarge
from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.web")

_LONGEST_HEADER = 2048
_LONGEST_NAME = 100  # in the log
_MOST_LOGGED = 1000
_INDEX = re.compile(r"\[\d+\]")


async def read_body(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be over `limit` bytes."""
    too_large = RequestTooLarge(f"the body is larger than {limit} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


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
