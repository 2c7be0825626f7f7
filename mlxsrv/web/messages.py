"""Handlers of Anthropic's routes."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.web.completions import answer, start_reply
from mlxsrv.web.middleware import request_id
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.paths import Endpoint
from mlxsrv.web.reading import read_aside, read_request, service_of
from mlxsrv.web.responses import JSONResponse, unless_gone
from mlxsrv.web.security.clients import client_of
from mlxsrv.wire.anthropic.answers import (
    MESSAGES,
    AnthropicMessage,
    MessageEvent,
    TokenCount,
    anthropic_model,
    anthropic_models,
)
from mlxsrv.wire.anthropic.errors import ERRORS, REQUEST_ID
from mlxsrv.wire.anthropic.requests import MESSAGES_REQUESTS


@Endpoint(
    "POST",
    "/v1/messages",
    "createMessage",
    "Answer a chat, in Anthropic's dialect",
    "With `stream`, as server-sent events that end with `message_stop`.",
    body=MESSAGES_REQUESTS,
    answer=AnthropicMessage,
    chunk=MessageEvent,
    refuses=ERRORS,
)
async def create_message(request: Request) -> Response:
    record_of(request.scope).operation = "chat"
    asked, headers = await read_request(request, MESSAGES_REQUESTS)
    reply = await start_reply(request, MESSAGES, asked.spec)
    builder = MESSAGES.builder(asked, reply.identity)
    return answer(reply, builder, {**headers, **_identity(request)})


@Endpoint(
    "POST",
    "/v1/messages/count_tokens",
    "countMessageTokens",
    "The tokens of a chat's prompt, in Anthropic's dialect",
    "Asked as a message is. Nothing is generated.",
    body=MESSAGES_REQUESTS,
    answer=TokenCount,
    refuses=ERRORS,
)
async def count_tokens(request: Request) -> Response:
    asked, headers = await read_request(request, MESSAGES_REQUESTS)
    spec = await read_aside(request, asked.spec)
    work = service_of(request).count_tokens(spec, client_of(request, spec.user))
    count = await unless_gone(request.receive, work)
    return JSONResponse(TokenCount(count), headers={**headers, **_identity(request)})


async def list_models(request: Request) -> Response:
    models = anthropic_models(await service_of(request).models())
    return JSONResponse(models, headers=_identity(request))


async def get_model(request: Request) -> Response:
    model = anthropic_model(await service_of(request).model(request.path_params["id"]))
    return JSONResponse(model, headers=_identity(request))


def _identity(request: Request) -> Mapping[str, str]:
    """The id of the request where Anthropic's clients read it."""
    return {REQUEST_ID: request_id(request.scope)}
