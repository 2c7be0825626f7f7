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
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from mlxsrv.errors import BackendMissing, EngineFailed, ModelNotLoaded, ServeError
from mlxsrv.events import (
    Cancel,
    Command,
    Constraint,
    Embed,
    Embedded,
    EngineStopped,
    Event,
    Failed,
    Finished,
    Job,
    Load,
    Loaded,
    LoadFailed,
    PromptRead,
    PromptScored,
    Report,
    Started,
    Submit,
    Token,
    Unload,
    Vectors,
)

if TYPE_CHECKING:
    from mlxsrv.engine.loading import Resident

_log = logging.getLogger("mlxsrv.engine")

_REST_SECONDS = 0.3  # long enough for the next request of a busy server to find warm buffers
_PARK_SECONDS = 10.0  # the longest slice that the end of the process waits for

JobEvent = Started | PromptRead | PromptScored | Token | Finished | Embedded | Failed
Receiver = Callable[[JobEvent], None]


class Port:
    """The event loop's end of the device thread: one per app, used on its loop only.

    A job's receiver hears Started, PromptRead, PromptScored if that was asked for, then Tokens, and
    exactly one end: a Token with `finish`, Finished, or Failed. After `cancel` it hears nothing:
    events already on their way find no receiver and are dropped. Texts to be embedded have no
    receiver: `embed` waits for their vectors.
    """

    def __init__(self, device: DeviceThread, loop: asyncio.AbstractEventLoop) -> None:
        self._device = device
        self._loop = loop
        self._receivers: dict[int, Receiver] = {}
        self._loads: dict[str, asyncio.Future[Loaded]] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count(1)
        self.failure: str | None = None

    def submit(self, job: Job, receiver: Receiver, constraint: Constraint | None = None) -> None:
        """Hand `job` to the device thread, and its constraint, which is that thread's from then
        on. Raises EngineFailed at once if it is dead."""
        self._require_alive()
        self._receivers[job.id] = receiver
        self._device.send(self, Submit(job, constraint))

    def cancel(self, job_id: int) -> None:
        """Free the job's row. Harmless for a job that has ended."""
        if self._receivers.pop(job_id, None) is not None:
            self._device.send(self, Cancel(job_id))

    async def embed(self, command: Embed) -> Vectors:
        """The vectors of texts. A caller that is cancelled takes back what is not computed yet.

        Raises:
            EngineFailed: the device thread died.
            ServeError: the model cannot do it; the message says why.
        """
        self._require_alive()
        future: asyncio.Future[JobEvent] = self._loop.create_future()
        self._receivers[command.id] = partial(_settle, future)
        self._device.send(self, command)
        try:
            event = await future
        finally:
            self.cancel(command.id)
        if isinstance(event, Embedded):
            return event.vectors
        self._require_alive()
        reason = event.reason if isinstance(event, Failed) else "no vectors came"
        raise ServeError(f"the model failed while embedding: {reason}")

    async def load(self, command: Load) -> Loaded:
        """Load a model. Raises ModelNotLoaded with the reason, EngineFailed if the thread dies.

        A caller that is cancelled leaves the load running; the model is then there unused.
        """
        self._require_alive()
        if command.model in self._loads:
            raise ModelNotLoaded("it is being loaded already")
        future: asyncio.Future[Loaded] = self._loop.create_future()
        self._loads[command.model] = future
        self._device.send(self, command)
        return await future

    def unload(self, model: str) -> None:
        """Forget the model. Its rows fail, and so does its load, if that is not over."""
        self._device.send(self, Unload(model))

    async def ready(self) -> int:
        """Wait until the device thread has imported MLX; the bytes of memory that MLX recommends.

        Raises:
            BackendMissing: MLX has no back end here.
            EngineFailed: the thread died.
        """
        memory: int = await self._ask(_Ready())
        return memory

    async def meet(self, path: str) -> None:
        """Have the device thread import the code of the model in folder `path`, so that no other
        thread is the first to. What is wrong with it, its load will say. Raises EngineFailed."""
        await self._ask(_Meet(path))

    async def report(self) -> Report:
        """What the device's memory and this port's models hold. Raises EngineFailed."""
        report: Report = await self._ask(_TakeStock())
        return report

    async def _ask(self, question: _Question) -> Any:
        self._require_alive()
        number = next(self._numbers)
        future = self._asked[number] = self._loop.create_future()
        self._device.send(self, _Ask(number, question))
        return await future

    def close(self) -> None:
        """Drop all models and rows of this port. It must not be used afterwards."""
        self._receivers.clear()
        self._device.send(self, _Close())

    def post(self, events: Sequence[Event | _Answer]) -> bool:
        """Called by the device thread: deliver on the loop. False if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._receive, events)
        except RuntimeError:
            return False
        return True

    def _receive(self, events: Sequence[Event | _Answer]) -> None:
        for event in events:
            match event:
                case Token() | Started() | PromptRead() | PromptScored():
                    receiver = self._receivers.get(event.job)
                    if receiver is not None:
                        receiver(event)
                        if isinstance(event, Token) and event.finish is not None:
                            self._receivers.pop(event.job, None)
                case Finished() | Embedded() | Failed():
                    receiver = self._receivers.pop(event.job, None)
                    if receiver is not None:
                        receiver(event)
                case Loaded():
                    _settle(self._loads.pop(event.model), event)
                case LoadFailed():
                    _settle(self._loads.pop(event.model), ModelNotLoaded(event.reason))
                case _Answer(number, value):
                    _settle(self._asked.pop(number), value)
                case EngineStopped():
                    self._stopped(event.reason)

    def _stopped(self, reason: str) -> None:
        self.failure = reason
        futures = [*self._loads.values(), *self._asked.values()]
        self._loads, self._asked = {}, {}
        for future in futures:
            _settle(future, EngineFailed(reason))
        receivers, self._receivers = self._receivers, {}
        for job_id, receiver in receivers.items():
            receiver(Failed(job_id, reason))

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise EngineFailed("the inference engine has failed; restart the server")


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():  # whoever waited was cancelled
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class _Open(msgspec.Struct, frozen=True):
    pass


class _Close(msgspec.Struct, frozen=True):
    pass


class _Ready(msgspec.Struct, frozen=True):
    pass


class _Meet(msgspec.Struct, frozen=True):
    path: str


class _TakeStock(msgspec.Struct, frozen=True):
    pass


_Question = _Ready | _Meet | _TakeStock


class _Ask(msgspec.Struct, frozen=True):
    number: int
    question: _Question


class _Answer(msgspec.Struct, frozen=True):
    """To the question of this number: a value, or the ServeError to raise."""

    number: int
    value: Any


_Order = Command | _Open | _Close | _Ask


class _Loading(msgspec.Struct, frozen=True):
    command: Load
    slices: Generator[None, None, None]


class _Client:
    """The device thread's side of a port: its models and what they are doing."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.models: dict[str, Resident] = {}
        self.loading: dict[str, _Loading] = {}
        self.cancelled: set[int] = set()
        self.gone = False

    @property
    def idle(self) -> bool:
        return not self.loading and all(model.idle for model in self.models.values())

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

    def step(self) -> None:
        """One slice for each model."""
        self._load()
        models = list(self.models.values())
        streaming = [model for model in models if model.streaming]
        for model in models:
            try:
                self.deliver(model.decode())
                beside = any(other is not model for other in streaming)
                self.deliver(model.read(beside=beside))
            except Exception as error:
                # Which row is to blame is not known, so all of this batch's fail; other models'
                # rows and the thread go on.
                _log.exception("a step failed")
                self.deliver(model.fail_batch(f"{type(error).__name__} in a decode step"))

    def _load(self) -> None:
        folders: set[str] = set()
        for name, loading in list(self.loading.items()):
            # The second of two with the same folder waits for the weights that it will share.
            if loading.command.path in folders:
                continue
            folders.add(loading.command.path)
            if next(loading.slices, _DONE) is _DONE:
                self.loading.pop(name, None)
                _release_memory()

    def deliver(self, events: Sequence[Event | _Answer]) -> None:
        if events and not self.port.post(events):
            _log.debug("an event loop is gone; its work is dropped")
            self.gone = True
            self.drop()

    def drop(self) -> None:
        """Forget all models, loaded or not."""
        self.models.clear()
        self.loading.clear()


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
        self._inbox: SimpleQueue[tuple[Port, _Order] | None] = SimpleQueue()
        self._clients: dict[Port, _Client] = {}
        self._parked = threading.Event()
        self._worked = False  # since memory was released
        threading.Thread(target=self._run, name="mlxsrv-device", daemon=True).start()
        atexit.register(self._park)

    @classmethod
    def open(cls) -> Port:
        """A port for the running event loop, starting the thread if this is the first."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
        port = Port(cls._shared, asyncio.get_running_loop())
        cls._shared.send(port, _Open())
        return port

    def send(self, port: Port, order: _Order) -> None:
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
        idle = all(client.idle for client in self._clients.values())
        self._worked |= not idle
        try:
            item = self._wait() if idle else self._inbox.get_nowait()
            while item is not None:
                self._obey(*item)
                item = self._inbox.get_nowait()
            return False
        except Empty:
            pass
        for client in self._clients.values():
            client.cancel()
        return True

    def _wait(self) -> tuple[Port, _Order] | None:
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

    def _obey(self, port: Port, order: _Order) -> None:
        client = self._clients.get(port)
        match order:
            case _Open():
                self._clients[port] = _Client(port)
                # Here, by the thread that uses it; `ready` will tell what is wrong with it.
                with suppress(Exception):
                    import mlxsrv.engine.loading  # noqa: F401
            case _ if client is None:
                _log.debug("an order of a port that is closed")
            case _Close():
                self._drop(client)
            case _Ask(number, question):
                client.deliver([_Answer(number, _answer(client, question))])
            case Submit(job, constraint):
                client.submit(job, constraint)
            case Embed():
                client.embed(order)
            case Cancel(job_id):
                client.cancelled.add(job_id)
            case Load():
                client.load(order, self._residents)
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
        from mlxsrv.engine.loading import load

        resident = yield from load(command, others)
    except Exception as error:
        _log.debug("load failed", exc_info=True)
        reason = " ".join(str(error).split()) or type(error).__name__
        client.deliver([LoadFailed(command.model, reason)])
        return
    client.models[command.model] = resident
    client.deliver([resident.loaded])


def _answer(client: _Client, question: _Question) -> Any:
    """What `question` asks, or the ServeError that tells why not."""
    try:
        require_backend()
        from mlxsrv.engine import loading

        match question:
            case _Ready():
                return loading.working_memory()
            case _Meet(path):
                return loading.meet(path)
            case _TakeStock():
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
