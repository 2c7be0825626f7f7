"""One request's claim on a model, and the rows that it decodes.

Used on the event loop only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import anyio.to_thread

from mlxsrv.errors import ServeError
from mlxsrv.formats.encoders import CrossEncoderConfig
from mlxsrv.formats.pooling import PoolingConfig
from mlxsrv.models.pool.clients import Client
from mlxsrv.models.pool.model import Model, Ticket

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Lease:
    """One request's claim on a model. Ends with `release`, which may be called more than once.

    Args:
        prepare: makes the model's tokenizer.
        enter: gives a ticket for the model.
        leave: ends the claim; gets the lease, and its ticket if there was one.
        require_open: raises ShuttingDown after the pool's end.

    Attributes:
        client: the one whose request it is.
        load_seconds: how long it has waited for the model's files, tokenizer and weights.
        keep_alive: seconds that the model, if it was entered, stays loaded without a user from
            then on; None: no change.
    """

    def __init__(
        self,
        model: Model,
        client: Client,
        *,
        prepare: Callable[[Model], Awaitable[Tokenizer]],
        enter: Callable[[Model], Ticket],
        leave: Callable[[Lease, Ticket | None], None],
        require_open: Callable[[], None],
    ) -> None:
        self.model = model
        self.client = client
        self.released = False
        self.load_seconds = 0.0
        self.keep_alive: float | None = None
        self._prepare = prepare
        self._enter = enter
        self._leave = leave
        self._require_open = require_open
        self._ticket: Ticket | None = None
        self._rows: set[object] = set()

    async def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, whether the model is loaded or not. Raises ServeError."""
        if self.model.tokenizer is not None:
            return self.model.tokenizer
        return await self._measure(self._prepare(self.model))

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
        self._ticket = self._enter(self.model)
        # If this wait is cancelled, the ticket may have entered already: `release` looks at it.
        await self._measure(self._ticket)
        # The pool may have ended between the ticket's entry and this turn of the loop.
        self._require_open()

    async def _measure(self, wait: Awaitable[T]) -> T:
        begun = monotonic()
        try:
            return await wait
        finally:
            self.load_seconds += monotonic() - begun

    async def borrow_row(self, borrower: object) -> None:
        """Wait for a row, until it is the client's turn. If the wait is cancelled, no row is
        held."""
        await self.model.row_queue.borrow(borrower, self.client)
        self._rows.add(borrower)

    def return_row(self, borrower: object, tokens: int = 0) -> None:
        """Give the row back, if the borrower has one.

        Args:
            tokens: read and generated for the borrower.
        """
        if borrower in self._rows:
            self._rows.remove(borrower)
            self.model.row_queue.give_back(borrower, tokens)

    def release(self) -> None:
        """End the claim, also while it waits to enter. All rows have been returned."""
        if not self.released:
            self.released = True
            self._leave(self, self._ticket)


class Withdrawn(ServeError):
    """The lease ended while it waited to enter. Whoever ended it has answered the client."""
