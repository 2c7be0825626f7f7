"""One request's claim on a model.

Used on the event loop only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple

import anyio.to_thread

from mlxsrv.engine.orders import Turn
from mlxsrv.errors import ServeError
from mlxsrv.formats.encoders import CrossEncoderConfig
from mlxsrv.formats.pooling import PoolingConfig
from mlxsrv.models.pool.clients import Client
from mlxsrv.models.pool.model import Model, Ticket

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Lender(Protocol):
    """The pool, as its leases know it: it stands on a floor above them."""

    async def prepare(self, model: Model) -> Tokenizer:
        """Make the model's tokenizer. Raises ServeError."""

    def admit(self, model: Model) -> Ticket:
        """A ticket for the model, which is loaded if need be. Raises ShuttingDown."""

    def end_lease(self, lease: Lease) -> None:
        """Count a lease out."""

    def require_open(self) -> None:
        """Raises ShuttingDown after the pool's end."""


class Lease:
    """One request's claim on a model. Ends with `release`, which may be called more than once.

    Args:
        pool: has the model.
        client: the one whose request it is; None: the server itself, which loads models.
        turn: of the request's jobs.

    Attributes:
        ticket: for the model, once it was asked for.
        load_seconds: how long it has waited for the model's files, tokenizer and weights.
        keep_alive: seconds that the model, if it was entered, stays loaded without a user from
            then on; None: no change.
    """

    def __init__(self, pool: Lender, model: Model, client: Client | None, turn: Turn) -> None:
        self.model = model
        self.client = client
        self.turn = turn
        self.ticket: Ticket | None = None
        self.released = False
        self.load_seconds = 0.0
        self.keep_alive: float | None = None
        self._pool = pool

    async def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, whether the model is loaded or not. Raises ServeError."""
        if self.model.tokenizer is not None:
            return self.model.tokenizer
        return await self._measure(self._pool.prepare(self.model))

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together; known with the tokenizer."""
        return self.model.files.context_length if self.model.files is not None else None

    @property
    def writes(self) -> bool:
        """Whether the model can write text; known with the tokenizer."""
        return self.model.files is not None and self.model.files.writes

    @property
    def pooling_config(self) -> PoolingConfig | str:
        """The model's way to make vectors, or why it makes none; known with the tokenizer."""
        assert self.model.files is not None
        return self.model.files.pooling_config

    @property
    def cross_encoder_config(self) -> CrossEncoderConfig | str:
        """The model's way to judge pairs of texts, or why it cannot; known with the tokenizer."""
        assert self.model.files is not None
        return self.model.files.cross_encoder_config

    async def run_in_worker(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Call `function` in a worker thread, and return its result. For work with the tokenizer.

        A caller that is cancelled still waits for the thread. The tokenizer stops before its next
        text, or its next piece of a long text.
        """
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self.model.tokenizing)

    async def enter(self) -> None:
        """Wait until the model is loaded; it stays until `release`.

        Raises:
            ModelNotLoaded, InsufficientMemory, EngineFailed: it cannot be loaded.
            Withdrawn: the lease ended meanwhile.
            ShuttingDown: the pool ended meanwhile.
        """
        if self.released:
            raise Withdrawn("its lease has ended")
        self.ticket = self._pool.admit(self.model)
        # If this wait is cancelled, the ticket may have entered already: `release` looks at it.
        await self._measure(self.ticket)
        # The pool may have ended between the ticket's entry and this turn of the loop.
        self._pool.require_open()

    async def _measure(self, wait: Awaitable[T]) -> T:
        begun = monotonic()
        counts = self.client is not None
        self.model.waiting_for_load += counts
        try:
            return await wait
        finally:
            self.model.waiting_for_load -= counts
            self.load_seconds += monotonic() - begun

    # Its jobs: they stand in the engine's line, which tells when they have a row.

    def note_queued(self, job: int) -> None:
        self.model.queued[job] = self.turn.client

    def note_started(self, job: int) -> None:
        if self.model.queued.pop(job, None) is not None:
            self.model.running.add(job)

    def note_ended(self, job: int) -> None:
        """Note that a job has ended, wherever it was; more than once, perhaps."""
        self.model.queued.pop(job, None)
        self.model.running.discard(job)

    def release(self) -> None:
        """End the claim, also while it waits to enter. All jobs have ended."""
        if not self.released:
            self.released = True
            self._pool.end_lease(self)


class Withdrawn(ServeError):
    """The lease ended while it waited to enter. Whoever ended it has answered the client."""
