"""OpenAI's chat and text completion types: requests in, responses and chunks out.

A request Struct holds the fields that this server honours. What else a body may carry falls in
two classes: fields that would change the output but cannot be honoured are refused unless their
value asks for nothing (`_NEUTRAL`); all others are named in `ignored`, for `X-Ignored-Params`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from mlxsrv.errors import (
    InvalidJSON,
    InvalidRequest,
    MissingParameter,
    ServeError,
    UnsupportedParameter,
)
from mlxsrv.events import Channel, FinishReason, Usage
from mlxsrv.wire.sse import DONE, PLACEHOLDER, frame, text_frames

# Requests.

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
PositiveInt = Annotated[int, Meta(ge=1)]
StopString = Annotated[str, Meta(min_length=1)]
TokenId = Annotated[int, Meta(ge=0)]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """What chat and text completion have in common."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    max_tokens: PositiveInt | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ContentPart(Struct, frozen=True):
    type: str
    text: str | None = None


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str = ""


class ToolCall(Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]

    @property
    def limit(self) -> int:
        return self.max_tokens or 16  # as OpenAI has it


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "profile": (None,),
    "steering": (None,),
}

T = TypeVar("T", bound=GenerationRequest)
D = TypeVar("D")


class RequestDecoder(Generic[T]):
    """Decodes bodies into one kind of request; made once, at module level.

    Raises:
        InvalidJSON, MissingParameter, InvalidRequest, UnsupportedParameter: `param` is the path.
    """

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._honoured = frozenset(kind.__struct_encode_fields__)

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """The request, and the names of fields that were ignored."""
        request = _decode(self._decoder.decode, body)
        fields = _decode(self._fields.decode, body)
        ignored = []
        for name in fields.keys() - self._honoured:
            value = _decode(msgspec.json.decode, fields[name])
            if name in _NEUTRAL:
                _require_neutral(name, value)
            elif value is not None:
                ignored.append(name)
        if request.stream_options is not None and not request.stream:
            ignored.append("stream_options")
        return request, sorted(ignored)


