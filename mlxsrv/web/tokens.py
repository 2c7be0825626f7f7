"""Handlers of the routes that turn text into tokens and back, without a generation."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.web.reading import read_aside, read_request, service_of
from mlxsrv.web.responses import JSONResponse, large_json, unless_gone
from mlxsrv.web.security.clients import client_of
from mlxsrv.wire.decoding import read_query
from mlxsrv.wire.openai.requests import CHAT_REQUESTS
from mlxsrv.wire.openai.tokens import DETOKENIZE_REQUESTS, TOKENIZE_REQUESTS, TokenizerQuery

_MOST_TEXT = 8 * 1024 * 1024  # bytes of a body with text; its tokens are a longer answer
_MOST_IDS = 16 * 1024 * 1024  # bytes of a body with token ids, about a million


async def tokenize(request: Request) -> Response:
    asked, headers = await read_request(request, TOKENIZE_REQUESTS, most=_MOST_TEXT)
    work = service_of(request).tokenize(asked, client_of(request))
    return await large_json(await unless_gone(request.receive, work), headers)


async def detokenize(request: Request) -> Response:
    asked, headers = await read_request(request, DETOKENIZE_REQUESTS, most=_MOST_IDS)
    work = service_of(request).detokenize(asked, client_of(request))
    return await large_json(await unless_gone(request.receive, work), headers)


async def apply_template(request: Request) -> Response:
    asked, headers = await read_request(request, CHAT_REQUESTS)
    spec = await read_aside(request, asked.spec)
    work = service_of(request).apply_template(spec, client_of(request, spec.user))
    response = await large_json(await unless_gone(request.receive, work), headers)
    request.app.ignored.add(response.headers, spec.ignored)
    return response


async def tokenizer_info(request: Request) -> Response:
    query = read_query(TokenizerQuery, request.query_params)
    work = service_of(request).tokenizer_info(query, client_of(request))
    return JSONResponse(await unless_gone(request.receive, work))
