"""Paths: where the app is mounted, and which route a request takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from types import ModuleType
from urllib.parse import unquote

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from mlxsrv.wire.operation import Operation

VERSION = "/v1"

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


def speaks_anthropic(scope: Scope) -> bool:
    """Whether the client is one of Anthropic's: some routes, and no route at all, answer in the
    client's own dialect."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


# Routes.

Handler = Callable[[Request], Awaitable[Response]]


class OperationRoute(Route):
    """A route of the API, with its description.

    Args:
        unversioned: the path has no version, for clients whose base URL has none. The API document
            and the metrics show the versioned route instead.
    """

    def __init__(
        self, operation: Operation, handler: Handler, *, unversioned: bool = False
    ) -> None:
        path = operation.path.removeprefix(VERSION) if unversioned else operation.path
        super().__init__(path, handler, methods=[operation.method])
        self.operation = operation
        self.unversioned = unversioned


class Endpoint(Operation, frozen=True):
    """An operation as a decorator: it makes a route of the handler that it stands on."""

    def __call__(self, handler: Handler) -> OperationRoute:
        return OperationRoute(self, handler)


def routes_of(module: ModuleType) -> list[OperationRoute]:
    """Return the routes whose handlers a module declares, in their order."""
    return [each for each in vars(module).values() if isinstance(each, OperationRoute)]


def find_operation(scope: Scope) -> Operation | None:
    """Return the description of the request's route; None if there is no route. A route with
    another method counts if no route has this one."""
    found = scope.get("route")  # Starlette notes it, once it has looked for it
    if isinstance(found, OperationRoute):
        return found.operation
    routes: Iterable[BaseRoute] = scope["app"].routes
    other_method = None
    for route in routes:
        if isinstance(route, OperationRoute):
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return route.operation
            if match is Match.PARTIAL:
                other_method = other_method or route.operation
    return other_method
