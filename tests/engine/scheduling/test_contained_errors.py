"""Errors in deciding: they end the jobs of the model that they concern, and nobody else's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mlxsrv.engine.events import PromptRead, Report, Started, Token
from mlxsrv.engine.orders import Budget, Cancel, Job, MakeReport, Unload, Watch
from mlxsrv.engine.outcomes import EmbedFacts, StoreFacts
from mlxsrv.engine.plans import Admit, Decode, Read, Release, Reset
from mlxsrv.engine.scheduling.embed_schedule import EmbedSchedule
from mlxsrv.engine.scheduling.model_schedule import ModelSchedule
from mlxsrv.engine.scheduling.row_book import RowBook
from mlxsrv.engine.scheduling.speculation import Speculation
from mlxsrv.engine.scheduling.store_schedule import StoreSchedule
from mlxsrv.engine.scheduling.text_schedule import TextSchedule
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.scheduling import MODEL, ORDER, Bench, expected, job, make

OTHER = 2  # the number of the other model


def make_two(device: FakeDevice | None = None) -> Bench:
    """A bench on which the models `m` and `n` are loaded."""
    bench = make(device)
    bench.load(msgspec.structs.replace(ORDER, model="n", path="/b"))
    return bench


def job_of(name: str, number: int, size: int, max_tokens: int = 4) -> Job:
    return msgspec.structs.replace(job(number, size, max_tokens), model=name)


class WideDevice(FakeDevice):
    """Draws one token that is none: no array of token ids can hold it."""

    def __init__(self, job_id: int, place: int) -> None:
        super().__init__()
        self._where = job_id, place

    def draw(self, job: Job, place: int) -> int:
        return 1 << 40 if (job.id, place) == self._where else super().draw(job, place)


def check_others(bench: Bench) -> None:
    """The other model's jobs had all that they wanted, and the model of those that failed serves
    new ones."""
    assert bench.job(3).tokens == expected(bench, 3, 30)
    failed = [log for log in bench.jobs.values() if log.failed is not None]
    assert failed
    assert all(log.ended for log in bench.jobs.values())
    bench.submit(job(7, 70, 5), job(8, 5, 6))
    bench.finish()
    assert bench.job(7).tokens == expected(bench, 7, 5)
    assert bench.job(8).tokens == expected(bench, 8, 6)
    assert bench.runner.empty


def test_a_token_that_is_none_ends_the_jobs_of_its_model_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = make_two(WideDevice(1, 9))
    bench.submit(job(1, 5, 10), job(2, 5, 20), job_of("n", 3, 5, 30))
    with caplog.at_level(logging.ERROR):
        bench.finish()
    # The token was sent with its end, for only the text that is kept cannot be made.
    assert bench.job(1).failed is None
    assert bench.job(1).tokens == [*expected(bench, 1, 9), 1 << 40]
    failed = bench.job(2).failed
    assert failed is not None
    assert "OverflowError" in failed.reason
    assert failed.clear is None
    [record] = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "'m'" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is OverflowError
    check_others(bench)


def break_once(
    monkeypatch: pytest.MonkeyPatch, cls: type, name: str, work: type | None = None
) -> None:
    """Have a method raise when it is called for the model, or for such a work, for the third
    time."""
    real: Callable[..., Any] = getattr(cls, name)
    calls = [0]

    def method(self: Any, *args: Any, **named: Any) -> Any:
        counts = work is None or isinstance(args[0], work)
        own = getattr(self, "_model", MODEL) == MODEL and getattr(self, "number", MODEL) == MODEL
        if own and counts:
            calls[0] += 1
            if calls[0] == 3:
                raise KeyError("a policy is wrong")
        return real(self, *args, **named)

    monkeypatch.setattr(cls, name, method)


@pytest.mark.parametrize(
    ("cls", "name", "work"),
    [
        (TextSchedule, "plan_rows", None),
        (TextSchedule, "plan_steps", None),
        (TextSchedule, "plan_slice", None),
        (TextSchedule, "settle", Decode),
        (TextSchedule, "settle", Read),
        (TextSchedule, "settle", Admit),
        (TextSchedule, "settle", Release),
        (TextSchedule, "submit", None),
        (TextSchedule, "cancel", None),
        (ModelSchedule, "statistics", None),
    ],
)
def test_an_error_anywhere_in_a_models_part_is_contained(
    monkeypatch: pytest.MonkeyPatch, cls: type, name: str, work: type | None
) -> None:
    bench = make_two()
    break_once(monkeypatch, cls, name, work)
    bench.submit(job_of("n", 3, 5, 30), job(1, 100, 60))
    reports: list[int] = []
    for number in (2, 4, 5, 6):
        bench.submit(job(number, 80, 3))
        bench.rounds(5)
        bench.cancel(number)
        reports.append(bench.ask(MakeReport()))
    bench.finish()
    assert bench.items(Reset) == [Reset(model=MODEL)]
    for number in reports:
        assert isinstance(bench.answers[1, number], Report)
    check_others(bench)


def test_what_is_no_error_of_the_model_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    bench = make_two()
    monkeypatch.setattr(TextSchedule, "plan_steps", stop)
    bench.submit(job(1, 5, 10))
    with pytest.raises(KeyboardInterrupt):
        bench.rounds(5)


def test_nothing_that_was_planned_before_counts_for_jobs_that_come_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work items that are left of the plan are done for rows that have failed. A job that comes
    at once has its own rows."""
    bench = make_two()
    bench.submit(job(1, 5, 20), job(2, 200), job_of("n", 3, 5, 30))
    bench.rounds(2)
    break_once(monkeypatch, TextSchedule, "settle", Decode)
    for number in (4, 5, 6):
        bench.submit(job(number, 10, 12))
        bench.round()
    assert bench.job(1).failed is not None
    plan = bench.plans[-1]
    bench.submit(job(9, 10, 12))
    bench.finish()
    assert [work.model for work in plan.items if isinstance(work, Decode)] == [MODEL, OTHER]
    assert bench.job(9).tokens == expected(bench, 9, 12)
    check_others(bench)


