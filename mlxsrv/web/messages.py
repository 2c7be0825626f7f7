"""Handlers of Anthropic's messages. Its list of models has a path of OpenAI's: see `status.py`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.web.completions import generating
from mlxsrv.web.middleware import request_id
from mlxsrv.web.paths import Endpoint
from mlxsrv.web.reading import read_aside, read_request, service_of
from mlxsrv.web.responses import JSONResponse, unless_gone
from mlxsrv.web.security.clients import client_of
from mlxsrv.wire.anthropic.answers import (
    MESSAGES,
    AnthropicMessage,
    MessageEvent,
    TokenCount,
)
from mlxsrv.wire.anthropic.errors import ERRORS, REQUEST_ID
from mlxsrv.wire.anthropic.requests import MESSAGES_REQUESTS

create_message = Endpoint(
    "POST",
    "/v1/messages",
    "createMessage",
    "Answer a chat, in Anthropic's format",
    "With `stream`, as server-sent events that end with `message_stop`.",
    body=MESSAGES_REQUESTS,
    answer=AnthropicMessage,
    chunk=MessageEvent,
    refuses=ERRORS,
)(generating(MESSAGES, "chat", id_header=REQUEST_ID))


@Endpoint(
    "POST",
    "/v1/messages/count_tokens",
    "countMessageTokens",
    "Count the tokens of a chat, in Anthropic's format",
    "The body is that of a message. Nothing is generated.",
    body=MESSAGES_REQUESTS,
    answer=TokenCount,
    refuses=ERRORS,
)
async def count_tokens(request: Request) -> Response:
    asked, headers = await read_request(request, MESSAGES_REQUESTS)
    spec = await read_aside(request, asked.spec)
    work = service_of(request).count_tokens(spec, client_of(request, spec.user))
    count = await unless_gone(request.receive, work)
    own = {REQUEST_ID: request_id(request.scope)}
    return JSONResponse(TokenCount(count), headers={**headers, **own})
