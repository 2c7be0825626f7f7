"""The event loop's end of the device thread: orders down, answers and events up.

A Port belongs to its event loop and is used there only; `post` alone is called by the device
thread. Orders go through the thread's inbox, first in, first out, so what is sent later is obeyed
later: a job is never met by the detachment of an SAE that was there when it was sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from mlxsrv.engine.watchdog import Watchdog
from mlxsrv.errors import EngineFailed, ModelNotLoaded, ServeError
from mlxsrv.events import (
    Activations,
    Attach,
    Attached,
    Cancel,
    Command,
    Constraint,
    Detach,
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
    Progress,
    PromptRead,
    PromptScored,
    Report,
    Started,
    Submit,
    Token,
    Unload,
    Vectors,
    Watch,
)

if TYPE_CHECKING:
    from mlxsrv.engine.device import DeviceThread

JobEvent = (
    Started
    | Progress
    | PromptRead
    | PromptScored
    | Token
    | Activations
    | Finished
    | Embedded
    | Failed
)
Receiver = Callable[[JobEvent], None]

_log = logging.getLogger("mlxsrv.engine")


class Port:
    """The event loop's end of the device thread: one per app, used on its loop only.

    A job's receiver hears Started, Progress while its prompt takes several slices, PromptRead,
    PromptScored if that was asked for, then Tokens, and exactly one end: a Token with `finish`,
    Finished, or Failed. After `cancel` it hears nothing:
    events already on their way find no receiver and are dropped. Texts to be embedded have no
    receiver: `embed` waits for their vectors. A receiver that raises has heard enough: its job is
    cancelled, and others hear theirs.

    Args:
        device: the thread.
        loop: the one that runs.
        step_timeout: seconds after which a slice of the thread's work counts as a stall, and is
            reported.
    """

    def __init__(
        self,
        device: DeviceThread,
        loop: asyncio.AbstractEventLoop,
        step_timeout: float | None = None,
    ) -> None:
        self._device = device
        self._loop = loop
        self._receivers: dict[int, Receiver] = {}
        self._loads: dict[str, asyncio.Future[Loaded]] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count(1)
        self.failure: str | None = None
        self.heard = loop.time()
        """When anything last came, for whomever."""
        self._watchdog = Watchdog(device.clock, loop, step_timeout, self._waits)

    @property
    def stalled(self) -> float:
        """Seconds that the device thread has been in a slice that takes too long; else 0."""
        return 0.0 if self.failure else self._watchdog.stalled

    def _waits(self) -> bool:
        return bool(self._receivers or self._loads or self._asked)

    def submit(self, job: Job, receiver: Receiver, constraint: Constraint | None = None) -> None:
        """Hand `job` to the device thread, and its constraint, which is that thread's from then
        on. Raises EngineFailed at once if it is dead."""
        self._require_alive()
        self._receivers[job.id] = receiver
        self._device.send(self, Submit(job, constraint))
        self._watchdog.wake()

    def cancel(self, job_id: int) -> None:
        """Free the job's row. Harmless for a job that has ended."""
        if self._receivers.pop(job_id, None) is not None:
            self._device.send(self, Cancel(job_id))

    async def embed(self, command: Embed, progressed: Callable[[], None] = lambda: None) -> Vectors:
        """The vectors of texts; `progressed` is called while they take several slices. A caller
        that is cancelled takes back what is not computed yet.

        Raises:
            EngineFailed: the device thread died.
            ServeError: the model cannot do it; the message says why.
        """
        self._require_alive()
        future: asyncio.Future[JobEvent] = self._loop.create_future()
        self._receivers[command.id] = partial(_settle_or_tell, future, progressed)
        self._device.send(self, command)
        self._watchdog.wake()
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
        self._watchdog.wake()
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
        memory: int = await self._ask(Ready())
        return memory

    async def meet(self, path: str) -> None:
        """Have the device thread import the code of the model in folder `path`, so that no other
        thread is the first to. What is wrong with it, its load will say. Raises EngineFailed."""
        await self._ask(Meet(path))

    async def report(self) -> Report:
        """What the device's memory and this port's models hold. Raises EngineFailed."""
        report: Report = await self._ask(TakeStock())
        return report

    async def _ask(self, question: Question) -> Any:
        self._require_alive()
        number = next(self._numbers)
        future = self._asked[number] = self._loop.create_future()
        self._device.send(self, Ask(number, question))
        self._watchdog.wake()
        return await future

    async def attach(self, command: Attach) -> Attached:
        """Put an SAE on a model. A caller that is cancelled does not stop it.

        Raises:
            SAEIncompatible: it does not fit, or cannot be read; the message says why.
            ModelNotLoaded, EngineFailed: the model or the thread is gone.
        """
        attached: Attached = await self._ask(command)
        return attached

    def detach(self, model: str) -> None:
        """Take the SAE off the model. Rows that it steers go on as they are."""
        self._device.send(self, Detach(model))

    def watch(self, command: Watch) -> None:
        """Have activations told to the receivers of the model's jobs from now on, or no more."""
        self._device.send(self, command)

    def close(self) -> None:
        """Drop all models and rows of this port. It must not be used afterwards."""
        self._receivers.clear()
        self._watchdog.close()
        self._device.send(self, Close())

    def post(self, events: Sequence[Event | Answer]) -> bool:
        """Called by the device thread: deliver on the loop. False if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._receive, events)
        except RuntimeError:
            return False
        return True

    def _receive(self, events: Sequence[Event | Answer]) -> None:
        self.heard = self._loop.time()
        if self._watchdog.reported is not None:
            self._watchdog.look()
        for event in events:
            match event:
                case (
                    Token() | Activations() | Started() | Progress() | PromptRead() | PromptScored()
                ):
                    receiver = self._receivers.get(event.job)
                    if receiver is not None:
                        if isinstance(event, Token) and event.finish is not None:
                            self._receivers.pop(event.job, None)
                        self._tell(receiver, event)
                case Finished() | Embedded() | Failed():
                    receiver = self._receivers.pop(event.job, None)
                    if receiver is not None:
                        self._tell(receiver, event)
                case Loaded():
                    _settle(self._loads.pop(event.model, None), event)
                case LoadFailed():
                    _settle(self._loads.pop(event.model, None), ModelNotLoaded(event.reason))
                case Answer(number, value):
                    _settle(self._asked.pop(number, None), value)
                case EngineStopped():
                    self._stopped(event.reason)

    def _tell(self, receiver: Receiver, event: JobEvent) -> None:
        try:
            receiver(event)
        except Exception as error:
            _log.exception("a receiver failed")
            self.cancel(event.job)
            if not isinstance(event, Failed):
                with suppress(Exception):
                    receiver(Failed(event.job, f"what came for it was refused: {error!r}"))

    def _stopped(self, reason: str) -> None:
        self.failure = reason
        futures = [*self._loads.values(), *self._asked.values()]
        self._loads, self._asked = {}, {}
        for future in futures:
            _settle(future, EngineFailed(reason))
        receivers, self._receivers = self._receivers, {}
        for job_id, receiver in receivers.items():
            self._tell(receiver, Failed(job_id, reason))

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise EngineFailed("the inference engine has failed; restart the server")


def _settle(future: asyncio.Future[Any] | None, outcome: Any) -> None:
    if future is None or future.done():  # whoever waited was cancelled
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _settle_or_tell(
    future: asyncio.Future[Any], progressed: Callable[[], None], event: JobEvent
) -> None:
    if isinstance(event, Progress):
        progressed()
    else:
        _settle(future, event)


class Open(msgspec.Struct, frozen=True):
    pass


class Close(msgspec.Struct, frozen=True):
    pass


class Ready(msgspec.Struct, frozen=True):
    pass


class Meet(msgspec.Struct, frozen=True):
    path: str


class TakeStock(msgspec.Struct, frozen=True):
    pass


Question = Ready | Meet | TakeStock | Attach


class Ask(msgspec.Struct, frozen=True):
    number: int
    question: Question


class Answer(msgspec.Struct, frozen=True):
    """To the question of this number: a value, or the ServeError to raise."""

    number: int
    value: Any


Order = Command | Open | Close | Ask