def _decode(decode: Callable[[Any], D], data: bytes | msgspec.Raw) -> D:
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJSON(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidJSON("the body is nested too deeply") from None


def _require_neutral(name: str, value: Any) -> None:
    if not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
        raise UnsupportedParameter(
            f"{name} is not supported by this server with this value; leave it out", param=name
        )


def _same(value: Any, neutral: Any) -> bool:
    """Equality of JSON values: Python's has 1 equal True."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")


def _invalid(text: str) -> InvalidRequest:
    """msgspec's error with its path turned into `param`."""
    match = _PATH.match(text)
    assert match is not None  # the pattern matches any text
    what, path = match["what"], match["path"] or None
    if missing := _MISSING.search(what):
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return MissingParameter(f"missing required parameter: {name}", param=name)
    where = f"{path}: " if path else ""
    return InvalidRequest(f"{where}{what[:1].lower()}{what[1:]}", param=path)


CHAT_REQUESTS = RequestDecoder(ChatRequest)
COMPLETION_REQUESTS = RequestDecoder(CompletionRequest)

# Responses.


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


class AssistantMessage(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int = 0
    message: AssistantMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody


class TextChoice(Struct, frozen=True, kw_only=True):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: FinishReason | Literal["error"] | None


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


class Delta(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True):
    index: int = 0
    delta: Delta
    logprobs: None = None
    finish_reason: FinishReason | Literal["error"] | None


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    error: ErrorBody | UnsetType = UNSET


UsageMode = Literal["with_finish", "own_chunk", "never"]


def usage_mode(options: StreamOptions | None) -> UsageMode:
    """Where a stream tells its usage: asked for, on a chunk of its own; not asked for either way,
    on the finish chunk; `stream_options` without it, nowhere."""
    if options is None:
        return "with_finish"
    return "own_chunk" if options.include_usage else "never"


ChunkReason = FinishReason | Literal["error"] | None


class Stream(ABC):
    """The frames of one streamed response, in the order that clients rely on: `opening`, any
    number of `text`, then `finish` or `error`."""

    def __init__(self, who: Identity, usage: UsageMode) -> None:
        self._who = who
        self._mode = usage

    @abstractmethod
    def opening(self) -> bytes: ...

    @abstractmethod
    def text(self, channel: Channel, text: str) -> bytes: ...

    @abstractmethod
    def _empty(self, reason: ChunkReason) -> ChatChunk | TextCompletion:
        """A chunk without text."""

    def finish(self, reason: FinishReason, usage: Usage) -> bytes:
        last = self._empty(reason)
        if self._mode == "never":
            return frame(last) + DONE
        body = UsageBody.of(usage)
        if self._mode == "with_finish":
            return frame(replace(last, usage=body)) + DONE
        return frame(last) + frame(replace(last, choices=[], usage=body)) + DONE

    def error(self, error: ServeError) -> bytes:
        return frame(replace(self._empty("error"), error=error_response(error).error)) + DONE

    @property
    def _usage(self) -> UnsetType | None:
        """What every chunk but the usage chunk says of usage."""
        return None if self._mode == "own_chunk" else UNSET


class ChatStream(Stream):
    def __init__(self, who: Identity, usage: UsageMode) -> None:
        super().__init__(who, usage)
        self._frames: dict[Channel, Callable[[str], bytes]] = {}

    def opening(self) -> bytes:
        return frame(self._chunk(Delta(role="assistant", content="")))

    def text(self, channel: Channel, text: str) -> bytes:
        frames = self._frames.get(channel)
        if frames is None:
            delta = (
                Delta(content=PLACEHOLDER)
                if channel == "content"
                else Delta(reasoning_content=PLACEHOLDER, reasoning=PLACEHOLDER)
            )
            frames = self._frames[channel] = text_frames(self._chunk(delta))
        return frames(text)

    def _empty(self, reason: ChunkReason) -> ChatChunk:
        return self._chunk(Delta(), reason)

    def _chunk(self, delta: Delta, reason: ChunkReason = None) -> ChatChunk:
        return ChatChunk(
            id=self._who.id,
            created=self._who.created,
            model=self._who.model,
            system_fingerprint=self._who.system_fingerprint,
            choices=[ChunkChoice(delta=delta, finish_reason=reason)],
            usage=self._usage,
        )


class CompletionStream(Stream):
    def __init__(self, who: Identity, usage: UsageMode) -> None:
        super().__init__(who, usage)
        self._frames = text_frames(self._chunk(PLACEHOLDER))

    def opening(self) -> bytes:
        return b""  # a text completion has no role to tell

    def text(self, channel: Channel, text: str) -> bytes:
        return self._frames(text)

    def _empty(self, reason: ChunkReason) -> TextCompletion:
        return self._chunk("", reason)

    def _chunk(self, text: str, reason: ChunkReason = None) -> TextCompletion:
        return _text_completion(self._who, text, reason, self._usage)


Pieces = Sequence[tuple[Channel, str]]


def chat_completion(
    who: Identity, pieces: Pieces, reason: FinishReason, usage: Usage
) -> ChatCompletion:
    """The whole response of a chat that was not streamed."""
    reasoning = "".join(text for channel, text in pieces if channel == "reasoning") or UNSET
    content = "".join(text for channel, text in pieces if channel == "content")
    return ChatCompletion(
        id=who.id,
        created=who.created,
        model=who.model,
        system_fingerprint=who.system_fingerprint,
        choices=[
            ChatChoice(
                message=AssistantMessage(
                    content=content, reasoning_content=reasoning, reasoning=reasoning
                ),
                finish_reason=reason,
            )
        ],
        usage=UsageBody.of(usage),
    )


def text_completion(
    who: Identity, pieces: Pieces, reason: FinishReason, usage: Usage
) -> TextCompletion:
    """The whole response of a text completion that was not streamed. It has no field for
    reasoning, so all text is text."""
    text = "".join(text for _, text in pieces)
    return _text_completion(who, text, reason, UsageBody.of(usage))


def _text_completion(
    who: Identity, text: str, reason: ChunkReason, usage: UsageBody | UnsetType | None
) -> TextCompletion:
    return TextCompletion(
        id=who.id,
        created=who.created,
        model=who.model,
        system_fingerprint=who.system_fingerprint,
        choices=[TextChoice(text=text, finish_reason=reason)],
        usage=usage,
    )


# The catalogue.


class ModelObject(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    loaded: bool
    context_length: int | None


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelObject]
