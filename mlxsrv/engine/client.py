"""The event loop's end of the device thread: orders go down, events come up.

An EngineClient belongs to its event loop and is used there only; the device thread knows its
mailbox alone. Orders go through the thread's inbox, first in, first out: what is sent later is
obeyed later. So a job still finds the SAE that was attached when it was sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from mlxsrv.engine.device import DeviceThread, Mailbox
from mlxsrv.engine.events import (
    Activations,
    Answered,
    Attached,
    Embedded,
    EngineStopped,
    Event,
    Failed,
    Finished,
    JobEvent,
    Loaded,
    MemoryShort,
    Progress,
    PromptRead,
    PromptScored,
    Receiver,
    Report,
    Started,
    Token,
    WeightsRead,
)
from mlxsrv.engine.orders import (
    Ask,
    Attach,
    Budget,
    Cancel,
    Close,
    Detach,
    GetMemory,
    ImportModelCode,
    Job,
    Load,
    MakeReport,
    Open,
    Order,
    Question,
    Submit,
    Unload,
    Watch,
)
from mlxsrv.engine.recording.recorder import Recording
from mlxsrv.engine.watchdog import Watchdog
from mlxsrv.errors import EngineFailed, InsufficientMemory, ServeError, ShuttingDown
from mlxsrv.generation.outputs import Vectors
from mlxsrv.generation.parameters import MakeConstraint

_log = logging.getLogger("mlxsrv.engine")


class EngineClient:
    """One app's connection to the device thread, used on the app's event loop only.

    A job's receiver is called with Started when it has its turn, with Progress while its prompt
    takes several slices, with PromptRead, with PromptScored if that was asked for, then with
    Tokens, and with exactly one end: a Token with `finish`, Finished, or Failed. After `cancel` it
    is not called again: events already on their way find no receiver and are dropped. If a receiver
    raises, its job is cancelled; other jobs go on.

    Args:
        device: the thread.
        loop: the running loop.
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
        self._mailbox = Mailbox(loop, self._receive)
        self._receivers: dict[int, Receiver] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._loads: dict[str, Callable[[int], None]] = {}
        self._numbers = count(1)
        self.failure: str | None = None
        """Why the device thread died; None while it lives."""
        self.heard = loop.time()
        """When an event last came, of any job."""
        self.memory_short: Callable[[int], None] | None = None
        """Called with the bytes that the budget lacks. `set_budget` answers it, in any case."""
        others = str if device.leader is None else device.leader.describe
        self._watchdog = Watchdog(device.clock, loop, step_timeout, self._waits, others)
        self._send(Open())

    @classmethod
    def open(
        cls, step_timeout: float | None = None, recording: Recording | None = None
    ) -> EngineClient:
        """A client for the running event loop. The first one starts the device thread, and decides
        whether it is recorded."""
        return cls(DeviceThread.shared(recording), asyncio.get_running_loop(), step_timeout)

    def close(self) -> None:
        """Drop all models and rows of this client. Its questions fail with ShuttingDown, its jobs
        end without an event. It must not be used afterwards."""
        self._receivers.clear()
        self._watchdog.stop()
        # The device thread forgets the questions, so they are answered here. By way of the mailbox,
        # for the loop may be closed, or another than the one that runs.
        over = ShuttingDown("the server is shutting down")
        self._mailbox.post([Answered(number, over) for number in self._questions])
        self._send(Close())

    @property
    def ranks(self) -> int:
        """The number of processes that divide each model."""
        return self._device.ranks

    @property
    def stalled(self) -> float:
        """Seconds that the device thread has been in a slice that takes too long; else 0."""
        return 0.0 if self.failure else self._watchdog.stalled

    def _waits(self) -> bool:
        return bool(self._receivers or self._questions)

    # Jobs.

    def submit(self, job: Job, receiver: Receiver) -> None:
        """Send a job to the device thread. Raises EngineFailed if the thread is dead."""
        self._require_alive()
        self._receivers[job.id] = receiver
        self._send(Submit(job))
        self._watchdog.wake()

    async def embed(
        self,
        job: Job,
        progressed: Callable[[], None] = lambda: None,
        started: Callable[[int], None] = lambda _: None,
    ) -> Vectors:
        """Embed texts. If the caller is cancelled, the texts that are not computed yet are dropped.

        Args:
            job: has the texts.
            progressed: called while they take several slices.
            started: called with the job's id when it has its turn.

        Returns:
            Their vectors, `(texts, width)`; or the logits of pairs, `(pairs, labels)`.

        Raises:
            EngineFailed: the device thread died.
            InsufficientMemory: a text can never fit into memory; the message has the numbers.
            ServeError: the model cannot do it; the message says why.
        """
        future: asyncio.Future[JobEvent] = self._loop.create_future()
        self.submit(job, partial(_settle_or_report, future, progressed, started))
        try:
            event = await future
        finally:
            self.cancel(job.id)
        if isinstance(event, Embedded):
            return event.vectors
        self._require_alive()
        if isinstance(event, Failed) and event.shortage is not None:
            raise InsufficientMemory(event.shortage.message)
        reason = event.reason if isinstance(event, Failed) else "no vectors came"
        raise ServeError(f"the model failed while embedding: {reason}")

    def cancel(self, job_id: int) -> None:
        """Free the job's row. Harmless for a job that has ended."""
        # The receiver goes at once, so nothing that is still on its way reaches it.
        if self._receivers.pop(job_id, None) is not None:
            self._send(Cancel(job_id))

    # Models.

    async def load(
        self,
        order: Load,
        make_constraint: MakeConstraint | None = None,
        progressed: Callable[[int], None] | None = None,
    ) -> Loaded:
        """Load a model. If the caller is cancelled, the load goes on; the model is then unused.

        Args:
            order: what to load.
            make_constraint: called by the device thread, for jobs with a grammar.
            progressed: called with the bytes of weights that each slice has read.

        Raises:
            ModelNotLoaded: the message says why.
            EngineFailed: the thread is dead.
        """
        if progressed is not None:
            self._loads[order.model] = progressed
        try:
            loaded: Loaded = await self._ask(order, make_constraint)
        finally:
            self._loads.pop(order.model, None)
        return loaded

    def unload(self, model: str) -> None:
        """Forget the model. Its rows fail, and so does its load, if that is not over."""
        self._send(Unload(model))

    async def import_model_code(self, path: str) -> None:
        """Have the device thread import the code of the model in folder `path`, so that no other
        thread is the first to. If it cannot, the model's load will say why.

        Raises EngineFailed.
        """
        await self._ask(ImportModelCode(path))

    # Steering.

    async def attach(self, order: Attach) -> Attached:
        """Put an SAE on a model. If the caller is cancelled, it is attached all the same.

        Raises:
            SAEIncompatible: it does not fit, or cannot be read; the message says why.
            ModelNotLoaded, EngineFailed: the model or the thread is gone.
        """
        attached: Attached = await self._ask(order)
        return attached

    def detach(self, model: str) -> None:
        """Take the SAE off the model. Rows that it steers stay steered."""
        self._send(Detach(model))

    def watch(self, order: Watch) -> None:
        """Begin or end reporting activations to the receivers of the model's jobs."""
        self._send(order)

    # The device.

    def set_budget(self, bytes: int) -> None:
        """Bound what the KV caches of this client's models take. It holds for all orders that are
        sent after this one."""
        self._send(Budget(bytes))

    async def memory(self) -> int:
        """Wait until the device thread has imported MLX; the bytes of memory that MLX recommends.

        Raises:
            BackendMissing: MLX has no back end here.
            EngineFailed: the thread is dead.
        """
        memory: int = await self._ask(GetMemory())
        return memory

    async def report(self) -> Report:
        """The use of the device's memory, and this client's models in numbers.

        Raises EngineFailed.
        """
        report: Report = await self._ask(MakeReport())
        return report

    # To the device thread.

    def _send(self, order: Order) -> None:
        self._device.send(self._mailbox, order)

    async def _ask(
        self, question: Question | Load | Attach, make_constraint: MakeConstraint | None = None
    ) -> Any:
        self._require_alive()
        number = next(self._numbers)
        future = self._questions[number] = self._loop.create_future()
        self._device.send(self._mailbox, Ask(number, question), make_constraint)
        self._watchdog.wake()
        return await future

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise EngineFailed("the inference engine has failed; restart the server")

    # From the device thread, by way of the mailbox; on the loop.

    def _receive(self, events: Sequence[Event]) -> None:
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
                        self._deliver(receiver, event)
                case Finished() | Embedded() | Failed():
                    receiver = self._receivers.pop(event.job, None)
                    if receiver is not None:
                        self._deliver(receiver, event)
                case Answered(number, value):
                    _settle(self._questions.pop(number, None), value)
                case MemoryShort(missing):
                    if self.memory_short is not None:
                        self.memory_short(missing)
                case WeightsRead(model, read):
                    if (progressed := self._loads.get(model)) is not None:
                        progressed(read)
                case EngineStopped():
                    self._stop(event.reason)

    def _deliver(self, receiver: Receiver, event: JobEvent) -> None:
        try:
            receiver(event)
        except Exception as error:
            _log.exception("a receiver failed")
            self.cancel(event.job)
            if not isinstance(event, Failed):
                with suppress(Exception):
                    receiver(Failed(event.job, f"the receiver of its events failed: {error!r}"))

    def _stop(self, reason: str) -> None:
        """The device thread died: fail all that waits for it."""
        self.failure = reason
        questions, self._questions = self._questions, {}
        for future in questions.values():
            _settle(future, EngineFailed(reason))
        receivers, self._receivers = self._receivers, {}
        for job_id, receiver in receivers.items():
            self._deliver(receiver, Failed(job_id, reason))


def _settle(future: asyncio.Future[Any] | None, outcome: Any) -> None:
    if future is None or future.done():  # its caller was cancelled
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _settle_or_report(
    future: asyncio.Future[Any],
    progressed: Callable[[], None],
    started: Callable[[int], None],
    event: JobEvent,
) -> None:
    if isinstance(event, Progress):
        progressed()
    elif isinstance(event, Started):
        started(event.job)
    else:
        _settle(future, event)
