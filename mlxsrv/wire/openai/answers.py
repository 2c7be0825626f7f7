"""OpenAI's types of answers: chat and text completions, whole and in chunks; models; health.

Fields that OpenAI requires are there even if they are null; fields that it leaves out are UNSET.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from mlxsrv.errors import ServeError
from mlxsrv.generation.outputs import FinishReason, Usage
from mlxsrv.generation.status import ModelObject
from mlxsrv.wire.dialect import ErrorShape
from mlxsrv.wire.openai.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    TextLogprobs,
)


class ErrorBody(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct, frozen=True):
    error: ErrorBody


def error_response(error: ServeError, request_id: str = "") -> ErrorResponse:
    return ErrorResponse(ErrorBody(error.message, error.type, error.param, error.code))


ERRORS = ErrorShape(ErrorResponse, error_response)
"""It also answers where there is no route."""


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


class TimingsBody(Struct, frozen=True, kw_only=True):
    """Tokens and milliseconds of the prompts, but for what the cache had of them, and of the
    answers. A rate is null where there is nothing to divide by."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None

    @classmethod
    def of(cls, usage: Usage | None) -> TimingsBody | UnsetType:
        if usage is None or usage.timings is None:
            return UNSET
        read, drawn = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
        prompt, answer = usage.timings.prompt, usage.timings.answer
        return cls(
            cache_n=usage.cached_tokens,
            prompt_n=read,
            prompt_ms=prompt * 1000,
            prompt_per_token_ms=prompt * 1000 / read if read else None,
            prompt_per_second=read / prompt if prompt else None,
            predicted_n=drawn,
            predicted_ms=answer * 1000,
            predicted_per_token_ms=answer * 1000 / drawn if drawn else None,
            predicted_per_second=drawn / answer if answer else None,
        )


class _Completion(Struct, frozen=True, kw_only=True):
    """The fields by which a response is known, whole or in chunks. An `Identity` has their values,
    but for `object`."""

    id: str
    object: str
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


class AssistantMessage(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


StopCause = Literal["repetition_detected"]


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: StopCause | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(_Completion, frozen=True, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET


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
    stop_reason: StopCause | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(_Completion, frozen=True, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET
    error: ErrorBody | UnsetType = UNSET


# Text.


class TextChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: ChunkReason
    stop_reason: StopCause | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextCompletion(_Completion, frozen=True, kw_only=True):
    """A whole response and, with `usage` left out or null, a chunk of a streamed one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: UsageBody | UnsetType | None = UNSET
    timings: TimingsBody | UnsetType = UNSET
    error: ErrorBody | UnsetType = UNSET


# The catalogue.


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelObject]
