"""Messages of Anthropic's requests: their content blocks, and what they say in no dialect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from mlxsrv.generation.spec import ChatMessage, PastCall
from mlxsrv.wire.decoding import decode_part, missing
from mlxsrv.wire.earlier_turns import leave_out, newest_question, past_arguments
from mlxsrv.wire.schema_rules import Schema, any_of
from mlxsrv.wire.tagged import TaggedKinds
from mlxsrv.wire.unknown import Search

CacheControl = dict[str, Any]
"""Where a client would begin to cache. Prompts are cached as a whole, so it changes nothing."""

_Blocks = Meta(max_length=10_000)

_ANY_BLOCK: Schema = {}  # filled below, where all kinds are known: some have blocks in them
_CONTENT: Schema = {
    "properties": {"content": {"description": "Blocks of other types are left out."}}
}

RawBlocks = str | Annotated[list[Annotated[Raw, Meta(extra_json_schema=_ANY_BLOCK)]], _Blocks]
"""A text, or blocks that are read by their types: clients give back some of unknown types."""


class TextBlockParam(Struct, frozen=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None


class ImageBlockParam(Struct, frozen=True, tag_field="type", tag="image"):
    source: dict[str, Any]
    cache_control: CacheControl | None = None


class DocumentSource(Struct, frozen=True):
    """`data` of the type "text" and `content` of the type "content" can be read."""

    schema_rules: ClassVar[Schema] = _CONTENT

    type: str
    media_type: str | None = None
    data: str | None = None
    content: RawBlocks | None = None


class DocumentBlockParam(Struct, frozen=True, tag_field="type", tag="document"):
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None


class SearchResultBlockParam(Struct, frozen=True, tag_field="type", tag="search_result"):
    source: str
    title: str
    content: Annotated[list[TextBlockParam], _Blocks]
    cache_control: CacheControl | None = None


class ToolReferenceBlockParam(Struct, frozen=True, tag_field="type", tag="tool_reference"):
    tool_name: str
    cache_control: CacheControl | None = None


class ThinkingBlockParam(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str | None = None
    signature: str | None = None


class RedactedThinkingBlockParam(Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    data: str | None = None


class ToolUseBlockParam(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any = None
    cache_control: CacheControl | None = None


class ToolResultBlockParam(Struct, frozen=True, tag_field="type", tag="tool_result"):
    schema_rules: ClassVar[Schema] = _CONTENT

    tool_use_id: str
    content: RawBlocks | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


BlockParam = (
    TextBlockParam
    | ImageBlockParam
    | DocumentBlockParam
    | SearchResultBlockParam
    | ToolReferenceBlockParam
    | ThinkingBlockParam
    | RedactedThinkingBlockParam
    | ToolUseBlockParam
    | ToolResultBlockParam
)

BLOCKS: TaggedKinds[Any] = TaggedKinds(BlockParam.__args__, "messages[].content[].")
_ANY_BLOCK.update(any_of(BLOCKS.kinds))


class MessageParam(Struct, frozen=True):
    """One turn. A system message may stand between turns."""

    schema_rules: ClassVar[Schema] = _CONTENT

    role: Literal["user", "assistant", "system"]
    content: RawBlocks


System = str | Annotated[list[TextBlockParam], _Blocks]

# To messages in no dialect.

_BETWEEN = "\n\n"
"""Between the texts of blocks, each of which is a paragraph of its own."""

_BILLING = "x-anthropic-billing-header"
"""The beginning of a line in which some clients say something new with each request. In the prompt
it would keep all that follows from being reused."""


def read_chat(
    system: System | None, messages: Sequence[MessageParam], search: Search
) -> list[ChatMessage]:
    """Return the messages in no dialect; those of one role that follow each other are one.

    Args:
        search: notes what is left out of them, and their unknown fields.

    Raises:
        InvalidRequest, MissingParameter, UnsupportedParameter: a block cannot be read; the error
            has its path in the request.
    """
    instructions = _read_system(system)
    newest = newest_question(message.role for message in messages)
    turns = (
        read
        for i, message in enumerate(messages)
        for read in _BlockReader(search, new=i == newest).turn(message, f"messages[{i}].content")
    )
    chat = [ChatMessage(role="system", content=instructions)] if instructions else []
    for role, group in groupby(turns, key=lambda message: message.role):
        same = [*group]
        chat += [_joined(same)] if role in ("user", "assistant") else same
    return chat


def _read_system(system: System | None) -> str:
    if not system:
        return ""
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    if texts[0].startswith(_BILLING):
        texts[0] = texts[0].partition("\n")[2]
    return _BETWEEN.join(text for text in texts if text)


def _joined(messages: Sequence[ChatMessage]) -> ChatMessage:
    thoughts = [message.reasoning for message in messages if message.reasoning]
    return ChatMessage(
        role=messages[0].role,
        content=_BETWEEN.join(message.content for message in messages if message.content),
        reasoning=_BETWEEN.join(thoughts) or None,
        calls=tuple(call for message in messages for call in message.calls),
    )


class _Type(Struct, frozen=True):
    type: str


_read_type = msgspec.json.Decoder(_Type).decode


class _BlockReader:
    """Reads the blocks of one message.

    Args:
        search: notes what is left out, and unknown fields.
        new: the message is the user's, and not answered yet.
    """

    def __init__(self, search: Search, *, new: bool) -> None:
        self._search = search
        self._new = new

    def turn(self, message: MessageParam, path: str) -> Iterator[ChatMessage]:
        """Yield the messages of one turn: a user's has one for each result of a tool."""
        if isinstance(message.content, str):
            yield ChatMessage(role=message.role, content=message.content)
        elif message.role == "assistant":
            yield self._read_assistant(message.content, path)
        elif message.role == "user":
            yield from self._read_user(message.content, path)
        else:
            yield ChatMessage(role="system", content=self._read_all(message.content, path))

    def _read_assistant(self, blocks: Sequence[Raw], path: str) -> ChatMessage:
        texts, thoughts, calls = [], [], []
        for block, raw, where in self._blocks(blocks, path):
            match block:
                case ThinkingBlockParam(thinking=text):
                    thoughts.append(text)
                case RedactedThinkingBlockParam():
                    pass  # nobody here can read it
                case ToolUseBlockParam(id=id, name=name, input=given):
                    calls.append(PastCall(name, past_arguments(given), id))
                case _:
                    texts.append(self._read_text(block, raw, where))
        return ChatMessage(
            role="assistant",
            content=_join(texts),
            reasoning=_join(thoughts) or None,
            calls=calls,
        )

    def _read_user(self, blocks: Sequence[Raw], path: str) -> Iterator[ChatMessage]:
        texts: list[str] = []
        answers = False  # it has the result of a tool
        for block, raw, where in self._blocks(blocks, path):
            if not isinstance(block, ToolResultBlockParam):
                texts.append(self._read_text(block, raw, where, new=self._new))
                continue
            if any(texts):
                yield ChatMessage(role="user", content=_join(texts))
            texts, answers = [], True
            yield self._read_result(block, where)
        if any(texts) or not answers:
            yield ChatMessage(role="user", content=_join(texts))

    def _read_result(self, block: ToolResultBlockParam, where: str) -> ChatMessage:
        given = block.content or ""
        text = given if isinstance(given, str) else self._read_all(given, f"{where}.content")
        if block.is_error:
            text = f"Error: {text}" if text else "Error"
        return ChatMessage(role="tool", content=text, call_id=block.tool_use_id)

    def _blocks(
        self, blocks: Sequence[Raw], path: str
    ) -> Iterator[tuple[BlockParam | None, Raw, str]]:
        """Yield each block, None in place of one of an unknown type, and its path."""
        for i, raw in enumerate(blocks):
            where = f"{path}[{i}]"
            kind = decode_part(_read_type, raw, where).type
            yield BLOCKS.decode_new(kind, raw, where, self._search), raw, where

    def _read_all(self, blocks: Sequence[Raw], path: str, *, new: bool = False) -> str:
        return _join(
            [
                self._read_text(block, raw, where, new=new)
                for block, raw, where in self._blocks(blocks, path)
            ]
        )

    def _read_text(
        self, block: BlockParam | None, raw: Raw, where: str, *, new: bool = False
    ) -> str:
        """Return the text of a block, or what stands in its place."""
        match block:
            case TextBlockParam(text=text):
                return text
            case DocumentBlockParam(source=source, title=title, context=context):
                text = self._read_source(source, f"{where}.source", new=new)
                return _join([title, context, text])
            case SearchResultBlockParam(title=title, source=source):
                return _BETWEEN.join((title, source, *(each.text for each in block.content)))
            case ToolReferenceBlockParam(tool_name=name):
                return name
        return leave_out(_read_type(raw).type, where, self._search, new=new, text="text")

    def _read_source(self, source: DocumentSource, where: str, *, new: bool) -> str:
        match source.type:
            case "text":
                if source.data is None:
                    raise missing(f"{where}.data")
                return source.data
            case "content":
                given = source.content or ""
                if isinstance(given, str):
                    return given
                return self._read_all(given, f"{where}.content", new=new)
        return leave_out(f"document of {source.type}", where, self._search, new=new)


def _join(texts: Sequence[str | None]) -> str:
    return _BETWEEN.join(text for text in texts if text)
