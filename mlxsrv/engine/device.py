"""The device thread: one per process, the only thread that touches MLX arrays.

MLX binds arrays and streams to threads, and its GPU back ends do not support concurrent use, so
every load, prefill and decode of every model of every app in the process happens here. The loop
fits on a postcard: drain all commands, then one slice of work for each model that has any.

What crosses, and who owns it:

- Commands go down through a SimpleQueue. The drained list is the only input of a round.
- Events go up through `port.post(events)`, one `call_soon_threadsafe` for all rows of a
  step, since a wake-up of the loop costs as much as the rest of a small step.
- A Port belongs to its event loop, a Batch to this thread. Neither touches the other's state.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from mlxsrv.engine.client import (
    Answer,
    Ask,
    Close,
    Meet,
    Open,
    Order,
    Port,
    Question,
    Ready,
    TakeStock,
)
from mlxsrv.engine.faults import describe, survivable
from mlxsrv.engine.patches import imports
from mlxsrv.engine.watchdog import Clock
from mlxsrv.errors import (
    BackendMissing,
    EngineFailed,
    ModelNotLoaded,
    SAEIncompatible,
    ServeError,
)
from mlxsrv.events import (
    Attach,
    Cancel,
    Constraint,
    Detach,
    Embed,
    EngineStopped,
    Event,
    Failed,
    Job,
    Load,
    LoadFailed,
    Submit,
    Unload,
    Watch,
)

if TYPE_CHECKING:
    from mlxsrv.engine.loading.load import Resident

_log = logging.getLogger("mlxsrv.engine")

_REST_SECONDS = 0.3  # long enough for the next request of a busy server to find warm buffers
_PARK_SECONDS = 10.0  # the longest slice that the end of the process waits for


class _Loading(msgspec.Struct, frozen=True):
    command: Load
    slices: Generator[None, None, None]


class _Attaching(msgspec.Struct, frozen=True):
    number: int
    """Of the question that this answers."""
    slices: Generator[None, None, Any]


class _Client:
    """The device thread's side of a port: its models and what they are doing."""

    def __init__(self, port: Port, clock: Clock) -> None:
        self.port = port
        self._clock = clock
        self.models: dict[str, Resident] = {}
        self.loading: dict[str, _Loading] = {}
        self.attaching: list[_Attaching] = []
        self.cancelled: set[int] = set()
        self.gone = False

    @property
    def idle(self) -> bool:
        return not (self.loading or self.attaching) and all(
            model.idle for model in self.models.values()
        )

    def submit(self, job: Job, constraint: Constraint | None) -> None:
        model = self.models.get(job.model)
        if model is None:
            self.deliver([Failed(job.id, "its model is not loaded")])
        else:
            self.deliver(model.submit(job, constraint))

    def embed(self, command: Embed) -> None:
        model = self.models.get(command.model)
        if model is None:
            self.deliver([Failed(command.id, "its model is not loaded")])
        else:
            self.deliver(model.embed(command))

    def cancel(self) -> None:
        """Free the rows of all jobs cancelled: together, for each change copies the caches."""
        cancelled, self.cancelled = self.cancelled, set()
        for model in self.models.values() if cancelled else ():
            model.cancel(cancelled)

    def load(self, command: Load, others: Callable[[], Sequence[Resident]]) -> None:
        name = command.model
        if name in self.models or name in self.loading:
            self.deliver([LoadFailed(name, "there is a model of this name")])
        else:
            self.loading[name] = _Loading(command, _load(self, command, others))

    def unload(self, name: str) -> None:
        if self.loading.pop(name, None) is not None:
            self.deliver([LoadFailed(name, "it was unloaded before it was there")])
        if (model := self.models.pop(name, None)) is not None:
            self.deliver(model.fail("its model was unloaded"))

    def attach(self, number: int, command: Attach) -> None:
        self.attaching.append(_Attaching(number, _attach(self, command)))

    def detach(self, name: str) -> None:
        if (model := self.models.get(name)) is not None:
            model.detach()

    def watch(self, command: Watch) -> None:
        if (model := self.models.get(command.model)) is not None:
            model.watch(command)

    def step(self) -> None:
        """One slice for each model, and one of what is loaded."""
        self._load()
        self._attach()
        models = list(self.models.items())
        streaming = [model for _, model in models if model.streaming]
        for name, model in models:
            try:
                self._clock.begin("decoding", name)
                self.deliver(model.decode())
                beside = any(other is not model for other in streaming)
                self._clock.begin("reading prompts", name)
                self.deliver(model.read(beside=beside) + model.progress())
            except Exception as error:
                # The batch finds out whose an error is. One that escapes it is its own, so all of
                # its rows fail; other models' rows and the thread go on.
                _log.exception("a batch failed")
                self.deliver(model.fail_batch(f"{describe(error)} in a step"))

    def _load(self) -> None:
        folders: set[str] = set()
        for name, loading in list(self.loading.items()):
            # The second of two with the same folder waits for the weights that it will share.
            if loading.command.path in folders:
                continue
            folders.add(loading.command.path)
            self._clock.begin("loading", name)
            if next(loading.slices, _DONE) is _DONE:
                self.loading.pop(name, None)
                _release_memory()

    def _attach(self) -> None:
        """One slice of each SAE; the answer when it is there, or why it cannot be."""
        for attaching in list(self.attaching):
            self._clock.begin("attaching an SAE")
            try:
                next(attaching.slices)
                continue
            except StopIteration as done:
                answer = done.value
            except ServeError as error:
                answer = error
            except Exception as error:
                _log.debug("attaching an SAE failed", exc_info=True)
                answer = SAEIncompatible(" ".join(str(error).split()) or type(error).__name__)
            self.attaching.remove(attaching)
            self.deliver([Answer(attaching.number, answer)])

    def deliver(self, events: Sequence[Event | Answer]) -> None:
        if events and not self.port.post(events):
            _log.debug("an event loop is gone; its work is dropped")
            self.gone = True
            self.drop()

    def drop(self) -> None:
        """Forget all models, loaded or not."""
        self.models.clear()
        self.loading.clear()
        self.attaching.clear()


