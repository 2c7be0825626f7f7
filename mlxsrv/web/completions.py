"""Handlers of the routes that generate text: chat, text completion, infill."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.service.reply import Reply
from mlxsrv.web.bodies import share_of
from mlxsrv.web.middleware import request_id
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.reading import read_recorded, service_of
from mlxsrv.web.responses import Fold, ReplyBody, ReplyStream
from mlxsrv.wire import openai, streams
from mlxsrv.wire.infill import INFILL_REQUESTS, InfillRequest, InfillStream, infill_completion
from mlxsrv.wire.requests import (
    CHAT_REQUESTS,
    COMPLETION_REQUESTS,
    ChatRequest,
    CompletionRequest,
)


async def chat_completions(request: Request) -> Response:
    asked, headers = await read_recorded(request, CHAT_REQUESTS, "chat")
    reply = await service_of(request).chat(asked, request_id(request.scope))
    return _answer(
        request, asked, reply, headers, stream=streams.ChatStream, fold=openai.chat_completion
    )


async def text_completions(request: Request) -> Response:
    asked, headers = await read_recorded(request, COMPLETION_REQUESTS, "text_completion")
    reply = await service_of(request).complete(asked, request_id(request.scope))
    return _answer(
        request, asked, reply, headers, stream=streams.CompletionStream, fold=openai.text_completion
    )


async def infill(request: Request) -> Response:
    asked, headers = await read_recorded(request, INFILL_REQUESTS, "text_completion")
    reply = await service_of(request).infill(asked, request_id(request.scope))
    return _answer(request, asked, reply, headers, stream=InfillStream, fold=infill_completion)


def _answer(
    request: Request,
    asked: ChatRequest | CompletionRequest | InfillRequest,
    reply: Reply,
    headers: Mapping[str, str],
    *,
    stream: type[streams.Stream],
    fold: Fold,
) -> Response:
    """Return the response that sends `reply`: in frames of a `stream`, or as one body, which `fold`
    makes."""
    record_of(request.scope).reply = reply
    # The answer may take long, and needs only the prompt's tokens: the body's bytes are free then.
    reply.when_tokenized(share_of(request.scope).release)
    if not asked.stream:
        return ReplyBody(reply, fold, headers=headers)
    frames = stream(
        reply.identity,
        streams.usage_mode(asked.stream_options),
        choices=asked.all_choices,
        scored=asked.likeliest is not None,
        timed=bool(asked.timings_per_token),
    )
    return ReplyStream(reply, frames, headers=headers)
