"""Messages of Anthropic's requests: their content blocks, and what they say in no dialect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlxsrv.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from mlxsrv.generation.spec import ChatMessage, PastCall

CacheControl = dict[str, Any]
"""Where a client would begin to cache. Prompts are cached as a whole, so it changes nothing."""

_Blocks = Meta(max_length=10_000)


class TextBlockParam(Struct, frozen=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None


class ImageBlockParam(Struct, frozen=True, tag_field="type", tag="image"):
    source: dict[str, Any]
    cache_control: CacheControl | None = None


class DocumentSource(Struct, frozen=True):
    """`data` of the type "text" and `content` of the type "content" can be read."""

    type: str
    media_type: str | None = None
    data: str | None = None
    content: str | Annotated[list[TextBlockParam | ImageBlockParam], _Blocks] | None = None


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
    thinking: str
    signature: str | None = None


class RedactedThinkingBlockParam(Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    data: str | None = None


class ToolUseBlockParam(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


ReadBlock = (
    TextBlockParam
    | ImageBlockParam
    | DocumentBlockParam
    | SearchResultBlockParam
    | ToolReferenceBlockParam
)
"""The blocks that a model reads as text, as far as it can."""


class ToolResultBlockParam(Struct, frozen=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | Annotated[list[ReadBlock], _Blocks] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


# msgspec wants one flat union.
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


class MessageParam(Struct, frozen=True):
    """One turn. A system message may stand between turns."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[BlockParam], _Blocks]


System = str | Annotated[list[TextBlockParam], _Blocks]

# To messages in no dialect.

_BETWEEN = "\n\n"
"""Between the texts of blocks, each of which is a paragraph of its own."""

_BILLING = "x-anthropic-billing-header"
"""The beginning of a line in which some clients tell something new with each request. In the prompt
it would keep all that follows from being reused."""


def read_chat(system: System | None, messages: Sequence[MessageParam]) -> list[ChatMessage]:
    """Return the messages in no dialect; those of one role that follow each other are one.

    Raises:
        InvalidRequest, MissingParameter, UnsupportedParameter: a block cannot be read; the error
            has its path in the request.
    """
    told = _read_system(system)
    turns = (
        read
        for i, message in enumerate(messages)
        for read in _read(message, f"messages[{i}].content")
    )
    chat = [ChatMessage(role="system", content=told)] if told else []
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


def _read(message: MessageParam, path: str) -> Iterator[ChatMessage]:
    """Yield the messages of one turn: a user's has one for each result of a tool."""
    if isinstance(message.content, str):
        yield ChatMessage(role=message.role, content=message.content)
        return
    places = [(block, f"{path}[{i}]") for i, block in enumerate(message.content)]
    match message.role:
        case "assistant":
            yield _read_assistant(places)
        case "user":
            yield from _read_user(places)
        case "system":
            texts = [_read_text(block, where, "system") for block, where in places]
            yield ChatMessage(role="system", content=_BETWEEN.join(texts))


def _read_assistant(places: Sequence[tuple[BlockParam, str]]) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for block, where in places:
        match block:
            case ThinkingBlockParam(thinking=text):
                thoughts.append(text)
            case RedactedThinkingBlockParam():
                pass  # nobody here can read it
            case ToolUseBlockParam(id=id, name=name, input=given):
                calls.append(PastCall(name, given, id))
            case _:
                texts.append(_read_text(block, where, "assistant"))
    return ChatMessage(
        role="assistant",
        content=_BETWEEN.join(texts),
        reasoning=_BETWEEN.join(thoughts) or None,
        calls=calls,
    )


def _read_user(places: Sequence[tuple[BlockParam, str]]) -> Iterator[ChatMessage]:
    texts: list[str] = []
    for block, where in places:
        if not isinstance(block, ToolResultBlockParam):
            texts.append(_read_text(block, where, "user"))
            continue
        if texts:
            yield ChatMessage(role="user", content=_BETWEEN.join(texts))
            texts = []
        yield _read_result(block, where)
    if texts or not places:
        yield ChatMessage(role="user", content=_BETWEEN.join(texts))


def _read_result(block: ToolResultBlockParam, where: str) -> ChatMessage:
    given = block.content or ""
    text = given if isinstance(given, str) else _read_all(given, f"{where}.content", "tool_result")
    if block.is_error:
        text = f"Error: {text}" if text else "Error"
    return ChatMessage(role="tool", content=text, call_id=block.tool_use_id)


def _read_all(blocks: Sequence[BlockParam], path: str, place: str) -> str:
    return _BETWEEN.join(_read_text(block, f"{path}[{i}]", place) for i, block in enumerate(blocks))


def _read_text(block: BlockParam, where: str, place: str) -> str:
    """Return the text of a block.

    Args:
        place: what the block stands in, for error messages.
    """
    match block:
        case TextBlockParam(text=text):
            return text
        case DocumentBlockParam(title=title, context=context):
            text = _read_source(block.source, f"{where}.source")
            return _BETWEEN.join(part for part in (title, context, text) if part)
        case SearchResultBlockParam(title=title, source=source):
            return _BETWEEN.join((title, source, *(each.text for each in block.content)))
        case ToolReferenceBlockParam(tool_name=name):
            return name
        case ImageBlockParam():
            raise UnsupportedParameter(
                f"{where}: this model reads text only, no images; leave the block out", param=where
            )
    kind = block.__struct_config__.tag
    raise InvalidRequest(f"{where}: a {kind} block cannot stand in a {place} message", param=where)


def _read_source(source: DocumentSource, where: str) -> str:
    match source.type:
        case "text":
            if source.data is None:
                raise MissingParameter(
                    f"missing required parameter: {where}.data", param=f"{where}.data"
                )
            return source.data
        case "content":
            given = source.content or ""
            return given if isinstance(given, str) else _read_all(given, f"{where}.content", "user")
    raise UnsupportedParameter(
        f"{where}: only documents of plain text can be read, with a source of the type text or "
        f"content, not {source.type[:100]!r}",
        param=where,
    )
