"""Loaded models: each loaded once for all who wait, used under a lease, evicted when idle.

A lease is one request's claim on one model. It first waits for the model's tokenizer, which needs
only the model's files: so a prompt that does not fit is refused before anything is loaded. Then it
enters: from there until its release the model stays.

Models that are to be loaded queue for memory. Idle models are unloaded for them at once, the least
recently used first. If that is not enough, models in use close: their users finish, new requests
queue for the model's next load, and it goes when its last user has left. So no request takes a
model away from another, and none waits for ever while others keep coming. They close as well
where the new weights would leave less memory than their requests have taken by then.

Everything here is owned by the event loop and used there only; the device thread only does what it
is sent. Its inbox is first in, first out, so an unload is done before the load that follows it.

What weights leave of the memory limit is the budget of rows and cached prompts: the device thread
keeps to it. It is sent whenever it changes, behind the unload that makes it larger and before the
load that makes it smaller, so that never both take the same memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import count
from math import inf
from secrets import token_bytes
from typing import TYPE_CHECKING

import msgspec

from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.faults import describe_error, survivable
from mlxsrv.engine.orders import Turn
from mlxsrv.engine.recording.recorder import Recording
from mlxsrv.engine.working_memory import SERVED_SHARE
from mlxsrv.errors import (
    InsufficientMemory,
    ModelNotLoaded,
    ServeError,
    ShuttingDown,
)
from mlxsrv.models.catalogue.catalogue import Catalogue, ModelEntry
from mlxsrv.models.catalogue.progress import LoadProgress
from mlxsrv.models.control_vectors import control_vectors
from mlxsrv.models.pool.clients import Client
from mlxsrv.models.pool.lease import Lease, Withdrawn
from mlxsrv.models.pool.memory import MemoryQueue, PoolLimits, Unwanted, used_bytes, weight_bytes
from mlxsrv.models.pool.model import (
    Attachment,
    LoadState,
    Model,
    Ticket,
    start_task,
)
from mlxsrv.models.pool.model_files import load_order
from mlxsrv.models.pool.observing import ModelObserver, PoolLog
from mlxsrv.models.pool.preparing import prepare_model
from mlxsrv.settings import Settings

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a pool at one moment."""

    limit: int
    """Bytes that all models may take; 0 until the device thread has reported the memory's size."""
    used: int
    """Bytes of it that weights and SAEs take: of models that are loaded, or are being loaded."""
    left: int
    """Bytes of it that are left for rows and cached prompts."""
    queue: tuple[str, ...]
    """Models that wait for memory, the next one first."""


