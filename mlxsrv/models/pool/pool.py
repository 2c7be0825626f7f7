"""Loaded models: each loaded once for all who wait, lent to requests by lease, evicted when idle.

A lease is one request's claim on one model. It first waits for what the model's files give, its
tokenizer, so that a prompt that does not fit is refused before anything is loaded. Then it enters:
from there until its release the model stays.

Models that are to be loaded take turns for room. What is idle makes room at once, the least
recently used first. If that is not enough, models in use close: their users finish, new requests
queue for the model's next turn, and when the last user has left it goes. So no request takes a
model away from another, and none waits for ever while others keep coming.

Used on the event loop only, which owns all of this; the device thread only does what it is sent.
Its inbox is first in, first out, so an unload is done before the load that it makes room for.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.faults import describe, survivable
from mlxsrv.engine.orders import Load
from mlxsrv.errors import (
    InsufficientMemory,
    ModelNotLoaded,
    Overloaded,
    SAEAttached,
    SAENotAttached,
    ServeError,
    ShuttingDown,
)
from mlxsrv.formats.sae_files import SAEFile
from mlxsrv.models.catalogue.catalogue import Catalogue, ModelEntry
from mlxsrv.models.control_vectors import control_vectors
from mlxsrv.models.pool.eviction import PoolLimits, taken
from mlxsrv.models.pool.lease import Lease, Withdrawn
from mlxsrv.models.pool.model import Attachment, Model, examine, is_here, make_tokenizer
from mlxsrv.models.pool.observing import ModelObserver, PoolLog
from mlxsrv.settings import Settings

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer

_MEMORY_SHARE = 0.8  # of what MLX recommends; caches and activations need some, too


class Pool:
    """The models of one app."""

    def __init__(
        self, catalogue: Catalogue, settings: Settings, observers: Sequence[ModelObserver] = ()
    ) -> None:
        self.catalogue = catalogue
        self._log = PoolLog(observers)
        self._settings = settings
        pinned = frozenset(catalogue.name(name) for name in settings.pin)
        self._limits = PoolLimits(settings.max_models, settings.memory_limit or 0, pinned)
        self.vectors = control_vectors(settings)
        self._models: dict[str, Model] = {}  # those that are loaded or have leases
        self._turns: deque[Model] = deque()  # those that wait for room
        self._attachment_numbers = count(1)
        self._engine: EngineClient | None = None
        self._closed = False

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    @property
    def engine(self) -> EngineClient:
        """This app's port on the device thread, opened on first use in the running loop.

        Raises ShuttingDown after `close`.
        """
        self._require_open()
        if self._engine is None:
            self._engine = EngineClient.open(self._settings.step_timeout)
        return self._engine

    def _require_open(self) -> None:
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
        """The model of the entry of this name, if it is loaded or wanted."""
        return self._models.get(name)

    @property
    def memory(self) -> tuple[int, int]:
        """The limit for all models, and what those that have room take of it; bytes."""
        return self._limits.bytes, taken([model for model in self if model.placed])

    def pinned(self, model: Model) -> bool:
        return self._limits.stays(model)

    # Attachments.

    @property
    def attachments(self) -> dict[str, Attachment]:
        """The SAEs that are attached, by the model's name."""
        found = {model.name: model.attachment for model in self}
        return {name: each for name, each in found.items() if each is not None and each.ready}

    async def attach(
        self, entry: ModelEntry, sae_id: str, path: Path, file: SAEFile, layer: int, before: bool
    ) -> Attachment:
        """Attach an SAE to a model, loading that if need be. Both stay until `detach`.

        A caller that is cancelled does not stop it.

        Raises:
            SAEAttached: the model has one.
            SAEIncompatible: it does not fit; the message says why.
            InsufficientMemory, ModelNotLoaded, Overloaded, EngineFailed: one cannot be loaded.
        """
        wanted = Attachment(
            number=next(self._attachment_numbers),
            model=entry.name,
            sae_id=sae_id,
            path=path,
            file=file,
            layer=layer,
            before=before,
            bytes=file.bytes,
            since=time.time(),
        )
        return await asyncio.shield(self._start(self._attach(self.lease(entry), wanted)))

    async def _attach(self, lease: Lease, wanted: Attachment) -> Attachment:
        model = lease.model
        try:
            await lease.enter()
            if model.attachment is not None:
                raise SAEAttached(f"{model.name} has an SAE already; detach it first")
            limit, used = self.memory
            if used + wanted.bytes > limit:
                raise InsufficientMemory(
                    f"the SAE needs {wanted.bytes} bytes; the limit for all models is {limit}, "
                    f"of which {used} are taken (--memory-limit)"
                )
            # From here on nobody else attaches one, and its memory counts.
            model.attachment = wanted
            try:
                attached = await self.engine.attach(wanted.command)
            except BaseException:
                model.attachment = None
                raise
            model.attachment = msgspec.structs.replace(wanted, bytes=attached.bytes, ready=True)
            return model.attachment
        finally:
            lease.release()

    def detach(self, name: str) -> Attachment:
        """Take the SAE off a model, which may then go. Raises SAENotAttached."""
        attachment = self.attachments.get(name)
        if attachment is None:
            raise SAENotAttached(f"{name} has no SAE attached")
        model = self._models[name]
        model.attachment = None
        self.engine.detach(name)
        if model.users == 0 and model.loaded is not None:
            self._rest(model)
        self._arrange()
        return attachment

    # Claims.

    def lease(self, entry: ModelEntry) -> Lease:
        """Claim a model. Raises Overloaded if its queue is full."""
        model = self._models.get(entry.name)
        if model is None:
            model = self._models[entry.name] = Model(entry, self._settings)
        if model.in_flight >= model.most:
            raise Overloaded(
                f"{model.name} has {model.in_flight} requests already; try again shortly"
            )
        return Lease(self, model)

    async def preload(self, entry: ModelEntry) -> None:
        """Load a model that no request has asked for yet. Raises ServeError."""
        lease = self.lease(entry)
        try:
            await lease.enter()
        finally:
            lease.release()

    async def enter(self, lease: Lease) -> None:
        model = lease.model
        if lease.released:
            raise Withdrawn("its claim has ended")
        if model.loaded is not None and not model.closing:
            self._admit(lease)
            return
        lease.ticket = asyncio.get_running_loop().create_future()
        model.waiting.append(lease)
        if model.loading is None:
            model.loading = self._start(self._load(model))
        # A wait that is cancelled may have been let in before it could know: its release tells.
        await lease.ticket

    def leave(self, lease: Lease) -> None:
        model = lease.model
        if lease.entered:
            self._count_out(model)
            return
        self._withdraw(lease)
        self._forget(model)

    def _admit(self, lease: Lease) -> None:
        model = lease.model
        lease.entered = True
        model.users += 1
        model.used = asyncio.get_running_loop().time()
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None

    def _count_out(self, model: Model) -> None:
        model.users -= 1
        if model.users == 0 and model.loaded is not None:
            self._rest(model)
            if self._turns:
                self._arrange()

    def _withdraw(self, lease: Lease) -> None:
        """Wait no more. Nobody else may wait for this model, and then it needs no room."""
        if lease in lease.model.waiting:
            lease.model.waiting.remove(lease)
            assert lease.ticket is not None
            if not lease.ticket.done():
                lease.ticket.set_exception(Withdrawn("its claim has ended"))
            self._arrange()

    def _let_in(self, model: Model) -> None:
        """Admit all who wait, on their behalf: between a model's load, or reopening, and their
        tasks' next turn nobody may find it idle."""
        while model.waiting:
            lease = model.waiting.popleft()
            assert lease.ticket is not None
            if not lease.ticket.done():
                self._admit(lease)
                lease.ticket.set_result(None)

    def _rest(self, model: Model) -> None:
        """Start the clock of a model that nobody uses."""
        loop = asyncio.get_running_loop()
        model.left = loop.time()
        seconds = self._settings.idle_timeout
        if seconds is not None and not self.pinned(model):
            model.timer = loop.call_later(seconds, self._evict, model, "idle")

    def _forget(self, model: Model) -> None:
        """Drop what is known of a model that is neither loaded nor claimed, once no work on it is
        left that the next claim would have to begin again."""
        working = model.preparing is not None or model.loading is not None
        if not working and model.loaded is None and model.in_flight == 0:
            self._models.pop(model.name, None)

    # Room.

    def _arrange(self) -> None:
        """Give room to those whose turn it is; close and reopen models for it.

        Called whenever something has changed that room depends on. It decides everything anew, so
        there is no state of a half-made decision: a model is closing only while the head of the
        queue needs its room.
        """
        if self._closed:
            return
        for model in self:
            model.closing = False
        while self._turns:
            head = self._turns[0]
            if head.loaded is not None or not head.wanted:
                # It was to go and did not have to, or its requests have left.
                self._take_turn(head, _Unwanted())
                continue
            try:
                victims = self._limits.victims(head, [model for model in self if model.placed])
            except InsufficientMemory as error:
                self._take_turn(head, error)
                continue
            if any(model.busy for model in victims):
                for model in victims:
                    model.closing = True
                break
            for model in victims:
                self._evict(model, f"room for {head.name}")
            head.placed = True
            self._take_turn(head, victims)
        for model in list(self):
            if model.loaded is not None and not model.closing:
                self._let_in(model)

    def _take_turn(self, head: Model, outcome: list[Model] | Exception) -> None:
        self._turns.popleft()
        turn, head.turn = head.turn, None
        if turn is None or turn.done():
            return
        if isinstance(outcome, list):
            turn.set_result(outcome)
        else:
            turn.set_exception(outcome)

    def _evict(self, model: Model, reason: str) -> None:
        """Unload a model that nobody uses."""
        assert model.users == 0
        assert model.loaded is not None
        self._log.evicted(model.loaded, reason)
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        self.engine.unload(model.name)
        model.loaded = None
        model.placed = model.closing = False
        self._forget(model)

    # Loading.

    async def prepare(self, model: Model) -> Tokenizer:
        """The tokenizer, made once however many wait for it; a failure is tried again."""
        if model.tokenizer is not None:
            return model.tokenizer
        if model.preparing is None:
            model.preparing = self._start(self._prepare(model))
        return await asyncio.shield(model.preparing)

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Work of its own, so that the first who waits for it can go without taking it from the
        others. By the time it fails they may all be gone; it has logged why."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    async def _prepare(self, model: Model) -> Tokenizer:
        """Have the files here, and learn from them what is known without loading."""
        source = model.entry.source
        draft = self.catalogue.draft(model.entry)
        try:
            # The device thread is the first to import MLX, and the model's code, which making the
            # tokenizer may import as well: what they make then stays bound to it.
            memory = await self.engine.memory()
            if self._settings.memory_limit is None:
                share = int(_MEMORY_SHARE * memory)
                self._limits = msgspec.structs.replace(self._limits, bytes=share)
            model.fetching = not await anyio.to_thread.run_sync(is_here, source, draft)
            # Abandoned when the server closes: a download may last, and looks at that itself.
            model.files = await anyio.to_thread.run_sync(
                examine,
                source,
                draft,
                self._settings,
                model.name,
                self._require_open,
                abandon_on_cancel=True,
            )
            model.fetching = False
            await self.engine.import_model_code(str(model.files.folder))
            tokenizer = await anyio.to_thread.run_sync(
                make_tokenizer, model.files.folder, self._settings.trust_remote_code
            )
            tokenizer.context = model.files.context_length
            tokenizer.lend(model.tokenizer_lock.pause)
            model.tokenizer = tokenizer
        except BaseException as error:
            if not survivable(error):
                raise
            told = error if isinstance(error, Exception) else RuntimeError(describe(error))
            raise self._cannot_load(model, told) from error
        finally:
            model.preparing = None
            model.fetching = False
            self._forget(model)
        return tokenizer

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
        try:
            victims = await self._make_room(model)
            placed = loop.time()
            loaded = await self.engine.load(self._command(model))
        except _Unwanted:
            model.loading = None
            if model.waiting:  # again, since
                model.loading = self._start(self._load(model))
            self._forget(model)
            return
        except Exception as error:
            self._fail(model, self._cannot_load(model, error), victims)
            return
        model.loading = None
        model.loaded = loaded
        tokenizer.marks_checkpoints = not loaded.cuts
        model.rows.total_tokens = self._settings.max_concurrency if loaded.batched else 1
        self._log.loaded(loaded, loop.time() - placed)
        if victims:
            self._log.switched(
                model.name,
                [victim.name for victim in victims],
                waited=placed - begun,
                seconds=loop.time() - begun,
            )
        self._let_in(model)
        if model.users == 0:
            self._rest(model)
        self._arrange()

    async def _make_room(self, model: Model) -> list[Model]:
        """Wait for the model's turn; returns the models that have gone for it.

        Raises:
            InsufficientMemory: it cannot fit.
            _Unwanted: it is loaded after all, or nobody waits for it any more.
        """
        turn: asyncio.Future[list[Model]] = asyncio.get_running_loop().create_future()
        model.turn = turn
        self._turns.append(model)
        self._arrange()
        return await turn

    def _command(self, model: Model) -> Load:
        settings, files = self._settings, model.files
        assert files is not None
        return Load(
            model=model.name,
            path=str(files.folder),
            adapter=None if files.adapter is None else str(files.adapter),
            draft=None if files.draft is None else str(files.draft),
            max_rows=settings.max_concurrency,
            prefill_chunk=settings.prefill_chunk,
            max_gap=settings.max_gap,
            prompt_cache_bytes=settings.prompt_cache_bytes,
            kv_bits=settings.kv_bits,
            max_kv_size=settings.max_kv_size,
            trust_remote_code=settings.trust_remote_code,
            vectors=tuple((each.name, str(each.file.path)) for each in self.vectors),
        )

    def _fail(self, model: Model, error: ServeError, victims: Sequence[Model]) -> None:
        """Tell all who wait, and bring back what went to make room: nothing has come of it."""
        model.loading = None
        model.placed = False
        while model.waiting:
            ticket = model.waiting.popleft().ticket
            assert ticket is not None
            if not ticket.done():
                ticket.set_exception(error)
        self._forget(model)
        self._arrange()
        for victim in victims:
            self._start(self._bring_back(victim.entry))

    async def _bring_back(self, entry: ModelEntry) -> None:
        """Load a model again that has gone for nothing, unless others have taken its room or wait
        for it. Raises ServeError."""
        lease = self.lease(entry)
        try:
            await lease.tokenizer()
            placed = [model for model in self if model.placed]
            if not self._turns and not self._limits.victims(lease.model, placed):
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
            if model.timer is not None:
                model.timer.cancel()
            if model.loaded is not None:
                self._log.dropped(model.name)

    async def close(self) -> None:
        """Drop all models and leave the device thread."""
        self._closed = True
        tasks = [task for model in self for task in (model.loading, model.preparing) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.abandon()


class _Unwanted(Exception):
    """A turn that nobody waits for any more."""
