"""One model's schedule and its runner, driven by hand: for tests and benchmarks of the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
import msgspec

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.events import Event, MemoryShort, Progress, Started
from mlxsrv.engine.execution.batch_check import check_batching
from mlxsrv.engine.execution.text_runner import TextRunner
from mlxsrv.engine.faults import note
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import Decoded, Done, DraftRead, Fault, Outcome
from mlxsrv.engine.plans import (
    Admit,
    Decode,
    Forget,
    Read,
    ReadDraft,
    Release,
    Rewind,
    WorkItem,
    count_fed,
)
from mlxsrv.engine.scheduling.memory_budget import MemoryBudget
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.scheduling.proposers import Proposer
from mlxsrv.engine.scheduling.speculation import Speculation
from mlxsrv.engine.scheduling.speculation_controller import SpeculationController
from mlxsrv.engine.scheduling.text_schedule import TextSchedule
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.generation.parameters import Constraint


def nominal_seconds(work: WorkItem) -> float:
    """Return what a work is said to take: a pass takes 1 ms, and each token some more. Slices and
    proposals follow from such times, so with these they are the same on every machine."""
    match work:
        case Decode():
            return 1e-3 + 1e-4 * (count_fed(work.proposals) - 1) * len(work.proposals)
        case Read():
            return 1e-3 + 2e-5 * sum(span.end - span.begin for span in work.spans)
        case ReadDraft():
            return 1e-5 * work.tokens
        case _:
            return 0.0


class TextEngine:
    """Generates text with a real model, a round at a time, on the thread of its caller.

    Its events are those of the schedule but for Progress, and for the Started of a job whose turn
    does not come at once.

    Args:
        model: a model of mlx-lm's.
        max_rows: rows decoded together.
        pace: decides how long slices are; slices of 64 tokens, unless given.
        cache_bytes: of kept prompts.
        steerer: what rows are steered with.
        budget: bytes that KV caches may take. There are never more.
        seconds: tells what a work is said to take; None: it is measured.
        more: arguments of TextRunner.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int,
        pace: Pace | None = None,
        cache_bytes: int = 0,
        caches: KVCacheFactory | None = None,
        steerer: Steerer | None = None,
        budget: int | None = None,
        seconds: Callable[[WorkItem], float] | None = nominal_seconds,
        **more: Any,
    ) -> None:
        self._seconds = seconds
        self._now = 0.0  # what all work items are said to have taken
        self.steerer = Steerer(model) if steerer is None else steerer
        self.runner = TextRunner(
            model,
            caches=make_caches(model) if caches is None else caches,
            steerer=self.steerer,
            prompt_cache_bytes=cache_bytes,
            **more,
        )
        self.budget = MemoryBudget()
        self.schedule = TextSchedule(
            1,
            max_rows=max_rows,
            pace=Pace(64, 10.0) if pace is None else pace,
            facts=self.runner.facts,
            budget=self.budget,
        )
        if budget is not None:
            self.budget.set(budget)
        self._constraints: dict[int, Constraint] = {}
        self._unsent: list[Event] = []

    def speculate(
        self, make_controller: Callable[[], SpeculationController], proposer: Proposer | None = None
    ) -> None:
        """Have such a controller decide about proposals, and this proposer make them, if tokens can
        be proposed at all."""
        if (speculation := self.schedule._speculation) is not None:
            speculation = Speculation(proposer or speculation.proposer, make_controller)
            self.schedule._speculation = speculation
            self.schedule.memory.book.proposer = speculation.proposer

    @property
    def streaming(self) -> bool:
        return self.schedule.streaming

    @property
    def idle(self) -> bool:
        return self.schedule.idle and not self._unsent

    def statistics(self) -> dict[str, int]:
        """In numbers, without those of kept prompts and of tokens delivered."""
        numbers = self.schedule.statistics()
        return {
            name: number
            for name, number in numbers.items()
            if name != "tokens" and not name.startswith("prompt_cache")
        }

    def submit(self, job: Job, constraint: Constraint | None = None) -> list[Event]:
        if constraint is not None:
            self._constraints[job.id] = constraint
        self.schedule.submit(job)
        self.budget.begin_round()
        return self._run(self.schedule.plan_rows(), submits=True)

    def cancel(self, job_ids: Iterable[int]) -> None:
        self.schedule.cancel(set(job_ids))
        while items := self.schedule.plan_rows():
            self._unsent += self._run(items)

    def fail(self, reason: str) -> Sequence[Event]:
        """End all jobs, as when the model goes. Its rows stay with the runner."""
        return self.schedule.fail(reason)

    def replan(self) -> None:
        """Have the next step look at what the steerer watches now."""
        self.schedule.watch(active=self.steerer.watches)
        self.runner.replan()

    def decode(self) -> list[Event]:
        """The steps of a round."""
        unsent, self._unsent = self._unsent, []
        self.budget.begin_round()
        if any(isinstance(event, MemoryShort) for event in self.budget.events):
            assert self.budget.bytes is not None
            self.budget.set(self.budget.bytes)
        events = self._run(self.schedule.plan_rows())
        return unsent + events + self._run(self.schedule.plan_steps())

    def prefill(self, *, beside: bool = False) -> list[Event]:
        """The slice of a round."""
        events = self._run(self.schedule.plan_rows())
        work = self.schedule.plan_slice(beside=beside)
        return events + self._run([] if work is None else [work])

    def round(self) -> list[Event]:
        return self.decode() + self.prefill()

    def _run(self, items: Sequence[WorkItem], *, submits: bool = False) -> list[Event]:
        for work in items:
            began = perf_counter()
            done: Done | None = None
            fault: Fault | None = None
            try:
                done, fault = self._do(work)
            except Exception as error:
                fault = note(error, "a work failed")
            outcome = Outcome(began, perf_counter(), done, fault)
            self.schedule.settle(work, self._retime(work, outcome))
        events = [*self.budget.events]
        self.budget.events.clear()
        untold = (Progress, MemoryShort) if submits else (Progress, MemoryShort, Started)
        return [event for event in events if not isinstance(event, untold)]

    def _retime(self, work: WorkItem, outcome: Outcome) -> Outcome:
        """The outcome with the times that the work is said to have taken."""
        if self._seconds is None:
            return outcome
        began, done = self._now, outcome.done
        self._now += self._seconds(work)
        if isinstance(done, (Decoded, DraftRead)):
            done = msgspec.structs.replace(done, waited=began)
        return Outcome(began, self._now, done, outcome.fault)

    def _do(self, work: WorkItem) -> tuple[Done | None, Fault | None]:
        match work:
            case Admit():
                return self.runner.admit(work.jobs, lambda job: self._constraints.get(job.id)), None
            case Release():
                return self.runner.release(work.rows), None
            case Rewind():
                self.runner.rewind(work.rows)
            case Forget():
                self.runner.forget(work.entries, draft=work.draft, spare=work.spare)
            case Read():
                return self.runner.read(work.spans), None
            case Decode():
                return self.runner.decode(work)
            case ReadDraft():
                return self.runner.read_draft(work.row, work.begin, work.tokens), None
            case _:
                raise AssertionError(work)
        return None, None


