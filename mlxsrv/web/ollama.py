"""Handlers of Ollama's API. Those that generate text share the handlers of `completions.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.service.observing import OperationName
from mlxsrv.web.completions import answer, start_reply
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.paths import Endpoint, OperationRoute
from mlxsrv.web.reading import read_request, service_of
from mlxsrv.web.responses import JSONResponse, unless_gone
from mlxsrv.wire.dialect import Dialect
from mlxsrv.wire.ollama.answers import (
    DoneReason,
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaTextAnswer,
    ollama_time,
)
from mlxsrv.wire.ollama.dialects import OllamaChatDialect, OllamaGenerateDialect
from mlxsrv.wire.ollama.durations import read_keep_alive
from mlxsrv.wire.ollama.models import OllamaModels, OllamaVersion, ollama_model
from mlxsrv.wire.ollama.operations import OLLAMA
from mlxsrv.wire.ollama.requests import OllamaChatRequest, OllamaGenerateRequest

R = TypeVar("R", OllamaChatRequest, OllamaGenerateRequest)


def make_routes() -> list[OperationRoute]:
    """Return the routes of Ollama's API."""
    chats = _generating(OllamaChatDialect(), "chat", OllamaChatAnswer)
    texts = _generating(OllamaGenerateDialect(), "text_completion", OllamaTextAnswer)
    endpoints: dict[str, Endpoint] = {
        "ollamaChat": chats,
        "ollamaGenerate": texts,
        "ollamaTags": list_models,
        "ollamaVersion": tell_version,
    }
    return [OperationRoute(operation, endpoints[operation.id]) for operation in OLLAMA]


def _generating(
    dialect: Dialect[R], operation: OperationName, empty: Callable[..., OllamaAnswer]
) -> Endpoint:
    """Return the handler of a route that generates text.

    Args:
        empty: makes the answer to a request that only loads or unloads a model.
    """

    async def endpoint(request: Request) -> Response:
        record_of(request.scope).operation = operation
        asked, headers = await read_request(request, dialect.requests)
        if asked.is_empty:
            reason = await _load(request, asked.model, read_keep_alive(asked.keep_alive))
            told = empty(model=asked.model, created_at=ollama_time(), done=True, done_reason=reason)
            return JSONResponse(told, headers=headers)
        reply = await start_reply(request, dialect.spec(asked), dialect.new_id())
        return answer(dialect, asked, reply, headers)

    return endpoint


async def _load(request: Request, model: str, keep_alive: float | None) -> DoneReason:
    """Load a model or, if it is to be kept for no time, unload it. Raises ServeError."""
    service = service_of(request)
    if keep_alive == 0:
        await service.unload(model)
        return "unload"
    await unless_gone(request.receive, service.load(model, keep_alive))
    return "load"


async def list_models(request: Request) -> Response:
    models = await service_of(request).models()
    return JSONResponse(OllamaModels([ollama_model(model) for model in models]))


async def tell_version(request: Request) -> Response:
    return JSONResponse(OllamaVersion())
