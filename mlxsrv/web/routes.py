"""All routes of the app, in one list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxsrv.web import completions, embeddings, management, status, tokens
from mlxsrv.web.paths import UnversionedRoute
from mlxsrv.web.responses import JSONResponse
from mlxsrv.wire import openapi
from mlxsrv.wire.operations import BY_ID


def make_routes(telemetry: Iterable[Route]) -> list[Route]:
    """Return the routes, those of the telemetry included. The first that matches is taken."""
    versioned = [
        _route("createChatCompletion", completions.chat_completions),
        _route("createCompletion", completions.text_completions),
        _route("createEmbedding", embeddings.embed),
        _route("rerank", embeddings.rerank),
        _route("score", embeddings.score),
        _route("listModels", status.list_models),
        _route("getModel", status.get_model),
    ]
    return [
        *versioned,
        *map(UnversionedRoute, versioned),
        _route("infill", completions.infill),
        _route("tokenize", tokens.tokenize),
        _route("detokenize", tokens.detokenize),
        _route("getTokenizerInfo", tokens.tokenizer_info),
        _route("applyTemplate", tokens.apply_template),
        *management.ROUTES,
        _route("getHealth", status.health),
        _route("getLiveness", status.live),
        *telemetry,
        _route("getDescription", describe_api),
    ]


def _route(operation_id: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    """The operation's path and method, answered by `endpoint`."""
    operation = BY_ID[operation_id]
    return Route(operation.path, endpoint, methods=[operation.method])


async def describe_api(request: Request) -> Response:
    """Answer with the OpenAPI document of the routes that this app has."""
    served = [
        (method, route.path)
        for route in request.app.routes
        if not isinstance(route, UnversionedRoute)
        for method in sorted(route.methods - {"HEAD"})
    ]
    return JSONResponse(openapi.document(served, prefix=request.scope.get("root_path", "")))
