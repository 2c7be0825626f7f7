"""A chat as chat templates take it: its messages are plain dicts with text only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mlxsrv.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from mlxsrv.wire.requests import Message, ToolCall

PlainMessage = dict[str, Any]


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """Messages with all that decides how they are rendered.

    Attributes:
        variables: the template's, besides the messages.
        continue_final: the last message goes on.
        answers: the beginning of an answer follows, unless the last message goes on.
        tools: those that the model may call.
        template: a client's template, in place of the model's.
    """

    messages: Sequence[PlainMessage]
    variables: Mapping[str, Any] = {}
    continue_final: bool = False
    answers: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None


def chat_messages(messages: Sequence[Message]) -> list[PlainMessage]:
    """Return the messages as chat templates take them.

    Raises:
        InvalidRequest, MissingParameter, UnsupportedParameter: a message cannot be read; the error
            has its path in the request.
    """
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain(message: Message, where: str) -> PlainMessage:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    plain: PlainMessage = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    thoughts = message.reasoning_content or message.reasoning
    if thoughts is not None:
        plain["reasoning_content"] = thoughts
    if message.function_call is not None:
        old = ToolCall(message.function_call)
        plain["tool_calls"] = [_tool_call(old, f"{where}.function_call", "arguments")]
    if message.tool_calls:
        plain["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    return plain


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


def _tool_call(call: ToolCall, where: str, arguments: str = "function.arguments") -> dict[str, Any]:
    """Return a call with its arguments as an object. On the wire they are a string of JSON."""
    path = f"{where}.{arguments}"
    try:
        given = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path}: not a JSON object: {error}", param=path) from None
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": given},
    }
