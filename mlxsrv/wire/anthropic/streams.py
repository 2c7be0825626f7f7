"""A message as server-sent events, in the order that clients rely on.

message_start; then blocks, one open at a time: content_block_start, deltas of its kind,
content_block_stop; then message_delta, with the usage, and message_stop. An error event ends the
stream wherever it is. Pings come wherever nothing is produced: comments do not count for clients
that wait for events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from mlxsrv.errors import ServeError
from mlxsrv.generation.outputs import Channel, Ended, Identity, TokenScore, Usage
from mlxsrv.wire.anthropic.answers import (
    SIGNATURE,
    AnthropicMessage,
    Block,
    BlockDelta,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJSONDelta,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    stop_reason,
)
from mlxsrv.wire.anthropic.errors import error_body
from mlxsrv.wire.dialect import Stream
from mlxsrv.wire.sse import PLACEHOLDER, named_frame, text_encoder


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


class MessageStream(Stream):
    """The events of one message."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._begun = False
        self._blocks = 0  # that were begun
        self._open: Channel | Literal["call"] | None = None  # what the open block is for
        self._write: Callable[[str], bytes] = _nothing_open  # more of that block
        self._calls = 0  # that were begun

    def keepalive(self) -> bytes:
        return _PING

    def opening(self) -> bytes:
        return b""  # the message begins when its usage is known

    def prompt_done(self, tokens: int, cached: int) -> bytes:
        self._begun = True
        usage = Usage(prompt_tokens=tokens, completion_tokens=0, cached_tokens=cached)
        empty = AnthropicMessage(
            id=self._identity.id,
            model=self._identity.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=MessageUsage.of(usage),
        )
        return _frame(MessageStart(empty))

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
        reason = stop_reason(ended.reason, ended.stop, whole=not ended.broken)
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
