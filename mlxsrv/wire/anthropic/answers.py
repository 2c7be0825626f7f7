"""Anthropic's answers: a message, whole and as the events of a stream; the list of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mlxsrv.errors import ServeError
from mlxsrv.generation.outputs import (
    Answer,
    Channel,
    Ended,
    FinishReason,
    Identity,
    TokenScore,
    Usage,
)
from mlxsrv.generation.status import ModelObject
from mlxsrv.wire.anthropic.errors import AnthropicErrorBody, error_body
from mlxsrv.wire.anthropic.requests import MESSAGES_REQUESTS
from mlxsrv.wire.dialect import Builder, Dialect
from mlxsrv.wire.sse import PLACEHOLDER, named_frame, text_encoder

SIGNATURE = "mlxsrv"
"""Ends thoughts. Clients give a block of thoughts back only if it has a signature; nobody checks
it here."""

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

# Blocks.


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock

# The message.


class ThinkingDetails(Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(Struct, frozen=True, kw_only=True):
    """The three numbers of input tokens add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        thinking = usage.reasoning_tokens
        return cls(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=UNSET if thinking is None else ThinkingDetails(thinking),
        )


class AnthropicMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct, frozen=True):
    input_tokens: int


# Models.


class AnthropicModel(Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModelList(Struct, frozen=True, kw_only=True):
    data: list[AnthropicModel]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


def anthropic_model(known: ModelObject) -> AnthropicModel:
    return AnthropicModel(
        id=known.id,
        display_name=known.id,
        created_at=datetime.fromtimestamp(known.created, UTC),
        max_input_tokens=known.context_length,
        max_tokens=known.context_length,
    )


def anthropic_models(known: Sequence[ModelObject]) -> AnthropicModelList:
    """All models, on one page."""
    models = [anthropic_model(one) for one in known]
    ids = [model.id for model in models]
    return AnthropicModelList(
        data=models, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None
    )


# Events.


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class ContentBlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputJSONDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJSONDelta


class ContentBlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class ContentBlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


class Ping(Struct, frozen=True, tag_field="type", tag="ping"):
    pass


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
    | AnthropicErrorBody
)


# The builder.


class _Kind(Struct, frozen=True):
    """A kind of block whose text comes in deltas."""

    empty: Block
    delta: BlockDelta


_CHANNELS: dict[Channel, _Kind] = {
    "content": _Kind(TextBlock(""), TextDelta(PLACEHOLDER)),
    "reasoning": _Kind(ThinkingBlock("", ""), ThinkingDelta(PLACEHOLDER)),
}


def _frame(event: MessageEvent) -> bytes:
    return named_frame(str(event.__struct_config__.tag), event)


_PING = _frame(Ping())


