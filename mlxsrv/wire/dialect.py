"""The seam between the service, which knows no dialect, and the dialects.

A `Dialect` hangs on a route that generates text: it reads requests and writes answers, whole or
streamed. An `ErrorShape` hangs on every route: it writes the errors of its dialect.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import Struct

from mlxsrv.errors import ServeError
from mlxsrv.generation.outputs import Answer, Channel, Ended, Identity, TokenScore, Usage
from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.wire.decoding import RequestDecoder

R = TypeVar("R", bound=Struct)


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


class Stream(ABC):
    """The frames of one streamed response, in the order that clients rely on: `opening`, then any
    number of pieces of each choice and its `end`. `error` ends all choices that are still open.

    Each method returns what is sent at once; b"" if nothing is.
    """

    media_type: ClassVar[str] = "text/event-stream"

    @property
    def live(self) -> bool:
        """Whether frames tell the usage or the time so far. The caller must then `carry` it."""
        return False

    def carry(self, usage: Usage) -> None:
        """Set the usage and the timings that the next frames have."""
        raise NotImplementedError

    @abstractmethod
    def keepalive(self) -> bytes:
        """The sign of life while nothing is produced. It may come before the opening."""

    @abstractmethod
    def opening(self) -> bytes:
        """The engine has the request."""

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
        """More of the arguments of a tool call whose head has been sent."""
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


class Dialect(ABC, Generic[R]):
    """The requests and answers of one endpoint that generates text.

    Attributes:
        requests: decodes bodies.
        id_prefix: the beginning of a response's id.
    """

    requests: ClassVar[RequestDecoder[Any]]
    id_prefix: ClassVar[str]

    def new_id(self, conversation: str = "") -> str:
        """Return the id of a new response. `conversation` is put in front of its random part."""
        return f"{self.id_prefix}{conversation}{uuid.uuid4().hex}"

    @abstractmethod
    def spec(self, request: R) -> GenerationSpec:
        """Return what the request asks for. Raises InvalidRequest."""

    @abstractmethod
    def stream(self, request: R, identity: Identity) -> Stream:
        """Return the encoder of one streamed response."""

    @abstractmethod
    def fold(
        self, request: R, identity: Identity, answers: Sequence[Answer], usage: Usage
    ) -> object:
        """Return the body of one whole response."""
