"""Chat and text completions, streamed and whole.

A stream has server-sent events in the order that clients rely on. A whole answer has almost nothing
of its chunks: other objects, other fields. They share the choices' scores and ends, the usage and
the identity.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from mlxsrv.errors import ServeError
from mlxsrv.generation.outputs import Answer, Channel, Ended, Identity, TokenScore, Usage
from mlxsrv.wire.dialect import Builder, Dialect
from mlxsrv.wire.openai.answers import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    Delta,
    FunctionDelta,
    MessageToolCall,
    StopCause,
    TextChoice,
    TextCompletion,
    TimingsBody,
    ToolCallDelta,
    UsageBody,
    error_response,
)
from mlxsrv.wire.openai.generation_request import GenerationRequest, StreamOptions
from mlxsrv.wire.openai.logprobs import TextScores, chat_logprobs, prompt_logprobs
from mlxsrv.wire.openai.requests import CHAT_REQUESTS, COMPLETION_REQUESTS
from mlxsrv.wire.sse import DONE, KEEPALIVE, PLACEHOLDER, frame, text_frames

UsageMode = Literal["asked", "continuous", "unasked", "never"]


def usage_mode(options: StreamOptions | None) -> UsageMode:
    """Return where a stream has its usage.

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


class OpenAIBuilder(Builder):
    """A response that may have several choices, scores, and usage on each chunk.

    Args:
        identity: what all chunks share.
        usage: where the stream has its usage.
        choices: how many there are. Their pieces may come in any order.
        scored: whether text chunks have log-probabilities, an empty list for no tokens.
        timed: whether all chunks have the time that the request has taken so far.
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
        self._identity = asdict(identity)
        self._mode = usage
        self._scored = scored
        self._open = dict.fromkeys(range(choices))
        self._timed = timed
        self._usage: UsageBody | UnsetType | None = (
            None if usage in ("asked", "continuous") else UNSET
        )
        self._timings: TimingsBody | UnsetType = UNSET
        # Encoders of chunks with text, by choice and channel.
        self._texts: list[dict[Channel, Callable[[str], bytes]]] = [{} for _ in range(choices)]

    @classmethod
    def for_request(cls, request: GenerationRequest, identity: Identity) -> Self:
        return cls(
            identity,
            usage_mode(request.stream_options),
            choices=request.all_choices,
            scored=request.likeliest is not None,
            timed=bool(request.timings_per_token),
        )

    @property
    def live(self) -> bool:
        return self._timed or self._mode == "continuous"

    def carry(self, usage: Usage) -> None:
        if self._mode == "continuous":
            self._usage = UsageBody.of(usage)
        if self._timed:
            self._timings = TimingsBody.of(usage)
        for texts in self._texts:
            texts.clear()

    def keepalive(self) -> bytes:
        return KEEPALIVE

    def text(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] = ()
    ) -> bytes:
        if scores:
            return frame(self._piece(choice, channel, text, scores))
        try:
            frames = self._texts[choice][channel]
        except KeyError:
            piece = self._piece(choice, channel, PLACEHOLDER, () if self._scored else None)
            frames = self._texts[choice][channel] = text_frames(piece)
        return frames(text)

    @abstractmethod
    def _piece(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] | None
    ) -> object:
        """A chunk with a text; the scores are None if none were asked for."""


class ChunkBuilder(OpenAIBuilder):
    """OpenAI's chunks, then `[DONE]`."""

    _kind: ClassVar[type[ChatChunk] | type[TextCompletion]]

    @abstractmethod
    def _choice(self, index: int, **fields: Any) -> ChunkChoice | TextChoice:
        """A choice of a chunk, with these fields and else empty."""

    def _chunk(self, choices: list[Any], **fields: Any) -> ChatChunk | TextCompletion:
        shared = {**self._identity, "usage": self._usage, "timings": self._timings}
        return self._kind(**{**shared, **fields}, choices=choices)

    def tokens(self, choice: int, tokens: Sequence[int]) -> bytes:
        return frame(self._chunk([self._choice(choice, token_ids=tokens)]))

    def end(self, ended: Ended) -> bytes:
        del self._open[ended.choice]
        reasons = {"finish_reason": ended.reason, "stop_reason": _stop_cause(ended.repeated)}
        last, usage = [self._choice(ended.choice, **reasons)], ended.usage
        if usage is None:
            return frame(self._chunk(last))
        timings = TimingsBody.of(usage)
        if self._mode == "never":
            return frame(self._chunk(last, timings=timings)) + DONE
        empty = [self._choice(0)] if self._mode == "unasked" else []
        reported = self._chunk(empty, usage=UsageBody.of(usage), timings=timings)
        return frame(self._chunk(last)) + frame(reported) + DONE

    def error(self, error: ServeError) -> bytes:
        open = [self._choice(index, finish_reason="error") for index in self._open]
        return frame(self._chunk(open, error=error_response(error).error)) + DONE


