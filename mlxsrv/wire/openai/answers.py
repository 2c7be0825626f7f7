"""OpenAI's types of answers: chat and text completions, whole and in chunks; models; health.

A fold makes one response of whole answers; `streams` writes the same as server-sent events. Fields
that OpenAI requires are there even if they are null; fields that it leaves out are UNSET.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from mlxsrv.errors import ServeError
from mlxsrv.generation.outputs import Answer, FinishReason, Identity, ToolUse, Usage
from mlxsrv.generation.status import ModelObject
from mlxsrv.wire.dialect import ErrorShape
from mlxsrv.wire.openai.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    TextLogprobs,
    TextScores,
    chat_logprobs,
    prompt_logprobs,
)
from mlxsrv.wire.openai.timings import TimingsBody


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
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
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
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET
    error: ErrorBody | UnsetType = UNSET


def chat_completion(identity: Identity, answers: Sequence[Answer], usage: Usage) -> ChatCompletion:
    """The response to a chat that is not streamed."""
    prompt, scores = answers[0].prompt, answers[0].prompt_scores
    return ChatCompletion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.system_fingerprint,
        choices=[_chat_choice(index, answer) for index, answer in enumerate(answers)],
        usage=UsageBody.of(usage),
        prompt_token_ids=UNSET if prompt is None else [*prompt],
        prompt_logprobs=UNSET if scores is None else prompt_logprobs(scores),
        timings=TimingsBody.of(usage),
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
        token_ids=UNSET if answer.tokens is None else [*answer.tokens],
    )


# Text.


class TextChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: ChunkReason
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextCompletion(Struct, frozen=True, kw_only=True):
    """A whole response and, with `usage` left out or null, a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageBody | UnsetType | None = UNSET
    timings: TimingsBody | UnsetType = UNSET
    error: ErrorBody | UnsetType = UNSET


def text_completion(identity: Identity, answers: Sequence[Answer], usage: Usage) -> TextCompletion:
    """The response to a text completion that is not streamed. It has no field for reasoning, so
    reasoning is a part of the text."""
    choices = [_text_choice(index, answer) for index, answer in enumerate(answers)]
    return make_text_completion(identity, choices, UsageBody.of(usage), TimingsBody.of(usage))


def _text_choice(index: int, answer: Answer) -> TextChoice:
    scores = answer.prompt_scores
    return TextChoice(
        index=index,
        text=answer.reasoning + answer.content,
        logprobs=None if answer.scores is None else TextScores().write(answer.scores),
        finish_reason=answer.reason,
        prompt_token_ids=UNSET if answer.prompt is None else [*answer.prompt],
        prompt_logprobs=UNSET if scores is None else prompt_logprobs(scores),
        token_ids=UNSET if answer.tokens is None else [*answer.tokens],
    )


def make_text_completion(
    identity: Identity,
    choices: list[TextChoice],
    usage: UsageBody | UnsetType | None,
    timings: TimingsBody | UnsetType = UNSET,
) -> TextCompletion:
    return TextCompletion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.system_fingerprint,
        choices=choices,
        usage=usage,
        timings=timings,
    )


# The catalogue.


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelObject]
