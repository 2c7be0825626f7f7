"""Completions as server-sent events, in the order that clients rely on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from mlxsrv.errors import ServeError
from mlxsrv.events import Channel, FinishReason, TokenScore, Usage
from mlxsrv.wire.logprobs import ChatLogprobs, TextLogprobs, TextScores, chat_logprobs
from mlxsrv.wire.openai import (
    ChatChunk,
    ChunkChoice,
    ChunkReason,
    Delta,
    FunctionDelta,
    Identity,
    TextChoice,
    TextCompletion,
    ToolCallDelta,
    UsageBody,
    error_response,
    make_text_completion,
)
from mlxsrv.wire.requests import StreamOptions
from mlxsrv.wire.sse import DONE, PLACEHOLDER, frame, text_frames

UsageMode = Literal["asked", "unasked", "never"]


def usage_mode(options: StreamOptions | None) -> UsageMode:
    """Whether a stream tells its usage, and in which shape; `Stream.end` writes it.

    - asked for: on a last chunk without choices, and null on all others;
    - `stream_options` that do not ask for it: nowhere;
    - no `stream_options`: on a last chunk with one empty choice, which clients that look at
      `choices[0]` can read. Not on the finish chunk: some drop a finish reason next to usage.
    """
    if options is None:
        return "unasked"
    return "asked" if options.include_usage else "never"


TextFrames = Callable[[str], bytes]


class Stream(ABC):
    """The frames of one streamed response, in the order that clients rely on: `opening`, then of
    each choice any number of pieces and its `end`; `error` ends whatever is still open.

    Args:
        choices: how many there are; choices interleave as they come.
        scored: text chunks carry the log-probabilities of their tokens, if only of none.
    """

    def __init__(
        self, who: Identity, usage: UsageMode, *, choices: int = 1, scored: bool = False
    ) -> None:
        self._who = who
        self._mode = usage
        self._scored = scored
        self._open = dict.fromkeys(range(choices))

    @abstractmethod
    def opening(self) -> bytes: ...

    @abstractmethod
    def text(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] = ()
    ) -> bytes: ...

    def tool(self, choice: int, index: int, id: str, name: str) -> bytes:
        """The head of the choice's tool call `index`. Only a chat has tools."""
        raise NotImplementedError

    def arguments(self, choice: int, index: int, text: str) -> bytes:
        """More of the arguments of a tool call whose head has been sent."""
        raise NotImplementedError

    @abstractmethod
    def _empty(self, choices: Iterable[int], reason: ChunkReason) -> ChatChunk | TextCompletion:
        """A chunk without text."""

    def end(self, choice: int, reason: FinishReason, usage: Usage | None) -> bytes:
        """The end of one choice. With `usage`, that of the stream, too."""
        del self._open[choice]
        last = self._empty([choice], reason)
        if usage is None:
            return frame(last)
        if self._mode == "never":
            return frame(last) + DONE
        told = self._empty([] if self._mode == "asked" else [0], None)
        return frame(last) + frame(replace(told, usage=UsageBody.of(usage))) + DONE

    def error(self, error: ServeError) -> bytes:
        """The end of the stream and of every choice that has none yet."""
        last = self._empty(self._open, "error")
        return frame(replace(last, error=error_response(error).error)) + DONE

    @property
    def _usage(self) -> UnsetType | None:
        """What every chunk but the usage chunk says of usage."""
        return None if self._mode == "asked" else UNSET


class ChatStream(Stream):
    def __init__(
        self, who: Identity, usage: UsageMode, *, choices: int = 1, scored: bool = False
    ) -> None:
        super().__init__(who, usage, choices=choices, scored=scored)
        self._texts: list[dict[Channel, TextFrames]] = [{} for _ in range(choices)]
        self._arguments: dict[tuple[int, int], TextFrames] = {}

    def opening(self) -> bytes:
        start = Delta(role="assistant", content="")
        return b"".join(frame(self._chunk(choice, start)) for choice in self._open)

    def text(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] = ()
    ) -> bytes:
        if scores:
            return frame(self._chunk(choice, _delta(channel, text), chat_logprobs(scores)))
        try:
            frames = self._texts[choice][channel]
        except KeyError:
            none = chat_logprobs([]) if self._scored else None
            chunk = self._chunk(choice, _delta(channel, PLACEHOLDER), none)
            frames = self._texts[choice][channel] = text_frames(chunk)
        return frames(text)

    def tool(self, choice: int, index: int, id: str, name: str) -> bytes:
        head = FunctionDelta(name=name, arguments="")
        call = ToolCallDelta(index=index, id=id, type="function", function=head)
        return frame(self._chunk(choice, Delta(tool_calls=[call])))

    def arguments(self, choice: int, index: int, text: str) -> bytes:
        try:
            frames = self._arguments[choice, index]
        except KeyError:
            call = ToolCallDelta(index=index, function=FunctionDelta(arguments=PLACEHOLDER))
            chunk = self._chunk(choice, Delta(tool_calls=[call]))
            frames = self._arguments[choice, index] = text_frames(chunk)
        return frames(text)

    def _empty(self, choices: Iterable[int], reason: ChunkReason) -> ChatChunk:
        return self._of(
            [ChunkChoice(index=index, delta=Delta(), finish_reason=reason) for index in choices]
        )

    def _chunk(self, choice: int, delta: Delta, logprobs: ChatLogprobs | None = None) -> ChatChunk:
        return self._of(
            [ChunkChoice(index=choice, delta=delta, logprobs=logprobs, finish_reason=None)]
        )

    def _of(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._who.id,
            created=self._who.created,
            model=self._who.model,
            system_fingerprint=self._who.system_fingerprint,
            choices=choices,
            usage=self._usage,
        )


def _delta(channel: Channel, text: str) -> Delta:
    if channel == "content":
        return Delta(content=text)
    return Delta(reasoning_content=text, reasoning=text)


class CompletionStream(Stream):
    def __init__(
        self, who: Identity, usage: UsageMode, *, choices: int = 1, scored: bool = False
    ) -> None:
        super().__init__(who, usage, choices=choices, scored=scored)
        none = TextScores().write([]) if scored else None
        self._texts = [
            text_frames(self._chunk(choice, PLACEHOLDER, none)) for choice in range(choices)
        ]
        self._scores: defaultdict[int, TextScores] = defaultdict(TextScores)

    def opening(self) -> bytes:
        return b""  # a text completion has no role to tell

    def text(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] = ()
    ) -> bytes:
        if scores:
            return frame(self._chunk(choice, text, self._scores[choice].write(scores)))
        return self._texts[choice](text)

    def _empty(self, choices: Iterable[int], reason: ChunkReason) -> TextCompletion:
        ends = [TextChoice(index=index, text="", finish_reason=reason) for index in choices]
        return make_text_completion(self._who, ends, self._usage)

    def _chunk(self, choice: int, text: str, logprobs: TextLogprobs | None) -> TextCompletion:
        piece = TextChoice(index=choice, text=text, logprobs=logprobs, finish_reason=None)
        return make_text_completion(self._who, [piece], self._usage)