class DeviceThread:
    """The thread. `DeviceThread.open()` gives a port on the process's one instance.

    Started with the first port, it lives as long as the process: without ports it holds no model
    and sleeps. Ending it sooner would buy nothing and is not safe: MLX's thread-local destructors
    want the interpreter after Python believes the thread gone, and abort if that is going too.
    """

    # One device, one thread: apps mounted side by side must share it, so none of them owns it.
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar[DeviceThread | None] = None

    def __init__(self) -> None:
        self._inbox: SimpleQueue[tuple[Port, Order] | None] = SimpleQueue()
        self.clock = Clock()
        self._clients: dict[Port, _Client] = {}
        self._parked = threading.Event()
        self._worked = False  # since memory was released
        threading.Thread(target=self._run, name="mlxsrv-device", daemon=True).start()
        atexit.register(self._park)

    @classmethod
    def open(cls, step_timeout: float | None = None) -> Port:
        """A port for the running event loop, starting the thread if this is the first. It reports
        work that takes longer than `step_timeout` seconds at a stretch."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
        port = Port(cls._shared, asyncio.get_running_loop(), step_timeout)
        cls._shared.send(port, Open())
        return port

    def send(self, port: Port, order: Order) -> None:
        self._inbox.put((port, order))

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
        """Tell every port, and each that asks from now on, so that no request waits for ever."""
        for port in self._clients:
            port.post([stopped])
        while (item := self._inbox.get()) is not None:
            item[0].post([stopped])

    def _drain(self) -> bool:
        """Obey all orders that are there, waiting for one if there is no work; false to park."""
        self.clock.stop()
        idle = all(client.idle for client in self._clients.values())
        self._worked |= not idle
        try:
            item = self._wait() if idle else self._inbox.get_nowait()
            while item is not None:
                self._serve(*item)
                item = self._inbox.get_nowait()
            return False
        except Empty:
            pass
        for client in self._clients.values():
            client.cancel()
        return True

    def _serve(self, port: Port, order: Order) -> None:
        """Obey an order. An error is an answer to who gave it, and nobody else's concern."""
        self.clock.begin("an order")
        try:
            self._obey(port, order)
        except BaseException as error:
            if not survivable(error):
                raise
            _log.exception("an order failed")
            client, reason = self._clients.get(port), describe(error)
            if client is None:
                return
            match order:
                case Submit(job):
                    client.deliver([Failed(job.id, reason)])
                case Embed():
                    client.deliver([Failed(order.id, reason)])
                case Load():
                    client.deliver([LoadFailed(order.model, reason)])
                case Ask(number):
                    client.deliver([Answer(number, EngineFailed(reason))])

    def _wait(self) -> tuple[Port, Order] | None:
        """The next order. If none comes for a moment after work, what that needed and nobody uses
        now goes back to the system."""
        if self._worked:
            with suppress(Empty):
                return self._inbox.get(timeout=_REST_SECONDS)
            _release_memory()
            self._worked = False
        return self._inbox.get()

    # A method of its own: a name that stays bound between rounds would keep a client's models.
    def _work(self) -> None:
        """One slice for each model of each client."""
        for client in list(self._clients.values()):
            client.step()
            if client.gone:
                self._drop(client)

    def _drop(self, client: _Client) -> None:
        del self._clients[client.port]
        client.drop()
        _release_memory()

    def _obey(self, port: Port, order: Order) -> None:
        client = self._clients.get(port)
        match order:
            case Open():
                self._clients[port] = _Client(port, self.clock)
                # Here, by the thread that uses it; `ready` will tell what is wrong with it.
                with suppress(Exception):
                    imports.import_engine()
            case _ if client is None:
                _log.debug("an order of a port that is closed")
            case Close():
                self._drop(client)
            case Ask(number, Attach() as command):
                client.attach(number, command)
            case Ask(number, question):
                client.deliver([Answer(number, _answer(client, question))])
            case Submit(job, constraint):
                client.submit(job, constraint)
            case Embed():
                client.embed(order)
            case Cancel(job_id):
                client.cancelled.add(job_id)
            case Load():
                client.load(order, self._residents)
            case Detach(model):
                client.detach(model)
                _release_memory()
            case Watch():
                client.watch(order)
            case Unload(model):
                client.unload(model)
                _release_memory()

    def _residents(self) -> list[Resident]:
        return [model for client in self._clients.values() for model in client.models.values()]


