"""Loads and attachments that are under way in the process: which of them a round brings on.

A round brings each of them on by one slice. How much a slice of a load reads is learnt from the
slices before, so that streams of other models never wait long. Two loads of the same folder do not
run beside each other: the second waits until the first has read the weights, then shares them.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from mlxsrv.engine.orders import Attach, Load
from mlxsrv.engine.outcomes import AttachStep, LoadStep, Outcome, Refusal
from mlxsrv.engine.plans import AttachSlice, LoadSlice

_FIRST_SLICE = 16 * 1024 * 1024  # bytes
_LEAST_SLICE = 1024 * 1024
_MOST_SLICE = 256 * 1024 * 1024


class FinishedLoad(NamedTuple):
    """A load that is over. With its `loaded` or its `refusal` the question is answered.

    `question` is the number that the client gave it.
    """

    question: int
    model: int
    order: Load
    step: LoadStep


class FinishedAttachment(NamedTuple):
    """An attachment that is over, as a FinishedLoad is."""

    question: int
    model: int
    order: Attach
    step: AttachStep


FinishedTask = FinishedLoad | FinishedAttachment


class _LoadTask:
    """One load. `limit` is how many bytes its next slice reads."""

    def __init__(self, order: Load, model: int, question: int) -> None:
        self.order = order
        self.model = model
        self.question = question
        self.limit = _FIRST_SLICE
        self.begun = False

    def plan(self) -> LoadSlice:
        order = None if self.begun else self.order
        self.begun = True
        return LoadSlice(model=self.model, limit=self.limit, order=order)

    def learn(self, bytes: int, seconds: float) -> None:
        """Choose the next limit, after a slice that has read so many bytes: as many as take half
        of the longest gap that streams may have."""
        if bytes:
            fitting = bytes * self.order.max_gap / 2 / max(seconds, 1e-6)
            # At most doubled: a slice from the system's file cache says little of one from the
            # disk.
            self.limit = max(_LEAST_SLICE, min(int(fitting), 2 * self.limit, _MOST_SLICE))

    def finish(self, step: LoadStep) -> FinishedLoad:
        return FinishedLoad(self.question, self.model, self.order, step)


class _AttachTask:
    """One attachment of an SAE. `number` is its own in the process; that of the order is its
    client's."""

    def __init__(self, order: Attach, number: int, model: int, question: int) -> None:
        self.order = order
        self.number = number
        self.model = model
        self.question = question
        self.begun = False

    def plan(self) -> AttachSlice:
        order = None if self.begun else self.order
        self.begun = True
        return AttachSlice(model=self.model, number=self.number, order=order)

    def finish(self, step: AttachStep) -> FinishedAttachment:
        return FinishedAttachment(self.question, self.model, self.order, step)


class LoadSchedule:
    """All loads and attachments of all clients. Each model has a number of its own, and so has
    each attachment."""

    def __init__(self) -> None:
        self._loads: dict[int, _LoadTask] = {}  # by model, in the order of arrival
        self._attachments: dict[int, _AttachTask] = {}  # by their own numbers
        self._numbers = count(1)  # of attachments

    @property
    def idle(self) -> bool:
        return not (self._loads or self._attachments)

    def name(self, model: int) -> str:
        """The client's name of a model that is being loaded; empty if it is not."""
        return self._loads[model].order.model if model in self._loads else ""

    def start_load(self, order: Load, model: int, question: int) -> None:
        """Begin to load `model`.

        Args:
            order: what to load.
            model: the number that the model gets.
            question: the number of the client's question, which the end of the load answers.
        """
        self._loads[model] = _LoadTask(order, model, question)

    def start_attachment(self, order: Attach, model: int, question: int) -> None:
        """Begin to attach an SAE to `model`, as with `start_load`."""
        number = next(self._numbers)
        self._attachments[number] = _AttachTask(order, number, model, question)

    def abandon(self, model: int) -> list[FinishedTask]:
        """Give up what is under way of a model that goes."""
        finished: list[FinishedTask] = []
        load = self._loads.pop(model, None)
        if load is not None:
            refusal = Refusal("model not loaded", "it was unloaded before it was there")
            finished.append(load.finish(LoadStep(refusal=refusal)))
        for number in [n for n, task in self._attachments.items() if task.model == model]:
            refusal = Refusal("model not loaded", "its model was unloaded")
            finished.append(self._attachments.pop(number).finish(AttachStep(refusal=refusal)))
        return finished

    def plan(self) -> list[LoadSlice | AttachSlice]:
        """The works of the next round: one slice of each that need not wait."""
        works: list[LoadSlice | AttachSlice] = []
        folders: set[str] = set()
        for load in self._loads.values():
            if load.order.path not in folders:
                folders.add(load.order.path)
                works.append(load.plan())
        works += [attachment.plan() for attachment in self._attachments.values()]
        return works

    def settle(self, work: LoadSlice | AttachSlice, outcome: Outcome) -> FinishedTask | None:
        """Learn from the outcome of a work. Returns the load or attachment if it is over: a fault
        ends it."""
        if isinstance(work, LoadSlice):
            return self._settle_load(work.model, outcome)
        return self._settle_attachment(work.number, outcome)

    def _settle_load(self, model: int, outcome: Outcome) -> FinishedLoad | None:
        task = self._loads.get(model)
        if task is None:  # abandoned since it was planned
            return None
        if outcome.fault is not None:
            step = LoadStep(refusal=Refusal("model not loaded", outcome.fault.reason))
        else:
            assert isinstance(outcome.done, LoadStep)
            step = outcome.done
        task.learn(step.bytes, outcome.seconds)
        if step.loaded is None and step.refusal is None:
            return None
        del self._loads[model]
        return task.finish(step)

    def _settle_attachment(self, number: int, outcome: Outcome) -> FinishedAttachment | None:
        task = self._attachments.get(number)
        if task is None:  # abandoned since it was planned
            return None
        if outcome.fault is not None:
            step = AttachStep(refusal=Refusal("engine failed", outcome.fault.reason))
        else:
            assert isinstance(outcome.done, AttachStep)
            step = outcome.done
        if step.attached is None and step.refusal is None:
            return None
        del self._attachments[number]
        return task.finish(step)
