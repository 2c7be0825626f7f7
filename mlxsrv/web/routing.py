"""Paths: where the app is, and which route a request takes."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

_VERSION = "/v1"

# Where a request is.


def place(scope: Scope, root_path: str) -> dict[str, str]:
    """The request's `path` and `root_path` as ASGI wants them: the whole path as the client sees
    it, and what of that leads to the app.

    Litestar gives a mounted app only the path below it, with a slash at its end, and leaves
    `root_path` as it was; `raw_path` then still has all of it. A proxy in front may have taken
    `root_path` off all of them.
    """
    mount: str = scope.get("root_path", "")
    path: str = scope["path"].rstrip("/")
    below = path[len(mount) :] if _leads_to(mount, path) else path
    whole = unquote((scope.get("raw_path") or b"").partition(b"?")[0]).rstrip("/")
    before = whole.removesuffix(below) if whole.endswith(below) else ""
    prefix = root_path.rstrip("/") + (before if _leads_to(mount, before) else mount + before)
    return {"root_path": prefix, "path": prefix + (below or "/")}


def _leads_to(mount: str, path: str) -> bool:
    return f"{path}/".startswith(f"{mount}/")


# Routes.


class Alias(Route):
    """A route without the version in its path, for clients whose base URL has none. It is
    described and counted as the route that it stands for."""

    def __init__(self, of: Route) -> None:
        super().__init__(of.path.removeprefix(_VERSION), of.endpoint, methods=of.methods)
        self.of = of


def aliases(routes: Iterable[Route]) -> list[Alias]:
    return [Alias(route) for route in routes if route.path.startswith(_VERSION)]


def find_route(scope: Scope) -> str:
    """The path as it is served, its parameters unfilled; "" where there is none."""
    routes: Iterable[BaseRoute] = scope["app"].routes
    beside = ""
    for route in routes:
        if isinstance(route, Route):
            match, _ = route.matches(scope)
            path = route.of.path if isinstance(route, Alias) else route.path
            if match is Match.FULL:
                return path
            if match is Match.PARTIAL:
                beside = beside or path
    return beside
