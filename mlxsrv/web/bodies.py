"""Bodies of requests: read within bounds, and told what of them meant nothing."""

from __future__ import annotations

from urllib.parse import quote

from starlette.requests import Request

from mlxsrv.errors import RequestTooLarge

_LONGEST_HEADER = 2048


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


def ignored_header(names: list[str]) -> dict[str, str]:
    """The header that names ignored fields, whose names may be anything and any number."""
    if not names:
        return {}
    text = ", ".join(quote(name, safe="") for name in names)
    # A value must not begin or end with a space, which is where one may be cut.
    return {"X-Ignored-Params": text[:_LONGEST_HEADER].strip()}
