"""All routes of the app, in one list."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxsrv.web import completions, embeddings, management, status, tokens
from mlxsrv.web.paths import UnversionedRoute
from mlxsrv.web.responses import JSONResponse
from mlxsrv.wire import openapi


def make_routes(telemetry: Iterable[Route]) -> list[Route]:
    """Return the routes, those of the telemetry included. The first that matches is taken."""
    versioned = [
        Route("/v1/chat/completions", completions.chat_completions, methods=["POST"]),
        Route("/v1/completions", completions.text_completions, methods=["POST"]),
        Route("/v1/embeddings", embeddings.embed, methods=["POST"]),
        Route("/v1/rerank", embeddings.rerank, methods=["POST"]),
        Route("/v1/score", embeddings.score, methods=["POST"]),
        Route("/v1/models", status.list_models),
        Route("/v1/models/{id:path}", status.get_model),
    ]
    return [
        *versioned,
        *map(UnversionedRoute, versioned),
        Route("/infill", completions.infill, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokens.tokenizer_info),
        Route("/apply-template", tokens.apply_template, methods=["POST"]),
        *management.ROUTES,
        Route("/health", status.health),
        Route("/health/live", status.live),
        *telemetry,
        Route("/openapi.json", describe_api),
    ]


async def describe_api(request: Request) -> Response:
    """Answer with the OpenAPI document of the routes that this app has."""
    served = [
        (method, route.path)
        for route in request.app.routes
        if not isinstance(route, UnversionedRoute)
        for method in sorted(route.methods - {"HEAD"})
    ]
    return JSONResponse(openapi.document(served, prefix=request.scope.get("root_path", "")))
