"""Handlers of Ollama's API. Those that generate text share the handlers of `completions.py`."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TypeVar

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mlxsrv.errors import ActionNotAllowed
from mlxsrv.generation.texts import EmbeddingSpec, TextVectors
from mlxsrv.service.observing import OperationName
from mlxsrv.web.completions import answer, start_reply
from mlxsrv.web.embeddings import compute
from mlxsrv.web.middleware import request_id
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.paths import Endpoint, OperationRoute
from mlxsrv.web.pulls import pull_model
from mlxsrv.web.reading import note_asked, read_request, service_of
from mlxsrv.web.responses import JSONResponse, large_json, unless_gone
from mlxsrv.web.security.clients import client_of
from mlxsrv.wire.dialect import Dialect
from mlxsrv.wire.ollama.answers import (
    DoneReason,
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaTextAnswer,
    nanoseconds,
    ollama_time,
)
from mlxsrv.wire.ollama.dialects import OllamaChatDialect, OllamaGenerateDialect
from mlxsrv.wire.ollama.durations import read_keep_alive
from mlxsrv.wire.ollama.models import (
    OllamaModels,
    OllamaRunning,
    OllamaVersion,
    ollama_model,
    running_model,
    shown_model,
)
from mlxsrv.wire.ollama.operations import OLLAMA
from mlxsrv.wire.ollama.requests import (
    OLLAMA_EMBEDS,
    OLLAMA_OLD_EMBEDS,
    OLLAMA_SHOWS,
    OllamaChatRequest,
    OllamaGenerateRequest,
)

R = TypeVar("R", OllamaChatRequest, OllamaGenerateRequest)


def make_routes(*, root: bool) -> list[OperationRoute]:
    """Return the routes of Ollama's API.

    Args:
        root: whether `GET /` is answered.
    """
    chats = _generating(OllamaChatDialect(), "chat", OllamaChatAnswer)
    texts = _generating(OllamaGenerateDialect(), "text_completion", OllamaTextAnswer)
    endpoints: dict[str, Endpoint] = {
        "ollamaChat": chats,
        "ollamaGenerate": texts,
        "ollamaEmbed": embed,
        "ollamaEmbeddings": embed_one,
        "ollamaTags": list_models,
        "ollamaVersion": tell_version,
        "ollamaShow": show_model,
        "ollamaPs": list_running,
        "ollamaPull": pull_model,
        "ollamaDelete": _refusing("delete models; remove their files on its machine"),
        "ollamaCopy": _refusing("copy models; its operator can give a model more names"),
        "ollamaCreate": _refusing("create models; its operator can add folders of models"),
        "ollamaPush": _refusing("push models"),
        "ollamaRoot": tell_running,
    }
    if not root:
        del endpoints["ollamaRoot"]
    return [
        OperationRoute(operation, endpoints[operation.id])
        for operation in OLLAMA
        if operation.id in endpoints
    ]


def _refusing(what: str) -> Endpoint:
    """Return the handler of a route that is there only to say that the server does not do this."""

    async def endpoint(request: Request) -> Response:
        raise ActionNotAllowed(f"this server does not {what}")

    return endpoint


def _generating(
    dialect: Dialect[R], operation: OperationName, empty: Callable[..., OllamaAnswer]
) -> Endpoint:
    """Return the handler of a route that generates text.

    Args:
        empty: makes the answer to a request that only loads or unloads a model.
    """

    async def endpoint(request: Request) -> Response:
        record = record_of(request.scope)
        record.operation = operation
        asked, headers = await read_request(request, dialect.requests)
        if asked.is_empty:
            record.operation = None  # it asks for no text
            reason = await _load(request, asked.model, read_keep_alive(asked.keep_alive))
            told = empty(model=asked.model, created_at=ollama_time(), done=True, done_reason=reason)
            return JSONResponse(told, headers=headers)
        reply = await start_reply(request, dialect, asked)
        return answer(dialect, asked, reply, headers)

    return endpoint


async def _load(request: Request, model: str, keep_alive: float | None) -> DoneReason:
    """Load a model or, if it is to be kept for no time, unload it. Raises ServeError."""
    service = service_of(request)
    if keep_alive == 0:
        await service.unload(model)
        return "unload"
    await unless_gone(request.receive, service.load(model, client_of(request), keep_alive))
    return "load"


# Embeddings.


async def embed(request: Request) -> Response:
    begun = monotonic()
    asked, headers = await read_request(request, OLLAMA_EMBEDS)
    vectors: list[list[float]] = []
    tokens, load = 0, 0.0
    if asked.is_empty:
        await _load(request, asked.model, read_keep_alive(asked.keep_alive))
    else:
        made = await _embed(request, asked.to_spec())
        vectors = await anyio.to_thread.run_sync(made.vectors.tolist)
        tokens, load = made.tokens, made.load_seconds
    told = OllamaEmbeddings(
        model=asked.model,
        embeddings=vectors,
        total_duration=nanoseconds(monotonic() - begun),
        load_duration=nanoseconds(load),
        prompt_eval_count=tokens,
    )
    return await large_json(told, headers)


async def embed_one(request: Request) -> Response:
    asked, headers = await read_request(request, OLLAMA_OLD_EMBEDS)
    if asked.is_empty:
        await _load(request, asked.model, read_keep_alive(asked.keep_alive))
        return JSONResponse(OllamaEmbedding([]), headers=headers)
    made = await _embed(request, asked.to_spec())
    return JSONResponse(OllamaEmbedding(made.vectors[0].tolist()), headers=headers)


async def _embed(request: Request, spec: EmbeddingSpec) -> TextVectors:
    record_of(request.scope).operation = "embeddings"
    note_asked(request, spec)
    work = service_of(request).embed(spec, request_id(request.scope), client_of(request))
    return await compute(request, work)


# Models.


async def list_models(request: Request) -> Response:
    models = await service_of(request).models()
    return JSONResponse(OllamaModels([ollama_model(model) for model in models]))


async def tell_version(request: Request) -> Response:
    return JSONResponse(OllamaVersion())


async def show_model(request: Request) -> Response:
    asked, headers = await read_request(request, OLLAMA_SHOWS)
    described, facts = await service_of(request).show(asked.named)
    return JSONResponse(shown_model(described, facts), headers=headers)


async def list_running(request: Request) -> Response:
    return JSONResponse(
        OllamaRunning([running_model(each) for each in service_of(request).running()])
    )


async def tell_running(request: Request) -> Response:
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})
