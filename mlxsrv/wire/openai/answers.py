"""OpenAI's types of answers: chat and text completions, whole and in chunks; models; health.

A fold makes one response of whole answers; `streams` writes the same as server-sent events. Fields
that OpenAI requires are there even if they are null; fields that it leaves out are UNSET.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from mlxsrv.errors import ServeError
from mlxsrv.generation.outputs import Answer, FinishReason, Identity, ToolUse, Usage
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


class ModelDetails(Struct, frozen=True):
    """As Ollama has them."""

    family: str
    parameter_size: str
    quantization_level: str
    format: str


class KVCacheCost(Struct, frozen=True, kw_only=True):
    """The bytes that the layers of one kind take in the KV cache of a row: those with `full`
    attention for each token, those with a `window` for each of the last ones, those that are
    quantized so many more for each of the `first` ones (`window` is their number), and those with a
    `state` whatever its length. A `draft` model takes its bytes for each token of one row only."""

    kind: Literal["full", "window", "first", "state", "draft"]
    bytes_per_token: int = 0
    window: int | None = None
    bytes: int = 0


ModelStatus = Literal["loaded", "downloading", "loading", "waiting for room", "unused", "failed"]


class DownloadState(Struct, frozen=True):
    """Bytes of a model's files: those that are here, and all."""

    completed: int
    total: int


class ModelObject(Struct, frozen=True, kw_only=True):
    """OpenAI's fields, then what else is known. Nulls: the model's files are not here yet.
    `kv_cache` is known while the model is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    loaded: bool
    state: ModelStatus
    reason: str | None = None
    """Why its last load failed; the next request tries again."""
    download: DownloadState | None = None
    """The progress of its download, while it is downloaded."""
    aliases: tuple[str, ...]
    type: Literal["chat", "base", "embedding"] | None = None
    context_length: int | None = None
    details: ModelDetails | None = None
    size: int | None = None
    """Bytes of its weights' files."""
    modified_at: datetime | None = None
    capabilities: tuple[str, ...] = ()
    kv_cache: list[KVCacheCost] | None = None


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelObject]


# The server itself.

HealthStatus = Literal["ok", "loading", "draining", "failed", "stalled"]


class ModelState(Struct, frozen=True, kw_only=True):
    """A model that is loaded or wanted. `engine` is the device thread's part, once it is loaded:
    rows that decode, prompts that are read or wait, the prompt cache."""

    id: str
    state: ModelStatus
    download: DownloadState | None
    pinned: bool
    requests: int
    rows: int
    """Answers that are being generated; others of the requests wait."""
    max_rows: int
    waiting_for_row: int
    waiting_clients: int
    """Clients whose requests wait for a row."""
    bytes: int | None
    idle_seconds: float | None
    kv_cache: list[KVCacheCost] | None
    engine: dict[str, int]


class MemoryState(Struct, frozen=True, kw_only=True):
    """In bytes: the limit; what weights and SAEs take of it, and the budget that they leave for
    KV caches; what of this rows have, prompts that are being read, and what can go at any time:
    kept prompts, and what draft models have read. Then what MLX has in use, keeps for reuse, and
    has had at most."""

    limit: int
    weights: int
    budget: int
    rows: int
    reading: int
    kept: int
    active: int
    cached: int
    peak: int


class EngineState(Struct, frozen=True, kw_only=True):
    """`stalled_seconds`: how long a step has taken that is still under way, if that is more than
    `--step-timeout`; else 0."""

    stalled_seconds: float


class FirstTokenTimes(Struct, frozen=True, kw_only=True):
    """Seconds from a request to the first text of its answer, for the last `replies`: at most 100.
    95 % of them took `p95` or less."""

    replies: int
    median: float
    p95: float


class RequestTotals(Struct, frozen=True, kw_only=True):
    """Requests to models since the server started: for text, vectors or scores. Those that ended,
    and those of them that failed; tokens of their prompts, those of them that came from the prompt
    cache, and tokens of answers. A request that runs counts when it ends."""

    ended: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft: FirstTokenTimes | None


class RecentError(Struct, frozen=True, kw_only=True):
    """A request that ended with an error. `route` is its path with the names of parameters, or
    empty if there is no such route; `model` is empty if there is none of the name that it asks for.
    With a `status` below 400 the stream had begun when it failed; with 0 nothing was answered."""

    time: datetime
    method: str
    route: str
    status: int
    code: str
    model: str
    request_id: str


class Health(Struct, frozen=True, kw_only=True):
    """`reason` and `download` are of the default model, where it could not be loaded or is
    downloaded."""

    status: HealthStatus
    reason: str | UnsetType = UNSET
    download: DownloadState | UnsetType = UNSET
    engine: EngineState | UnsetType = UNSET
    models: list[ModelState] | UnsetType = UNSET
    memory: MemoryState | UnsetType = UNSET
    requests: RequestTotals | UnsetType = UNSET
    errors: list[RecentError] | UnsetType = UNSET
    """The last 20, the latest first."""
