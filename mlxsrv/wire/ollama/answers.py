"""Answers of Ollama's API, whole and as the lines of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mlxsrv.errors import ModelNotFound, ServeError, UnsupportedParameter
from mlxsrv.generation.outputs import Answer, FinishReason, Timings, TokenScore, ToolUse, Usage
from mlxsrv.wire.dialect import ErrorShape
from mlxsrv.wire.openai.logprobs import TokenLogprob, TopLogprob, chat_logprobs

# Errors.


class OllamaError(Struct, frozen=True):
    error: str


def ollama_error(error: ServeError, request_id: str = "") -> OllamaError:
    """Clients look for Ollama's own words where there is no such model, or it has no tools."""
    match error:
        case ModelNotFound():
            return OllamaError(f"model not found: {error.message}")
        case UnsupportedParameter(param="tools"):
            return OllamaError(f"the model does not support tools: {error.message}")
    return OllamaError(error.message)


ERRORS = ErrorShape(OllamaError, ollama_error)


# Log-probabilities.


class OllamaLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob] | UnsetType = UNSET


def ollama_logprobs(scores: Sequence[TokenScore]) -> list[OllamaLogprob]:
    return [_logprob(each) for each in chat_logprobs(scores).content]


def _logprob(each: TokenLogprob) -> OllamaLogprob:
    return OllamaLogprob(each.token, each.logprob, each.bytes, each.top_logprobs or UNSET)


# Tool calls.


class OllamaCalledFunction(Struct, frozen=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Struct, frozen=True):
    id: str
    function: OllamaCalledFunction


def ollama_call(index: int, use: ToolUse) -> OllamaCall | None:
    """Return a tool call with its arguments as an object; None if it is broken."""
    if not use.complete:
        return None
    try:
        arguments = msgspec.json.decode(use.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    return OllamaCall(use.id, OllamaCalledFunction(index, use.name, arguments))


def split_calls(uses: Sequence[ToolUse], fragment: str) -> tuple[list[OllamaCall], str]:
    """Return the calls of an answer, and the text of those that are left out as broken.

    Args:
        fragment: what the model wrote of the call that the answer ended in, if it is broken.
    """
    calls, texts = [], []
    for index, use in enumerate(uses):
        call = ollama_call(index, use)
        if call is not None:
            calls.append(call)
        elif not fragment or use is not uses[-1]:
            texts.append(use.text)
    return calls, "".join([*texts, fragment])


# Texts.

DoneReason = Literal["stop", "length", "load", "unload"]

_DONE_REASONS: dict[FinishReason, DoneReason] = {
    "stop": "stop",
    "tool_calls": "stop",
    "length": "length",
    "timeout": "length",  # Ollama has no word for a deadline; it says as much, that more would come
}


class OllamaAnswer(Struct, frozen=True, kw_only=True):
    """A line, or the whole answer. The last line has the reason, the counts of tokens (the
    prompt's include those that were cached), and times in nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[OllamaLogprob] | UnsetType = UNSET


class OllamaAnswerMessage(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaChatAnswer(OllamaAnswer, frozen=True, kw_only=True):
    message: OllamaAnswerMessage = OllamaAnswerMessage()


class OllamaTextAnswer(OllamaAnswer, frozen=True, kw_only=True):
    response: str = ""
    thinking: str | UnsetType = UNSET


def ollama_time(time: datetime | None = None) -> str:
    """Return a time, or now, as Ollama writes it."""
    return (time or datetime.now(UTC)).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Return a duration; at least 1, since clients divide by it."""
    return max(round(seconds * 1e9), 1)


def done_fields(reason: FinishReason, usage: Usage) -> dict[str, Any]:
    """Return the fields that only the end of an answer has."""
    timings = usage.timings or Timings(0.0, 0.0)
    return {
        "done": True,
        "done_reason": _DONE_REASONS[reason],
        "total_duration": nanoseconds(timings.total),
        "load_duration": nanoseconds(timings.load),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": nanoseconds(timings.prompt),
        "eval_count": usage.completion_tokens,
        "eval_duration": nanoseconds(timings.answer),
    }


def chat_answer(model: str, answer: Answer, usage: Usage) -> OllamaChatAnswer:
    calls, left_out = split_calls(answer.tools, answer.fragment)
    return OllamaChatAnswer(
        model=model,
        created_at=ollama_time(),
        message=OllamaAnswerMessage(
            content=answer.content + left_out,
            thinking=answer.reasoning or UNSET,
            tool_calls=calls or UNSET,
        ),
        logprobs=UNSET if answer.scores is None else ollama_logprobs(answer.scores),
        **done_fields(answer.reason, usage),
    )


def text_answer(model: str, answer: Answer, usage: Usage) -> OllamaTextAnswer:
    return OllamaTextAnswer(
        model=model,
        created_at=ollama_time(),
        response=answer.content,
        thinking=answer.reasoning or UNSET,
        logprobs=UNSET if answer.scores is None else ollama_logprobs(answer.scores),
        **done_fields(answer.reason, usage),
    )


# Embeddings.


class OllamaEmbeddings(Struct, frozen=True, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct, frozen=True):
    embedding: list[float]
