"""Handlers of the routes that turn text into tokens and back, without a generation."""

from __future__ import annotations

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.generation.texts import TokenizerInfo
from mlxsrv.web.paths import Endpoint
from mlxsrv.web.reading import read_aside, read_request, service_of
from mlxsrv.web.responses import JSONResponse, large_json, unless_gone
from mlxsrv.web.security.clients import client_of
from mlxsrv.wire.decoding import read_query
from mlxsrv.wire.openai.requests import CHAT_REQUESTS
from mlxsrv.wire.openai.tokens import (
    DETOKENIZE_REQUESTS,
    TOKENIZE_REQUESTS,
    AppliedTemplate,
    DetokenizeResponse,
    TokenizeResponse,
    TokenizerQuery,
)

_MOST_TEXT = 8 * 1024 * 1024  # bytes of a body with text; its tokens are a longer answer
_MOST_IDS = 16 * 1024 * 1024  # bytes of a body with token ids, about a million


@Endpoint(
    "POST",
    "/tokenize",
    "tokenize",
    "Turn a text or a chat into tokens",
    body=TOKENIZE_REQUESTS,
    answer=TokenizeResponse,
)
async def tokenize(request: Request) -> Response:
    asked, headers = await read_request(request, TOKENIZE_REQUESTS, most=_MOST_TEXT)
    spec = await read_aside(request, asked.spec)
    work = service_of(request).tokenize(spec, client_of(request))
    tokens = await unless_gone(request.receive, work)
    answer = await anyio.to_thread.run_sync(asked.answer, tokens)  # perhaps a million objects
    return await large_json(answer, headers)


@Endpoint(
    "POST",
    "/detokenize",
    "detokenize",
    "Turn tokens into text",
    body=DETOKENIZE_REQUESTS,
    answer=DetokenizeResponse,
)
async def detokenize(request: Request) -> Response:
    asked, headers = await read_request(request, DETOKENIZE_REQUESTS, most=_MOST_IDS)
    work = service_of(request).detokenize(asked.tokens, asked.model, client_of(request))
    text = await unless_gone(request.receive, work)
    return await large_json(DetokenizeResponse(content=text, prompt=text), headers)


@Endpoint(
    "GET",
    "/tokenizer_info",
    "getTokenizerInfo",
    "Describe the tokenizer",
    query=TokenizerQuery,
    answer=TokenizerInfo,
    fails=(404, 503, 504),
)
async def tokenizer_info(request: Request) -> Response:
    query = read_query(TokenizerQuery, request.query_params)
    work = service_of(request).tokenizer_info(query.model, client_of(request))
    return JSONResponse(await unless_gone(request.receive, work))


@Endpoint(
    "POST",
    "/apply-template",
    "applyTemplate",
    "Render a chat with the model's template",
    "The body is that of a chat. Nothing is generated.",
    body=CHAT_REQUESTS,
    answer=AppliedTemplate,
)
async def apply_template(request: Request) -> Response:
    asked, headers = await read_request(request, CHAT_REQUESTS)
    spec = await read_aside(request, asked.spec)
    work = service_of(request).apply_template(spec, client_of(request, spec.user))
    text = await unless_gone(request.receive, work)
    response = await large_json(AppliedTemplate(text), headers)
    request.app.ignored.add_to(response.headers, spec.ignored)
    return response
