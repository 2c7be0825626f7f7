"""The guard: middleware that refuses a request before anything is spent on it.

It checks, in this order: the size of the headers, how the body is framed, the host name, the
origin, the rate limit and the API key. It also limits the time that the body may take to arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxsrv.errors import (
    HeadersTooLarge,
    InvalidHTTP,
    RateLimited,
    RequestTimeout,
    ServeError,
)
from mlxsrv.settings import Settings
from mlxsrv.web.page.serving import is_page
from mlxsrv.web.paths import is_verbose, path_below_mount
from mlxsrv.web.responses import refusal
from mlxsrv.web.security.api_keys import APIKeys, invalid_key
from mlxsrv.web.security.clients import client_address, note_sender
from mlxsrv.web.security.headers import MOST_HEADER_BYTES, RequestHeaders, adding_headers
from mlxsrv.web.security.hosts import AllowedHosts
from mlxsrv.web.security.origins import AllowedOrigins, is_preflight, preflight_response
from mlxsrv.web.security.rates import Allowance, RateLimit

TakeRequest = Callable[[Hashable], Awaitable[Allowance]]
"""Counts a request of a client. May raise StoreFailed."""


class Guard:
    """Lets a request through to the app, or answers it with an error.

    Args:
        take: counts requests for several processes together; None: this one counts its own.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        keys: APIKeys,
        origins: AllowedOrigins,
        *,
        local: bool,
        take: TakeRequest | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._origins = origins
        self._hosts = AllowedHosts(settings, local=local)
        self._take = take
        self._rates = None if settings.rate_limit is None else RateLimit(settings.rate_limit)
        self._page = settings.page == "on"
        self._root = self._page or settings.ollama_root
        self._body_timeout = settings.body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            _check_size(scope)
            _check_framing(headers)
            self._hosts.check(headers)
            self._origins.check(scope, headers)
            if is_preflight(scope, headers):
                await preflight_response(headers)(scope, receive, send)
                return
            if not self._is_open(scope):
                key = self._keys.key_of(headers)
                if self._rates is not None:
                    # A wrong key counts for the address, so that guessing has an end.
                    taker = client_address(scope) if key is None else key.digest
                    if self._take is None:
                        allowance = self._rates.take(taker)
                    else:
                        allowance = await self._take(taker)
                    send = adding_headers(send, allowance.headers)
                    _check_rate(allowance)
                if self._keys and key is None:
                    raise invalid_key(headers)
                note_sender(scope, key, keys=len(self._keys))
        except ServeError as error:
            await refusal(scope, error)(scope, receive, send)
            return
        if scope["method"] not in ("GET", "HEAD"):
            receive = _within(self._body_timeout, receive)
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        """Whether the request needs no key: it asks only whether the server is well or is there, or
        for a file of the page, in which the key is then given."""
        path = path_below_mount(scope)
        if path == "/health":
            return not is_verbose(scope)
        if path == "/health/live":
            return True
        return is_page(scope) and (self._root if path == "/" else self._page)


def _check_size(scope: Scope) -> None:
    size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    for name, value in scope["headers"]:
        size += len(name) + len(value)
    if size > MOST_HEADER_BYTES:
        raise HeadersTooLarge(
            f"the request's line and headers are larger than {MOST_HEADER_BYTES} bytes"
        )


def _check_framing(headers: RequestHeaders) -> None:
    """Refuse two headers that say where the body ends: a proxy in front may follow the other."""
    if b"transfer-encoding" in headers and b"content-length" in headers:
        raise InvalidHTTP("a request must not have both Content-Length and Transfer-Encoding")


def _check_rate(allowance: Allowance) -> None:
    if allowance.wait is not None:
        raise RateLimited(f"more than {allowance.limit} requests a minute; see Retry-After")


def _within(seconds: float, receive: Receive) -> Receive:
    """Return a `receive` that raises RequestTimeout if the whole body has not arrived in `seconds`.

    After the body it waits for the disconnect as long as that takes.
    """
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
