"""What is told to those who watch the service: metrics, traces.

Nobody watches by default, and then nothing here is called for a token, and little for a request.
Times are seconds of `time.monotonic`: a loop's own clock may tick in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Literal, Protocol

from msgspec import Struct

from mlxsrv.engine.events import JobEvent, PromptRead, Receiver, Token
from mlxsrv.generation import FinishReason, Timings, Usage
from mlxsrv.models.pool.observing import (
    ModelEvicted,
    ModelFailed,
    ModelLoaded,
    ModelObserver,
)
from mlxsrv.wire.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from mlxsrv.wire.infill import InfillRequest
from mlxsrv.wire.requests import ChatRequest, CompletionRequest

AnyRequest = (
    ChatRequest
    | CompletionRequest
    | InfillRequest
    | EmbeddingRequest
    | RerankRequest
    | ScoreRequest
)
OperationName = Literal["chat", "text_completion", "embeddings", "rerank", "score"]
"""As OpenTelemetry's conventions name them; `rerank` and `score` are our own."""

TokenCallback = Callable[[float | None], None]
"""Told of each token the seconds since the one before it of its choice; None of the first."""


class Generated(Struct, frozen=True, kw_only=True):
    """What one reply came to; a time is None where it did not come so far.

    `begun` is when it was made, `submitted` when the engine got the first of its jobs. `error` is
    the code of what it failed with. Where it is None and there are no `reasons`, its client left.
    """

    id: str
    model: str
    usage: Usage
    reasons: tuple[FinishReason, ...]
    begun: float
    submitted: float | None
    first_token: float | None
    last_token: float | None
    error: str | None

    @property
    def disconnected(self) -> bool:
        return self.error is None and not self.reasons


class RequestEnded(Struct, frozen=True, kw_only=True):
    """One request, when its answer has been sent or its client has left.

    `route` is a path as it is served, "" where there is none; `model` a name of the catalogue, ""
    where it has no such. `asked` is None where the body could not be read, `generated` where no
    text was asked for or the request was refused; `tokens` are those of texts that were embedded.
    `time` is when it began, in nanoseconds since 1970.
    """

    method: str
    route: str
    status: int
    headers: Mapping[str, str]
    id: str
    time: int
    begun: float
    ended: float
    operation: OperationName | None = None
    model: str = ""
    asked: AnyRequest | None = None
    generated: Generated | None = None
    tokens: int | None = None
    error: str | None = None


class Observer(ModelObserver, Protocol):
    """Called on the event loop, in the middle of things: must be quick, and must not raise. Who
    implements it inherits, and need not know of what it does not care for."""

    def tokens(self, model: str) -> TokenCallback | None:
        """Who is to be told of the tokens of a reply of this model; None: nobody."""
        return None

    def ended(self, request: RequestEnded) -> None:
        return None

    def model_loaded(self, event: ModelLoaded) -> None:
        return None

    def model_failed(self, event: ModelFailed) -> None:
        return None

    def model_evicted(self, event: ModelEvicted) -> None:
        return None

    async def close(self) -> None:
        """The app's lifespan ends; it may begin anew."""
        return


class Timing:
    """When the tokens of one reply came. They are noted as they arrive: when they are read says
    more of the client than of the engine."""

    def __init__(self, observers: Sequence[Observer], model: str) -> None:
        told = [observer.tokens(model) for observer in observers]
        self._tells = tuple(tell for tell in told if tell is not None)
        self.begun = monotonic()
        self.submitted: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._prompts_from: float | None = None  # when the first was begun
        self._prompts_to: float | None = None  # when the last was read and had its first token

    @property
    def timings(self) -> Timings | None:
        """How long prompts and answers took; None: none is read yet. A prompt's time is measured on
        the device thread up to its end, and from there to its first token here."""
        if self._prompts_from is None or self._prompts_to is None:
            return None
        answer = 0.0
        if self.first_token is not None and self.last_token is not None:
            answer = self.last_token - self.first_token
        return Timings(self._prompts_to - self._prompts_from, answer)

    def watch(self, receive: Receiver) -> Receiver:
        """`receive`, of a job that is submitted now, but each token's time is noted."""
        if self.submitted is None:
            self.submitted = monotonic()
        tells = self._tells
        last: float | None = None

        def receive_and_note(event: JobEvent) -> None:
            nonlocal last
            if type(event) is Token:
                now = monotonic()
                gap = None if last is None else now - last
                for tell in tells:
                    tell(gap)
                if self.first_token is None:
                    self.first_token = now
                if last is None:
                    self._prompts_to = now
                last = self.last_token = now
            elif type(event) is PromptRead:
                now = self._prompts_to = monotonic()
                begun = now - event.seconds
                self._prompts_from = min(begun, self._prompts_from or begun)
            receive(event)

        return receive_and_note
