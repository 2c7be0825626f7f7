"""All routes of the app, in the order in which they are tried: the first that matches is taken."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from mlxsrv.web import (
    completions,
    embeddings,
    management,
    messages,
    ollama,
    responses_api,
    status,
    tokens,
)
from mlxsrv.web.page.serving import Page
from mlxsrv.web.paths import VERSION, Endpoint, OperationRoute, routes_of
from mlxsrv.web.responses import JSONResponse
from mlxsrv.wire import openapi

_MODULES = (
    completions,
    messages,
    responses_api,
    embeddings,
    tokens,
    ollama,
    management,
    status,
)


def make_routes(
    telemetry: Iterable[OperationRoute], *, page: bool, ollama_root: bool
) -> list[BaseRoute]:
    """Return the routes, those of the telemetry included.

    Args:
        page: whether there is a page at `GET /`.
        ollama_root: whether `GET /` says that Ollama is running.
    """
    declared = [each for module in _MODULES for each in routes_of(module)]
    versioned = [each for each in declared if each.path.startswith(f"{VERSION}/")]
    others = [each for each in declared if each not in versioned]
    return [
        *(Page().routes(browsers_only=ollama_root) if page else ()),
        *versioned,
        *(OperationRoute(each.operation, each.endpoint, unversioned=True) for each in versioned),
        *(each for each in others if ollama_root or each is not ollama.root),
        *telemetry,
        describe_api,
    ]


@Endpoint("GET", "/openapi.json", "getDescription", "Get this document")
async def describe_api(request: Request) -> Response:
    """Answer with the OpenAPI document of the routes that this app has."""
    served = [
        route.operation
        for route in request.app.routes
        if isinstance(route, OperationRoute) and not route.unversioned
    ]
    return JSONResponse(openapi.document(served, prefix=request.scope.get("root_path", "")))
