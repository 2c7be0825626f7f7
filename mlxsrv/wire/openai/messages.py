"""Messages of chat completions: on the wire, and in no dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from mlxsrv.generation.spec import ChatMessage, PastCall
from mlxsrv.wire.decoding import missing
from mlxsrv.wire.earlier_turns import leave_out, newest_question, past_arguments
from mlxsrv.wire.schema_rules import STRING, Schema
from mlxsrv.wire.unknown import Search


class ContentPart(Struct, frozen=True):
    schema_rules: ClassVar[Schema] = {
        "properties": {"type": {"const": "text"}, "text": STRING},
        "required": ["type", "text"],
    }

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, frozen=True):
    """A call; `arguments` is JSON as a string or, from clients of Ollama's API, an object."""

    schema_rules: ClassVar[Schema] = {
        "properties": {
            "arguments": {
                "contentMediaType": "application/json",
                "contentSchema": {"type": "object"},
            }
        }
    }

    name: str
    arguments: Any = None

    def past(self, id: str | None = None) -> PastCall:
        return PastCall(self.name, past_arguments(self.arguments), id)


class CustomCall(Struct, frozen=True):
    """A call of a tool with a free text as its input."""

    name: str
    input: str = ""


class ToolCall(Struct, frozen=True):
    """A call. It is of another type only if another server has sent it."""

    schema_rules: ClassVar[Schema] = {
        "properties": {
            "type": {"const": "function"},
            "function": {"$ref": "#/components/schemas/FunctionCall"},
        },
        "required": ["function"],
    }

    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str | None = None
    type: str = "function"

    def past(self, where: str) -> PastCall | None:
        """Return the call; None if it is of a type that nobody here knows. Raises
        MissingParameter."""
        if self.custom is not None:
            return PastCall(self.custom.name, {"input": self.custom.input}, self.id)
        if self.function is not None:
            return self.function.past(self.id)
        if self.type == "function":
            raise missing(f"{where}.function")
        return None


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


def read_messages(messages: Sequence[Message], search: Search) -> list[ChatMessage]:
    """Return the messages in no dialect.

    Args:
        search: notes what is left out of them.

    Raises:
        MissingParameter, UnsupportedParameter: a message cannot be read; the error has its path in
            the request.
    """
    newest = newest_question(message.role for message in messages)
    return [
        _read(message, f"messages[{i}]", search, new=i == newest)
        for i, message in enumerate(messages)
    ]


def _read(message: Message, where: str, search: Search, *, new: bool) -> ChatMessage:
    calls = []
    for i, each in enumerate(message.tool_calls or ()):
        path = f"{where}.tool_calls[{i}]"
        if (call := each.past(path)) is None:
            leave_out(each.type, path, search)
        else:
            calls.append(call)
    if message.function_call is not None:
        calls = calls or [message.function_call.past()]
    return ChatMessage(
        role=_ROLES[message.role],
        content=read_parts(message.content, f"{where}.content", search, new=new)
        or message.refusal
        or "",
        name=message.name,
        reasoning=message.reasoning_content or message.reasoning,
        calls=calls,
        call_id=message.tool_call_id,
    )


def read_parts(
    content: str | Sequence[ContentPart] | None,
    path: str,
    search: Search,
    *,
    texts: Sequence[str] = ("text",),
    new: bool = False,
) -> str:
    """Return the text of a message: its own, or that of its parts, one after the other.

    Args:
        search: notes what is left out.
        texts: the types of parts that are text, first the usual one. Refusals are, too.
        new: it is the user's, and not answered yet.

    Raises:
        MissingParameter, UnsupportedParameter: a part cannot be read; the error has its path.
    """
    if content is None or isinstance(content, str):
        return content or ""
    read = []
    for i, part in enumerate(content):
        field = "refusal" if part.type == "refusal" else "text"
        if field == "text" and part.type not in texts:
            read.append(leave_out(part.type, f"{path}[{i}]", search, new=new, text=texts[0]))
            continue
        text: str | None = getattr(part, field)
        if text is None:
            raise missing(f"{path}[{i}].{field}")
        read.append(text)
    return "".join(read)
