"""Loads and attachments that are under way in the process.

A round does one slice of each of them. How much a slice of a load reads is learnt from the slices
before, so that streams of other models never wait long. Two loads of the same folder do not
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


class FinishedTask(NamedTuple):
    """A load or an attachment that is over. With what its `step` has, or its refusal, the question
    is answered; `question` is the number that the client gave it."""

    question: int
    model: int
    order: Load | Attach
    step: LoadStep | AttachStep


class _Task:
    """One load, or one attachment of an SAE. `limit` is how many bytes the next slice of a load
    reads; `number` is an attachment's own in the process, and that of the order is its client's."""

    def __init__(self, order: Load | Attach, model: int, question: int, number: int) -> None:
        self.order = order
        self.model = model
        self.question = question
        self.number = number
        self.limit = _FIRST_SLICE
        self._begun = False

    def next_slice(self) -> LoadSlice | AttachSlice:
        begun, self._begun = self._begun, True
        if isinstance(self.order, Load):
            order = None if begun else self.order
            return LoadSlice(model=self.model, limit=self.limit, order=order)
        return AttachSlice(
            model=self.model, number=self.number, order=None if begun else self.order
        )

    def learn(self, bytes: int, seconds: float) -> None:
        """Choose the next limit, after a slice of a load that has read so many bytes: as many as
        take half of the longest gap that streams may have."""
        if bytes and isinstance(self.order, Load):
            fitting = bytes * self.order.max_gap / 2 / max(seconds, 1e-6)
            # At most doubled: a slice from the system's file cache says little of one from the
            # disk.
            self.limit = max(_LEAST_SLICE, min(int(fitting), 2 * self.limit, _MOST_SLICE))

    def finish(self, step: LoadStep | AttachStep) -> FinishedTask:
        return FinishedTask(self.question, self.model, self.order, step)

    def refuse(self, refusal: Refusal) -> LoadStep | AttachStep:
        """The step with which it is over, and has failed."""
        if isinstance(self.order, Load):
            return LoadStep(refusal=refusal)
        return AttachStep(refusal=refusal)


class LoadSchedule:
    """All loads and attachments of all clients. Each model has a number of its own, and so has
    each attachment."""

    def __init__(self) -> None:
        # By the numbers of the model and of the attachment, 0 for the load; as they came.
        self._tasks: dict[tuple[int, int], _Task] = {}
        self._numbers = count(1)  # of attachments

    @property
    def empty(self) -> bool:
        return not self._tasks

    def name(self, model: int) -> str:
        """The client's name of a model that is being loaded; empty if it is not."""
        task = self._tasks.get((model, 0))
        return "" if task is None else task.order.model

    def start(self, order: Load | Attach, model: int, question: int) -> None:
        """Begin to load `model`, or to attach an SAE to it.

        Args:
            order: what to load or to attach.
            model: the number that the model has, or gets.
            question: the number of the client's question, which the end of this answers.
        """
        number = next(self._numbers) if isinstance(order, Attach) else 0
        self._tasks[model, number] = _Task(order, model, question, number)

    def abandon(self, model: int) -> list[FinishedTask]:
        """Give up what is under way of a model that goes."""
        finished: list[FinishedTask] = []
        for key in [key for key in self._tasks if key[0] == model]:
            task = self._tasks.pop(key)
            loading = isinstance(task.order, Load)
            reason = "it was unloaded before it was there" if loading else "its model was unloaded"
            finished.append(task.finish(task.refuse(Refusal("model not loaded", reason))))
        return finished

    def plan(self) -> list[LoadSlice | AttachSlice]:
        """The work items of the next round: one slice of each that need not wait."""
        items: list[LoadSlice | AttachSlice] = []
        folders: set[str] = set()
        for task in self._tasks.values():
            if isinstance(task.order, Attach) or task.order.path not in folders:
                items.append(task.next_slice())
            if isinstance(task.order, Load):
                folders.add(task.order.path)
        return items

    def note_outcome(self, work: LoadSlice | AttachSlice, outcome: Outcome) -> FinishedTask | None:
        """Learn from the outcome of a work. Returns the load or attachment if it is over: a fault
        ends it."""
        key = work.model, work.number if isinstance(work, AttachSlice) else 0
        task = self._tasks.get(key)
        if task is None:  # abandoned since it was planned
            return None
        if outcome.fault is not None:
            loading = isinstance(work, LoadSlice)
            step = task.refuse(
                Refusal("model not loaded" if loading else "engine failed", outcome.fault.reason)
            )
        else:
            assert isinstance(outcome.done, (LoadStep, AttachStep))
            step = outcome.done
        if isinstance(step, LoadStep):
            task.learn(step.bytes, outcome.seconds)
        if not step.over:
            return None
        del self._tasks[key]
        return task.finish(step)
