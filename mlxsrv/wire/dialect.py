"""The seam between the service, which knows no dialect, and the dialects.

Each route that generates text has a `Dialect`: a decoder of requests, and a `Builder` for each
reply, which writes what the client sees, streamed or whole. Each route has an `ErrorShape`, which
writes errors.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import Struct

from mlxsrv.errors import ServeError
from mlxsrv.generation.outputs import (
    Answer,
    Channel,
    Ended,
    Identity,
    Opened,
    Output,
    PromptDone,
    PromptInfo,
    SampledTokens,
    TextPiece,
    TokenScore,
    ToolInput,
    ToolStarted,
    Usage,
)
from mlxsrv.generation.spec import GenerationSpec, SamplingWishes
from mlxsrv.wire.decoding import RequestDecoder
from mlxsrv.wire.steering import SteeringFields


def _own_status(error: ServeError) -> int:
    return error.status


class ErrorShape(Struct, frozen=True):
    """The form in which a dialect writes errors.

    Attributes:
        kind: the type of the body.
        body: makes the body of an error; the second argument is the id of the request.
        status: its HTTP status.
        id_header: a header for the id of the request, besides X-Request-ID.
    """

    kind: Any
    body: Callable[[ServeError, str], object]
    status: Callable[[ServeError], int] = _own_status
    id_header: str | None = None


class Builder(ABC):
    """Builds what a client sees of one reply: the frames of a stream, or one body.

    A stream has its frames in the order that clients rely on: `opening`, then any number of pieces
    of each choice and its `end`. `error` ends all choices that are still open. Each of these
    methods returns what is sent at once; b"" if nothing is.
    """

    media_type: ClassVar[str] = "text/event-stream"

    def write(self, output: Output) -> bytes:
        """Return the frames of one output."""
        match output:
            case TextPiece(choice, channel, text, scores):
                return self.text(choice, channel, text, scores)
            case ToolStarted(choice, index, id, name):
                return self.tool(choice, index, id, name)
            case ToolInput(choice, index, text):
                return self.arguments(choice, index, text)
            case Ended():
                return self.end(output)
            case Opened():
                return self.opening()
            case PromptDone(tokens, cached):
                return self.prompt_done(tokens, cached)
            case SampledTokens(choice, tokens):
                return self.tokens(choice, tokens)
            case PromptInfo(choice, prompt):  # a stream has no log-probabilities of its prompt
                return b"" if prompt is None else self.prompt(choice, prompt)

    @abstractmethod
    def whole(self, answers: Sequence[Answer], usage: Usage) -> object:
        """Return the body of a response that is not streamed. The builder has written no frames."""

    @property
    def live(self) -> bool:
        """Whether frames have the usage or the time so far. The caller must then `carry` it."""
        return False

    def carry(self, usage: Usage) -> None:
        """Set the usage and the timings that the next frames have."""
        raise NotImplementedError

    @abstractmethod
    def keepalive(self) -> bytes:
        """The sign of life while nothing is produced. It may come before the opening."""

    def opening(self) -> bytes:
        """It is the turn of the request."""
        return b""

    def prompt_done(self, tokens: int, cached: int) -> bytes:
        """The prompt is read; `cached` of its tokens were known. It comes before any text."""
        return b""

    @abstractmethod
    def text(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] = ()
    ) -> bytes: ...

    def tool(self, choice: int, index: int, id: str, name: str) -> bytes:
        """The head of tool call `index` of a choice. Only a chat has tools."""
        raise NotImplementedError

    def arguments(self, choice: int, index: int, text: str) -> bytes:
        """More of the arguments of a tool call whose head has been sent. Whatever format
        the model writes, the pieces of a call are together the arguments of the whole call."""
        raise NotImplementedError

    def prompt(self, choice: int, tokens: Sequence[int]) -> bytes:
        """The token ids of a choice's prompt. They come before its other pieces."""
        return b""

    def tokens(self, choice: int, tokens: Sequence[int]) -> bytes:
        """Ids of generated tokens. Their text has its own frames."""
        return b""

    @abstractmethod
    def end(self, ended: Ended) -> bytes:
        """The end of one choice; with usage also of the stream."""

    @abstractmethod
    def error(self, error: ServeError) -> bytes:
        """The end of the stream, and of every choice that has not ended yet."""


class TextRequest(SteeringFields, frozen=True, kw_only=True):
    """A request for text, in any dialect."""

    def spec(self) -> GenerationSpec:
        """Return what the request asks for. Raises InvalidRequest."""
        raise NotImplementedError


def sampling_wishes(fields: Struct, **others: Any) -> SamplingWishes:
    """Return the wishes that stand in fields of their own names, and `others`."""
    names = [name for name in SamplingWishes.__struct_fields__ if name in fields.__struct_fields__]
    return SamplingWishes(**{name: getattr(fields, name) for name in names} | others)


def stop_strings(given: str | Sequence[str] | None) -> list[str]:
    """Return the stop strings of a field that has one or several; an empty one is none."""
    return [text for text in ([given] if isinstance(given, str) else given or []) if text]


R = TypeVar("R", bound=TextRequest)


class Dialect(Struct, Generic[R], frozen=True):
    """The requests and answers of one endpoint that generates text.

    Attributes:
        requests: decodes bodies.
        id_prefix: the beginning of a response's id.
        builder: makes the builder of the response to one request.
    """

    requests: RequestDecoder[R]
    id_prefix: str
    builder: Callable[[R, Identity], Builder]

    def new_id(self, conversation: str = "") -> str:
        """Return the id of a new response. `conversation` is put in front of its random part."""
        return f"{self.id_prefix}{conversation}{uuid.uuid4().hex}"
