"""Answers of Ollama's API as lines of JSON."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from mlxsrv.errors import ServeError
from mlxsrv.generation.outputs import Channel, Ended, TokenScore, ToolUse
from mlxsrv.wire.dialect import Stream
from mlxsrv.wire.ndjson import MEDIA_TYPE, line, text_lines
from mlxsrv.wire.ollama.answers import (
    OllamaAnswer,
    OllamaAnswerMessage,
    OllamaCall,
    OllamaChatAnswer,
    OllamaTextAnswer,
    done_fields,
    ollama_error,
    ollama_logprobs,
    ollama_time,
    split_calls,
)
from mlxsrv.wire.sse import PLACEHOLDER


class _HeldCall(Struct):
    """A tool call, as far as it has come."""

    id: str
    name: str
    arguments: list[str]


class OllamaStream(Stream):
    """The lines of one answer. `created_at` of all lines but the last is when the stream began: a
    time for each line would cost as much as the rest of the line.

    Args:
        model: the name that the client has given.
    """

    media_type = MEDIA_TYPE

    def __init__(self, model: str) -> None:
        self._model = model
        self._created_at = ollama_time()
        self._texts: dict[Channel, Callable[[str], bytes]] = {}
        self._calls: dict[int, _HeldCall] = {}

    @abstractmethod
    def _make(self, channel: Channel, text: str, **fields: Any) -> OllamaAnswer:
        """Return the answer with a text in the place of its channel."""

    def keepalive(self) -> bytes:
        """A line without text: clients read every line as JSON."""
        return self._line("content", "")

    def opening(self) -> bytes:
        return b""

    def text(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] = ()
    ) -> bytes:
        if scores:
            return self._line(channel, text, logprobs=ollama_logprobs(scores))
        try:
            lines = self._texts[channel]
        except KeyError:
            template = self._make(channel, PLACEHOLDER, **self._shared)
            lines = self._texts[channel] = text_lines(template)
        return lines(text)

    def end(self, ended: Ended) -> bytes:
        calls = self._send_calls(ended)
        assert ended.usage is not None  # there is one choice
        done = done_fields(ended.reason, ended.usage)
        last = self._make("content", "", model=self._model, created_at=ollama_time(), **done)
        return calls + line(last)

    def error(self, error: ServeError) -> bytes:
        return line(ollama_error(error))

    @property
    def _shared(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": self._created_at}

    def _line(self, channel: Channel, text: str, **fields: Any) -> bytes:
        return line(self._make(channel, text, **self._shared, **fields))

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
        calls, left_out = split_calls(uses, ended.fragment)
        lines = [self._line("content", "", tool_calls=[call]) for call in calls]
        return b"".join([*lines, self.text(0, "content", left_out) if left_out else b""])


class OllamaChatStream(OllamaStream):
    def _make(
        self,
        channel: Channel,
        text: str,
        *,
        tool_calls: list[OllamaCall] | UnsetType = UNSET,
        **fields: Any,
    ) -> OllamaChatAnswer:
        message = OllamaAnswerMessage(
            content=text if channel == "content" else "",
            thinking=text if channel == "reasoning" else UNSET,
            tool_calls=tool_calls,
        )
        return OllamaChatAnswer(message=message, **fields)


class OllamaTextStream(OllamaStream):
    def _make(self, channel: Channel, text: str, **fields: Any) -> OllamaTextAnswer:
        return OllamaTextAnswer(
            response=text if channel == "content" else "",
            thinking=text if channel == "reasoning" else UNSET,
            **fields,
        )
