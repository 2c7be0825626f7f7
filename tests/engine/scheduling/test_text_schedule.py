"""Schedules of rows: what is learnt from outcomes that a model alone would rarely give."""

from __future__ import annotations

from typing import Any

from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import Admitted, Done, Outcome, PromptsRead, RowFailure
from mlxsrv.engine.plans import Admit, Read, Work
from mlxsrv.engine.scheduling.pace import LEAST_SLICE, Pace
from mlxsrv.engine.scheduling.text_schedule import TextSchedule
from mlxsrv.generation.parameters import Sampling
from tests.support.fake_device import FACTS


def make_job(number: int, size: int = 40, **more: Any) -> Job:
    more.setdefault("max_tokens", 9)
    prompt = tuple(range(5, 5 + size))
    return Job(number, "m", prompt, end_tokens=frozenset(), sampling=Sampling(), **more)


def make_schedule(pace: Pace | None = None) -> TextSchedule:
    return TextSchedule(1, max_rows=4, pace=Pace(64, 10.0) if pace is None else pace, facts=FACTS)


def plan(schedule: TextSchedule) -> list[Work]:
    works = [*schedule.plan_rows(), *schedule.plan_steps()]
    slice = schedule.plan_slice(beside=False)
    return works if slice is None else [*works, slice]


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
