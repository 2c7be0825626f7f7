"""Answers of Ollama's API, whole and as the lines of a stream: one JSON object a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mlxsrv.errors import ModelNotFound, ServeError, UnsupportedParameter
from mlxsrv.generation.outputs import (
    Answer,
    Channel,
    Ended,
    FinishReason,
    Timings,
    TokenScore,
    ToolUse,
    Usage,
)
from mlxsrv.wire.dialect import Builder, Dialect, ErrorShape
from mlxsrv.wire.ollama.requests import OLLAMA_CHATS, OLLAMA_TEXTS
from mlxsrv.wire.openai.logprobs import TokenLogprob, TopLogprob, chat_logprobs
from mlxsrv.wire.sse import PLACEHOLDER, encode_json, text_encoder

MEDIA_TYPE = "application/x-ndjson"


def line(value: object) -> bytes:
    """Return `value` as JSON on a line of its own."""
    return encode_json(value) + b"\n"


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


def _logprobs_of(scores: Sequence[TokenScore]) -> list[OllamaLogprob]:
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


def _read_call(index: int, use: ToolUse) -> OllamaCall | None:
    """Return a tool call with its arguments as an object; None if it is broken."""
    if not use.complete:
        return None
    try:
        arguments = msgspec.json.decode(use.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    return OllamaCall(use.id, OllamaCalledFunction(index, use.name, arguments))


def _split_calls(uses: Sequence[ToolUse], fragment: str) -> tuple[list[OllamaCall], str]:
    """Return the calls of an answer, and the text of those that are left out as broken.

    Args:
        fragment: what the model wrote of the call that the answer ended in, if it is broken.
    """
    calls, texts = [], []
    for index, use in enumerate(uses):
        call = _read_call(index, use)
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


def _done_fields(reason: FinishReason, usage: Usage) -> dict[str, Any]:
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


# The builder.


class _HeldCall(Struct):
    """A tool call, as far as it has come."""

    id: str
    name: str
    arguments: list[str]


class OllamaBuilder(Builder):
    """One answer, as lines or whole. `created_at` of all lines but the last is when the stream
    began: a time for each line would cost as much as the rest of the line.

    Args:
        make: makes an object of content, thoughts, calls, and other fields.
        model: the name that the client has given.
    """

    media_type = MEDIA_TYPE

    def __init__(self, make: Callable[..., OllamaAnswer], model: str) -> None:
        self._make = make
        self._model = model
        self._created_at = ollama_time()
        self._texts: dict[Channel, Callable[[str], bytes]] = {}
        self._calls: dict[int, _HeldCall] = {}

    def keepalive(self) -> bytes:
        """A line without text: clients read every line as JSON."""
        return self._line("content", "")

    def whole(self, answers: Sequence[Answer], usage: Usage) -> OllamaAnswer:
        [answer] = answers
        calls, left_out = _split_calls(answer.tools, answer.fragment)
        return self._make(
            answer.content + left_out,
            answer.reasoning or UNSET,
            calls,
            model=self._model,
            created_at=ollama_time(),
            logprobs=UNSET if answer.scores is None else _logprobs_of(answer.scores),
            **_done_fields(answer.reason, usage),
        )

    def text(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] = ()
    ) -> bytes:
        if scores:
            return self._line(channel, text, logprobs=_logprobs_of(scores))
        try:
            lines = self._texts[channel]
        except KeyError:
            lines = self._texts[channel] = text_encoder(self._line(channel, PLACEHOLDER))
        return lines(text)

    def end(self, ended: Ended) -> bytes:
        calls = self._send_calls(ended)
        assert ended.usage is not None  # there is one choice
        done = _done_fields(ended.reason, ended.usage)
        return calls + self._line("content", "", created_at=ollama_time(), **done)

    def error(self, error: ServeError) -> bytes:
        return line(ollama_error(error))

    def _line(
        self, channel: Channel, text: str, calls: Sequence[OllamaCall] = (), **fields: Any
    ) -> bytes:
        content, thoughts = (text, UNSET) if channel == "content" else ("", text)
        shared = {"model": self._model, "created_at": self._created_at}
        return line(self._make(content, thoughts, calls, **{**shared, **fields}))

    # Tool calls. Which are broken is known at the end, so they are sent there, each as a whole.

    def tool(self, choice: int, index: int, id: str, name: str) -> bytes:
        self._calls[index] = _HeldCall(id, name, [])
        return b""

    def arguments(self, choice: int, index: int, text: str) -> bytes:
        self._calls[index].arguments.append(text)
        return b""

    def _send_calls(self, ended: Ended) -> bytes:
        uses = [
            ToolUse(held.id, held.name, "".join(held.arguments), index not in ended.broken)
            for index, held in self._calls.items()
        ]
        calls, left_out = _split_calls(uses, ended.fragment)
        lines = [self._line("content", "", [call]) for call in calls]
        return b"".join([*lines, self.text(0, "content", left_out) if left_out else b""])


def _make_chat(
    content: str, thoughts: str | UnsetType, calls: Sequence[OllamaCall], **fields: Any
) -> OllamaChatAnswer:
    message = OllamaAnswerMessage(
        content=content, thinking=thoughts, tool_calls=[*calls] if calls else UNSET
    )
    return OllamaChatAnswer(message=message, **fields)


def _make_text(
    content: str, thoughts: str | UnsetType, calls: Sequence[OllamaCall], **fields: Any
) -> OllamaTextAnswer:
    """There are no calls: a request for a text has no tools."""
    return OllamaTextAnswer(response=content, thinking=thoughts, **fields)


CHATS = Dialect(
    OLLAMA_CHATS, "ollama-", lambda request, identity: OllamaBuilder(_make_chat, request.model)
)
TEXTS = Dialect(
    OLLAMA_TEXTS, "ollama-", lambda request, identity: OllamaBuilder(_make_text, request.model)
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
