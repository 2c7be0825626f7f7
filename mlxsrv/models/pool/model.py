"""One model of the pool: its state, what is known of it, and who uses it.

Rules:

- `LoadState` says how far the model is on its way into memory. `FOLLOWING` is the table of what may
  follow what; `Model.enter` is the only place that changes the state, and checks it.
- Only the pool, what it calls to prepare a load, and leases change a model. Others read its
  attributes, and borrow from `tokenizing` and `compiling`.
- Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio
import msgspec

from mlxsrv.engine.events import Loaded, kv_bytes
from mlxsrv.engine.orders import Attach
from mlxsrv.formats.sae_files import SAEFile
from mlxsrv.generation.status import ByteProgress
from mlxsrv.models.catalogue.catalogue import ModelEntry
from mlxsrv.models.catalogue.progress import DownloadProgress, LoadProgress
from mlxsrv.models.pool.clients import Client, Places
from mlxsrv.models.pool.model_files import SHORT_ROW, ModelFiles
from mlxsrv.settings import Settings
from mlxsrv.states import follow

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer

_TOKENIZERS = 16
_COMPILERS = 4

Status = Literal["loaded", "downloading", "loading", "waiting for room", "unused"]
"""A state in the words of `/health`."""


Ticket = asyncio.Future[None]
"""Done when its lease has entered the model, or when it never can."""


class LoadState(Enum):
    """The states of a model on its way into memory."""

    UNUSED = auto()
    """Nothing is under way. The tokenizer may be there already."""
    PREPARING = auto()
    """Its files are read, and its tokenizer is made."""
    FETCHING = auto()
    """Its files, or some of them, are downloaded."""
    WAITING = auto()
    """It waits until other models have freed memory, or a place among those that may be loaded."""
    LOADING = auto()
    """Its memory is reserved, and the device thread loads it."""
    LOADED = auto()
    CLOSING = auto()
    """It is loaded, and goes as soon as its users have left, to free memory for another."""


_S = LoadState
FOLLOWING: Mapping[LoadState, frozenset[LoadState]] = {
    _S.UNUSED: frozenset({_S.PREPARING, _S.WAITING}),
    _S.PREPARING: frozenset({_S.FETCHING, _S.UNUSED}),
    _S.FETCHING: frozenset({_S.PREPARING, _S.UNUSED}),
    _S.WAITING: frozenset({_S.LOADING, _S.UNUSED}),
    _S.LOADING: frozenset({_S.LOADED, _S.UNUSED}),
    # A model that goes waits again if its next load is queued already.
    _S.LOADED: frozenset({_S.CLOSING, _S.UNUSED, _S.WAITING}),
    _S.CLOSING: frozenset({_S.LOADED, _S.UNUSED, _S.WAITING}),
}
_PREPARING = frozenset({_S.PREPARING, _S.FETCHING})
_IN_MEMORY = frozenset({_S.LOADED, _S.CLOSING})


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """An SAE at one layer of a model; jobs name it by its number."""

    number: int
    model: str
    sae_id: str
    path: Path
    file: SAEFile
    layer: int
    before: bool
    bytes: int
    since: float
    """When it was attached; seconds since 1970."""
    ready: bool = False

    @property
    def order(self) -> Attach:
        return Attach(self.model, self.number, str(self.path), self.layer, self.before)


class Model:
    """An entry of the catalogue that is loaded, or that somebody has a lease on.

    `tokenizing` bounds the threads that make prompts of texts, each of which takes some megabytes.
    `compiling` bounds the threads, each with a process of its own, that compile grammars.

    Attributes:
        files: known together with the tokenizer.
        tokenizer: may be there before the model is loaded.
        loaded: the device thread's answer, while the model is loaded.
        leases: that were not released.
        users: leases that have entered.
        max_rows: jobs that have a row together, at most.
        queued: jobs that wait for a row, with their clients.
        running: jobs that have a row.
        waiting_for_load: requests that wait for its files, its tokenizer or its weights.
        last_entry: when a user entered last, by the loop's clock.
        keep_alive: seconds that it stays loaded without a user; None: as the settings say. It is
            forgotten when the model is unloaded.
        download: the last download of its files, or of its draft model's.
        reading: the progress of its load, while it is loaded.
    """

    def __init__(self, entry: ModelEntry, settings: Settings) -> None:
        self.entry = entry
        self.max_rows = settings.max_concurrency
        self.queued: dict[int, str] = {}
        self.running: set[int] = set()
        self.waiting_for_load = 0
        self.leases = 0
        self.tokenizing = anyio.CapacityLimiter(_TOKENIZERS)
        self.compiling = anyio.CapacityLimiter(_COMPILERS)
        self.files: ModelFiles | None = None
        self.tokenizer: Tokenizer | None = None
        self.loaded: Loaded | None = None
        self.attachment: Attachment | None = None
        self.users = 0
        self.last_entry = 0.0
        self.keep_alive: float | None = None
        self.download: DownloadProgress | None = None
        self.reading: LoadProgress | None = None
        self._state = LoadState.UNUSED
        self._places = Places(settings.max_concurrency, settings.max_queue)
        self._tickets: deque[Ticket] = deque()
        self._last_exit = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self.prepare_task: asyncio.Task[Tokenizer] | None = None
        self.load_task: asyncio.Task[None] | None = None

    # For all to read.

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def state(self) -> LoadState:
        return self._state

    @property
    def requests(self) -> int:
        """Clients' requests: leases but for the server's own."""
        return self._places.taken

    @property
    def waiting_clients(self) -> int:
        """Clients whose jobs wait for a row."""
        return len(set(self.queued.values()))

    @property
    def turn(self) -> int:
        """The seconds until a request that comes now may have a row."""
        return self._places.turn

    @property
    def waiting(self) -> int:
        """Leases that wait to enter."""
        return len(self._tickets)

    @property
    def wanted(self) -> bool:
        """Somebody waits to enter."""
        return any(not ticket.done() for ticket in self._tickets)

    @property
    def own_bytes(self) -> int:
        """Bytes of what it shares with no model: adapter, draft model, SAE, and what its weights
        take in memory beyond their files."""
        own = 0 if self.attachment is None else self.attachment.bytes
        if self.files is None:
            return own
        files = self.files.base + self.files.own
        beyond = 0 if self.loaded is None else max(self.loaded.bytes - files, 0)
        return own + self.files.own + beyond

    @property
    def short_row(self) -> int:
        """Bytes that a short row takes, which has its own KV cache until it has joined others; an
        estimate until the model is loaded."""
        if self.loaded is not None:
            return 2 * kv_bytes(self.loaded.kv_costs, 2 * SHORT_ROW)  # it has room to grow
        return 0 if self.files is None else self.files.short_row

    @property
    def unused(self) -> bool:
        """It is loaded, and no request wants it."""
        return self._state is LoadState.LOADED and self.leases == 0

    @property
    def has_memory(self) -> bool:
        """It is in memory, or on its way there: its bytes count."""
        return self._state is LoadState.LOADING or self._state in _IN_MEMORY

    @property
    def busy(self) -> bool:
        """It cannot go now."""
        return self.users > 0 or self._state is LoadState.LOADING

    @property
    def progressing(self) -> bool:
        """Its files, its tokenizer or its weights are on their way; it does not wait for memory."""
        if self._state is LoadState.UNUSED:
            return self.load_task is not None
        return self._state in _PREPARING or self._state is LoadState.LOADING

    @property
    def status(self) -> Status:
        if self._state in _IN_MEMORY:
            return "loaded"
        if self._state is LoadState.WAITING:
            return "waiting for room"
        if self._state is LoadState.FETCHING:
            return "downloading"
        asked = self.load_task is not None or self._state is LoadState.LOADING
        return "loading" if asked else "unused"

    @property
    def arrived(self) -> ByteProgress | None:
        """The progress of its download; None if none is under way."""
        if self._state is not LoadState.FETCHING or self.download is None:
            return None
        return self.download.arrived

    @property
    def weights_read(self) -> ByteProgress | None:
        """The progress of its load; None if none is under way."""
        return None if self.reading is None else self.reading.arrived

    @property
    def forgettable(self) -> bool:
        """Neither loaded nor claimed, and no work on it is left that the next lease would have to
        begin again."""
        working = self.prepare_task is not None or self.load_task is not None
        return not working and self.loaded is None and self.leases == 0

    @property
    def idle_seconds(self) -> float | None:
        """The time it has been loaded without a user; None if it is not loaded or has one."""
        idle = self.loaded is not None and self.users == 0
        return _now() - self._last_exit if idle else None

    # For the pool: states.

    def enter(self, state: LoadState) -> None:
        """Change the state. Raises RuntimeError if the table does not allow it."""
        self._state = follow(self.name, self._state, state, FOLLOWING)

    def finish_loading(self, loaded: Loaded, max_rows: int) -> None:
        self.enter(LoadState.LOADED)
        self.loaded = loaded
        self.max_rows = max_rows if loaded.batched else 1

    def finish_unloading(self, state: LoadState) -> None:
        self.stop_idle_timer()
        self.enter(state)
        self.loaded = None
        self.keep_alive = None

    # For the pool: leases. A lease waits for its ticket. A ticket that is done without an error has
    # entered; its lease may learn that only later, since its task has yet to run.

    def add_lease(self, client: Client | None) -> None:
        """Count a lease in; one of a client takes a place.

        Raises Overloaded if there is no place for this client.
        """
        if client is not None:
            self._places.take(client, self.name)
        self.leases += 1

    def remove_lease(self, client: Client | None) -> None:
        if client is not None:
            self._places.give_back(client)
        self.leases -= 1

    def queue(self) -> Ticket:
        """A new ticket, which waits."""
        ticket: Ticket = asyncio.get_running_loop().create_future()
        self._tickets.append(ticket)
        return ticket

    def admit_waiting(self) -> None:
        """Let in all whose tickets still wait, on their behalf: until their tasks run, nobody may
        find the model idle."""
        while self._tickets:
            ticket = self._tickets.popleft()
            if not ticket.done():
                self.users += 1
                self.last_entry = _now()
                self.stop_idle_timer()
                ticket.set_result(None)

    def refuse_waiting(self, error: Exception) -> None:
        """End the wait of all tickets with an error."""
        while self._tickets:
            ticket = self._tickets.popleft()
            if not ticket.done():
                ticket.set_exception(error)

    def withdraw(self, ticket: Ticket, error: Exception) -> bool:
        """Take a ticket out of the queue. False if it is not there."""
        if ticket not in self._tickets:
            return False
        self._tickets.remove(ticket)
        if not ticket.done():
            ticket.set_exception(error)
        return True

    def leave(self, keep_alive: float | None) -> None:
        """Count out one that has entered, and take over its `keep_alive`, if it gives one."""
        self.users -= 1
        if keep_alive is not None:
            self.keep_alive = keep_alive

    def start_idle_time(self, timeout: float | None, evict: Callable[[Model, str], None]) -> None:
        """Note that the last user has left; call `evict` after `timeout` seconds without one."""
        self._last_exit = _now()
        if timeout is not None:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(timeout, evict, self, "idle")

    def stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None


def _now() -> float:
    return asyncio.get_running_loop().time()


def start_task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task that several requests may wait for. One that is cancelled does not end it for
    the others.

    If nobody waits for it any more, nobody reads its error. So the task logs its own failure, and
    asyncio's warning of an error that was never read is switched off.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task
