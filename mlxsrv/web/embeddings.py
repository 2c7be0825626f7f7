"""Handlers of the routes that compute numbers: embeddings, rerank, score."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.web.middleware import request_id
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.paths import Endpoint
from mlxsrv.web.reading import read_recorded, service_of
from mlxsrv.web.responses import large_json, unless_gone
from mlxsrv.web.security.clients import client_of
from mlxsrv.wire.decoding import RequestDecoder
from mlxsrv.wire.openai.embeddings import (
    EMBEDDING_REQUESTS,
    SCORE_REQUESTS,
    EmbeddingList,
    RerankResponse,
    ScoreList,
)


async def embed(request: Request) -> Response:
    asked, headers = await read_recorded(request, EMBEDDING_REQUESTS, "embeddings")
    client = client_of(request, asked.user, asked.priority)
    work = service_of(request).embed(asked, request_id(request.scope), client)
    return await _answer(request, work, headers)


def reranking(requests: RequestDecoder[Any]) -> Endpoint:
    """Return the handler of a route that reranks."""

    async def endpoint(request: Request) -> Response:
        asked, headers = await read_recorded(request, requests, "rerank")
        client = client_of(request, asked.user, asked.priority)
        work = service_of(request).rerank(asked, request_id(request.scope), client)
        return await _answer(request, work, headers)

    return endpoint


async def score(request: Request) -> Response:
    asked, headers = await read_recorded(request, SCORE_REQUESTS, "score")
    client = client_of(request, asked.user, asked.priority)
    work = service_of(request).score(asked, request_id(request.scope), client)
    return await _answer(request, work, headers)


async def _answer(
    request: Request,
    work: Coroutine[Any, Any, EmbeddingList | RerankResponse | ScoreList],
    headers: Mapping[str, str],
) -> Response:
    answer = await unless_gone(request.receive, work)
    record = record_of(request.scope)
    record.model, record.tokens = answer.model, answer.usage.prompt_tokens
    return await large_json(answer, headers)
