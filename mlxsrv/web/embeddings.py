"""Handlers of the routes that compute numbers: embeddings, rerank, score."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.generation.texts import PairScores, TextVectors
from mlxsrv.service.observing import OperationName
from mlxsrv.web.middleware import request_id
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.paths import Endpoint, Handler
from mlxsrv.web.reading import note_asked, read_request, service_of
from mlxsrv.web.responses import large_json, unless_gone
from mlxsrv.web.security.clients import client_of
from mlxsrv.wire.decoding import RequestDecoder
from mlxsrv.wire.openai.embeddings import (
    COHERE_RERANK_REQUESTS,
    EMBEDDING_REQUESTS,
    RERANK_REQUESTS,
    SCORE_REQUESTS,
    EmbeddingList,
    EmbeddingRequest,
    RerankRequest,
    RerankResponse,
    ScoreList,
    ScoreRequest,
    embedding_list,
    rerank_response,
    score_list,
)

A = TypeVar("A", EmbeddingRequest, RerankRequest, ScoreRequest)
M = TypeVar("M", TextVectors, PairScores)


@Endpoint(
    "POST",
    "/v1/embeddings",
    "createEmbedding",
    "Embed texts",
    body=EMBEDDING_REQUESTS,
    answer=EmbeddingList,
    fails=(507,),
)
async def embed(request: Request) -> Response:
    asked, headers = await _read(request, EMBEDDING_REQUESTS, "embeddings")
    spec = asked.to_spec()
    client = client_of(request, asked.user, asked.priority)
    made = await compute(
        request, service_of(request).embed(spec, request_id(request.scope), client)
    )
    answer = await anyio.to_thread.run_sync(embedding_list, spec, made)
    return await large_json(answer, headers)


def _reranking(requests: RequestDecoder[Any]) -> Handler:
    """Return the handler of a route that reranks."""

    async def endpoint(request: Request) -> Response:
        asked, headers = await _read(request, requests, "rerank")
        return await large_json(rerank_response(asked, await _score(request, asked)), headers)

    return endpoint


rerank = Endpoint(
    "POST",
    "/v1/rerank",
    "rerank",
    "Rank documents by their relevance to a query",
    body=RERANK_REQUESTS,
    answer=RerankResponse,
    fails=(507,),
)(_reranking(RERANK_REQUESTS))

rerank_as_cohere = Endpoint(
    "POST",
    "/v2/rerank",
    "rerankAsCohere",
    "Rank documents, in the format of Cohere's second version",
    "Documents that are too long are cut, unless `truncate` is `NONE`.",
    body=COHERE_RERANK_REQUESTS,
    answer=RerankResponse,
    fails=(507,),
)(_reranking(COHERE_RERANK_REQUESTS))


@Endpoint(
    "POST",
    "/v1/score",
    "score",
    "Score pairs of texts",
    "A cross-encoder judges each pair; an embedder compares the vectors.",
    body=SCORE_REQUESTS,
    answer=ScoreList,
    fails=(507,),
)
async def score(request: Request) -> Response:
    asked, headers = await _read(request, SCORE_REQUESTS, "score")
    return await large_json(score_list(await _score(request, asked)), headers)


async def _score(request: Request, asked: RerankRequest | ScoreRequest) -> PairScores:
    client = client_of(request, asked.user, asked.priority)
    work = service_of(request).score(asked.to_spec(), request_id(request.scope), client)
    return await compute(request, work)


async def compute(request: Request, work: Coroutine[Any, Any, M]) -> M:
    """Return the result of `work`, unless the client leaves; the observers get its numbers."""
    made = await unless_gone(request.receive, work)
    record = record_of(request.scope)
    record.model, record.tokens = made.model, made.tokens
    return made


async def _read(
    request: Request, decoder: RequestDecoder[A], operation: OperationName
) -> tuple[A, Mapping[str, str]]:
    """As `read_request`; the observers get what a model is asked for."""
    record_of(request.scope).operation = operation
    asked, headers = await read_request(request, decoder)
    note_asked(request, asked.to_spec())
    return asked, headers