def make_caches(model: Any, **more: Any) -> KVCacheFactory:
    """Make what a load makes. Only recurrent layers are tried: all others of `tests.support.tiny`
    do as their kinds promise.

    Args:
        model: one of mlx-lm's.
        more: arguments of KVCacheFactory.
    """
    caches = KVCacheFactory(model, **more)
    if caches.batched and not caches.pads:
        for _ in check_batching(model, caches):
            pass
    return caches


def assert_greedy(model: Any, prompt: Sequence[int], drawn: Sequence[int], count: int) -> None:
    """Fails unless `drawn` is the model's greedy text of `count` tokens, end tokens taken for any
    other.

    One pass over prompt and text, without a KV cache, tells the likeliest token after each of its
    beginnings. Greedy text has just these, so nothing is to be generated to compare with.
    """
    assert len(drawn) == count
    tokens = mx.array([*prompt, *drawn[:-1]])[None]
    assert list(drawn) == model(tokens)[0, len(prompt) - 1 :].argmax(-1).tolist()


class Always(SpeculationController):
    """Finds rounds worth it at all times with as many proposals as given, or else as the dice
    fall, some plain steps among them."""

    def __init__(self, proposals: int | None = None) -> None:
        super().__init__()
        self._dice = random.Random(0)
        self._fixed = proposals

    def affords(self, unread: int) -> bool:
        return self._fixed is not None or unread > 16 or self._dice.random() < 0.8

    def choose(self, found: Sequence[int], *, known: bool = True) -> int:
        return min(self._fixed or self._dice.randint(1, 5), max(found))

    def saw_speculative_step(self, *args: Any, **more: Any) -> None:
        """Nothing to find out."""

    def saw_reading(self, tokens: int, seconds: float) -> None:
        """Nothing to find out."""
