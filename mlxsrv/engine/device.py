"""The device thread: one per process, the only thread that touches MLX arrays.

MLX binds arrays and streams to threads, and its GPU back ends do not support concurrent use. So
every load, prefill and decode step of every model of every app in the process happens here. A round
of this thread: take all orders that are there, have the scheduler plan, have the runner do each
work item, and deliver the events that follow from it.

What crosses the thread's boundary, and who owns it:

- Orders come down through a SimpleQueue, each with its client's mailbox. The drained orders are the
  only input of a round; those that come meanwhile wait for the next.
- With the order of a load comes what makes constraints of its jobs' grammars. Both sides use it:
  the client's threads compile grammars, and this thread finds them compiled. What it makes of them
  belongs to this thread.
- Events go up through the mailbox: of each client once after the plan and once after each work
  item, if there are any, each time with one `call_soon_threadsafe`.
- A client belongs to its event loop, the scheduler and the runner to this thread. Neither touches
  the other's state.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from mlxsrv.engine.backend import import_engine
from mlxsrv.engine.events import EngineStopped, Event
from mlxsrv.engine.free_memory import release_memory
from mlxsrv.engine.orders import (
    Ask,
    Close,
    Fetched,
    Load,
    Open,
    Order,
    StorageReport,
    Unload,
    Written,
)
from mlxsrv.engine.ranks.follower import RankFollower
from mlxsrv.engine.ranks.leader import RankLeader
from mlxsrv.engine.recording.recorder import RecordedScheduler, Recorder, Recording
from mlxsrv.engine.runner import Runner
from mlxsrv.engine.scheduling.scheduler import Received, Scheduler
from mlxsrv.engine.watchdog import Clock
from mlxsrv.generation.parameters import MakeConstraint

if TYPE_CHECKING:
    from mlxsrv.engine.ranks.rank_group import RankGroup

_log = logging.getLogger("mlxsrv.engine")

JoinRanks = Callable[
    [Clock, Callable[[str], None], Callable[[], None]],
    "tuple[RankGroup, RankLeader | RankFollower]",
]
"""Joins the ranks of this process's; see `ranks.joining`."""

_REST_SECONDS = 0.3  # long enough for the next request of a busy server to find warm buffers
_LOOK_SECONDS = 0.2
_PARK_SECONDS = 10.0  # the longest work that the end of the process waits for


