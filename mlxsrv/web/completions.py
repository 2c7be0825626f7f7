"""Handlers of the routes that generate text: those of OpenAI's dialect, and what all share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.service.observing import OperationName
from mlxsrv.service.reply import Reply
from mlxsrv.web.bodies import share_of
from mlxsrv.web.middleware import request_id
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.paths import Endpoint, Handler
from mlxsrv.web.reading import note_asked, read_aside, read_request, service_of
from mlxsrv.web.responses import ReplyBody, ReplyStream
from mlxsrv.web.security.clients import client_of
from mlxsrv.wire.dialect import Builder, Dialect, R
from mlxsrv.wire.openai.answers import ChatChunk, ChatCompletion, TextCompletion
from mlxsrv.wire.openai.builders import CHATS, COMPLETIONS
from mlxsrv.wire.openai.infill import FIMS, INFILLS, LLAMA_COMPLETIONS, LlamaCompletion

CONVERSATION = "mlxsrv.conversation"
"""The key of a scope under which a replica notes the key of the request's conversation: hexadecimal
digits, with which the response's id begins."""


def generating(
    dialect: Dialect[R], operation: OperationName, *, id_header: str | None = None
) -> Handler:
    """Return the handler of a route that generates text.

    Args:
        id_header: a header for the id of the request, besides X-Request-ID.
    """

    async def endpoint(request: Request) -> Response:
        record_of(request.scope).operation = operation
        asked, headers = await read_request(request, dialect.requests)
        if id_header is not None:
            headers = {**headers, id_header: request_id(request.scope)}
        reply = await start_reply(request, dialect, asked.spec)
        return answer(reply, dialect.builder(asked, reply.identity), headers)

    return endpoint


async def start_reply(
    request: Request, dialect: Dialect[R], make_spec: Callable[[], GenerationSpec]
) -> Reply:
    """Have the service generate what the request asks for. Raises ServeError."""
    spec = await read_aside(request, make_spec)
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


def answer(reply: Reply, builder: Builder, headers: Mapping[str, str]) -> Response:
    """Return the response that sends `reply`, streamed if the request asks for that, else whole."""
    kind = ReplyStream if reply.spec.streamed else ReplyBody
    return kind(reply, builder, headers=headers)


create_chat_completion = Endpoint(
    "POST",
    "/v1/chat/completions",
    "createChatCompletion",
    "Answer a chat",
    "With `stream`, as server-sent events that end with `data: [DONE]`.",
    body=CHATS.requests,
    answer=ChatCompletion,
    chunk=ChatChunk,
    fails=(507,),
)(generating(CHATS, "chat"))

create_completion = Endpoint(
    "POST",
    "/v1/completions",
    "createCompletion",
    "Complete a text",
    "With `stream`, as server-sent events that end with `data: [DONE]`.",
    body=COMPLETIONS.requests,
    answer=TextCompletion,
    chunk=TextCompletion,
    fails=(507,),
)(generating(COMPLETIONS, "text_completion"))

create_fim_completion = Endpoint(
    "POST",
    "/v1/fim/completions",
    "createFIMCompletion",
    "Fill in the middle, in Mistral's format",
    "For models with fill-in-the-middle tokens, unless there is no `suffix`. With `stream`, as a "
    "chat's server-sent events, which end with `data: [DONE]`.",
    body=FIMS.requests,
    answer=ChatCompletion,
    chunk=ChatChunk,
    fails=(507,),
)(generating(FIMS, "text_completion"))

infill = Endpoint(
    "POST",
    "/infill",
    "infill",
    "Fill in the middle, in llama.cpp's format",
    "For models with fill-in-the-middle tokens; as llama.cpp's server has it. With `stream`, as "
    "server-sent events, of which the last has `stop: true`.",
    body=INFILLS.requests,
    answer=LlamaCompletion,
    chunk=LlamaCompletion,
    fails=(507,),
)(generating(INFILLS, "text_completion"))

llama_completion = Endpoint(
    "POST",
    "/completion",
    "llamaCompletion",
    "Complete a text, in llama.cpp's format",
    "With `stream`, as server-sent events, of which the last has `stop: true`.",
    body=LLAMA_COMPLETIONS.requests,
    answer=LlamaCompletion,
    chunk=LlamaCompletion,
    fails=(507,),
)(generating(LLAMA_COMPLETIONS, "text_completion"))
