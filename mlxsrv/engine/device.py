"""The device thread: one per process, the only thread that touches MLX arrays.

MLX binds arrays and streams to threads, and its GPU back ends do not support concurrent use. So
every load, prefill and decode step of every model of every app in the process happens here. A round
of this thread: obey all orders that are there; then, for each model that has work, do one decode
step and at most one slice of a load, of prompts or of texts.

What crosses the thread's boundary, and who owns it:

- Orders come down through a SimpleQueue, each with its client's mailbox. The drained orders are
  the only input of a round.
- Events go up through the mailbox: of each model once after its decode step and once after its
  slice, if there are any, each time with one `call_soon_threadsafe`.
- A client belongs to its event loop, a session to this thread. Neither touches the other's state.
"""

from __future__ import annotations

import atexit
import logging
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, ClassVar

from mlxsrv.engine.backend import import_engine, release_memory
from mlxsrv.engine.events import EngineStopped
from mlxsrv.engine.faults import survivable
from mlxsrv.engine.mailbox import Mailbox
from mlxsrv.engine.orders import Close, Open, Order
from mlxsrv.engine.session import Session
from mlxsrv.engine.watchdog import Clock

if TYPE_CHECKING:
    from mlxsrv.engine.loading.resident import ResidentModel

_log = logging.getLogger("mlxsrv.engine")

_REST_SECONDS = 0.3  # long enough for the next request of a busy server to find warm buffers
_PARK_SECONDS = 10.0  # the longest slice that the end of the process waits for


class DeviceThread:
    """The thread. `DeviceThread.shared()` gives the process's one instance.

    Started for the first client, it lives as long as the process: without clients it holds no
    model and sleeps. Ending it sooner is not safe: MLX's thread-local destructors run after Python
    has marked the thread as ended. If the interpreter shuts down at that time, they crash.
    """

    # One device, one thread: apps mounted side by side must share it, so none of them owns it.
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar[DeviceThread | None] = None

    def __init__(self) -> None:
        self.clock = Clock()
        self._inbox: SimpleQueue[tuple[Mailbox, Order] | None] = SimpleQueue()
        self._sessions: dict[Mailbox, Session] = {}
        self._parked = threading.Event()
        self._worked = False  # since memory was released
        threading.Thread(target=self._run, name="mlxsrv-device", daemon=True).start()
        atexit.register(self._park)

    @classmethod
    def shared(cls) -> DeviceThread:
        """The process's device thread, started if this is the first call. From any thread."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
        return cls._shared

    def send(self, mailbox: Mailbox, order: Order) -> None:
        """Queue an order of the client with this mailbox. Called on the client's loop."""
        self._inbox.put((mailbox, order))

    def _park(self) -> None:
        """At exit: have the thread leave MLX and stay out of it, or the exit may crash."""
        self._inbox.put(None)
        self._parked.wait(_PARK_SECONDS)

    # From here on: the device thread.

    def _run(self) -> None:
        try:
            while self._drain():
                self._work()
        except BaseException as error:
            _log.critical("the device thread died", exc_info=True)
            self._answer_dead(EngineStopped(f"the device thread died: {type(error).__name__}"))
        self._parked.set()
        threading.Event().wait()

    def _answer_dead(self, stopped: EngineStopped) -> None:
        """Tell every client, and each that sends an order from now on, so that no request waits
        for ever."""
        for mailbox in self._sessions:
            mailbox.post([stopped])
        while (item := self._inbox.get()) is not None:
            item[0].post([stopped])

    def _drain(self) -> bool:
        """Obey all orders that are there, waiting for one if there is no work; false to park."""
        self.clock.stop()
        idle = all(session.idle for session in self._sessions.values())
        self._worked |= not idle
        try:
            item = self._wait() if idle else self._inbox.get_nowait()
            while item is not None:
                self._serve(*item)
                item = self._inbox.get_nowait()
            return False
        except Empty:
            pass
        for session in self._sessions.values():
            session.cancel_jobs()
        return True

    def _wait(self) -> tuple[Mailbox, Order] | None:
        """The next order. If none comes for a moment after work, free memory goes back to the
        system before the thread waits on."""
        if self._worked:
            with suppress(Empty):
                return self._inbox.get(timeout=_REST_SECONDS)
            release_memory()
            self._worked = False
        return self._inbox.get()

    def _serve(self, mailbox: Mailbox, order: Order) -> None:
        """Obey an order. If it fails, only the client that sent it is told."""
        self.clock.begin("an order")
        try:
            self._obey(mailbox, order)
        except BaseException as error:
            if not survivable(error):
                raise
            session = self._sessions.get(mailbox)
            if session is None:
                _log.exception("an order failed")
            else:
                session.refuse(order, error)

    def _obey(self, mailbox: Mailbox, order: Order) -> None:
        session = self._sessions.get(mailbox)
        if isinstance(order, Open):
            self._sessions[mailbox] = Session(mailbox, self.clock, self._residents)
            # This thread must import MLX. An import error is reported later, as the answer to
            # GetMemory.
            with suppress(Exception):
                import_engine()
        elif session is None:
            _log.debug("an order of a client that is closed")
        elif isinstance(order, Close):
            self._drop(session)
        else:
            session.obey(order)

    # A method of its own: a local variable that lives on between rounds would keep the models of a
    # closed session in memory.
    def _work(self) -> None:
        """Do the work of one round, for each client's session."""
        for session in list(self._sessions.values()):
            session.step()
            if session.gone:
                self._drop(session)

    def _drop(self, session: Session) -> None:
        del self._sessions[session.mailbox]
        session.drop()
        release_memory()

    def _residents(self) -> list[ResidentModel]:
        return [model for session in self._sessions.values() for model in session.models.values()]
