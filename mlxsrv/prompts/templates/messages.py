"""A chat as chat templates take it: its messages are plain dicts with text only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mlxsrv.generation.spec import ChatMessage, ToolSpec

PlainMessage = dict[str, Any]
Messages = list[PlainMessage]


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """Messages with all that decides how they are rendered.

    Attributes:
        variables: the template's, besides the messages.
        continue_final: the last message goes on.
        answers: the beginning of an answer follows, unless the last message goes on.
        tools: those that the model may call.
        template: a client's template, in place of the model's.
        path: where the messages stand in the request, for error messages.
        template_path: where the client's template stands in it.
    """

    messages: Sequence[PlainMessage]
    variables: Mapping[str, Any] = {}
    continue_final: bool = False
    answers: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    path: str = "messages"
    template_path: str = "chat_template"


def plain_message(message: ChatMessage) -> PlainMessage:
    """Return a message as chat templates take it."""
    plain: PlainMessage = {"role": message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    if message.call_id is not None:
        plain["tool_call_id"] = message.call_id
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    if message.calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return plain


def plain_tool(tool: ToolSpec) -> dict[str, Any]:
    """Return a tool as chat templates take it: with OpenAI's names, in the order of its examples,
    so that the same tool is always the same text."""
    fields = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    function = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": function}