_DONE = object()


def _load(
    client: _Client, command: Load, others: Callable[[], Sequence[Resident]]
) -> Generator[None, None, None]:
    """Load a model slice by slice and tell how it went."""
    # Imported here, by the thread that uses it: an app that is only imported, or asked for
    # --help, does not pay for MLX and transformers.
    try:
        from mlxsrv.engine.loading.load import load

        resident = yield from load(command, others)
    except BaseException as error:
        if not survivable(error):
            raise
        _log.debug("load failed", exc_info=True)
        reason = " ".join(str(error).split()) or type(error).__name__
        client.deliver([LoadFailed(command.model, reason)])
        return
    client.models[command.model] = resident
    client.deliver([resident.loaded])


def _attach(client: _Client, command: Attach) -> Generator[None, None, Any]:
    """Put an SAE on a model slice by slice. Raises ModelNotLoaded, or what is wrong with it."""
    model = client.models.get(command.model)
    if model is None:
        raise ModelNotLoaded("its model is not loaded")
    attached = yield from model.attach(command)
    if client.models.get(command.model) is not model:
        raise ModelNotLoaded("its model was unloaded")
    return attached


def _answer(client: _Client, question: Question) -> Any:
    """What `question` asks, or the ServeError that tells why not."""
    try:
        require_backend()
        from mlxsrv.engine.loading import load as loading

        match question:
            case Ready():
                return loading.working_memory()
            case Meet(path):
                return loading.meet(path)
            case TakeStock():
                return loading.take_stock(client.models)
    except ServeError as error:
        return error
    except Exception as error:
        _log.error("a question failed", exc_info=True)
        return EngineFailed(f"{type(error).__name__}: {error}")


def _release_memory() -> None:
    """Give free buffers back to the system: MLX's, and on Linux the allocator's."""
    mx = sys.modules.get("mlx.core")
    if mx is None:  # there is no back end, so there are no buffers
        return
    mx.synchronize()  # a step under way holds on to its arrays
    mx.clear_cache()
    if sys.platform == "linux":
        # glibc keeps what is freed in pieces of up to 32 MB: on a CPU, that is all of a model.
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def require_backend() -> None:
    """Raises BackendMissing if MLX is installed without a back end for this machine."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise BackendMissing(
            "MLX has no back end here. On Linux install one of mlxsrv's extras: "
            "pip install 'mlxsrv[cpu]' or pip install 'mlxsrv[cuda]'"
        ) from error
