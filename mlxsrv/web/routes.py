"""All routes of the app, in one list."""

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
from mlxsrv.web.paths import Endpoint, OperationRoute
from mlxsrv.web.responses import JSONResponse
from mlxsrv.wire import openapi
from mlxsrv.wire.openai.dialects import (
    ChatDialect,
    CompletionDialect,
    FIMDialect,
    InfillDialect,
    LlamaCompletionDialect,
)
from mlxsrv.wire.openai.embeddings import COHERE_RERANK_REQUESTS, RERANK_REQUESTS
from mlxsrv.wire.operations import BY_ID


def make_routes(
    telemetry: Iterable[OperationRoute], *, page: bool, ollama_root: bool
) -> list[BaseRoute]:
    """Return the routes, those of the telemetry included. The first that matches is taken.

    Args:
        page: whether there is a page at `GET /`.
        ollama_root: whether `GET /` says that Ollama is running.
    """
    versioned = [
        _route("createChatCompletion", completions.generating(ChatDialect(), "chat")),
        _route("createCompletion", completions.generating(CompletionDialect(), "text_completion")),
        _route("createFIMCompletion", completions.generating(FIMDialect(), "text_completion")),
        _route("createMessage", messages.create_message),
        _route("countMessageTokens", messages.count_tokens),
        _route("createResponse", responses_api.create_response),
        _route("countInputTokens", responses_api.count_input_tokens),
        _route("getResponse", responses_api.get_response),
        _route("deleteResponse", responses_api.delete_response),
        _route("listInputItems", responses_api.list_input_items),
        _route("createEmbedding", embeddings.embed),
        _route("rerank", embeddings.reranking(RERANK_REQUESTS)),
        _route("score", embeddings.score),
        _route("listModels", status.list_models),
        _route("getModel", status.get_model),
    ]
    return [
        *(Page().routes(browsers_only=ollama_root) if page else ()),
        *versioned,
        *(OperationRoute(each.operation, each.endpoint, unversioned=True) for each in versioned),
        _route("infill", completions.generating(InfillDialect(), "text_completion")),
        _route(
            "llamaCompletion", completions.generating(LlamaCompletionDialect(), "text_completion")
        ),
        _route("rerankAsCohere", embeddings.reranking(COHERE_RERANK_REQUESTS)),
        _route("tokenize", tokens.tokenize),
        _route("detokenize", tokens.detokenize),
        _route("getTokenizerInfo", tokens.tokenizer_info),
        _route("applyTemplate", tokens.apply_template),
        *ollama.make_routes(root=ollama_root),
        *management.ROUTES,
        _route("getHealth", status.health),
        _route("getLiveness", status.live),
        *telemetry,
        _route("getDescription", describe_api),
    ]


def _route(operation_id: str, endpoint: Endpoint) -> OperationRoute:
    """The operation's path and method, answered by `endpoint`."""
    return OperationRoute(BY_ID[operation_id], endpoint)


async def describe_api(request: Request) -> Response:
    """Answer with the OpenAPI document of the routes that this app has."""
    served = [
        (route.operation.method, route.operation.path)
        for route in request.app.routes
        if isinstance(route, OperationRoute) and not route.unversioned
    ]
    return JSONResponse(openapi.document(served, prefix=request.scope.get("root_path", "")))
