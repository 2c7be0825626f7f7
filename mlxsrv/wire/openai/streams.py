"""Completions as server-sent events, in the order that clients rely on."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Literal

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from mlxsrv.errors import ServeError
from mlxsrv.generation.outputs import Channel, Ended, Identity, TokenScore, Usage
from mlxsrv.wire.dialect import Stream
from mlxsrv.wire.openai.answers import (
    ChatChunk,
    ChunkChoice,
    ChunkReason,
    Delta,
    FunctionDelta,
    TextChoice,
    TextCompletion,
    ToolCallDelta,
    UsageBody,
    error_response,
    make_text_completion,
)
from mlxsrv.wire.openai.generation_request import StreamOptions
from mlxsrv.wire.openai.logprobs import ChatLogprobs, TextLogprobs, TextScores, chat_logprobs
from mlxsrv.wire.openai.timings import TimingsBody
from mlxsrv.wire.sse import DONE, KEEPALIVE, PLACEHOLDER, frame, text_frames

UsageMode = Literal["asked", "continuous", "unasked", "never"]


def usage_mode(options: StreamOptions | None) -> UsageMode:
    """Where a stream tells its usage; `Stream.end` writes it.

    - "asked": on a last chunk without choices, and null on all others;
    - "continuous": the same, but all other chunks have the usage so far;
    - "never": nowhere, because the request has `stream_options` that do not ask for it;
    - "unasked": the request has no `stream_options`. On a last chunk with one empty choice, so that
      clients that look at `choices[0]` can read it. Not on the finish chunk, because some clients
      drop a finish reason next to usage.
    """
    if options is None:
        return "unasked"
    if not options.include_usage:
        return "never"
    return "continuous" if options.continuous_usage_stats else "asked"


TextFrames = Callable[[str], bytes]


class OpenAIStream(Stream):
    """The frames of a response that may have several choices, scores, and usage on each chunk.

    Args:
        identity: what all chunks share.
        usage: where the stream tells its usage.
        choices: how many there are. Their pieces may come in any order.
        scored: whether text chunks have log-probabilities, an empty list for no tokens.
        timed: whether all chunks tell the time that the request has taken so far.
    """

    def __init__(
        self,
        identity: Identity,
        usage: UsageMode,
        *,
        choices: int = 1,
        scored: bool = False,
        timed: bool = False,
    ) -> None:
        self._identity = identity
        self._mode = usage
        self._choices = choices
        self._scored = scored
        self._open = dict.fromkeys(range(choices))
        self._timed = timed
        self._usage: UsageBody | UnsetType | None = (
            None if usage in ("asked", "continuous") else UNSET
        )
        self._timings: TimingsBody | UnsetType = UNSET
        self._encode_templates()

    @property
    def live(self) -> bool:
        return self._timed or self._mode == "continuous"

    def carry(self, usage: Usage) -> None:
        if self._mode == "continuous":
            self._usage = UsageBody.of(usage)
        if self._timed:
            self._timings = TimingsBody.of(usage)
        self._encode_templates()

    def keepalive(self) -> bytes:
        return KEEPALIVE

    @abstractmethod
    def _encode_templates(self) -> None:
        """Encode what the chunks share, or forget what was encoded, if it is encoded on demand.

        Called at the start, and whenever the usage or the timings on the chunks change.
        """


class ChunkStream(OpenAIStream):
    """OpenAI's chunks, then `[DONE]`."""

    @abstractmethod
    def _empty(self, choices: Iterable[int], reason: ChunkReason) -> ChatChunk | TextCompletion:
        """A chunk without text."""

    def end(self, ended: Ended) -> bytes:
        del self._open[ended.choice]
        last, usage = self._empty([ended.choice], ended.reason), ended.usage
        if usage is None:
            return frame(last)
        timings = TimingsBody.of(usage)
        if self._mode == "never":
            return frame(replace(last, timings=timings)) + DONE
        told = self._empty([0] if self._mode == "unasked" else [], None)
        told = replace(told, usage=UsageBody.of(usage), timings=timings)
        return frame(last) + frame(told) + DONE

    def error(self, error: ServeError) -> bytes:
        last = self._empty(self._open, "error")
        return frame(replace(last, error=error_response(error).error)) + DONE


class ChatStream(ChunkStream):
    """Chunks of a chat completion."""

    def _encode_templates(self) -> None:
        self._texts: list[dict[Channel, TextFrames]] = [{} for _ in range(self._choices)]
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

    def prompt(self, choice: int, tokens: Sequence[int]) -> bytes:
        if choice != 0:  # all choices of a chat have one prompt
            return b""
        return frame(replace(self._chunk(choice, Delta()), prompt_token_ids=[*tokens]))

    def tokens(self, choice: int, tokens: Sequence[int]) -> bytes:
        drawn = ChunkChoice(index=choice, delta=Delta(), finish_reason=None, token_ids=[*tokens])
        return frame(self._of([drawn]))

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
            id=self._identity.id,
            created=self._identity.created,
            model=self._identity.model,
            system_fingerprint=self._identity.system_fingerprint,
            choices=choices,
            usage=self._usage,
            timings=self._timings,
        )


def _delta(channel: Channel, text: str) -> Delta:
    if channel == "content":
        return Delta(content=text)
    return Delta(reasoning_content=text, reasoning=text)


class CompletionStream(ChunkStream):
    """Chunks of a text completion."""

    @cached_property
    def _scores(self) -> defaultdict[int, TextScores]:
        """Writes the log-probabilities of each choice: offsets go on from chunk to chunk."""
        return defaultdict(TextScores)

    def _encode_templates(self) -> None:
        none = TextScores().write([]) if self._scored else None
        self._texts = [
            text_frames(self._chunk(choice, PLACEHOLDER, none)) for choice in range(self._choices)
        ]

    def opening(self) -> bytes:
        return b""  # a text completion has no role

    def text(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] = ()
    ) -> bytes:
        if scores:
            return frame(self._chunk(choice, text, self._scores[choice].write(scores)))
        return self._texts[choice](text)

    def _empty(self, choices: Iterable[int], reason: ChunkReason) -> TextCompletion:
        ends = [TextChoice(index=index, text="", finish_reason=reason) for index in choices]
        return self._of(ends)

    def prompt(self, choice: int, tokens: Sequence[int]) -> bytes:
        ids = [*tokens]
        begun = TextChoice(index=choice, text="", finish_reason=None, prompt_token_ids=ids)
        return frame(self._of([begun]))

    def tokens(self, choice: int, tokens: Sequence[int]) -> bytes:
        drawn = TextChoice(index=choice, text="", finish_reason=None, token_ids=[*tokens])
        return frame(self._of([drawn]))

    def _chunk(self, choice: int, text: str, logprobs: TextLogprobs | None) -> TextCompletion:
        return self._of(
            [TextChoice(index=choice, text=text, logprobs=logprobs, finish_reason=None)]
        )

    def _of(self, choices: list[TextChoice]) -> TextCompletion:
        return make_text_completion(self._identity, choices, self._usage, self._timings)
