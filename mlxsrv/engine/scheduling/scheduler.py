"""The scheduler: from orders and outcomes to the work items of the next round.

It is host code, without MLX, clock, queue or thread. What it decides follows from the orders and
the outcomes that it was given, in their order; so a record of these gives the same plans again.

An error in deciding for one model ends that model's jobs, and its schedule begins anew. Other
models go on.

A round is: what the orders ask for, one slice of each load and of each attachment; then, for each
model, rows that come and go, one step, and at most one slice of prompts or of texts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count
from typing import assert_never

import msgspec

from mlxsrv.engine.events import Answered, Event, Failed, Loaded, Report, WeightsRead
from mlxsrv.engine.faults import note
from mlxsrv.engine.orders import (
    Ask,
    Attach,
    Budget,
    Cancel,
    Close,
    Detach,
    Fetched,
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
    Written,
)
from mlxsrv.engine.outcomes import AttachStep, DeviceAnswer, LoadStep, Outcome, Refusal
from mlxsrv.engine.plans import (
    AnswerQuestion,
    AttachSlice,
    Decode,
    DetachSAE,
    LoadSlice,
    RoundPlan,
    UnloadModel,
    WatchFeatures,
    WorkItem,
)
from mlxsrv.engine.scheduling.load_schedule import FinishedTask, LoadSchedule
from mlxsrv.engine.scheduling.memory_budget import MemoryBudget
from mlxsrv.engine.scheduling.model_schedule import ModelSchedule
from mlxsrv.errors import (
    BackendMissing,
    EngineFailed,
    ModelNotLoaded,
    SAEIncompatible,
    ServeError,
)

_log = logging.getLogger("mlxsrv.engine")

_ERRORS: dict[str, type[ServeError]] = {
    "model not loaded": ModelNotLoaded,
    "sae incompatible": SAEIncompatible,
    "backend missing": BackendMissing,
    "engine failed": EngineFailed,
}


class Received(msgspec.Struct, frozen=True):
    """An order, and the number of the client that sent it."""

    client: int
    order: Order


class _Client:
    """One client's models and events.

    Attributes:
        models: the numbers of its models, by their names.
        loading: the same of those on their way.
        cancelled: jobs to cancel in the next plan, all at once: each row that is freed costs copies
            of other rows' KV caches.
        budget: of the KV caches of its models; has the events that are to be delivered.
    """

    def __init__(self) -> None:
        self.models: dict[str, int] = {}
        self.budget = MemoryBudget()
        self.loading: dict[str, int] = {}
        self.cancelled: set[int] = set()


class Scheduler:
    """Plans the rounds of the device thread, for all clients."""

    def __init__(self) -> None:
        self._clients: dict[int, _Client] = {}
        self._models: dict[int, ModelSchedule] = {}
        self._owners: dict[int, int] = {}  # the client of each model, loaded or on its way
        self._loads = LoadSchedule()
        self._numbers = count(1)
        self._quiet = False  # in the last plan rows only draw tokens

    @property
    def idle(self) -> bool:
        """Whether the next plan is empty unless orders come."""
        return self._loads.empty and all(model.idle for model in self._models.values())

    def name(self, model: int) -> str:
        """Its client's name of a model, for the log; empty for a number that no model has."""
        if model in self._models:
            return self._models[model].name
        return self._loads.name(model)

    def take_events(self) -> list[tuple[int, list[Event]]]:
        """The events that are to be delivered now, by the client's number."""
        taken: list[tuple[int, list[Event]]] = []
        for number, client in self._clients.items():
            if client.budget.events:
                taken.append((number, [*client.budget.events]))
                client.budget.events.clear()
        return taken

    # Planning.

    def plan(self, orders: Sequence[Received] = ()) -> RoundPlan:
        """The work items of the next round."""
        items: list[WorkItem] = []
        for received in orders:
            items += self._obey(received.client, received.order)
        if orders:
            self._cancel()
        quiet = self._quiet and not orders
        for client in self._clients.values():
            self._decide_memory(client, quiet=quiet)
        # What goes, goes first, so that there is room for what others of the plan take.
        for model in self._models.values():
            try:
                items += model.plan_changes()
            except Exception as error:
                model.contain(error)
                items += model.plan_reset()
        if not any(client.budget.exceeded for client in self._clients.values()):
            items += self._loads.plan()
        streaming = {model.number for model in self._models.values() if model.rows.streaming}
        for model in self._sort_by_growth():
            try:
                items += model.plan(beside=bool(streaming - {model.number}))
            except Exception as error:
                model.contain(error)
                items += model.plan_reset()
        self._quiet = all(isinstance(work, Decode) and work.plain for work in items)
        return RoundPlan(tuple(items))

    def _decide_memory(self, client: _Client, *, quiet: bool) -> None:
        """Keep the KV caches of a client's models within its budget."""
        try:
            client.budget.begin_round(quiet=quiet)
        except Exception as error:  # nobody knows for which model
            fault = note(error, "deciding about memory failed: all jobs of the client end")
            for number in client.models.values():
                self._models[number].begin_anew(fault.reason)

    def _sort_by_growth(self) -> list[ModelSchedule]:
        """The models in the order of their steps: first those whose KV caches shrink, if any do."""
        models = list(self._models.values())
        if len(models) > 1:
            models.sort(key=lambda model: model.rows.memory.groups.growth)
        return models

    def _obey(self, number: int, order: Order) -> Sequence[WorkItem]:
        """Do what the order says. Returns the work items that it needs at once."""
        if isinstance(order, Open):
            self._clients[number] = _Client()
            return ()
        if isinstance(order, (Written, Fetched)):
            if order.model in self._models:
                try:
                    self._models[order.model].rows.note_report(order)
                except Exception as error:
                    self._models[order.model].contain(error)
            return ()
        client = self._clients.get(number)
        if client is None:
            _log.debug("an order of a client that is closed")
            return ()
        match order:
            case Submit(job):
                self._submit(client, job)
            case Cancel(job_id):
                client.cancelled.add(job_id)
            case Budget(most):
                client.budget.set(most)
            case Ask(question_number, question):
                return self._ask(number, question_number, question)
            case Unload(name):
                return self._unload(client, name)
            case Detach() | Watch():
                return self._steer(client, order)
            case Close():
                return self._close(number)
        return ()

    def _find(self, client: _Client, name: str) -> ModelSchedule:
        """Raises ModelNotLoaded."""
        if name not in client.models:
            raise ModelNotLoaded("its model is not loaded")
        return self._models[client.models[name]]

    def _submit(self, client: _Client, job: Job) -> None:
        try:
            model = self._find(client, job.model)
        except ModelNotLoaded as error:
            client.budget.events.append(Failed(job.id, str(error)))
            return
        try:
            model.submit(job)
        except Exception as error:
            client.budget.events.append(Failed(job.id, str(error)))
            # Of a job that cannot be, or of a number that is no token id.
            if not isinstance(error, (ServeError, ValueError, OverflowError)):
                model.contain(error)

    def _ask(
        self, client: int, number: int, question: Question | Load | Attach
    ) -> Sequence[WorkItem]:
        try:
            match question:
                case Load():
                    self._load(client, number, question)
                case Attach():
                    self._attach(client, number, question)
                case GetMemory() | ImportModelCode() | MakeReport():
                    return [AnswerQuestion(client=client, number=number, question=question)]
                case _:
                    assert_never(question)
        except ServeError as error:
            self._answer(client, number, error)
        return ()

    def _load(self, client: int, number: int, order: Load) -> None:
        """Raises ModelNotLoaded."""
        names = self._clients[client]
        if order.model in names.loading:
            raise ModelNotLoaded("it is being loaded already")
        if order.model in names.models:
            raise ModelNotLoaded("there is a model of this name")
        model = next(self._numbers)
        names.loading[order.model] = model
        self._owners[model] = client
        self._loads.start(order, model, number)

    def _attach(self, client: int, number: int, order: Attach) -> None:
        """Raises ServeError."""
        model = self._find(self._clients[client], order.model)
        if not model.generates:
            raise SAEIncompatible("this model does not generate text")
        self._loads.start(order, model.number, number)

    def _unload(self, client: _Client, name: str) -> Sequence[WorkItem]:
        number = client.loading.pop(name, 0) or client.models.pop(name, 0)
        return self._drop(number, "its model was unloaded") if number else ()

    def _drop(self, number: int, reason: str) -> Sequence[WorkItem]:
        """Forget a model, loaded or not, with its jobs and what is under way of it. What is to be
        written to disk is handed over before."""
        for task in self._loads.abandon(number):
            self._finish(task)
        self._owners.pop(number, None)
        items: list[WorkItem] = []
        if (model := self._models.get(number)) is not None:
            try:
                items = model.end_all(reason)
            except Exception as error:
                model.contain(error)
            model.rows.fail(reason)  # if that was an error, it has begun anew, without jobs
            del self._models[number]
        return [*items, UnloadModel(model=number)]

    def _steer(self, client: _Client, order: Detach | Watch) -> Sequence[WorkItem]:
        if order.model not in client.models:
            _log.debug("an order for a model that is not there")
            return ()
        model = self._models[client.models[order.model]]
        if not model.generates:
            return ()
        # Rows that came before the order are steered as it was when they came.
        items: list[WorkItem] = []
        try:
            items += model.plan_rows()
        except Exception as error:
            model.contain(error)
        if isinstance(order, Detach):
            return [*items, DetachSAE(model=model.number)]
        # This plan's own slice and step are watched already.
        model.watch(active=bool(order.features or order.top))
        return [
            *items,
            WatchFeatures(model=model.number, features=order.features, top=order.top),
        ]

    def _close(self, number: int) -> Sequence[WorkItem]:
        """Forget the client, its models and its loads."""
        client = self._clients[number]
        gone = [*client.models.values(), *client.loading.values()]
        items = [work for model in gone for work in self._drop(model, "its client is gone")]
        del self._clients[number]
        return items

    def _cancel(self) -> None:
        """Free the rows of all jobs that were cancelled."""
        for client in self._clients.values():
            if client.cancelled:
                for model in map(self._models.__getitem__, client.models.values()):
                    try:
                        model.rows.cancel(client.cancelled)
                    except Exception as error:
                        model.contain(error)
                client.cancelled = set()

    # Outcomes.

    def settle(self, work: WorkItem, outcome: Outcome) -> None:
        """Take the outcome of one work item of the last plan. All come in their order."""
        if isinstance(work, (LoadSlice, AttachSlice)):
            if (task := self._loads.note_outcome(work, outcome)) is not None:
                self._finish(task)
            elif isinstance(outcome.done, LoadStep) and work.model in self._owners:
                self._tell_progress(work.model, outcome.done.bytes)
        elif isinstance(work, AnswerQuestion):
            self._settle_question(work, outcome)
        elif (model := self._models.get(work.model)) is not None:
            try:
                model.settle(work, outcome)
            except Exception as error:
                model.contain(error)

    def _finish(self, task: FinishedTask) -> None:
        """Answer the question for a load or an attachment that is over."""
        client = self._owners[task.model]
        value: object = None
        if task.step.refusal is not None:
            value = _error(task.step.refusal)
        elif isinstance(task.step, AttachStep):
            value = task.step.attached
        else:
            value = self._add_model(task, task.step, client)
        if isinstance(task.order, Load):
            self._clients[client].loading.pop(task.order.model, None)
            if task.step.refusal is not None:
                del self._owners[task.model]
        self._answer(client, task.question, value)

    def _tell_progress(self, model: int, bytes: int) -> None:
        event = WeightsRead(self._loads.name(model), bytes)
        self._clients[self._owners[model]].budget.events.append(event)

    def _add_model(self, task: FinishedTask, step: LoadStep, client: int) -> Loaded:
        assert isinstance(task.order, Load)
        assert step.loaded is not None
        assert step.embed is not None
        self._models[task.model] = ModelSchedule(
            task.model,
            client,
            task.order,
            step.text,
            step.embed,
            self._clients[client].budget,
        )
        self._clients[client].models[task.order.model] = task.model
        return step.loaded

    def _settle_question(self, work: AnswerQuestion, outcome: Outcome) -> None:
        client, number = work.client, work.number
        done = outcome.done if isinstance(outcome.done, DeviceAnswer) else DeviceAnswer()
        if outcome.fault is not None:
            self._answer(client, number, EngineFailed(outcome.fault.reason))
        elif done.refusal is not None:
            self._answer(client, number, _error(done.refusal))
        elif isinstance(done.value, Report):
            self._answer(client, number, self._report(client, done.value))
        else:
            self._answer(client, number, done.value)

    def _report(self, client: int, report: Report) -> Report:
        """The device's report, with the numbers of the client's models."""
        if client not in self._clients:
            return report
        models, budget = self._clients[client].models, self._clients[client].budget.bytes
        numbers: dict[str, dict[str, int]] = {}
        for name, number in models.items():
            try:
                numbers[name] = self._models[number].statistics()
            except Exception as error:
                self._models[number].contain(error)
        return msgspec.structs.replace(report, models=numbers, budget=budget)

    def _answer(self, client: int, number: int, value: object) -> None:
        """Answer a client's question, unless the client is gone."""
        if client in self._clients:
            self._clients[client].budget.events.append(Answered(number, value))


def _error(refusal: Refusal) -> ServeError:
    return _ERRORS[refusal.kind](refusal.reason)