class Mailbox:
    """All that the device thread knows of a client: it delivers events on the client's event loop.
    Two mailboxes are never equal.

    Args:
        loop: the client's.
        deliver: called on the loop with the events of a model's decode step, of its slice, or of an
            order.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[Event]], None]
    ) -> None:
        self._loop = loop
        self.deliver = deliver

    def post(self, events: Sequence[Event]) -> bool:
        """Send events to the loop; false if it is closed. Called on the device thread.

        One wake-up of the loop for all of them: it costs as much as the rest of a small step.
        """
        try:
            self._loop.call_soon_threadsafe(self.deliver, events)
        except RuntimeError:
            return False
        return True


class _Parcel(NamedTuple):
    """An order on its way down."""

    mailbox: Mailbox | None
    """None: it comes from the storage thread."""
    order: Order
    make_constraint: MakeConstraint | None = None


class DeviceThread:
    """The thread. `DeviceThread.shared()` gives the process's one instance.

    Started for the first client, it lives as long as the process: without clients it holds no
    model and sleeps. Ending it sooner is not safe: MLX's thread-local destructors run after Python
    has marked the thread as ended. If the interpreter shuts down at that time, they crash.
    """

    # One device, one thread: apps mounted side by side must share it, so none of them owns it.
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar[DeviceThread | None] = None

    def __init__(self, recording: Recording | None = None, join: JoinRanks | None = None) -> None:
        self.clock = Clock()
        self.ranks = 1  # how many there are
        self.leader: RankLeader | None = None  # on rank 0 of several, once they have joined
        self.follower: RankFollower | None = None  # on each of the others
        self.joined: Future[int] = Future()
        self._join_ranks = join
        self.shutdown_wished: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM)
        self._recording = recording
        self._inbox: SimpleQueue[_Parcel | None] = SimpleQueue()
        self._parked = threading.Event()
        # The device thread's own, from here on.
        self._scheduler = _make_scheduler(recording)
        self._runner = Runner(self._send_report)
        self._clients: dict[Mailbox, int] = {}
        self._opened = 0
        self._failed = False
        self._worked = False  # since memory was released
        threading.Thread(target=self._run, name="mlxsrv-device", daemon=True).start()
        atexit.register(self._park)

    @classmethod
    def shared(
        cls, recording: Recording | None = None, join: JoinRanks | None = None
    ) -> DeviceThread:
        """The process's device thread, started if this is the first call. From any thread.

        Only the first call can have it recorded: a record has all rounds from the first.
        """
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls(recording, join)
            elif recording not in (None, cls._shared._recording):
                _log.warning("not recorded: the device thread runs already, for another app")
        return cls._shared

    @classmethod
    def joins_ranks(cls) -> bool:
        """Whether the process's device thread was started as that of one of several ranks."""
        return cls._shared is not None and cls._shared._join_ranks is not None

    def send(
        self, mailbox: Mailbox, order: Order, make_constraint: MakeConstraint | None = None
    ) -> None:
        """Queue an order of the client with this mailbox. Called on the client's loop.

        `make_constraint` is for jobs of the model that is to be loaded, and is called on this
        thread.
        """
        self._inbox.put(_Parcel(mailbox, order, make_constraint))

    def _send_report(self, order: StorageReport) -> None:
        """Queue a report of the storage thread. Called on that thread, which no longer uses
        anything that the report is about."""
        self._inbox.put(_Parcel(None, order))

    def _park(self) -> None:
        """At exit: wait until the thread is out of MLX for good, or the exit may crash."""
        self._inbox.put(None)
        self._parked.wait(_PARK_SECONDS)

    def wait(self) -> int:
        """Wait until rank 0 has stopped all ranks. Returns the exit status."""
        while not self._parked.wait(_LOOK_SECONDS):  # between two waits, signals are handled
            pass
        return 3 if self._failed else 0

    # From here on: the device thread.

    def _run(self) -> None:
        try:
            if self._join():
                self._serve()
            if self.leader is not None:
                self.leader.stop()
            self._runner.storage.finish_writes()
        except BaseException as error:
            _log.critical("the device thread died", exc_info=True)
            self._failed = True
            if self._join_ranks is not None:
                self._parked.set()
            self._answer_dead(EngineStopped(f"the device thread died: {type(error).__name__}"))
        self._parked.set()
        threading.Event().wait()

    def _serve(self) -> None:
        """Do rounds until the end: on a following rank those that rank 0 plans, else those of its
        own scheduler."""
        if self.follower is not None:
            self.follower.follow(self._runner.run)
            return
        while (orders := self._drain()) is not None:
            self._work(orders)

    def _join(self) -> bool:
        """Wait for all ranks, if there are to be several. False: they have not come; `joined` has
        the error."""
        if self._join_ranks is None:
            self.joined.set_result(0)
            return True
        try:
            import_engine()
            group, member = self._join_ranks(self.clock, self._lose, lambda: self.shutdown_wished())
        except Exception as error:
            self.joined.set_exception(error)
            return False
        self._runner = Runner(self._send_report, ranks=group)
        if isinstance(member, RankLeader):
            self.leader = member
        else:
            self.follower = member
        self.ranks = group.size
        self.joined.set_result(group.rank)
        return True

    def _lose(self, reason: str) -> None:
        """Send every client EngineStopped: a rank is lost. Called on a thread of the leader's: this
        one may wait for ever in a collective. A client that opens at this moment may not hear of
        it; the process ends soon."""
        for mailbox in tuple(self._clients):
            mailbox.post([EngineStopped(reason)])

    def _answer_dead(self, stopped: EngineStopped) -> None:
        """Send EngineStopped to every client, and to each that sends an order from now on, so that
        no request waits for ever."""
        for mailbox in self._clients:
            mailbox.post([stopped])
        while (parcel := self._inbox.get()) is not None:
            if parcel.mailbox is not None:
                parcel.mailbox.post([stopped])

    def _drain(self) -> list[Received] | None:
        """Take all orders from the inbox; without work, wait for one. None: the process ends, and
        all orders are done."""
        self.clock.stop()
        idle = self._scheduler.idle
        self._worked |= not idle
        orders: list[Received] = []
        try:
            parcel = self._wait() if idle else self._inbox.get_nowait()
            while parcel is not None:
                orders += self._unpack(parcel)
                parcel = self._inbox.get_nowait()
            if orders:  # a client that has closed may have left prompts that are to be stored
                self._inbox.put(None)
            return orders or None
        except Empty:
            late = self._runner.storage.give_up()
            return [*orders, *(Received(0, order) for order in late)]

    def _wait(self) -> _Parcel | None:
        """The next order. If none comes for a moment after work, free memory goes back to the
        system before the thread waits on.

        Raises Empty when a read from disk has taken too long.
        """
        left = self._runner.storage.seconds_left
        if self._worked and (left is None or left > _REST_SECONDS):
            with suppress(Empty):
                return self._inbox.get(timeout=_REST_SECONDS)
            release_memory()
            self._worked = False
            left = self._runner.storage.seconds_left
        return self._inbox.get(timeout=None if left is None else max(left, 0.0))

    def _unpack(self, parcel: _Parcel) -> Sequence[Received]:
        mailbox, order, make_constraint = parcel
        if isinstance(order, (Fetched, Written)):
            return [Received(0, order)] if self._runner.storage.accept(order) else []
        assert mailbox is not None
        if isinstance(order, Open):
            self._opened += 1
            self._clients[mailbox] = self._opened
            # This thread must import MLX. An import error is reported later, as the answer to
            # GetMemory.
            with suppress(Exception):
                import_engine()
        client = self._clients.get(mailbox, 0)
        makers = self._runner.constraint_makers
        match order:
            case Close():
                self._clients.pop(mailbox, None)
                for key in [key for key in makers if key[0] == client]:
                    del makers[key]
            case Unload(model):
                makers.pop((client, model), None)
            case Ask(question=Load(model=model)) if make_constraint is not None:
                makers[client, model] = make_constraint
        return [Received(client, order)]

    # A method of its own: a local variable that lives on between rounds would keep the models of a
    # closed client in memory.
    def _work(self, orders: Sequence[Received]) -> None:
        """Do one round."""
        self.clock.begin("planning")
        plan = self._scheduler.plan(orders)
        self._deliver()
        if self.leader is not None and plan.items:
            self.leader.send(plan)
        for number, work in enumerate(plan.items):
            self.clock.begin(work.title, self._scheduler.name(work.model))
            outcome = self._runner.run(work)
            if self.leader is not None:
                self.leader.note_outcome(number, outcome)
            self._scheduler.settle(work, outcome)
            self._deliver()

    def _deliver(self) -> None:
        """Send events to their clients. One whose loop is closed is forgotten."""
        for number, events in self._scheduler.take_events():
            mailbox = next(box for box, client in self._clients.items() if client == number)
            if not mailbox.post(events):
                _log.debug("an event loop is gone; its work is dropped")
                self.send(mailbox, Close())


def _make_scheduler(recording: Recording | None) -> Scheduler:
    return Scheduler() if recording is None else RecordedScheduler(Recorder(recording))
