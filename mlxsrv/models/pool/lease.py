"""One request's claim on a model, and the rows it decodes.

Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mlxsrv.errors import ServeError
from mlxsrv.formats.encoders import CrossEncoderConfig
from mlxsrv.formats.pooling import PoolingConfig
from mlxsrv.models.pool.model import Model

if TYPE_CHECKING:
    from mlxsrv.models.pool.pool import Pool
    from mlxsrv.prompts.tokenizer import Tokenizer


class Lease:
    """One request's claim on a model. Ends with `release`, which may be called more than once."""

    def __init__(self, pool: Pool, model: Model) -> None:
        self._pool = pool
        self.model = model
        self.ticket: asyncio.Future[None] | None = None  # done when it may enter, or never can
        self.entered = False
        self.released = False
        self._rows: set[object] = set()
        model.in_flight += 1

    async def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, whether the model is loaded or not. Raises ServeError."""
        return self.model.tokenizer or await self._pool.prepare(self.model)

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together; known with the tokenizer."""
        return self.model.files.context_length if self.model.files is not None else None

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What the model can do; known with the tokenizer."""
        return self.model.files.capabilities if self.model.files is not None else ()

    @property
    def pooling_config(self) -> PoolingConfig | str:
        """How its vectors are made, or why they cannot be; known with the tokenizer."""
        assert self.model.files is not None
        return self.model.files.pooling_config

    @property
    def cross_encoder_config(self) -> CrossEncoderConfig | str:
        """How pairs of texts are judged, or why they cannot be; known with the tokenizer."""
        assert self.model.files is not None
        return self.model.files.cross_encoder_config

    async def enter(self) -> None:
        """Wait until the model is loaded; it stays until `release`.

        Raises:
            ModelNotLoaded, InsufficientMemory, EngineFailed: it cannot be loaded.
            Withdrawn: the claim has been ended meanwhile.
        """
        await self._pool.enter(self)

    async def borrow_row(self, borrower: object) -> None:
        """Wait for a row, first come, first served.

        On behalf of the borrower, not of the task: a reply is answered by one task and may be ended
        by another.
        """
        await self.model.rows.acquire_on_behalf_of(borrower)
        # A borrow that is cancelled holds nothing: anyio gives the token back before it raises.
        self._rows.add(borrower)

    def return_row(self, borrower: object) -> None:
        """Give the row back, if the borrower has one."""
        if borrower in self._rows:
            self._rows.remove(borrower)
            self.model.rows.release_on_behalf_of(borrower)

    def release(self) -> None:
        """End the claim, also while it waits to enter. All rows have been returned."""
        if not self.released:
            self.released = True
            self.model.in_flight -= 1
            self._pool.leave(self)


class Withdrawn(ServeError):
    """To who waits to enter when its claim is ended; whoever ended it has told its client why."""
