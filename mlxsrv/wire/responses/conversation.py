"""From items to the messages of a chat.

All that an assistant says in one turn (reasoning, text, calls) is several items, and one message of
a chat.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mlxsrv.generation.spec import ChatMessage, PastCall
from mlxsrv.wire.earlier_turns import newest_question, past_arguments
from mlxsrv.wire.openai.messages import read_parts
from mlxsrv.wire.responses.items import (
    InputCall,
    InputCustomCall,
    InputCustomOutput,
    InputItem,
    InputMessage,
    InputOutput,
    InputReasoning,
    ItemPart,
    PlacedItem,
)
from mlxsrv.wire.responses.tools import flat_name
from mlxsrv.wire.unknown import Search

_SEPARATOR = "\n\n"

# Encrypted content.

_PREFIX = "mlxsrv1."


def seal(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`. It is encoded and not secret: it is there for
    clients that let the server store nothing, and give back what they got."""
    return _PREFIX + base64.b64encode(reasoning.encode()).decode()


def unseal(content: str) -> str | None:
    """Return the reasoning in an `encrypted_content`; None if another server made it."""
    if not content.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(content[len(_PREFIX) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return None


# Messages.


def chat_messages(
    instructions: str | None, items: Sequence[PlacedItem], search: Search
) -> list[ChatMessage]:
    """Return the messages of a chat.

    Args:
        search: notes what is left out of them.

    Raises:
        MissingParameter, UnsupportedParameter: an item cannot be read; the error has its path.
    """
    messages = [ChatMessage(role="system", content=instructions)] if instructions else []
    turn = _Turn()
    newest = newest_question(_role(placed.item) for placed in items)
    for place, (path, item) in enumerate((placed.path, placed.item) for placed in items):
        role, text = _role(item), _text(item, path, search, new=place == newest)
        if role == "assistant":
            turn.append(item, text)
        elif text or role != "system":
            messages += turn.messages()
            turn = _Turn()
            call_id = getattr(item, "call_id", None)
            messages.append(ChatMessage(role=role, content=text, call_id=call_id))
    return [*messages, *turn.messages()]


def _role(item: InputItem) -> Literal["system", "user", "assistant", "tool"]:
    match item:
        case InputMessage(role="user"):
            return "user"
        case InputMessage(role="system" | "developer"):
            return "system"
        case InputOutput() | InputCustomOutput():
            return "tool"
    return "assistant"


_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def _text(item: InputItem, path: str, search: Search, *, new: bool) -> str:
    """Return the text of a message or of a tool's output; other items have none."""
    match item:
        case InputMessage(content=content):
            return read_parts(content, f"{path}.content", search, texts=_TEXTS, new=new)
        case InputOutput(output=output) | InputCustomOutput(output=output):
            return read_parts(output, f"{path}.output", search, texts=_TEXTS)
    return ""


class _Turn:
    """A turn of the assistant: all its items between two messages of others."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[PastCall] = []

    def append(self, item: InputItem, text: str) -> None:
        """Append an item, with its text if it is a message."""
        match item:
            case InputReasoning():
                self._reasoning.append(_reasoning(item))
            case InputMessage():
                self._texts.append(text)
            case InputCall(arguments=given):
                self._append_call(item, past_arguments(given))
            case InputCustomCall(input=given):
                self._append_call(item, {"input": given})

    def _append_call(
        self, item: InputCall | InputCustomCall, arguments: Mapping[str, Any] | str
    ) -> None:
        name = flat_name(item.name, item.namespace)
        self._calls.append(PastCall(name, arguments, item.call_id))

    def messages(self) -> list[ChatMessage]:
        """Return the message of the turn; none if there is no item."""
        if not (self._reasoning or self._texts or self._calls):
            return []
        return [
            ChatMessage(
                role="assistant",
                content=_SEPARATOR.join(self._texts),
                reasoning=_SEPARATOR.join(self._reasoning) or None,
                calls=self._calls,
            )
        ]


def _reasoning(item: InputReasoning) -> str:
    """Return the thoughts, from the first of the three places that has them."""
    if item.content:
        return _join(item.content)
    sealed = None if item.encrypted_content is None else unseal(item.encrypted_content)
    return _join(item.summary or ()) if sealed is None else sealed


def _join(parts: Sequence[ItemPart]) -> str:
    return "".join(part.text or "" for part in parts)
