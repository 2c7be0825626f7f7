"""Loaded models: each loaded once for all who wait, lent to requests by lease.

Used on the event loop only. A lease is one request's claim on one model, from before the model is
loaded until the reply is over. It bounds how many requests may be there at all (the queue), makes
them wait for a row (the limiter), and keeps the model in use.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from mlxsrv.engine.device import DeviceThread, Port
from mlxsrv.errors import ModelNotLoaded, Overloaded, ServeError, ShuttingDown
from mlxsrv.events import Load
from mlxsrv.logs import log
from mlxsrv.models.catalogue import Catalogue, Entry
from mlxsrv.settings import Settings

if TYPE_CHECKING:
    from mlxsrv.engine.tokenizer import Tokenizer

_log = logging.getLogger("mlxsrv.models")

_COMPILERS = 4


class Model:
    """One entry of the catalogue and what is known of it here.

    `rows` lends as many tokens as the batch has rows: whoever holds one is decoded at once.
    `tokenizing` lends the tokenizer, which is not for concurrent use, to one thread at a time.
    `compiling` bounds the threads, each with a process of its own, that compile grammars.
    """

    def __init__(self, entry: Entry, settings: Settings) -> None:
        self.entry = entry
        self.rows = anyio.CapacityLimiter(settings.max_concurrency)
        self.tokenizing = anyio.CapacityLimiter(1)
        self.compiling = anyio.CapacityLimiter(_COMPILERS)
        self.most = settings.max_concurrency + settings.max_queue
        self.in_flight = 0
        self.tokenizer: Tokenizer | None = None  # set: the model is loaded
        self.loading: asyncio.Task[Tokenizer] | None = None

    @property
    def loaded(self) -> bool:
        return self.tokenizer is not None


class Lease:
    """One request's claim on a model. Ends with `release`, which may be called more than once."""

    def __init__(self, pool: Pool, model: Model) -> None:
        self._pool = pool
        self.model = model
        self._released = False
        self._rows: set[object] = set()
        model.in_flight += 1

    async def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, once the model is loaded. Raises ModelNotLoaded, EngineFailed."""
        return self.model.tokenizer or await self._pool.load(self.model)

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
        """End the claim. All rows have been returned."""
        if not self._released:
            self._released = True
            self.model.in_flight -= 1


class Pool:
    """The models of one app."""

    def __init__(self, catalogue: Catalogue, settings: Settings) -> None:
        self.catalogue = catalogue
        self._settings = settings
        self._models = {entry.name: Model(entry, settings) for entry in catalogue}
        self._port: Port | None = None
        self._closed = False

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    @property
    def port(self) -> Port:
        """This app's port on the device thread, opened on first use in the running loop.

        Raises ShuttingDown after `close`.
        """
        if self._closed:
            raise ShuttingDown("the server is shutting down")
        if self._port is None:
            self._port = DeviceThread.open()
        return self._port

    @property
    def failure(self) -> str | None:
        """Why the device thread is dead, if it is."""
        return self._port.failure if self._port is not None else None

    def model(self, name: str | None) -> Model:
        """The model that a request names. Raises ModelNotFound."""
        return self._models[self.catalogue.find(name).name]

    def lease(self, name: str | None) -> Lease:
        """Claim a model. Raises ModelNotFound, and Overloaded if its queue is full."""
        model = self.model(name)
        if model.in_flight >= model.most:
            raise Overloaded(
                f"{model.entry.name} has {model.in_flight} requests already; try again shortly"
            )
        return Lease(self, model)

    async def load(self, model: Model) -> Tokenizer:
        """Load the model, once however many wait for it; the next call after a failure retries.

        The load is a task of its own, so that the first of its waiters can go away without
        taking it from the others.
        """
        if model.loading is None:
            model.loading = asyncio.create_task(self._load(model))
            # Its waiters may all be gone by the time it fails; _load has logged why.
            model.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(model.loading)

    def abandon(self) -> None:
        """Leave the device thread without waiting for anything: the loop is gone."""
        self._closed = True
        if self._port is not None:
            self._port.close()
            self._port = None
            for model in self:
                if model.loaded:
                    log(_log, logging.INFO, "model unloaded", model=model.entry.name)

    async def close(self) -> None:
        """Drop all models and leave the device thread."""
        tasks = [model.loading for model in self if model.loading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.abandon()

    async def _load(self, model: Model) -> Tokenizer:
        name = model.entry.name
        started = time.perf_counter()
        try:
            folder = await anyio.to_thread.run_sync(model.entry.fetch)
            # The device thread goes first: what it imports stays bound to it.
            loaded = await self.port.load(
                Load(
                    model=name,
                    path=str(folder),
                    max_rows=self._settings.max_concurrency,
                    prefill_chunk=self._settings.prefill_chunk,
                    max_gap=self._settings.max_gap,
                    prompt_cache_bytes=self._settings.prompt_cache_bytes,
                )
            )
            model.tokenizer = await anyio.to_thread.run_sync(_make_tokenizer, folder)
        except Exception as error:
            log(_log, logging.ERROR, "load failed", model=name, reason=str(error))
            if isinstance(error, ServeError):
                raise
            raise ModelNotLoaded(f"cannot load {name}: {error}") from error
        finally:
            model.loading = None
        model.tokenizer.marks_checkpoints = not loaded.cuts
        if not loaded.batched:
            model.rows.total_tokens = 1
        log(
            _log,
            logging.INFO,
            "model loaded",
            model=name,
            seconds=time.perf_counter() - started,
            bytes=loaded.bytes,
            batched=loaded.batched,
        )
        return model.tokenizer


def _make_tokenizer(folder: Path) -> Tokenizer:
    # Imported on first use: transformers takes most of a second.
    from mlxsrv.engine.tokenizer import Tokenizer

    return Tokenizer(folder)
