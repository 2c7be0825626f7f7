"""Who may use the server: which keys, which web pages, under which names, and how often.

A web page can make its reader's browser send requests to a server on localhost, which no firewall
sees. What it cannot do is to lie about itself: a browser sends the page's Origin with every request
that changes anything or whose answer the page could read. So a foreign Origin is refused, not only
kept from reading the answer, since a generation costs as much unread. What a page fetches without
an Origin (images, scripts, frames) is a GET whose answer it never sees, and GETs change nothing
here; browsers mark it with Sec-Fetch-Site, and it is refused as well. Programs that are no browsers
send none of these, and pass.

A page can also have its own host name point at 127.0.0.1 (DNS rebinding), and is of the same origin
then. But the name stays in Host: a server that listens on loopback answers to names of the machine
alone. An address in Host is no name that anybody could point elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxsrv.errors import (
    HeadersTooLarge,
    HostNotAllowed,
    InvalidAPIKey,
    InvalidHTTP,
    OriginNotAllowed,
    RateLimited,
    RequestTimeout,
    ServeError,
)
from mlxsrv.logs import log
from mlxsrv.settings import Settings, SettingsError
from mlxsrv.web.paths import is_verbose, path_below_mount
from mlxsrv.web.responses import refusal
from mlxsrv.web.security.rates import Allowance, RateLimit

_log = logging.getLogger("mlxsrv.security")

MOST_HEADER_BYTES = 64 * 1024

RequestHeaders = Mapping[bytes, bytes]

# Names by which a container knows the machine that it runs on are as good as localhost.
_LOCAL_NAMES = ("localhost", "host.docker.internal", "host.containers.internal")

_CORS_HEADERS = {
    "Access-Control-Expose-Headers": "Retry-After, X-Ignored-Params, X-RateLimit-Limit-Requests, "
    "X-RateLimit-Remaining-Requests, X-RateLimit-Reset-Requests, X-Request-ID",
}
_PREFLIGHT_SECONDS = 600


# Keys.


class Keys:
    """The keys that are good, as digests: nothing here can tell one."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = sorted({_digest(key.encode()) for key in keys})

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, headers: RequestHeaders) -> bytes | None:
        """The digest of the good key that a request brings, if it does.

        The time it takes says nothing of how much of a key is right, or of which key it is.
        """
        good = None
        for given in _given_keys(headers):
            digest, known = _digest(given), False
            for one in self._digests:
                known |= hmac.compare_digest(digest, one)
            good = digest if known else good
        return good


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _given_keys(headers: RequestHeaders) -> list[bytes]:
    scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    bearer = credentials.strip() if scheme.lower() == b"bearer" else b""
    return [key for key in (bearer, headers.get(b"x-api-key", b"")) if key]


def load_keys(settings: Settings) -> Keys:
    """All keys of the settings.

    Raises:
        SettingsError: the file cannot be read, holds no key, or a line that is none. What it holds
            is not told.
    """
    keys = [*settings.api_key]
    if settings.api_key_file is not None:
        keys += _read_keys(Path(settings.api_key_file).expanduser())
    return Keys(keys)


