"""Handlers of the routes that generate text: those of OpenAI's dialect, and what all share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.service.observing import OperationName
from mlxsrv.service.reply import Reply
from mlxsrv.web.bodies import share_of
from mlxsrv.web.middleware import request_id
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.paths import Endpoint, Handler
from mlxsrv.web.reading import note_asked, read_aside, read_request, service_of
from mlxsrv.web.responses import ReplyBody, ReplyStream
from mlxsrv.web.security.clients import client_of
from mlxsrv.wire.dialect import Dialect
from mlxsrv.wire.openai.answers import ChatChunk, ChatCompletion, TextCompletion
from mlxsrv.wire.openai.dialects import (
    ChatDialect,
    CompletionDialect,
    FIMDialect,
    InfillDialect,
    LlamaCompletionDialect,
)
from mlxsrv.wire.openai.infill import LlamaCompletion

R = TypeVar("R", bound=Struct)

CONVERSATION = "mlxsrv.conversation"
"""The key of a scope under which a replica notes the key of the request's conversation: hexadecimal
digits, with which the response's id begins."""


def generating(dialect: Dialect[R], operation: OperationName) -> Handler:
    """Return the handler of a route that generates text."""

    async def endpoint(request: Request) -> Response:
        record_of(request.scope).operation = operation
        asked, headers = await read_request(request, dialect.requests)
        reply = await start_reply(request, dialect, asked)
        return answer(dialect, asked, reply, headers)

    return endpoint


async def start_reply(request: Request, dialect: Dialect[R], asked: R) -> Reply:
    """Have the service generate; the observers are told. Raises ServeError."""
    spec = await read_aside(request, partial(dialect.spec, asked))
    note_asked(request, spec.without_messages)
    reply = await service_of(request).generate(
        spec,
        request_id(request.scope),
        dialect.new_id(request.scope.get(CONVERSATION, "")),
        client_of(request, spec.user, spec.priority),
    )
    record_of(request.scope).reply = reply
    # The answer may take long, and needs only the prompt's tokens: the body's bytes are free then.
    reply.when_tokenized(share_of(request.scope).release)
    return reply


def answer(dialect: Dialect[R], asked: R, reply: Reply, headers: Mapping[str, str]) -> Response:
    """Return the response that sends `reply`, streamed if the request asks for that, else whole."""
    if reply.spec.streamed:
        return ReplyStream(reply, dialect.stream(asked, reply.identity), headers=headers)
    return ReplyBody(
        reply,
        lambda answers, usage: dialect.fold(asked, reply.identity, answers, usage),
        headers=headers,
    )


create_chat_completion = Endpoint(
    "POST",
    "/v1/chat/completions",
    "createChatCompletion",
    "Answer a chat",
    "With `stream`, as server-sent events that end with `data: [DONE]`.",
    body=ChatDialect.requests,
    answer=ChatCompletion,
    chunk=ChatChunk,
    fails=(507,),
)(generating(ChatDialect(), "chat"))

create_completion = Endpoint(
    "POST",
    "/v1/completions",
    "createCompletion",
    "Go on with a text",
    "With `stream`, as server-sent events that end with `data: [DONE]`.",
    body=CompletionDialect.requests,
    answer=TextCompletion,
    chunk=TextCompletion,
    fails=(507,),
)(generating(CompletionDialect(), "text_completion"))

create_fim_completion = Endpoint(
    "POST",
    "/v1/fim/completions",
    "createFIMCompletion",
    "What is to be written between two texts, as Mistral's API has it",
    "For models with fill-in-the-middle tokens, unless there is no `suffix`. With `stream`, as a "
    "chat's server-sent events, which end with `data: [DONE]`.",
    body=FIMDialect.requests,
    answer=ChatCompletion,
    chunk=ChatChunk,
    fails=(507,),
)(generating(FIMDialect(), "text_completion"))

infill = Endpoint(
    "POST",
    "/infill",
    "infill",
    "What is to be written between two texts",
    "For models with fill-in-the-middle tokens; as llama.cpp's server has it. With `stream`, as "
    "server-sent events, of which the last has `stop: true`.",
    body=InfillDialect.requests,
    answer=LlamaCompletion,
    chunk=LlamaCompletion,
    fails=(507,),
)(generating(InfillDialect(), "text_completion"))

llama_completion = Endpoint(
    "POST",
    "/completion",
    "llamaCompletion",
    "Go on with a text, as llama.cpp's server does",
    "With `stream`, as server-sent events, of which the last has `stop: true`.",
    body=LlamaCompletionDialect.requests,
    answer=LlamaCompletion,
    chunk=LlamaCompletion,
    fails=(507,),
)(generating(LlamaCompletionDialect(), "text_completion"))