def test_a_schedule_that_fails_at_every_plan_fails_its_jobs_and_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make_two()
    real = TextSchedule.plan_slice

    def plan_slice(self: TextSchedule, **named: bool) -> Any:
        if self._model == MODEL:
            raise ZeroDivisionError
        return real(self, **named)

    monkeypatch.setattr(TextSchedule, "plan_slice", plan_slice)
    bench.submit(job(1, 5), job_of("n", 3, 5, 30))
    bench.rounds(2)
    bench.submit(job(2, 5))
    bench.finish()
    assert bench.scheduler.idle
    for number in (1, 2):
        failed = bench.job(number).failed
        assert failed is not None
        assert not any(isinstance(event, Started) for event in bench.job(number).events)
    assert len(bench.items(Reset)) == 2
    assert bench.job(3).tokens == expected(bench, 3, 30)


def test_a_policy_that_is_wrong_about_one_model_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = msgspec.structs.replace(FACTS, lookup=True)
    bench = make(FakeDevice(facts))
    break_once(monkeypatch, Speculation, "propose")
    bench.submit(job(1, 50, 30))
    bench.finish()
    assert bench.job(1).failed is not None
    bench.submit(job(2, 50, 30))
    bench.finish()
    assert bench.job(2).tokens == expected(bench, 2, 30)


@pytest.mark.parametrize("name", ["check", "plan", "settle"])
def test_an_error_about_texts_is_contained(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    bench = make_two(FakeDevice(embed=EmbedFacts(slices=True)))
    break_once(monkeypatch, EmbedSchedule, name)
    bench.submit(job_of("n", 3, 5, 30), job(1, 5, 40))
    for number in (2, 4, 5):
        bench.submit(Job(number, "m", texts=((5,) * 70, (6,) * 80)))
        bench.rounds(2)
    bench.finish()
    assert len(bench.items(Reset)) == 1
    check_others(bench)


def test_what_is_watched_is_watched_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    bench.send(Watch("m", (1, 2), 0))
    bench.round()
    break_once(monkeypatch, TextSchedule, "plan_steps")
    bench.submit(job(1, 5, 20))
    bench.finish()
    assert bench.job(1).failed is not None
    assert bench.runner.text(MODEL).watched
    for number in (2, 3):  # the second does not begin with the first one's prompt, which is kept
        bench.submit(job(number, 200, 6, family=2))
        bench.finish()
        assert bench.job(number).read == PromptRead(number, 0)


def test_a_row_that_was_cancelled_when_the_schedule_failed_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make_two()
    bench.submit(job(1, 5, 20), job(2, 5, 20), job_of("n", 3, 5, 30))
    bench.rounds(3)
    real, rounds = TextSchedule.plan_rows, len(bench.plans)

    def plan_rows(self: TextSchedule) -> Any:
        if self._model == MODEL and len(bench.plans) == rounds:
            raise ValueError("wrong")
        return real(self)

    monkeypatch.setattr(TextSchedule, "plan_rows", plan_rows)
    bench.send(Cancel(1))
    bench.finish()
    assert [type(event) for event in bench.job(1).events][-1] is Token
    assert bench.job(2).failed is not None
    check_others(bench)


@pytest.mark.parametrize(
    ("cls", "name", "stored"),
    [
        (RowBook, "end_all", False),
        (RowBook, "_plan_rows", True),
        (StoreSchedule, "plan_all", True),
    ],
)
def test_an_error_in_ending_a_model_is_contained(
    monkeypatch: pytest.MonkeyPatch, cls: type, name: str, stored: bool
) -> None:
    facts = msgspec.structs.replace(FACTS, store=StoreFacts(0, 0) if stored else None)
    bench = make_two(FakeDevice(facts))
    bench.send(Budget(1 << 30))
    bench.submit(job(1, 100, 50), job_of("n", 3, 5, 30))
    bench.rounds(6)
    real: Callable[..., Any] = getattr(cls, name)

    def method(self: Any, *args: Any) -> Any:
        if self._model == MODEL:
            raise KeyError("a policy is wrong")
        return real(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(cls, name, method)
        bench.send(Unload("m"))
        bench.round()
    assert bench.job(1).failed is not None
    bench.finish()
    assert bench.job(3).tokens == expected(bench, 3, 30)
    bench.load(ORDER)
    bench.submit(job(7, 70, 5))
    bench.finish()
    assert bench.job(7).tokens == expected(bench, 7, 5)