class MessageBuilder(Builder):
    """One message.

    Its events are in the order that clients rely on: message_start; then blocks, one open at a
    time: content_block_start, deltas of its kind, content_block_stop; then message_delta, with the
    usage, and message_stop. An error event ends the stream wherever it is. Pings come wherever
    nothing is produced: comments do not count for clients that wait for events.

    A whole message has other blocks than its stream: one for each kind of text, and text in place
    of a call that is not complete, which a stream has begun before that is known.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._begun = False
        self._blocks = 0  # that were begun
        self._open: Channel | Literal["call"] | None = None  # what the open block is for
        self._write: Callable[[str], bytes] = _nothing_open  # more of that block
        self._calls = 0  # that were begun

    def keepalive(self) -> bytes:
        return _PING

    def whole(self, answers: Sequence[Answer], usage: Usage) -> AnthropicMessage:
        [answer] = answers
        whole = all(use.complete for use in answer.tools)
        return self._message(
            [*_blocks(answer)],
            usage,
            StopDelta(_stop_reason(answer.reason, answer.stop, whole=whole), answer.stop),
        )

    def _message(
        self, content: list[Block], usage: Usage, stop: StopDelta | None = None
    ) -> AnthropicMessage:
        return AnthropicMessage(
            id=self._identity.id,
            model=self._identity.model,
            content=content,
            stop_reason=None if stop is None else stop.stop_reason,
            stop_sequence=None if stop is None else stop.stop_sequence,
            usage=MessageUsage.of(usage),
        )

    def prompt_done(self, tokens: int, cached: int) -> bytes:
        # The message begins here and not at the opening, because it begins with its usage.
        self._begun = True
        usage = Usage(prompt_tokens=tokens, completion_tokens=0, cached_tokens=cached)
        return _frame(MessageStart(self._message([], usage)))

    def text(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] = ()
    ) -> bytes:
        if channel == self._open:
            return self._write(text)
        if not text:
            return b""
        kind = _CHANNELS[channel]
        return self._begin(channel, kind.empty, kind.delta) + self._write(text)

    def tool(self, choice: int, index: int, id: str, name: str) -> bytes:
        self._calls += 1
        return self._begin("call", ToolUseBlock(id, name, {}), InputJSONDelta(PLACEHOLDER))

    def arguments(self, choice: int, index: int, text: str) -> bytes:
        return self._write(text)

    def end(self, ended: Ended) -> bytes:
        usage = ended.usage
        assert usage is not None  # there is one choice
        # An answer that ended before its prompt was read has no message yet.
        start = b"" if self._begun else self.prompt_done(usage.prompt_tokens, usage.cached_tokens)
        rest = self._rest(ended) + self._stop()
        reason = _stop_reason(ended.reason, ended.stop, whole=not ended.broken)
        last = MessageDelta(StopDelta(reason, ended.stop), MessageUsage.of(usage))
        return start + rest + _frame(last) + _frame(MessageStop())

    def _rest(self, ended: Ended) -> bytes:
        """The text of a call that was cut off before it was begun here."""
        if self._calls - 1 in ended.broken or not ended.fragment:
            return b""
        kind = _CHANNELS["content"]
        return self._begin("content", kind.empty, kind.delta) + self._write(ended.fragment)

    def error(self, error: ServeError) -> bytes:
        return _frame(error_body(error))

    def _begin(self, of: Channel | Literal["call"], empty: Block, delta: BlockDelta) -> bytes:
        """End the open block and begin another one."""
        stop, index = self._stop(), self._blocks
        self._blocks += 1
        self._open = of
        self._write = text_encoder(_frame(ContentBlockDelta(index, delta)))
        return stop + _frame(ContentBlockStart(index, empty))

    def _stop(self) -> bytes:
        """End the open block, if there is one."""
        if self._open is None:
            return b""
        index, signature = self._blocks - 1, b""
        if self._open == "reasoning":
            signature = _frame(ContentBlockDelta(index, SignatureDelta(SIGNATURE)))
        self._open = None
        return signature + _frame(ContentBlockStop(index))


def _nothing_open(text: str) -> bytes:
    raise AssertionError("no block is open")


def _blocks(answer: Answer) -> Iterator[Block]:
    """Yield the blocks of an answer. A call that is not complete is text: no client may make it."""
    if answer.reasoning:
        yield ThinkingBlock(answer.reasoning, SIGNATURE)
    if answer.content:
        yield TextBlock(answer.content)
    for use in answer.tools:
        if use.complete:
            yield ToolUseBlock(use.id, use.name, msgspec.json.decode(use.arguments))
        elif not answer.fragment or use is not answer.tools[-1]:
            yield TextBlock(use.text)
    if answer.fragment:
        yield TextBlock(answer.fragment)


def _stop_reason(reason: FinishReason, stop: str | None, *, whole: bool) -> StopReason:
    """Return why an answer ended.

    Args:
        stop: the stop string that ended it.
        whole: all its tool calls are complete. If not, no client shall make them.
    """
    if stop is not None:
        return "stop_sequence"
    if reason in ("length", "timeout"):
        return "max_tokens"
    return "tool_use" if reason == "tool_calls" and whole else "end_turn"


MESSAGES = Dialect(MESSAGES_REQUESTS, "msg_", lambda request, identity: MessageBuilder(identity))
