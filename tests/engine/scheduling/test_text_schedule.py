"""Schedules of rows: what is learnt of outcomes that are rare, and what decisions cost."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest

from mlxsrv.engine.events import Token
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import Admitted, Decoded, Done, Outcome, PromptsRead, RowFailure
from mlxsrv.engine.plans import Admit, Decode, Read, Span, WorkItem
from mlxsrv.engine.scheduling.memory_budget import MemoryBudget
from mlxsrv.engine.scheduling.pace import LEAST_SLICE, Pace
from mlxsrv.engine.scheduling.prompt_index import as_tokens
from mlxsrv.engine.scheduling.proposers import DraftModel
from mlxsrv.engine.scheduling.row import Row, RowState
from mlxsrv.engine.scheduling.speculation import Speculation
from mlxsrv.engine.scheduling.speculation_controller import SpeculationController
from mlxsrv.engine.scheduling.text_schedule import TextSchedule
from mlxsrv.generation.parameters import Sampling
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.scheduling import job, make


def make_job(number: int, size: int = 40, **more: Any) -> Job:
    plain: dict[str, Any] = {"max_tokens": 9, "end_tokens": frozenset(), "sampling": Sampling()}
    return Job(number, "m", tuple(range(5, 5 + size)), **(plain | more))


def make_schedule(
    pace: Pace | None = None, budget: MemoryBudget | None = None, **facts: Any
) -> TextSchedule:
    return TextSchedule(
        1,
        max_rows=4,
        pace=Pace(64, 10.0) if pace is None else pace,
        facts=msgspec.structs.replace(FACTS, **facts),
        budget=budget,
    )


def plan(schedule: TextSchedule) -> list[WorkItem]:
    schedule.budget.begin_round()
    items = [*schedule.plan_rows(), *schedule.plan_steps()]
    slice = schedule.plan_slice(beside=False)
    return items if slice is None else [*items, slice]


def outcome(done: Done | None, seconds: float = 0.1) -> Outcome:
    return Outcome(5.0, 5.0 + seconds, done)


def test_a_slice_of_rows_that_were_not_admitted_tells_nothing_of_the_pace() -> None:
    pace = Pace(64, 0.2)
    schedule = make_schedule(pace)
    schedule.submit(make_job(1))
    admit, read = plan(schedule)
    assert isinstance(admit, Admit)
    assert isinstance(read, Read)
    schedule.settle(admit, outcome(Admitted((RowFailure(1, "no such SAE"),))))
    schedule.settle(read, outcome(PromptsRead(), 1e-6))
    assert pace.limit(decoding=False, long=False, beside=True) == LEAST_SLICE


def read_prompt(schedule: TextSchedule, job: Job) -> list[Span]:
    """Have a job's prompt read, to its end. Returns the spans."""
    spans: list[Span] = []
    schedule.submit(job)
    while not schedule.streaming:
        for work in plan(schedule):
            spans += work.spans if isinstance(work, Read) else ()
            schedule.settle(work, outcome(PromptsRead() if isinstance(work, Read) else None))
    return spans


def test_only_tokens_that_are_delivered_count() -> None:
    budget = MemoryBudget()
    schedule = make_schedule(budget=budget)
    read_prompt(schedule, make_job(1, end_tokens=frozenset([7])))
    [step] = plan(schedule)
    schedule.settle(step, outcome(Decoded()))
    [step] = plan(schedule)
    schedule.settle(step, outcome(Decoded(tokens=((1, 9), (1, 7), (1, 9)))))
    reported = [event.id for event in budget.events if isinstance(event, Token)]
    assert reported == [9, 7]
    assert schedule.statistics()["tokens"] == 2


class Counted(int):
    """A token id that notes when it is compared."""

    compared: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_long_prompts_that_begin_alike_are_not_compared_token_by_token() -> None:
    schedule = make_schedule()
    for number in range(8):
        prompt = (*map(Counted, range(1000)), Counted(2000 + number // 2))
        schedule.submit(msgspec.structs.replace(make_job(number), prompt=prompt))
    *_, read = plan(schedule)
    assert isinstance(read, Read)
    assert [span.rows for span in read.spans] == [(0, 1)], "twins"
    assert Counted.compared == 0


def test_texts_are_not_compared_while_no_proposal_is_affordable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make_row(number: int) -> Row:
        job = make_job(number)
        row = Row(job, as_tokens(job.prompt))
        for state in (
            RowState.WAITING,
            RowState.PREFILLING,
            RowState.FRESH,
            RowState.DECODING,
        ):
            row.enter(state)
        return row

    controller, row = SpeculationController(), make_row(2)
    speculation = Speculation(DraftModel(), lambda: controller)
    for _ in range(8):
        controller.saw_plain_step(0.01)
    speculation.saw_reading(make_row(1), 0, 30, Outcome(0.0, 0.001))
    assert speculation.plan_reading([row], 64) is not None
    controller.saw_reading(1000, 100.0)  # which costs all credit
    monkeypatch.delattr(Row, "text")
    assert speculation.plan_reading([row], 64) is None


class RepeatingDevice(FakeDevice):
    """Each row repeats three tokens of its own."""

    def draw(self, job: Job, place: int) -> int:
        return 10 * job.id + place % 3


def test_proposals_are_those_of_the_rows_also_when_one_has_left() -> None:
    bench = make(RepeatingDevice(msgspec.structs.replace(FACTS, lookup=True)))
    bench.submit(*(job(number, 30, 5000) for number in (1, 2, 3, 4)))
    bench.rounds(60)
    bench.cancel(2)
    bench.rounds(60)
    bench.submit(job(5, 30, 5000))
    bench.rounds(60)
    bench.runner.items.clear()
    bench.cancel(4)  # the last row takes its place
    bench.rounds(3)
    [first, *_] = bench.items(Decode)
    assert first.groups is not None
    [group] = first.groups
    assert [*group.rows] != sorted(group.rows), "rows change their places"
    guesses = [each[0] for each in first.proposals if isinstance(each, tuple)]
    assert [guess // 10 for guess in guesses] == [*group.rows]
