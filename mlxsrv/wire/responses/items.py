"""Items of a conversation: what a client sends and what the store gives back.

An item is read by its type. Items of types that mean nothing to a local model (a web search, an
image that was made) are left out, and named among the ignored fields.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from mlxsrv.wire.decoding import decode_part, missing
from mlxsrv.wire.earlier_turns import leave_out
from mlxsrv.wire.openai.messages import ContentPart
from mlxsrv.wire.schema_rules import STRING, Schema
from mlxsrv.wire.tagged import TaggedKinds
from mlxsrv.wire.unknown import Search


class ItemPart(ContentPart, frozen=True, omit_defaults=True):
    """A part of a message, of a tool's output or of reasoning."""

    schema_rules: ClassVar[Schema] = {
        "properties": {
            "type": {"enum": ["input_text", "output_text", "summary_text", "reasoning_text"]},
            "text": STRING,
        },
        "required": ["type", "text"],
    }

    annotations: Any = None
    logprobs: Any = None


_TEXTS = ("input_text", "output_text", "text")  # types of parts that any message may have

Parts = str | Annotated[list[ItemPart], Meta(max_length=10_000)]


class InputItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of all items. Clients that give items back may leave out both."""

    id: str | None = None
    status: str | None = None


class InputMessage(InputItem, frozen=True, kw_only=True, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts | None = None
    phase: str | None = None


class InputCall(InputItem, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model made. `arguments` is JSON as text or, from some clients, an object."""

    call_id: str
    name: str
    arguments: Any = None
    namespace: str | None = None


class InputOutput(
    InputItem, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    """The result of a function."""

    call_id: str
    output: Parts


class InputCustomCall(
    InputItem, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"
):
    """A call of a custom tool, whose input is a free text."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None


class InputCustomOutput(
    InputItem, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call_output"
):
    """The result of a custom tool."""

    call_id: str
    output: Parts


class InputReasoning(InputItem, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Thoughts of an earlier answer."""

    summary: Annotated[list[ItemPart], Meta(max_length=10_000)] | None = None
    content: Annotated[list[ItemPart], Meta(max_length=10_000)] | None = None
    encrypted_content: str | None = None


class InputReference(InputItem, frozen=True, kw_only=True, tag_field="type", tag="item_reference"):
    """An item that the server has stored."""

    id: str


ITEM_KINDS: tuple[type[InputItem], ...] = (
    InputMessage,
    InputCall,
    InputOutput,
    InputCustomCall,
    InputCustomOutput,
    InputReasoning,
    InputReference,
)


class _Head(Struct, frozen=True):
    """The fields that say what kind an item is."""

    type: str | None = None
    role: Any = None
    id: str | None = None

    def kind(self, path: str) -> str:
        """Raises MissingParameter if nothing says what kind it is."""
        if self.type is not None:
            return self.type
        if self.role is not None:
            return "message"
        if self.id is not None:
            return "item_reference"
        raise missing(f"{path}.type")


_read_head = msgspec.json.Decoder(_Head).decode
_ITEMS = TaggedKinds(ITEM_KINDS, "input[].")


class PlacedItem(Struct, frozen=True):
    """An item and its path in the request."""

    path: str
    item: InputItem


def read_item(raw: Raw, path: str, search: Search) -> PlacedItem | None:
    """Return an item; None if its type means nothing here.

    Args:
        search: notes the item, if it is left out, and its unknown fields.

    Raises:
        InvalidRequest: the item is wrong; the error has its path.
    """
    kind = decode_part(_read_head, raw, path).kind(path)
    item = _ITEMS.decode_new(kind, raw, path, search)
    if item is None:
        leave_out(kind, path, search)
        return None
    return PlacedItem(path, item)


def read_stored(items: Sequence[bytes], path: str) -> list[PlacedItem]:
    """Return items that were stored. `path` is the field that refers to them."""
    return [PlacedItem(path, _ITEMS.decode(_read_head(each).type, each)) for each in items]


_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def new_item_id(type: str) -> str:
    """Return an id for an item of this type."""
    return f"{_ID_PREFIXES.get(type, 'item')}_{uuid.uuid4().hex}"


def stored_form(item: InputItem) -> tuple[str, bytes]:
    """Return the id of an item that a client has sent, and the item as it is stored: with an id
    and a status, and the content of a message as parts of its role's kind."""
    id = item.id or new_item_id(str(item.__struct_config__.tag))
    item = replace(item, id=id, status=item.status or "completed")
    match item:
        case InputMessage(role=role, content=content):
            parts = [ItemPart("text", content)] if isinstance(content, str) else content or []
            item = replace(item, content=[_stored_part(part, role) for part in parts])
        case InputCall(arguments=given) if not isinstance(given, str):
            text = msgspec.json.encode({} if given is None else given).decode()
            item = replace(item, arguments=text)
        case InputReasoning(summary=None):
            item = replace(item, summary=[])
    return id, msgspec.json.encode(item)


def _stored_part(part: ItemPart, role: str) -> ItemPart:
    """A part of a message as OpenAI's types want it in a list: what an assistant said is
    `output_text` with annotations, however the client named it."""
    if part.type not in _TEXTS:
        return part
    if role != "assistant":
        return ItemPart("input_text", part.text)
    return replace(part, type="output_text", annotations=part.annotations or [])