class Pool:
    """The models of one app."""

    def __init__(
        self, catalogue: Catalogue, settings: Settings, observers: Sequence[ModelObserver] = ()
    ) -> None:
        self.catalogue = catalogue
        self.vectors = control_vectors(settings)
        self._settings = settings
        self._log = PoolLog(observers)
        pinned = frozenset(catalogue.name(name) for name in settings.pin)
        self._limits = PoolLimits(settings.max_models, settings.memory_limit or 0, pinned)
        self._models: dict[str, Model] = {}  # those that are loaded or have leases
        self._queue = MemoryQueue()
        self._engine: EngineClient | None = None
        self._budget: int | None = None  # the last that was sent
        self._taken: dict[str, int] = {}  # bytes of rows, by model, when a load was last asked for
        self._arrivals = count(1)
        self._secret = token_bytes(16)  # a client's id may tell who it is, and a record is shown
        self._closed = False

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    @property
    def engine(self) -> EngineClient:
        """This app's client of the device thread, opened on first use in the running loop.

        Raises ShuttingDown after `shut_down`.
        """
        self.require_open()
        if self._engine is None:
            recording = Recording.from_settings(self._settings)
            self._engine = EngineClient.open(self._settings.step_timeout, recording)
            self._engine.memory_short = self._make_room
        return self._engine

    def require_open(self) -> None:
        """Raises ShuttingDown after `shut_down`."""
        if self._closed:
            raise ShuttingDown("the server is shutting down")

    @property
    def failure(self) -> str | None:
        """Why the device thread is dead, if it is."""
        return self._engine.failure if self._engine is not None else None

    @property
    def stalled(self) -> float:
        """Seconds that the device thread has been in a slice that takes too long; else 0."""
        return self._engine.stalled if self._engine is not None else 0.0

    def model(self, name: str) -> Model | None:
        """The model of the entry of this name, if it is loaded or somebody has a lease on it."""
        return self._models.get(name)

    @property
    def memory(self) -> tuple[int, int]:
        """The limit, and what of it is reserved: weights, and a short row of each model; bytes."""
        return self._limits.bytes, used_bytes(self._with_memory())

    @property
    def attachments(self) -> dict[str, Attachment]:
        """The SAEs that are attached, by the model's name."""
        found = {model.name: model.attachment for model in self}
        return {name: each for name, each in found.items() if each is not None and each.ready}

    def statistics(self) -> PoolStatistics:
        placed = self._with_memory()
        return PoolStatistics(
            limit=self._limits.bytes,
            used=weight_bytes(placed),
            left=self._limits.left(placed),
            queue=tuple(model.name for model in self._queue),
        )

    def stays(self, model: Model) -> bool:
        """Whether the model is never evicted: it is pinned, or has an SAE."""
        return self._limits.stays(model)

    def _with_memory(self) -> list[Model]:
        return [model for model in self if model.has_memory]

    # Leases.

    def lease(self, entry: ModelEntry, client: Client | None = None) -> Lease:
        """Claim a model for a client, or for the server itself. Raises Overloaded if the model's
        queue has no place for the client."""
        model = self._models.get(entry.name)
        if model is None:
            model = self._models[entry.name] = Model(entry, self._settings)
        model.add_lease(client)
        return Lease(self, model, client, Turn() if client is None else self._make_turn(client))

    def _make_turn(self, client: Client) -> Turn:
        id = client.id.encode(errors="surrogatepass")
        digest = blake2b(id, key=self._secret, digest_size=8).hexdigest()
        return Turn(digest, client.priority, next(self._arrivals))

    async def preload(self, entry: ModelEntry) -> None:
        """Load a model that no request has asked for yet. Raises ServeError."""
        lease = self.lease(entry)
        try:
            await lease.enter()
        finally:
            lease.release()

    def admit(self, model: Model) -> Ticket:
        """A ticket for a model, which is loaded if need be. Raises ShuttingDown."""
        self.require_open()  # or the ticket might wait for a load that `shut_down` has cancelled
        ticket = model.queue()
        if model.state is LoadState.LOADED:
            model.admit_waiting()
        elif model.load_task is None:
            model.load_task = start_task(self._load(model))
        return ticket

    def end_lease(self, lease: Lease) -> None:
        """Count a lease out, and do what its model was kept from."""
        model, ticket = lease.model, lease.ticket
        model.remove_lease(lease.client)
        if ticket is not None and _has_entered(ticket):
            model.leave(lease.keep_alive)
            if model.users == 0 and model.loaded is not None:
                self._start_idle_time(model)
                if self._queue:
                    self._arrange()
            return
        if ticket is not None and model.withdraw(ticket, Withdrawn("its lease has ended")):
            # If nobody else waits for the model, it needs no memory any more.
            self._arrange()
        self._forget(model)

    def reserve(self, model: Model, attachment: Attachment | None) -> None:
        """Count the memory of a model's SAE, which it has or is to have; None: no longer."""
        model.attachment = attachment
        self._divide()

    def allow_eviction(self, model: Model) -> None:
        """Reconsider a model that was kept for an SAE, which has just been detached."""
        if model.users == 0 and model.loaded is not None:
            self._start_idle_time(model)
        self._arrange()

    def _start_idle_time(self, model: Model) -> None:
        # After the pool's end nothing is loaded, so there is nothing to evict.
        timeout = None if self._closed else self.idle_limit(model)
        model.start_idle_time(timeout, self._evict_idle)

    def idle_limit(self, model: Model) -> float | None:
        """Seconds after which a model is unloaded if nobody uses it; None: it stays."""
        if self._limits.stays(model) or model.keep_alive == inf:
            return None
        return self._settings.idle_timeout if model.keep_alive is None else model.keep_alive

    def seconds_left(self, model: Model) -> float | None:
        """Seconds until a loaded model may be unloaded, if nobody uses it; None: it stays."""
        limit = self.idle_limit(model)
        return None if limit is None else max(limit - (model.idle_seconds or 0.0), 0.0)

    def unload(self, name: str) -> None:
        """Unload a model as soon as nobody uses it or waits for it. One that is pinned, or has an
        SAE, stays."""
        model = self._models.get(name)
        if model is None or self._limits.stays(model):
            return
        model.keep_alive = 0.0
        if model.loaded is not None and model.users == 0:
            self._evict(model, "asked for")
            self._arrange()

    def _forget(self, model: Model) -> None:
        if model.forgettable:
            self._models.pop(model.name, None)

    # Memory.

    def _arrange(self) -> None:
        """Give memory to the models whose turn it is; close and reopen others for it.

        Called whenever something has changed that this depends on. It decides everything anew, so
        no decision is ever half made: a model is closing only while the head of the queue needs
        its memory.
        """
        if self._closed:
            return
        closing: list[Model] = []
        while head := self._queue.head:
            if head.loaded is not None or not head.wanted:
                # It was closing and has been reopened, or its requests have left.
                self._queue.refuse(head, Unwanted())
                continue
            try:
                victims = self._limits.victims(head, self._with_memory())
            except InsufficientMemory as error:
                self._queue.refuse(head, error)
                continue
            if any(model.busy for model in victims):
                closing = victims
                break
            if crowded := self._find_crowded(head, victims):
                closing = crowded
                break
            for model in victims:
                self._evict(model, f"room for {head.name}")
            self._queue.give(head, victims)
        self._close_only(closing)
        self._divide()

    def _divide(self, *, answer: bool = False) -> None:
        """Send the device thread the bytes that are left for rows and cached prompts, if they have
        changed; with `answer` in any case, since it waits for that."""
        left = self._limits.left(self._with_memory())
        # Before there is an engine, and before the limit is known, nothing is loaded.
        if self._closed or self._engine is None or not self._limits.bytes:
            return
        if left != self._budget:
            self._log.divided(self._limits.bytes, left)
        elif not answer:
            return
        self._budget = left
        self._engine.set_budget(left)

    def _make_room(self, bytes: int) -> None:
        """Unload idle models, as the device thread lacks so many bytes for rows."""
        if self._closed:
            return
        for model in self._limits.idle_models(bytes, self._with_memory()):
            self._evict(model, "room for requests")
        # Nobody waits for an idle model, and for one in use there is no more room than before.
        self._divide(answer=True)

    def _find_crowded(self, head: Model, victims: Sequence[Model]) -> list[Model]:
        """The models in use, if what their rows have taken does not fit beside `head`: else their
        answers would be interrupted, or cut where one has most of it."""
        stay = [model for model in self._with_memory() if model not in victims]
        used = [model for model in stay if model.users > 0]
        taken = sum(self._taken.get(model.name, 0) for model in used)
        return used if taken > self._limits.left([*stay, head]) else []

    def _close_only(self, closing: Sequence[Model]) -> None:
        """Close these of the loaded models, and reopen the others."""
        for model in list(self):
            if model.state is LoadState.LOADED and model in closing:
                model.enter(LoadState.CLOSING)
            elif model.state is LoadState.CLOSING and model not in closing:
                model.enter(LoadState.LOADED)
            if model.state is LoadState.LOADED:
                model.admit_waiting()

    def _evict(self, model: Model, reason: str) -> None:
        """Unload a model that nobody uses."""
        assert model.users == 0
        assert model.loaded is not None
        self._log.evicted(model.loaded, reason)
        self.engine.unload(model.name)
        # Requests that came while it was closing may have queued for its next load.
        queued = model in self._queue
        model.finish_unloading(LoadState.WAITING if queued else LoadState.UNUSED)
        self._forget(model)

    def _evict_idle(self, model: Model, reason: str) -> None:
        self._evict(model, reason)
        self._divide()

    # Loading.

    async def prepare(self, model: Model) -> Tokenizer:
        """The tokenizer, made once however many wait for it; a failure is tried again."""
        if model.tokenizer is not None:
            return model.tokenizer
        self.require_open()
        if model.prepare_task is None:
            model.enter(LoadState.PREPARING)
            model.prepare_task = start_task(self._prepare(model))
        return await asyncio.shield(model.prepare_task)

    async def _prepare(self, model: Model) -> Tokenizer:
        """Make the tokenizer. Raises ServeError, which is logged."""
        try:
            # The device thread must be the first to import MLX: what it makes on import stays bound
            # to that thread.
            memory = await self.engine.memory()
            if self._settings.memory_limit is None:
                share = int(SERVED_SHARE * memory)
                self._limits = msgspec.structs.replace(self._limits, bytes=share)
            draft = self.catalogue.draft(model.entry)
            return await prepare_model(
                model,
                draft,
                self._settings,
                self.engine,
                self.require_open,
                self.catalogue.format_words(model.entry),
            )
        except BaseException as error:
            if not survivable(error):
                raise
            reason = error if isinstance(error, Exception) else RuntimeError(describe_error(error))
            raise self._cannot_load(model, reason) from error
        finally:
            model.prepare_task = None
            model.enter(LoadState.UNUSED)
            self._forget(model)

    async def _load(self, model: Model) -> None:
        """Bring a model into memory, and let in who waits for it."""
        victims: list[Model] = []
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            tokenizer = await self.prepare(model)
        except ServeError as error:
            self._fail(model, error, victims)
            return
        assert model.files is not None
        try:
            # From the moment the wait ends the model is LOADING, so nobody else takes its memory.
            # The evictions are in the device thread's inbox already, before this load.
            victims = await self._wait_for_memory(model)
            placed = loop.time()
            lookup = self.catalogue.looks_up(model.entry)
            order = load_order(model.name, model.files, self._settings, self.vectors, lookup=lookup)
            with LoadProgress(model.name, model.files.base + model.files.own) as model.reading:
                progressed = model.reading.add
                loaded = await self.engine.load(order, tokenizer.make_constraint, progressed)
        except Unwanted:
            model.load_task = None
            if model.wanted:  # a request has come before this task heard that it was unwanted
                model.load_task = start_task(self._load(model))
            self._forget(model)
            return
        except Exception as error:
            self._fail(model, self._cannot_load(model, error), victims)
            return
        model.load_task = None
        model.finish_loading(loaded, self._settings.max_concurrency)
        try:
            self._limits.require_row(model, self._with_memory())
        except InsufficientMemory as error:
            self.engine.unload(model.name)
            model.finish_unloading(LoadState.UNUSED)
            self._fail(model, self._cannot_load(model, error), victims)
            return
        tokenizer.marks_checkpoints = not loaded.cuts
        self._log.loaded(loaded, loop.time() - placed)
        if victims:
            self._log.switched(
                model.name,
                [victim.name for victim in victims],
                waited=placed - begun,
                seconds=loop.time() - begun,
            )
        model.admit_waiting()
        if model.users == 0:
            self._start_idle_time(model)
        self._arrange()

    async def _wait_for_memory(self, model: Model) -> list[Model]:
        """Queue for memory; returns the models that have been evicted for it.

        Raises:
            InsufficientMemory: it cannot fit.
            Unwanted: it is loaded after all, or nobody waits for it any more.
            EngineFailed: the device thread is dead.
        """
        if any(other.users for other in self):
            report = await self.engine.report()
            self._taken = {
                name: numbers.get("row_bytes", 0) + numbers.get("reading_bytes", 0)
                for name, numbers in report.models.items()
            }
        wait = self._queue.enqueue(model)
        self._arrange()
        return await wait

    def _fail(self, model: Model, error: ServeError, victims: Sequence[Model]) -> None:
        """End the wait of all who wait, and load again what was evicted for nothing."""
        model.load_task = None
        if model.state is LoadState.LOADING:
            model.enter(LoadState.UNUSED)
        model.refuse_waiting(error)
        self._forget(model)
        self._arrange()
        for victim in victims:
            start_task(self._bring_back(victim.entry))

    async def _bring_back(self, entry: ModelEntry) -> None:
        """Load an evicted model again, unless others have taken its memory or wait for it.

        Raises ServeError.
        """
        lease = self.lease(entry)
        try:
            await lease.tokenizer()
            if not self._queue and not self._limits.victims(lease.model, self._with_memory()):
                await lease.enter()
        finally:
            lease.release()

    def _cannot_load(self, model: Model, error: Exception) -> ServeError:
        """The error for those who wait, logged."""
        known = self.catalogue.known(model.name) is not None
        self._log.failed(model.name, error, known=known)
        if isinstance(error, ServeError) and type(error) is not ModelNotLoaded:
            return error
        # The device thread and the hub give the reason alone.
        return ModelNotLoaded(f"cannot load {model.name}: {error}")

    # The end.

    def abandon(self) -> None:
        """Leave the device thread without waiting for anything: the loop is gone."""
        self._closed = True
        if self._engine is None:
            return
        self._engine.close()
        self._engine = None
        for model in self:
            model.stop_idle_timer()
            if model.loaded is not None:
                self._log.dropped(model.name)

    async def shut_down(self) -> None:
        """Drop all models and leave the device thread. Who still waits gets ShuttingDown."""
        self._closed = True
        tasks = [task for model in self for task in (model.load_task, model.prepare_task) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in self:
            model.refuse_waiting(ShuttingDown("the server is shutting down"))
        self.abandon()


def _has_entered(ticket: Ticket) -> bool:
    return ticket.done() and not ticket.cancelled() and ticket.exception() is None
