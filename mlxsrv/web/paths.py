"""Paths: where the app is mounted, and which route a request takes."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

from starlette.datastructures import QueryParams
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

_VERSION = "/v1"

# Where a request is.


def place(scope: Scope, root_path: str) -> dict[str, str]:
    """Return the request's `path` and `root_path` as ASGI defines them: the whole path as the
    client sees it, and the part of it that leads to the app.

    Litestar gives a mounted app only the path below it, with a slash at its end, and leaves
    `root_path` as it was; `raw_path` still has the whole path then. A proxy in front may have
    removed `root_path` from all of them.
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


def path_below_mount(scope: Scope) -> str:
    """The path as the app's own routes name it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_verbose(scope: Scope) -> bool:
    """Whether the query asks `/health` for names and numbers, which needs a key."""
    value: str = QueryParams(scope["query_string"]).get("verbose", "0")
    return value not in ("", "0", "false")


# Routes.


class UnversionedRoute(Route):
    """A route without the version in its path, for clients whose base URL has none.

    The API document and the metrics show the versioned route instead.
    """

    def __init__(self, versioned: Route) -> None:
        super().__init__(
            versioned.path.removeprefix(_VERSION), versioned.endpoint, methods=versioned.methods
        )
        self.versioned = versioned


def find_route(scope: Scope) -> str:
    """Return the path pattern of the request's route, such as `/v1/models/{id:path}`; "" if there
    is none. A route with another method counts if no route has this one."""
    routes: Iterable[BaseRoute] = scope["app"].routes
    other_method = ""
    for route in routes:
        if isinstance(route, Route):
            match, _ = route.matches(scope)
            path = route.versioned.path if isinstance(route, UnversionedRoute) else route.path
            if match is Match.FULL:
                return path
            if match is Match.PARTIAL:
                other_method = other_method or path
    return other_method