def _read_keys(path: Path) -> list[str]:
    try:
        readable_by_all = path.stat().st_mode & stat.S_IROTH
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SettingsError(f"--api-key-file {path}: {why}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        key, _, rest = line.strip().partition(" ")
        if not key or key.startswith("#"):
            continue
        printable = key.isascii() and key.isprintable()
        if not printable or not (not rest.strip() or rest.strip().startswith("#")):
            raise SettingsError(f"--api-key-file {path}: line {number} is not a key")
        keys.append(key)
    if not keys:
        raise SettingsError(f"--api-key-file {path}: there is no key in it")
    if readable_by_all:
        log(_log, logging.WARNING, "api key file can be read by every user", path=str(path))
    return keys


# Requests.


class Guard:
    """Refuses who may not, before anything is spent on them.

    `local`: the server listens on loopback only. Where the app is mounted its parent knows that,
    and may have checked Host itself.
    """

    def __init__(self, app: ASGIApp, settings: Settings, keys: Keys, *, local: bool) -> None:
        self._app = app
        self._keys = keys
        self._origins = _origins(settings)
        self._names = {*_LOCAL_NAMES, *(name.lower() for name in settings.allowed_host)}
        self._checks_host = (local or bool(settings.allowed_host)) and "*" not in self._names
        self._rates = None if settings.rate_limit is None else RateLimit(settings.rate_limit)
        self._body_timeout = settings.body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            _check_size(scope)
            _check_framing(headers)
            self._check_host(headers)
            self._check_origin(scope, headers)
            if _is_preflight(scope, headers):
                await _preflight(headers)(scope, receive, send)
                return
            allowance = None if _is_open(scope) else self._admit(scope, headers)
        except Refused as refused:
            await refusal(scope, refused.error, refused.headers)(scope, receive, send)
            return
        if allowance is not None:
            send = _with_headers(send, allowance.headers)
        if scope["method"] not in ("GET", "HEAD"):
            receive = _in_time(receive, self._body_timeout)
        await self._app(scope, receive, send)

    def _check_host(self, headers: RequestHeaders) -> None:
        host = headers.get(b"host")
        if not self._checks_host or host is None:  # no browser leaves it out
            return
        name = _host_name(host.decode("latin-1"))
        if name not in self._names and not name.endswith(".localhost") and not _is_address(name):
            raise Refused(
                HostNotAllowed(
                    "this server listens on loopback and does not answer to the host name of this "
                    "request; --allowed-host NAME allows another name"
                )
            )

    def _check_origin(self, scope: Scope, headers: RequestHeaders) -> None:
        if "*" in self._origins:
            return
        origin = headers.get(b"origin")
        if origin is not None:
            told = origin.decode("latin-1").lower()
            host = headers.get(b"host", b"").decode("latin-1").lower()
            allowed = told in self._origins or _is_same(told, host)
        else:
            # The user followed a link, and sees the answer: the page that has it does not.
            allowed = headers.get(b"sec-fetch-site") not in _FOREIGN or _is_visit(scope, headers)
        if not allowed:
            raise Refused(
                OriginNotAllowed(
                    "a web page of another origin may not use this server; "
                    "--allowed-origin ORIGIN allows one"
                )
            )

    def _admit(self, scope: Scope, headers: RequestHeaders) -> Allowance | None:
        """What the client has left after this request, if there is a limit."""
        key = self._keys.find(headers) if self._keys else None
        allowance = None
        if self._rates is not None:
            # Wrong keys count for the address, so that guessing has an end.
            allowance = self._rates.take(_address(scope) if key is None else key)
            if allowance.wait is not None:
                many = f"more than {allowance.limit} requests a minute"
                raise Refused(RateLimited(f"{many}; see Retry-After"), allowance.headers)
        if self._keys and key is None:
            told = allowance.headers if allowance is not None else {}
            raise Refused(
                InvalidAPIKey(
                    "the API key of this request is not one of this server's"
                    if _given_keys(headers)
                    else "this server needs an API key: Authorization: Bearer KEY"
                ),
                {"WWW-Authenticate": "Bearer", **told},
            )
        return allowance


class Refused(Exception):
    """A refusal and the headers that go with it."""

    def __init__(self, error: ServeError, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.headers = headers


_FOREIGN = (b"cross-site", b"same-site")  # the same site may be another port


def _origins(settings: Settings) -> frozenset[str]:
    return frozenset(origin.lower().rstrip("/") for origin in settings.allowed_origin)


def _is_same(origin: str, host: str) -> bool:
    """Whether a page of `origin` came from `host`. The scheme may differ where TLS ends before
    us."""
    scheme, _, authority = origin.partition("://")
    default = {"http": ":80", "https": ":443"}.get(scheme, "")
    return bool(authority) and host in (authority, authority + default)


def _is_visit(scope: Scope, headers: RequestHeaders) -> bool:
    fetched = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest"))
    return scope["method"] in ("GET", "HEAD") and fetched == (b"navigate", b"document")


def _host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    name, colon, port = host.lower().rpartition(":")
    named = name if colon and port.isdecimal() else host.lower()
    return named.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_open(scope: Scope) -> bool:
    """Whether anybody may ask: whether the server is well, but not what it holds and does."""
    below = path_below_mount(scope)
    return below == "/health/live" or (below == "/health" and not is_verbose(scope))


def _check_size(scope: Scope) -> None:
    size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    for name, value in scope["headers"]:
        size += len(name) + len(value)
    if size > MOST_HEADER_BYTES:
        what = f"the request's line and headers are larger than {MOST_HEADER_BYTES} bytes"
        raise Refused(HeadersTooLarge(what))


def _check_framing(headers: RequestHeaders) -> None:
    """Where two headers say where the body ends, a proxy before us may believe the other one."""
    if b"transfer-encoding" in headers and b"content-length" in headers:
        what = "a request has either Content-Length or Transfer-Encoding"
        raise Refused(InvalidHTTP(what), {"Connection": "close"})


def _address(scope: Scope) -> str:
    """The client's address; of IPv6 the network, in which it may have any address it likes."""
    host: str = scope["client"][0] if scope.get("client") else ""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.IPv6Network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return send_with_headers


def _in_time(receive: Receive, seconds: float) -> Receive:
    """`receive`, but it raises RequestTimeout if the whole body is not there in time. Whoever
    waits for the disconnect afterwards waits as long as it takes."""
    deadline = asyncio.get_running_loop().time() + seconds
    arriving = True

    async def receive_in_time() -> Message:
        nonlocal arriving
        if not arriving:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise RequestTimeout(f"the body did not arrive within {seconds:g} s") from None
        arriving = message.get("more_body", False)
        return message

    return receive_in_time


# What browsers are told of allowed origins.


class Cors:
    """Lets pages of allowed origins read answers, refusals and bugs included.

    Starlette's own would do this and preflights; but its refusals are plain text without a log
    line, and the guard has to judge origins anyway.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._origins = _origins(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = _with_headers(send, self._headers(dict(scope["headers"]).get(b"origin")))
        await self._app(scope, receive, send)

    def _headers(self, origin: bytes | None) -> dict[str, str]:
        if "*" in self._origins:
            return {"Access-Control-Allow-Origin": "*", **_CORS_HEADERS}
        told = "" if origin is None else origin.decode("latin-1")
        if told.lower() not in self._origins:
            return {"Vary": "Origin"}
        return {"Access-Control-Allow-Origin": told, "Vary": "Origin", **_CORS_HEADERS}


def _is_preflight(scope: Scope, headers: RequestHeaders) -> bool:
    """Whether a browser asks if a page may ask; such a question cannot bring a key."""
    return (
        scope["method"] == "OPTIONS"
        and b"origin" in headers
        and b"access-control-request-method" in headers
    )


def _preflight(headers: RequestHeaders) -> Response:
    """The answer for an origin that has been allowed; `Cors` names it."""
    asked = headers.get(b"access-control-request-headers", b"").decode("latin-1")
    told = {
        "Access-Control-Allow-Methods": "DELETE, GET, HEAD, PATCH, POST, PUT",
        "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
        "Cache-Control": "no-store",
    }
    if asked:
        told["Access-Control-Allow-Headers"] = asked
    if headers.get(b"access-control-request-private-network") == b"true":
        told["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=told)
