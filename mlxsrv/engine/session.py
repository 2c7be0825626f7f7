"""A client's session on the device thread: its models, and those on their way.

Used on the device thread only. The client sends orders and takes events, each through a queue;
it never touches a session.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mlxsrv.engine.backend import release_memory, require_backend
from mlxsrv.engine.events import Answered, Attached, Event, Failed, Loaded
from mlxsrv.engine.faults import describe, survivable
from mlxsrv.engine.mailbox import Mailbox
from mlxsrv.engine.orders import (
    Ask,
    Attach,
    Cancel,
    Detach,
    Embed,
    GetMemory,
    ImportModelCode,
    Load,
    MakeReport,
    Order,
    Question,
    Submit,
    Unload,
    Watch,
)
from mlxsrv.engine.watchdog import Clock
from mlxsrv.errors import EngineFailed, ModelNotLoaded, SAEIncompatible, ServeError

if TYPE_CHECKING:
    from mlxsrv.engine.loading.load import Residents
    from mlxsrv.engine.loading.resident import ResidentModel

_log = logging.getLogger("mlxsrv.engine")


class _Task(NamedTuple):
    """A load or an attachment, done a slice at a time; what it returns is its answer."""

    number: int
    """The number of the question that it answers."""
    order: Load | Attach
    slices: Generator[None, None, Any]


class Session:
    """One client's models, loads and attachments.

    Args:
        mailbox: where the client's events go.
        clock: stores which slice the thread is in.
        residents: gives all models in memory, also other clients'; they share weights.
    """

    def __init__(self, mailbox: Mailbox, clock: Clock, residents: Residents) -> None:
        self.mailbox = mailbox
        self.models: dict[str, ResidentModel] = {}
        self.gone = False
        """The client's loop is closed, so nobody hears of its work."""
        self._clock = clock
        self._residents = residents
        self._tasks: list[_Task] = []
        self._cancelled: set[int] = set()

    @property
    def idle(self) -> bool:
        return not self._tasks and all(model.idle for model in self.models.values())

    def deliver(self, events: Sequence[Event]) -> None:
        if events and not self.mailbox.post(events):
            _log.debug("an event loop is gone; its work is dropped")
            self.gone = True
            self.drop()

    def drop(self) -> None:
        """Forget all models, loaded or not."""
        self.models.clear()
        self._tasks.clear()

    # Orders.

    def obey(self, order: Order) -> None:
        """Do what the order says, or begin to.

        Raises whatever is wrong with the order. The caller then calls `refuse`.
        """
        match order:
            case Submit(job, constraint):
                self.deliver(self._find(job.model).batch.submit(job, constraint))
            case Embed():
                self._find(order.model).embedder.submit(order)
            case Cancel(job_id):
                self._cancelled.add(job_id)
            case Ask(number, Load() as load):
                self._check_name(load.model)
                self._tasks.append(_Task(number, load, self._load(load)))
            case Ask(number, Attach() as attach):
                self._tasks.append(_Task(number, attach, self._attach(attach)))
            case Ask(number, (GetMemory() | ImportModelCode() | MakeReport()) as question):
                self.deliver([Answered(number, self._answer(question))])
            case Unload(name):
                self._unload(name)
                release_memory()
            case Detach(name):
                self._find(name).detach()
                release_memory()
            case Watch():
                self._find(order.model).watch(order)

    def refuse(self, order: Order, error: BaseException) -> None:
        """Tell the client why an order failed. For orders without an answer, such as Detach, the
        error is only logged."""
        if isinstance(error, (ServeError, ValueError)):
            _log.debug("an order was refused", exc_info=error)
            reason = _reason(error)
        else:
            _log.error("an order failed", exc_info=error)
            reason = describe(error)
        match order:
            case Submit(job):
                self.deliver([Failed(job.id, reason)])
            case Embed(job_id):
                self.deliver([Failed(job_id, reason)])
            case Ask(number):
                own = isinstance(error, ServeError)
                answer = _bare(error) if own else EngineFailed(reason)
                self.deliver([Answered(number, answer)])

    def cancel_jobs(self) -> None:
        """Free the rows of the jobs that were cancelled since the last call.

        All cancelled rows are removed together, because each removal copies the caches of the
        remaining rows.
        """
        cancelled, self._cancelled = self._cancelled, set()
        for model in self.models.values() if cancelled else ():
            model.cancel(cancelled)

    def _find(self, name: str) -> ResidentModel:
        model = self.models.get(name)
        if model is None:
            raise ModelNotLoaded("its model is not loaded")
        return model

    def _check_name(self, name: str) -> None:
        if any(task.order.model == name for task in self._loads):
            raise ModelNotLoaded("it is being loaded already")
        if name in self.models:
            raise ModelNotLoaded("there is a model of this name")

    def _unload(self, name: str) -> None:
        for task in self._loads:
            if task.order.model == name:
                self._tasks.remove(task)
                reason = ModelNotLoaded("it was unloaded before it was there")
                self.deliver([Answered(task.number, reason)])
        if (model := self.models.pop(name, None)) is not None:
            self.deliver(model.fail("its model was unloaded"))

    def _answer(self, question: Question) -> Any:
        """Raises BackendMissing."""
        require_backend()
        from mlxsrv.engine.loading import device_memory, weights

        match question:
            case GetMemory():
                return device_memory.working_memory()
            case ImportModelCode(path):
                return weights.import_model_code(path)
            case MakeReport():
                return device_memory.report(self.models)

    # Work.

    def step(self) -> None:
        """Run a slice of each load and attachment. Then, for each model, a decode step and a slice
        of prompts or texts; their events are delivered after each of the two."""
        self._run_tasks()
        models = list(self.models.items())
        streaming = [model for _, model in models if model.streaming]
        for name, model in models:
            self._clock.begin("decoding", name)
            self.deliver(model.decode())
            self._clock.begin("reading prompts", name)
            self.deliver(model.prefill(beside=any(other is not model for other in streaming)))

    @property
    def _loads(self) -> list[_Task]:
        return [task for task in self._tasks if isinstance(task.order, Load)]

    def _run_tasks(self) -> None:
        folders: set[str] = set()
        for task in list(self._tasks):
            if self.gone:
                return
            if isinstance(task.order, Load):
                # If two loads have the same folder, the second waits until the first has read the
                # weights, then shares them.
                if task.order.path in folders:
                    continue
                folders.add(task.order.path)
                self._clock.begin("loading", task.order.model)
            else:
                self._clock.begin("attaching an SAE")
            try:
                next(task.slices)
                continue
            except StopIteration as done:
                answer = done.value
            except ServeError as error:
                answer = _bare(error)
            self._tasks.remove(task)
            self.deliver([Answered(task.number, answer)])
            release_memory()

    def _load(self, order: Load) -> Generator[None, None, Loaded]:
        """Load a model, yielding between slices. Raises ModelNotLoaded with the reason."""
        # Imported here, by the thread that uses it: an app that is only imported, or asked for
        # --help, does not pay for MLX and transformers.
        try:
            from mlxsrv.engine.loading.load import load

            model = yield from load(order, self._residents)
        except BaseException as error:
            if not survivable(error):
                raise
            _log.debug("load failed", exc_info=True)
            reason = _reason(error)
        else:
            self.models[order.model] = model
            return model.loaded
        # Not while the exception is handled: its traceback would keep the arrays that were read.
        raise ModelNotLoaded(reason)

    def _attach(self, order: Attach) -> Generator[None, None, Attached]:
        """Put an SAE on a model, yielding between slices.

        Raises:
            ModelNotLoaded: the model is not there, or not any more.
            SAEIncompatible: the SAE cannot be used; the message says why.
        """
        model = self._find(order.model)
        try:
            attached = yield from model.attach(order)
        except Exception as error:
            _log.debug("attaching an SAE failed", exc_info=True)
            reason = _reason(error)
        else:
            if self.models.get(order.model) is model:
                return attached
            raise ModelNotLoaded("its model was unloaded")
        raise SAEIncompatible(reason)


def _reason(error: BaseException) -> str:
    """The message alone, or the error's type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _bare(error: BaseException) -> BaseException:
    """The error without its traceback, whose frames would keep models in memory."""
    return error.with_traceback(None)
