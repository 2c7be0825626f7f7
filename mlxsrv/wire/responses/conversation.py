"""From items to the messages of a chat.

All that an assistant says in one turn (reasoning, text, calls) is several items, and one message of
a chat.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Literal

from mlxsrv.errors import MissingParameter
from mlxsrv.generation.spec import ChatMessage, PastCall
from mlxsrv.wire.left_out import leave_out, newest_question
from mlxsrv.wire.past_calls import past_arguments
from mlxsrv.wire.responses.items import (
    InputCall,
    InputCustomCall,
    InputCustomOutput,
    InputMessage,
    InputOutput,
    InputReasoning,
    ItemPart,
    Parts,
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
    chat = _Chat(instructions, search)
    newest = newest_question(map(_role, items))
    for place, placed in enumerate(items):
        chat.add(placed, new=place == newest)
    return chat.finish()


def _role(placed: PlacedItem) -> str:
    match placed.item:
        case InputMessage(role=role):
            return role
        case InputOutput() | InputCustomOutput():
            return "tool"
    return "assistant"


class _Chat:
    """The messages so far, and the turn of the assistant that is not complete yet."""

    def __init__(self, instructions: str | None, search: Search) -> None:
        self._search = search
        self._messages: list[ChatMessage] = []
        self._turn: _Turn | None = None
        self._add_system(instructions or "")

    def add(self, placed: PlacedItem, *, new: bool) -> None:
        """Add an item.

        Args:
            new: it is the user's, and not answered yet.
        """
        item, path = placed.item, placed.path
        match item:
            case InputReasoning():
                self._assistant.reasoning.append(_reasoning(item))
            case InputMessage(role="assistant"):
                self._assistant.texts.append(self._text(item.content, f"{path}.content"))
            case InputCall():
                name = flat_name(item.name, item.namespace)
                call = PastCall(name, past_arguments(item.arguments), item.call_id)
                self._assistant.calls.append(call)
            case InputCustomCall():
                name = flat_name(item.name, item.namespace)
                self._assistant.calls.append(PastCall(name, {"input": item.input}, item.call_id))
            case InputMessage(role="user"):
                self._append("user", self._text(item.content, f"{path}.content", new=new))
            case InputMessage():
                self._add_system(self._text(item.content, f"{path}.content"))
            case InputOutput() | InputCustomOutput():
                self._append(
                    "tool", self._text(item.output, f"{path}.output"), call_id=item.call_id
                )

    def finish(self) -> list[ChatMessage]:
        self._end_turn()
        return self._messages

    @property
    def _assistant(self) -> _Turn:
        self._turn = self._turn or _Turn()
        return self._turn

    def _add_system(self, text: str) -> None:
        if text:
            self._append("system", text)

    def _append(
        self, role: Literal["system", "user", "tool"], text: str, call_id: str | None = None
    ) -> None:
        self._end_turn()
        self._messages.append(ChatMessage(role=role, content=text, call_id=call_id))

    def _text(self, content: Parts | None, path: str, *, new: bool = False) -> str:
        if content is None or isinstance(content, str):
            return content or ""
        return "".join(self._part(part, f"{path}[{i}]", new=new) for i, part in enumerate(content))

    def _part(self, part: ItemPart, path: str, *, new: bool) -> str:
        match part.type:
            case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
                name, text = "text", part.text
            case "refusal":
                name, text = "refusal", part.refusal
            case _:
                return leave_out(part.type, path, self._search, new=new)
        if text is None:
            where = f"{path}.{name}"
            raise MissingParameter(f"missing required parameter: {where}", param=where)
        return text

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._messages.append(self._turn.message())
            self._turn = None


class _Turn:
    """One turn of the assistant: all its items between two messages of others."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[PastCall] = []

    def message(self) -> ChatMessage:
        return ChatMessage(
            role="assistant",
            content=_SEPARATOR.join(self.texts),
            reasoning=_SEPARATOR.join(self.reasoning) or None,
            calls=self.calls,
        )


def _reasoning(item: InputReasoning) -> str:
    """The thoughts, from the first of the three places that has them."""
    if item.content:
        return _join(item.content)
    sealed = None if item.encrypted_content is None else unseal(item.encrypted_content)
    return _join(item.summary or ()) if sealed is None else sealed


def _join(parts: Sequence[ItemPart]) -> str:
    return "".join(part.text or "" for part in parts)
