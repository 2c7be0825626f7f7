"""Messages of chat completions: on the wire, and in no dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlxsrv.errors import MissingParameter, UnsupportedParameter
from mlxsrv.generation.spec import ChatMessage, PastCall
from mlxsrv.wire.past_calls import past_arguments


class ContentPart(Struct, frozen=True):
    type: str
    text: str | None = None


class FunctionCall(Struct, frozen=True):
    """A call; `arguments` is JSON as a string or, from clients of Ollama's API, an object."""

    name: str
    arguments: Any = None

    def past(self, id: str | None = None) -> PastCall:
        return PastCall(self.name, past_arguments(self.arguments), id)


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
        MissingParameter, UnsupportedParameter: a message cannot be read; the error has its path in
            the request.
    """
    return [_read(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read(message: Message, where: str) -> ChatMessage:
    content = _content(message, where)
    calls = [call.function.past(call.id) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls = calls or [message.function_call.past()]
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
