"""Headers of requests and answers, as the rules and middleware of this package handle them."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

MOST_HEADER_BYTES = 64 * 1024  # of a request: its line and its headers

RequestHeaders = Mapping[bytes, bytes]
"""Headers by their names in lower case."""


def adding_headers(send: Send, headers: Mapping[str, str]) -> Send:
    """Return a `send` that adds `headers` to the response."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return send_with_headers
