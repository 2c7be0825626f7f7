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
import logging
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, ClassVar

import msgspec

from mlxsrv.errors import BackendMissing, EngineFailed, ModelNotLoaded
from mlxsrv.events import (
    Cancel,
    Command,
    Constraint,
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
    Started,
    Submit,
    Token,
    Unload,
)

if TYPE_CHECKING:
    from mlxsrv.engine.batch import Batch

_log = logging.getLogger("mlxsrv.engine")

_PARK_SECONDS = 10.0  # the longest slice that the end of the process waits for

JobEvent = Started | PromptRead | PromptScored | Token | Finished | Failed
Receiver = Callable[[JobEvent], None]


class Port:
    """The event loop's end of the device thread: one per app, used on its loop only.

    A job's receiver hears Started, PromptRead, PromptScored if that was asked for, then Tokens, and
    exactly one end: a Token with `finish`, Finished, or Failed. After `cancel` it hears nothing:
    events already on their way find no receiver and are dropped.
    """

    def __init__(self, device: DeviceThread, loop: asyncio.AbstractEventLoop) -> None:
        self._device = device
        self._loop = loop
        self._receivers: dict[int, Receiver] = {}
        self._loads: dict[str, asyncio.Future[Loaded]] = {}
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

    async def load(self, command: Load) -> Loaded:
        """Load a model. Raises ModelNotLoaded with the reason, EngineFailed if the thread dies.

        A caller that is cancelled leaves the load running; the model is then there unused.
        """
        self._require_alive()
        future: asyncio.Future[Loaded] = self._loop.create_future()
        self._loads[command.model] = future
        self._device.send(self, command)
        return await future

    def unload(self, model: str) -> None:
        self._device.send(self, Unload(model))

    def close(self) -> None:
        """Drop all models and rows of this port. It must not be used afterwards."""
        self._receivers.clear()
        self._device.send(self, _Close())

    def post(self, events: list[Event]) -> bool:
        """Called by the device thread: deliver on the loop. False if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._receive, events)
        except RuntimeError:
            return False
        return True

    def _receive(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Token() | Started() | PromptRead() | PromptScored():
                    receiver = self._receivers.get(event.job)
                    if receiver is not None:
                        receiver(event)
                        if isinstance(event, Token) and event.finish is not None:
                            self._receivers.pop(event.job, None)
                case Finished() | Failed():
                    receiver = self._receivers.pop(event.job, None)
                    if receiver is not None:
                        receiver(event)
                case Loaded():
                    self._settle(event.model, event)
                case LoadFailed():
                    self._settle(event.model, ModelNotLoaded(event.reason))
                case EngineStopped():
                    self._stopped(event.reason)

    def _settle(self, model: str, outcome: Loaded | Exception) -> None:
        future = self._loads.pop(model)
        if future.done():  # whoever waited was cancelled
            return
        if isinstance(outcome, Loaded):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    def _stopped(self, reason: str) -> None:
        self.failure = reason
        for model in list(self._loads):
            self._settle(model, EngineFailed(reason))
        receivers, self._receivers = self._receivers, {}
        for job_id, receiver in receivers.items():
            receiver(Failed(job_id, reason))

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise EngineFailed("the inference engine has failed; restart the server")


class _Open(msgspec.Struct, frozen=True):
    pass


class _Close(msgspec.Struct, frozen=True):
    pass


_Order = Command | _Open | _Close


class _Client:
    """The device thread's side of a port: its models and what they are doing."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.batches: dict[str, Batch] = {}
        self.loading: dict[str, Iterator[None]] = {}
        self.cancelled: set[int] = set()

    @property
    def idle(self) -> bool:
        return not self.loading and all(batch.idle for batch in self.batches.values())

    def obey(self, command: Command) -> None:
        match command:
            case Submit(job, constraint):
                batch = self.batches.get(job.model)
                if batch is None:
                    self.deliver([Failed(job.id, "its model is not loaded")])
                else:
                    self.deliver(batch.submit(job, constraint))
            case Cancel(job_id):
                self.cancelled.add(job_id)
            case Load():
                self.loading[command.model] = _load(self, command)
            case Unload(model):
                batch = self.batches.pop(model, None)
                if batch is not None:
                    self.deliver(batch.fail("its model was unloaded"))
                    del batch
                _release_memory()

    def deliver(self, events: list[Event]) -> None:
        if events and not self.port.post(events):
            _log.debug("an event loop is gone; its work is dropped")
            self.batches.clear()
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
                for client in list(self._clients.values()):
                    self._work(client)
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
        try:
            item = self._inbox.get(block=idle)
            while item is not None:
                self._obey(*item)
                item = self._inbox.get_nowait()
            return False
        except Empty:
            pass
        for client in self._clients.values():
            if client.cancelled:
                # Together: each change of a batch's rows copies its caches.
                for batch in client.batches.values():
                    batch.cancel(client.cancelled)
                client.cancelled = set()
        return True

    def _obey(self, port: Port, order: _Order) -> None:
        match order:
            case _Open():
                self._clients[port] = _Client(port)
            case _Close():
                del self._clients[port]
                _release_memory()
            case _:
                self._clients[port].obey(order)

    def _work(self, client: _Client) -> None:
        """One slice for each of the client's models."""
        for model, load in list(client.loading.items()):
            if next(load, _DONE) is _DONE:
                del client.loading[model]
        for batch in list(client.batches.values()):
            try:
                client.deliver(batch.decode())
                client.deliver(batch.prefill())
            except Exception as error:
                # Which row is to blame is not known, so all of this batch's fail; other models'
                # rows and the thread go on.
                _log.exception("a step failed")
                client.deliver(batch.fail(f"{type(error).__name__} in a decode step"))


_DONE = object()


def _load(client: _Client, command: Load) -> Iterator[None]:
    """Load a model slice by slice and tell how it went."""
    # Imported here, by the thread that uses it: an app that is only imported, or asked for
    # --help, does not pay for MLX and transformers.
    try:
        from mlxsrv.engine.loading import make_batch, read_model, warm_up

        model, size = yield from read_model(command.path)
        warm_up(model)
        batch = make_batch(model, command)
    except Exception as error:
        _log.debug("load failed", exc_info=True)
        reason = " ".join(str(error).split()) or type(error).__name__
        client.deliver([LoadFailed(command.model, reason)])
        return
    client.batches[command.model] = batch
    client.deliver([Loaded(command.model, batch.batched, batch.cuts, size)])


def _release_memory() -> None:
    """Give MLX's free buffers back to the system."""
    import mlx.core as mx

    mx.clear_cache()


def require_backend() -> None:
    """Raises BackendMissing if MLX is installed without a back end for this machine."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise BackendMissing(
            "MLX has no back end here. On Linux install one of mlxsrv's extras: "
            "pip install 'mlxsrv[cpu]' or pip install 'mlxsrv[cuda]'"
        ) from error
