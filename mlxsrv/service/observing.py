"""Observers of the service, such as metrics and traces, and the records that they get.

As long as no observer is `timed`, nothing here runs for a token, and little for a request. Times
are seconds of `time.monotonic`, because a loop's own clock may have a resolution of milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import ClassVar, Literal, Protocol

from msgspec import Struct

from mlxsrv.engine.events import JobEvent, PromptRead, Receiver, Token
from mlxsrv.generation.outputs import FinishReason, Timings, Usage
from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.generation.texts import EmbeddingSpec, PairsSpec
from mlxsrv.models.pool.observing import ModelObserver

AskedOfModel = GenerationSpec | EmbeddingSpec | PairsSpec
OperationName = Literal["chat", "text_completion", "embeddings", "rerank", "score"]
"""The names of OpenTelemetry's conventions; `rerank` and `score` are our own."""

TokenCallback = Callable[[float | None], None]
"""Called for each token, with the seconds since the token before it in its choice; None for the
first token."""


class Generated(Struct, frozen=True, kw_only=True):
    """The result of one reply.

    Attributes:
        reasons: why each choice ended; empty if the reply failed or its client left.
        begun: when the reply was made.
        ttft: seconds until its first text was read, as in the log; None if none was.
        started: when its first job had its turn; None if none had.
        first_token, last_token: when they arrived; None if there is none, or if no observer is
            timed.
        error: the code of the error that ended the reply, if one did.
    """

    id: str
    model: str
    usage: Usage
    reasons: tuple[FinishReason, ...]
    begun: float
    ttft: float | None
    started: float | None
    first_token: float | None
    last_token: float | None
    error: str | None

    @property
    def disconnected(self) -> bool:
        return self.error is None and not self.reasons


class RequestEnded(Struct, frozen=True, kw_only=True):
    """One request, after its answer was sent or its client has left.

    Attributes:
        route: the path of the route; "" if no route matched.
        time: when the request began, in nanoseconds since 1970.
        model: a name of the catalogue; "" if it does not have the one that the request names.
        asked: None if the body could not be decoded.
        generated: None if the request was refused, or asks for no text.
        tokens: the number of tokens of texts that were embedded.
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
    asked: AskedOfModel | None = None
    generated: Generated | None = None
    tokens: int | None = None
    error: str | None = None


class Observer(ModelObserver, Protocol):
    """Its methods are called on the event loop, between other work: they must be quick, and must
    not raise. An observer inherits from it, and implements only what it needs.

    Attributes:
        timed: whether it wants to know when tokens arrived. If no observer does, nothing is called
            for a token.
    """

    timed: ClassVar[bool] = True

    def tokens(self, model: str) -> TokenCallback | None:
        """Return what is called for each token of a reply of this model; None: nothing."""
        return None

    def ended(self, request: RequestEnded) -> None:
        return None

    def model_loaded(self, model: str, seconds: float, bytes: int) -> None:
        return None

    def model_failed(self, model: str, reason: str) -> None:
        return None

    def model_evicted(self, model: str, reason: str) -> None:
        return None

    async def close(self) -> None:
        """Called when the app's lifespan ends. Another one may begin."""
        return


class Timing:
    """The times at which the tokens of one reply arrived. The time at which they are read depends
    on the client, not on the engine.

    Args:
        wanted: whether somebody wants to know them, beside the observers.
    """

    def __init__(self, observers: Sequence[Observer], model: str, *, wanted: bool) -> None:
        self._wanted = wanted or any(observer.timed for observer in observers)
        callbacks = [observer.tokens(model) for observer in observers]
        self._callbacks = tuple(each for each in callbacks if each is not None)
        self.begun = monotonic()
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._prompts_from: float | None = None  # when the engine began with the first prompt
        self._prompts_to: float | None = (
            None  # when the last prompt was read, or its first token came
        )

    def timings(self, load: float) -> Timings | None:
        """Return how long prompts and answers took; None if no prompt is read yet.

        The device thread measures a prompt up to its end. The time from there to its first token is
        measured here.

        Args:
            load: seconds for which the reply waited for its model.
        """
        if self._prompts_from is None or self._prompts_to is None:
            return None
        answer = 0.0
        if self.first_token is not None and self.last_token is not None:
            answer = self.last_token - self.first_token
        total = monotonic() - self.begun
        return Timings(self._prompts_to - self._prompts_from, answer, load, total)

    def note_start(self) -> bool:
        """Note that a job has its turn. Returns whether it is the first."""
        first = self.started is None
        self.started = monotonic() if self.started is None else self.started
        return first

    def watch(self, receive: Receiver) -> Receiver:
        """Return `receive` for a job, with the time of each token noted if somebody wants to know
        it."""
        if not self._wanted:
            return receive
        callbacks = self._callbacks
        last: float | None = None

        def receive_and_note(event: JobEvent) -> None:
            nonlocal last
            if type(event) is Token:
                now = monotonic()
                gap = None if last is None else now - last
                for callback in callbacks:
                    callback(gap)
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