class ChatBuilder(ChunkBuilder):
    """A chat completion."""

    _kind = ChatChunk

    @cached_property
    def _arguments(self) -> dict[tuple[int, int], Callable[[str], bytes]]:
        """Encoders of chunks with arguments, by choice and call."""
        return {}

    def carry(self, usage: Usage) -> None:
        super().carry(usage)
        self._arguments.clear()

    def opening(self) -> bytes:
        start = Delta(role="assistant", content="")
        return b"".join(self._delta(choice, start) for choice in self._open)

    def tool(self, choice: int, index: int, id: str, name: str) -> bytes:
        head = FunctionDelta(name=name, arguments="")
        call = ToolCallDelta(index=index, id=id, type="function", function=head)
        return self._delta(choice, Delta(tool_calls=[call]))

    def arguments(self, choice: int, index: int, text: str) -> bytes:
        try:
            frames = self._arguments[choice, index]
        except KeyError:
            call = ToolCallDelta(index=index, function=FunctionDelta(arguments=PLACEHOLDER))
            chunk = self._chunk([self._choice(choice, delta=Delta(tool_calls=[call]))])
            frames = self._arguments[choice, index] = text_frames(chunk)
        return frames(text)

    def prompt(self, choice: int, tokens: Sequence[int]) -> bytes:
        if choice != 0:  # all choices of a chat have one prompt
            return b""
        return frame(self._chunk([self._choice(choice)], prompt_token_ids=tokens))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> ChatCompletion:
        prompt, scores = answers[0].prompt, answers[0].prompt_scores
        return ChatCompletion(
            **self._identity,
            choices=[_chat_choice(index, answer) for index, answer in enumerate(answers)],
            usage=UsageBody.of(usage),
            prompt_token_ids=UNSET if prompt is None else [*prompt],
            prompt_logprobs=UNSET if scores is None else prompt_logprobs(scores),
            timings=TimingsBody.of(usage),
        )

    def _delta(self, choice: int, delta: Delta) -> bytes:
        return frame(self._chunk([self._choice(choice, delta=delta)]))

    def _choice(self, index: int, **fields: Any) -> ChunkChoice:
        return ChunkChoice(index=index, **{"delta": Delta(), "finish_reason": None, **fields})

    def _piece(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] | None
    ) -> object:
        if channel == "content":
            delta = Delta(content=text)
        else:
            delta = Delta(reasoning_content=text, reasoning=text)
        logprobs = None if scores is None else chat_logprobs(scores)
        return self._chunk([self._choice(choice, delta=delta, logprobs=logprobs)])


def _chat_choice(index: int, answer: Answer) -> ChatChoice:
    reasoning = answer.reasoning or UNSET
    calls = [
        MessageToolCall(id=use.id, function=CalledFunction(use.name, use.arguments))
        for use in answer.tools
    ]
    return ChatChoice(
        index=index,
        message=AssistantMessage(
            content=None if answer.tools and not answer.content else answer.content,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or UNSET,
        ),
        logprobs=None if answer.scores is None else chat_logprobs(answer.scores),
        finish_reason=answer.reason,
        stop_reason=_stop_cause(answer.repeated),
        token_ids=UNSET if answer.tokens is None else [*answer.tokens],
    )


def _stop_cause(repeated: bool) -> StopCause | UnsetType:
    """Return what ended an answer besides its reason, by vLLM's name."""
    return "repetition_detected" if repeated else UNSET


class CompletionBuilder(ChunkBuilder):
    """A text completion. It has no field for reasoning, so reasoning is a part of the text."""

    _kind = TextCompletion

    @cached_property
    def _scores(self) -> defaultdict[int, TextScores]:
        """Writes the log-probabilities of each choice: offsets go on from chunk to chunk."""
        return defaultdict(TextScores)

    def prompt(self, choice: int, tokens: Sequence[int]) -> bytes:
        return frame(self._chunk([self._choice(choice, prompt_token_ids=tokens)]))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> TextCompletion:
        choices = [self._text_choice(index, answer) for index, answer in enumerate(answers)]
        return TextCompletion(
            **self._identity,
            choices=choices,
            usage=UsageBody.of(usage),
            timings=TimingsBody.of(usage),
        )

    def _text_choice(self, index: int, answer: Answer) -> TextChoice:
        scores = answer.prompt_scores
        return TextChoice(
            index=index,
            text=answer.reasoning + answer.content,
            logprobs=None if answer.scores is None else self._scores[index].write(answer.scores),
            finish_reason=answer.reason,
            stop_reason=_stop_cause(answer.repeated),
            prompt_token_ids=UNSET if answer.prompt is None else [*answer.prompt],
            prompt_logprobs=UNSET if scores is None else prompt_logprobs(scores),
            token_ids=UNSET if answer.tokens is None else [*answer.tokens],
        )

    def _choice(self, index: int, **fields: Any) -> TextChoice:
        return TextChoice(index=index, **{"text": "", "finish_reason": None, **fields})

    def _piece(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] | None
    ) -> object:
        logprobs = None if scores is None else self._scores[choice].write(scores)
        return self._chunk([self._choice(choice, text=text, logprobs=logprobs)])


CHATS = Dialect(CHAT_REQUESTS, "chatcmpl-", ChatBuilder.for_request)
COMPLETIONS = Dialect(COMPLETION_REQUESTS, "cmpl-", CompletionBuilder.for_request)
