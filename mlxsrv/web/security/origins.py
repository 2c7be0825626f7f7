"""Origins of web pages: which pages may use the server, and the CORS headers for them.

A web page can make its reader's browser send requests to a server on localhost, past any firewall.
But a browser sends the page's Origin with every request that changes something, and with every
request whose answer the page could read. A request with a foreign Origin is refused, because a
generation costs as much if nobody reads it. What a page loads without an Origin (images, scripts,
frames) is a GET whose answer the page never sees, and a GET changes nothing here. Browsers mark
such a request with Sec-Fetch-Site, and it is refused as well. Programs that are not browsers send
neither header, and pass.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxsrv.errors import OriginNotAllowed
from mlxsrv.settings import Settings
from mlxsrv.web.security.headers import RequestHeaders, adding_headers

_FOREIGN = (b"cross-site", b"same-site")  # another port is the same site
_PREFLIGHT_SECONDS = 600

_CORS_HEADERS = {
    "Access-Control-Expose-Headers": "Retry-After, X-Ignored-Params, X-RateLimit-Limit-Requests, "
    "X-RateLimit-Remaining-Requests, X-RateLimit-Reset-Requests, X-Request-ID, request-id",
}


class AllowedOrigins:
    """The origins of pages that may use the server, besides its own."""

    def __init__(self, settings: Settings) -> None:
        self._origins = frozenset(origin.lower().rstrip("/") for origin in settings.allowed_origin)

    def check(self, scope: Scope, headers: RequestHeaders) -> None:
        """Raises OriginNotAllowed."""
        if "*" in self._origins:
            return
        origin = headers.get(b"origin")
        if origin is not None:
            page = origin.decode("latin-1").lower()
            host = headers.get(b"host", b"").decode("latin-1").lower()
            allowed = page in self._origins or _is_same(page, host)
        else:
            # Where the user follows a link, the user sees the answer, and the page does not.
            allowed = headers.get(b"sec-fetch-site") not in _FOREIGN or _is_visit(scope, headers)
        if not allowed:
            raise OriginNotAllowed(
                "a web page of another origin may not use this server; "
                "--allowed-origin ORIGIN allows one"
            )

    def cors_headers(self, origin: bytes | None) -> dict[str, str]:
        """The headers of an answer to a request with this Origin."""
        if "*" in self._origins:
            return {"Access-Control-Allow-Origin": "*", **_CORS_HEADERS}
        page = "" if origin is None else origin.decode("latin-1")
        if page.lower() not in self._origins:
            return {"Vary": "Origin"}
        return {"Access-Control-Allow-Origin": page, "Vary": "Origin", **_CORS_HEADERS}


def _is_same(origin: str, host: str) -> bool:
    """Whether a page of `origin` came from `host`. The scheme may differ, where a proxy in front
    ends TLS."""
    scheme, _, authority = origin.partition("://")
    default = {"http": ":80", "https": ":443"}.get(scheme, "")
    return bool(authority) and host in (authority, authority + default)


def _is_visit(scope: Scope, headers: RequestHeaders) -> bool:
    fetched = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest"))
    return scope["method"] in ("GET", "HEAD") and fetched == (b"navigate", b"document")


class Cors:
    """Middleware that lets pages of allowed origins read every answer, errors included.

    Starlette's own middleware would do this and answer preflights. But its refusals are plain text
    without a log line, and the guard has to check origins anyway.
    """

    def __init__(self, app: ASGIApp, origins: AllowedOrigins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            origin = dict(scope["headers"]).get(b"origin")
            send = adding_headers(send, self._origins.cors_headers(origin))
        await self._app(scope, receive, send)


def is_preflight(scope: Scope, headers: RequestHeaders) -> bool:
    """Whether a browser asks if a page may send a request. A preflight cannot carry a key."""
    return (
        scope["method"] == "OPTIONS"
        and b"origin" in headers
        and b"access-control-request-method" in headers
    )


def preflight_response(headers: RequestHeaders) -> Response:
    """The answer to a preflight of an allowed origin; `Cors` adds the origin to it."""
    asked = headers.get(b"access-control-request-headers", b"").decode("latin-1")
    allowed = {
        "Access-Control-Allow-Methods": "DELETE, GET, HEAD, PATCH, POST, PUT",
        "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
        "Cache-Control": "no-store",
    }
    if asked:
        allowed["Access-Control-Allow-Headers"] = asked
    if headers.get(b"access-control-request-private-network") == b"true":
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=allowed)
