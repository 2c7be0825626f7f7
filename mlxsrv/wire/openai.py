"""What the server says: OpenAI's chat and text completion types, whole and in chunks.

A fold makes of whole answers one response; a Stream writes the same, in the order that clients
rely on, as server-sent events. Fields that OpenAI requires are there even when null; those it
leaves out are UNSET.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from mlxsrv.errors import ServeError
from mlxsrv.events import Answer, Channel, FinishReason, TokenScore, ToolUse, Usage
from mlxsrv.wire.logprobs import ChatLogprobs, TextLogprobs, TextScores, chat_logprobs
from mlxsrv.wire.requests import StreamOptions
from mlxsrv.wire.sse import DONE, PLACEHOLDER, frame, text_frames


class ErrorBody(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct, frozen=True):
    error: ErrorBody


def error_response(error: ServeError) -> ErrorResponse:
    return ErrorResponse(ErrorBody(error.message, error.type, error.param, error.code))


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    reasoning_tokens: int


class UsageBody(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> UsageBody:
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptDetails(usage.cached_tokens),
            completion_tokens_details=UNSET
            if usage.reasoning_tokens is None
            else CompletionDetails(usage.reasoning_tokens),
        )


class Identity(Struct, frozen=True):
    """What all chunks of a response share."""

    id: str
    created: int
    model: str
    system_fingerprint: str


# Chat.


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str


class MessageToolCall(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @classmethod
    def of(cls, use: ToolUse) -> MessageToolCall:
        return cls(id=use.id, function=CalledFunction(use.name, use.arguments))


class AssistantMessage(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody


class FunctionDelta(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


ChunkReason = FinishReason | Literal["error"] | None


class ChunkChoice(Struct, frozen=True, kw_only=True):
    index: int = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChunkReason


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    error: ErrorBody | UnsetType = UNSET


def chat_completion(who: Identity, answers: Sequence[Answer], usage: Usage) -> ChatCompletion:
    """The whole response of a chat that was not streamed."""
    return ChatCompletion(
        id=who.id,
        created=who.created,
        model=who.model,
        system_fingerprint=who.system_fingerprint,
        choices=[_chat_choice(index, answer) for index, answer in enumerate(answers)],
        usage=UsageBody.of(usage),
    )


def _chat_choice(index: int, answer: Answer) -> ChatChoice:
    reasoning = answer.reasoning or UNSET
    return ChatChoice(
        index=index,
        message=AssistantMessage(
            content=None if answer.tools and not answer.content else answer.content,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=[MessageToolCall.of(use) for use in answer.tools] or UNSET,
        ),
        logprobs=None if answer.scores is None else chat_logprobs(answer.scores),
        finish_reason=answer.reason,
    )


# Text.


class TextChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: ChunkReason


class TextCompletion(Struct, frozen=True, kw_only=True):
    """A whole response and, with `usage` left out or null, a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageBody | UnsetType | None = UNSET
    error: ErrorBody | UnsetType = UNSET


def text_completion(who: Identity, answers: Sequence[Answer], usage: Usage) -> TextCompletion:
    """The whole response of a text completion that was not streamed. It has no field for
    reasoning, so all text is text."""
    choices = [
        TextChoice(
            index=index,
            text=answer.reasoning + answer.content,
            logprobs=None if answer.scores is None else TextScores().write(answer.scores),
            finish_reason=answer.reason,
        )
        for index, answer in enumerate(answers)
    ]
    return _text_completion(who, choices, UsageBody.of(usage))


def _text_completion(
    who: Identity, choices: list[TextChoice], usage: UsageBody | UnsetType | None
) -> TextCompletion:
    return TextCompletion(
        id=who.id,
        created=who.created,
        model=who.model,
        system_fingerprint=who.system_fingerprint,
        choices=choices,
        usage=usage,
    )


# Streams.

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
        return _text_completion(self._who, ends, self._usage)

    def _chunk(self, choice: int, text: str, logprobs: TextLogprobs | None) -> TextCompletion:
        piece = TextChoice(index=choice, text=text, logprobs=logprobs, finish_reason=None)
        return _text_completion(self._who, [piece], self._usage)


# The catalogue.


class ModelDetails(Struct, frozen=True):
    """As Ollama has them."""

    family: str
    parameter_size: str
    quantization_level: str
    format: str


class ModelObject(Struct, frozen=True, kw_only=True):
    """OpenAI's fields, then what else is known. Nulls: the model's files are not here yet."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    loaded: bool
    aliases: tuple[str, ...]
    type: Literal["chat", "base", "embedding"] | None = None
    context_length: int | None = None
    details: ModelDetails | None = None
    size: int | None = None
    """Bytes of its weights' files."""
    modified_at: datetime | None = None
    capabilities: tuple[str, ...] = ()


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelObject]


# Tokens: not OpenAI's, which has no such endpoints, but llama.cpp's.


class TokenPiece(Struct, frozen=True):
    """A token and its text or, where its bytes are no text alone, their values."""

    id: int
    piece: str | list[int]

    @classmethod
    def of(cls, id: int, token: bytes) -> TokenPiece:
        try:
            return cls(id, token.decode())
        except UnicodeDecodeError:
            return cls(id, list(token))


class TokenizeResponse(Struct, frozen=True):
    tokens: list[int | TokenPiece]
    count: int


class DetokenizeResponse(Struct, frozen=True):
    content: str


# The server itself.

HealthStatus = Literal["ok", "loading", "draining", "failed", "stalled"]


class ModelState(Struct, frozen=True, kw_only=True):
    """A model that is loaded or wanted. `engine` is the device thread's part, once it is loaded:
    rows that decode, prompts that are read or wait, the prompt cache."""

    id: str
    state: Literal["loaded", "loading", "waiting for room", "unused"]
    pinned: bool
    requests: int
    rows: int
    """Answers that are being generated; others of the requests wait."""
    max_rows: int
    bytes: int | None
    idle_seconds: float | None
    engine: dict[str, int]


class MemoryState(Struct, frozen=True, kw_only=True):
    """In bytes: the limit for weights and what they take of it; what MLX has in use, keeps for
    reuse, and has had at most."""

    limit: int
    weights: int
    active: int
    cached: int
    peak: int


class EngineState(Struct, frozen=True, kw_only=True):
    """`stalled_seconds`: how long a step has taken that is still under way, if that is more than
    `--step-timeout`; else 0."""

    stalled_seconds: float


class Health(Struct, frozen=True, kw_only=True):
    status: HealthStatus
    engine: EngineState | UnsetType = UNSET
    models: list[ModelState] | UnsetType = UNSET
    memory: MemoryState | UnsetType = UNSET
