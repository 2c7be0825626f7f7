"""Serve the page: one HTML file, and the modules and styles that it names.

The files are read once, when the app is made, and each is answered with its ETag, so that a
browser asks again after an upgrade and downloads only what has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from urllib.parse import quote

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from mlxsrv.errors import RouteNotFound
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.paths import path_below_mount

_FOLDER = "/page/"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PREFIX = b"{{prefix}}"  # stands in the HTML where the path of the mount belongs

# What a model writes is shown as text nodes. If a bug of the page let it become more than text,
# the browser would neither run nor fetch it.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFile(Struct, frozen=True):
    content: bytes
    media_type: str
    etag: str


class Page:
    """The page's files, by name."""

    def __init__(self) -> None:
        folder = files("mlxsrv.web.page") / "files"
        self._html = (folder / "index.html").read_bytes()
        self._files = {
            each.name: _page_file(each.read_bytes(), each.name)
            for each in folder.iterdir()
            if not each.name.startswith(".") and each.name != "index.html"
        }

    def routes(self, *, browsers_only: bool) -> list[BaseRoute]:
        """Return the routes of the page.

        Args:
            browsers_only: whether `GET /` is left to another route if it is no browser that asks.
        """
        index = _BrowserRoute if browsers_only else Route
        return [
            index("/", self.index, methods=["GET"]),
            Route(_FOLDER + "{name}", self.file, methods=["GET"]),
        ]

    async def index(self, request: Request) -> Response:
        """The HTML, with the path of the mount in its links."""
        # A client may choose a part of this path, where a parent passes all paths on. A quote in it
        # would end that of the HTML, or that of a command which the page makes.
        prefix = quote(request.scope.get("root_path", ""), safe="/%")
        html = self._html.replace(_PREFIX, prefix.encode())
        # Where others than browsers get another answer here, a cache must not mix the two.
        return _answer(request, _page_file(html, "index.html"), {"Vary": "Accept"})

    async def file(self, request: Request) -> Response:
        found = self._files.get(request.path_params["name"])
        if found is None:
            raise RouteNotFound(f"there is no {request.url.path} here")
        return _answer(request, found, {})


def is_page(scope: Scope) -> bool:
    """Whether the request asks for a file of the page, if there is one."""
    path = path_below_mount(scope)
    return scope["method"] in ("GET", "HEAD") and (path == "/" or path.startswith(_FOLDER))


class _BrowserRoute(Route):
    """Matches a request that accepts HTML by name, as browsers do."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if "text/html" in Headers(scope=scope).get("accept", ""):
            return super().matches(scope)
        return Match.NONE, {}


def _page_file(content: bytes, name: str) -> PageFile:
    suffix = name[name.rindex(".") :]
    digest = hashlib.sha256(content).hexdigest()[:32]
    return PageFile(content, _TYPES[suffix], f'"{digest}"')


def _answer(request: Request, found: PageFile, more: Mapping[str, str]) -> Response:
    record_of(request.scope).quiet = True
    headers = {**_HEADERS, **more, "ETag": found.etag}
    asked = request.headers.get("if-none-match", "")
    if found.etag in (tag.strip().removeprefix("W/") for tag in asked.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)
