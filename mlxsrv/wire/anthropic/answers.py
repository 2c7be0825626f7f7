"""Anthropic's types of answers: a message, whole and as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mlxsrv.generation.outputs import Answer, FinishReason, Identity, Usage
from mlxsrv.wire.anthropic.errors import AnthropicErrorBody

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


def message(identity: Identity, answer: Answer, usage: Usage) -> AnthropicMessage:
    """The response that is not streamed."""
    whole = all(use.complete for use in answer.tools)
    return AnthropicMessage(
        id=identity.id,
        model=identity.model,
        content=[*_blocks(answer)],
        stop_reason=stop_reason(answer.reason, answer.stop, whole=whole),
        stop_sequence=answer.stop,
        usage=MessageUsage.of(usage),
    )


def _blocks(answer: Answer) -> Iterator[Block]:
    """Yield the blocks of an answer. A call that is not complete is told as text, so that no client
    makes it."""
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


def stop_reason(reason: FinishReason, stop: str | None, *, whole: bool) -> StopReason:
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
