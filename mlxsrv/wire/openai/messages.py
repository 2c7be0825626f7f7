"""Messages of chat completions: on the wire, and in no dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mlxsrv.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from mlxsrv.generation.spec import ChatMessage, PastCall


class ContentPart(Struct, frozen=True):
    type: str
    text: str | None = None


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str = ""


class ToolCall(Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct, frozen=True):
    """One turn. Thoughts come back under either of the two names they are sent by, and an old
    client's call is in `function_call`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Meta(max_length=10_000)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=1000)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


_ROLES: dict[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def read_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Return the messages in no dialect.

    Raises:
        InvalidRequest, MissingParameter, UnsupportedParameter: a message cannot be read; the error
            has its path in the request.
    """
    return [_read(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read(message: Message, where: str) -> ChatMessage:
    content = _content(message, where)
    calls = [
        _call(call.function, call.id, f"{where}.tool_calls[{i}].function.arguments")
        for i, call in enumerate(message.tool_calls or ())
    ]
    if message.function_call is not None:
        old = _call(message.function_call, None, f"{where}.function_call.arguments")
        calls = calls or [old]
    return ChatMessage(
        role=_ROLES[message.role],
        content=content,
        name=message.name,
        reasoning=message.reasoning_content or message.reasoning,
        calls=calls,
        call_id=message.tool_call_id,
    )


def _content(message: Message, where: str) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for i, part in enumerate(message.content):
        path = f"{where}.content[{i}]"
        if part.type != "text":
            raise UnsupportedParameter(
                f"{path}: this model takes text only, not {part.type!r}", param=path
            )
        if part.text is None:
            raise MissingParameter(f"missing required parameter: {path}.text", param=f"{path}.text")
        texts.append(part.text)
    return "".join(texts)


def _call(function: FunctionCall, id: str | None, path: str) -> PastCall:
    """Return a call with its arguments as an object. On the wire they are a string of JSON."""
    try:
        given = msgspec.json.decode(function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path}: not a JSON object: {error}", param=path) from None
    return PastCall(function.name, given, id)
