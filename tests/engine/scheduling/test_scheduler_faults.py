"""The scheduler after faults: who is tried, who ends, and when a draft is given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxsrv.engine.events import Progress, PromptRead, Started
from mlxsrv.engine.faults import NOT_A_NUMBER, OUT_OF_MEMORY
from mlxsrv.engine.orders import Budget, Job
from mlxsrv.engine.outcomes import RowFailure
from mlxsrv.engine.plans import (
    Decode,
    Forget,
    Read,
    ReadDraft,
    Rewind,
    RoundPlan,
    WorkItem,
)
from mlxsrv.engine.scheduling.speculation_controller import SpeculationController
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.scheduling import (
    MODEL,
    Bench,
    DraftDevice,
    FaultyDevice,
    expected,
    job,
    make,
)

# Faults.


def last_round_with(bench: Bench, count: int) -> Callable[[WorkItem], bool]:
    """Chooses a step of so many rows."""
    return lambda work: isinstance(work, Decode) and rows_of(bench, work) == count


def rows_of(bench: Bench, work: Decode) -> int:
    return len(bench.runner.text(work.model).decoded(work))


def step(number: int) -> Callable[[WorkItem], bool]:
    """Chooses the step of this number, and those behind it."""
    seen = [0]

    def choose(work: WorkItem) -> bool:
        seen[0] += isinstance(work, Decode)
        return isinstance(work, Decode) and seen[0] >= number

    return choose


def test_a_row_that_fails_alone_ends() -> None:
    bench = make(FaultyDevice(step(3)))
    bench.submit(job(1, 5, 20))
    bench.finish()
    failed = bench.job(1).failed
    assert failed is not None
    assert failed.reason == "it broke"
    assert bench.runner.empty


def test_after_a_fault_all_rows_go_on_with_the_same_tokens() -> None:
    bench = make(FaultyDevice(step(4)))
    bench.submit(*(job(number, 5, 20) for number in range(1, 9)))
    bench.finish()
    for number in range(1, 9):
        assert bench.job(number).tokens == expected(bench, number, 20)
    assert sorted(tried(bench)) == sorted([*range(1, 9)] * 2), "until past the place of the fault"


def suspects_read(bench: Bench) -> list[int]:
    """Suspects whose texts are being read, or are read and not with the others."""
    queue = bench.scheduler._models[MODEL].rows._queue
    return [row.id for row in queue.partly_read if row.suspect]


def lose(*jobs: Job) -> Bench:
    """A bench on which the first step with all of these jobs' rows has failed."""
    device = FaultyDevice(lambda work: False)
    bench = make(device)
    device._chooses = last_round_with(bench, len(jobs))
    bench.submit(*jobs)
    until(bench, lambda: not device._times)
    return bench


def until(bench: Bench, holds: Callable[[], bool]) -> None:
    for _ in range(200):
        if holds():
            return
        bench.round()
    raise AssertionError("it does not come to that")


def tried(bench: Bench) -> list[int]:
    """The rows of the steps of suspects."""
    return [work.suspect for work in bench.items(Decode) if work.suspect is not None]


def test_suspects_are_read_and_draw_one_at_a_time() -> None:
    bench = lose(job(1, 300, 60), job(2, 5, 60), job(3, 1, 60), job(4, 90, 60))
    seen: list[list[int]] = []
    bench.checks.append(lambda plan: seen.append(suspects_read(bench)))
    bench.finish()
    assert {*map(len, seen)} == {0, 1}
    assert {row for rows in seen for row in rows} == {1, 2, 3, 4}
    for number in range(1, 5):
        assert bench.job(number).tokens == expected(bench, number, 60)


def test_suspects_do_not_wait_for_a_long_prompt_that_is_half_read() -> None:
    device = FaultyDevice(lambda work: False, memory=True)
    bench = make(device)
    bench.submit(job(1, 9000))
    bench.rounds(2)
    bench.submit(job(2, 100, 60), job(3, 100, 60))
    device._chooses = last_round_with(bench, 2)
    until(bench, lambda: not device._times)
    read = len(bench.items(Read))
    until(bench, lambda: 3 in tried(bench))
    spans = {span.rows for work in bench.items(Read)[read:-1] for span in work.spans}
    assert spans == {(2,), (3,)}, "there is memory for one row at a time"
    bench.finish()


def test_a_suspect_whose_text_is_one_token_draws_alone() -> None:
    bench = lose(job(1, 1, 20), job(2, 1, 20))
    assert not bench.job(1).tokens
    bench.finish()
    assert tried(bench) == [1, 1, 2, 2]
    assert bench.job(1).tokens == expected(bench, 1, 20)


def test_suspects_that_wait_do_not_look_stalled_or_short_of_memory() -> None:
    bench = lose(*(job(number, 200, 20) for number in (1, 2, 3)))
    bench.rounds(2)
    [read] = suspects_read(bench)
    [first, *_] = waiting = [number for number in (1, 2, 3) if number != read]
    assert bench.job(first).events[-1] == Progress(first)
    numbers = bench.scheduler._models[MODEL].statistics()
    assert numbers["reading"] == 1
    assert numbers["waiting"] == len(waiting)
    assert not numbers["waiting_for_memory"]
    bench.finish()


def test_a_suspect_that_memory_does_not_suffice_for_leaves_the_others_their_places() -> None:
    bench = lose(*(job(number, 5, 60) for number in range(1, 9)))
    until(bench, lambda: 8 in tried(bench))
    device = bench.runner.device
    assert isinstance(device, FaultyDevice)
    device._times, device._memory = 1, True
    device._chooses = lambda work: isinstance(work, Decode) and work.suspect == 8
    bench.rounds(10)
    assert rows_of(bench, Decode(model=MODEL)) == 7
    assert suspects_read(bench) == [], "it waits for a place"
    assert bench.scheduler._models[MODEL].rows._book.fitting == 7
    bench.finish()
    for number in range(1, 9):
        assert bench.job(number).tokens == expected(bench, number, 60)


def test_a_suspect_may_be_preempted_between_its_tokens() -> None:
    bench = lose(job(1, 300, 99), job(2, 400, 40))
    until(bench, lambda: 2 in tried(bench))
    bench.send(Budget(FACTS.kv_bytes(800)))
    bench.round()
    assert bench.items(Rewind)[-1].rows == (2,)
    bench.finish()
    assert tried(bench) == [1, 1, 2, 2], "what it has drawn alone counts"
    assert bench.job(2).tokens == expected(bench, 2, 40)


def test_after_a_fault_rows_are_tried_beside_the_others() -> None:
    bench = make(FaultyDevice(step(4)), max_rows=8)
    bench.submit(*(job(number, 5, 30) for number in range(1, 5)))
    bench.rounds(4 + 12)
    steps = [[w.suspect for w in plan.items if isinstance(w, Decode)] for plan in bench.plans]
    assert [None, 2] in steps
    bench.finish()


def test_the_row_that_is_to_blame_ends_and_the_others_go_on() -> None:
    device = FaultyDevice(lambda work: False)
    bench = make(device)

    def choose(work: WorkItem) -> bool:
        """Row 3 breaks each step in which it draws its fifth token."""
        if not isinstance(work, Decode):
            return False
        groups = bench.runner.text(MODEL).decoded(work)
        return any(row.id == 3 and len(row.drawn) == 4 for row in groups)

    device._chooses, device._times = choose, 100
    bench.submit(*(job(number, 5, 20) for number in range(1, 9)))
    bench.finish()
    assert bench.job(3).failed is not None
    for number in {*range(1, 9)} - {3}:
        assert bench.job(number).tokens == expected(bench, number, 20)


def test_where_memory_is_short_fewer_rows_are_decoded_together() -> None:
    device = FaultyDevice(lambda work: False, memory=True)
    bench = make(device)
    device._chooses, device._times = last_round_with(bench, 8), 1
    bench.submit(*(job(number, 5, 12) for number in range(1, 9)))
    bench.rounds(3)
    sizes: list[int] = []
    bench.checks.append(lambda plan: sizes.append(count_rows(bench, plan)))
    bench.finish()
    assert max(sizes[2:8]) <= 4
    assert all(bench.job(n).tokens == expected(bench, n, 12) for n in range(1, 9))
    assert any(work.spare for work in bench.items(Forget))


def count_rows(bench: Bench, plan: RoundPlan) -> int:
    return sum(rows_of(bench, work) for work in plan.items if isinstance(work, Decode))


def test_a_row_for_which_memory_never_suffices_ends() -> None:
    bench = make(FaultyDevice(step(1), 100, memory=True))
    bench.submit(job(1, 5, 12))
    bench.finish()
    failed = bench.job(1).failed
    assert failed is not None
    assert failed.clear == OUT_OF_MEMORY


@pytest.mark.parametrize(("times", "ended"), [(1, []), (2, [1])])
def test_prompts_of_a_slice_that_failed_are_read_alone(times: int, ended: list[int]) -> None:
    bench = make(FaultyDevice(lambda work: isinstance(work, Read), times))
    bench.submit(*(job(number, 12, 3) for number in range(1, 5)))
    bench.finish()
    assert [n for n in range(1, 5) if bench.job(n).failed is not None] == ended
    assert all(len(work.spans) == 1 for work in bench.items(Read)[1:])


def test_a_long_prompt_whose_slice_fails_for_memory_is_read_anew() -> None:
    def choose(work: WorkItem) -> bool:
        return isinstance(work, Read) and work.spans[0].begin > 100

    bench = make(FaultyDevice(choose, 1, memory=True))
    bench.submit(job(1, 400), job(2, 300))
    bench.finish()
    assert bench.job(1).tokens == expected(bench, 1, 4)
    assert bench.job(2).tokens == expected(bench, 2, 4)


class BrokenDevice(FakeDevice):
    """Job 2 has NaN at its third token, job 3 a constraint that cannot go on there, and job 4 is
    not taken."""

    def breaks(self, job: Job, place: int) -> bool:
        return job.id == 2 and place == 2

    def stop(self, job: Job, place: int) -> RowFailure | None:
        return RowFailure(3, "no rule", "the grammar") if (job.id, place) == (3, 2) else None

    def refuse(self, job: Job) -> RowFailure | None:
        return RowFailure(4, "no SAE", "no such feature") if job.id == 4 else None


def test_what_concerns_one_row_ends_that_row() -> None:
    bench = make(BrokenDevice())
    bench.submit(*(job(number, 10, 6) for number in range(1, 5)))
    bench.finish()
    assert bench.job(1).tokens == expected(bench, 1, 6)
    reasons = [bench.job(number).failed for number in (2, 3, 4)]
    assert [failed and (failed.reason, failed.clear) for failed in reasons] == [
        (NOT_A_NUMBER, NOT_A_NUMBER),
        ("no rule", "the grammar"),
        ("no SAE", "no such feature"),
    ]
    assert len(bench.job(2).tokens) == 2
    assert len(bench.job(3).tokens) == 3
    assert not any(isinstance(event, Started) for event in bench.job(4).events)


def test_what_the_model_computed_nan_for_is_not_kept() -> None:
    bench = make(BrokenDevice())
    bench.submit(job(2, 200, 6))
    bench.finish()
    bench.submit(job(5, 200, 6, family=2))
    bench.finish()
    assert bench.job(5).read == PromptRead(5, 0)


# Drafts.


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 50, 101), (0.0, 0, 12)])
def test_a_draft_is_used_while_it_helps(share: float, least: int, most: int) -> None:
    bench = make(DraftDevice(share))
    bench.submit(job(1, 20, 500))
    bench.finish()
    rounds = sum(bool(work.proposals) for work in bench.items(Decode))
    assert least <= rounds <= most
    assert bench.items(ReadDraft)
    assert bench.job(1).tokens == expected(bench, 1, 500)


def test_a_draft_proposes_to_a_row_that_is_alone() -> None:
    bench = make(DraftDevice(1.0))
    bench.submit(job(1, 20, 500))
    bench.rounds(20)
    assert bench.items(Decode)[-1].proposals
    bench.submit(job(2, 20, 20))
    bench.runner.items.clear()
    while not bench.job(2).ended:
        bench.round()
    assert not any(work.proposals for work in bench.items(Decode))
    bench.finish()
    assert bench.items(Decode)[-1].proposals


def test_the_time_of_a_draft_s_reading_is_no_step_s(monkeypatch: pytest.MonkeyPatch) -> None:
    device, timed = DraftDevice(1.0), list[float]()
    device.time = lambda work, passes: 1.0 if isinstance(work, ReadDraft) else 0.001  # type: ignore
    saw = SpeculationController.saw_plain_step

    def note(controller: SpeculationController, seconds: float) -> None:
        timed.append(seconds)
        saw(controller, seconds)

    monkeypatch.setattr(SpeculationController, "saw_plain_step", note)
    bench = make(device)
    bench.submit(job(1, 20, 100))
    bench.finish()
    assert bench.items(ReadDraft)
    assert timed
    assert max(timed) < 0.5


def test_a_draft_whose_speculative_step_fails_is_given_up() -> None:
    bench = make(DraftDevice(1.0))
    faulty = FaultyDevice(lambda work: isinstance(work, Decode) and bool(work.proposals))
    bench.runner.device.fail = faulty.fail  # type: ignore[method-assign]
    bench.submit(job(1, 20, 200))
    bench.finish()
    assert bench.job(1).tokens == expected(bench, 1, 200)
    bench.submit(job(2, 20, 1000))
    bench.finish()
    assert sum(bool(work.proposals) for work in bench.items(Decode)) == 1
    assert len(bench.items(ReadDraft)) == 1


def test_a_draft_goes_on_from_an_equal_text() -> None:
    """The same prompt again has the same answer: the draft has read more than the row has."""
    bench = make(DraftDevice(1.0))
    bench.submit(job(1, 200, 100))
    bench.finish()
    device = bench.runner.device
    device.draw = lambda job, place: FakeDevice.draw(device, FIRST, place)  # type: ignore
    bench.submit(job(2, 200, 100, family=1))
    bench.finish()
    assert bench.job(2).tokens == bench.job(1).tokens


FIRST = job(1, 200)


class EndingDevice(DraftDevice):
    """Job 2 ends in this way with its first token, or goes on."""

    def __init__(self, way: str) -> None:
        super().__init__(1.0)
        self._way = way

    def breaks(self, job: Job, place: int) -> bool:
        return self._way == "nan" and (job.id, place) == (2, 0)

    def stop(self, job: Job, place: int) -> RowFailure | None:
        dead = self._way == "constraint" and (job.id, place) == (2, 0)
        return RowFailure(2, "no rule") if dead else None


@pytest.mark.parametrize(
    ("way", "third", "known"),
    [
        # The row ended in the step before the draft read its text: the draft's text is unknown.
        ("length", 1, False),
        ("length", 2, False),
        ("stop", 1, False),
        ("nan", 1, False),
        ("nan", 2, False),
        ("constraint", 1, False),
        # It went on, so the draft has its text, and no other's.
        ("goes on", 1, False),
        ("goes on", 2, True),
    ],
)
def test_a_draft_is_known_to_have_read_the_text_of_a_row_that_is_left(
    way: str, third: int, known: bool
) -> None:
    """Job 1 was followed by the draft, then job 2; now job 3 has the prompt of one of them."""
    bench = make(EndingDevice(way))
    bench.submit(job(1, 200, 100))
    bench.finish()
    first = FakeDevice().draw(job(2, 1), 0)
    ends = frozenset([first] if way == "stop" else [])
    bench.submit(job(2, 200, 1 if way == "length" else 8, end_tokens=ends))
    bench.finish()
    assert [work.row for work in bench.items(ReadDraft)][-1] == 2
    assert (len(bench.job(2).tokens) > 1) == (way == "goes on")
    bench.runner.items.clear()
    bench.submit(job(3, 200, 100, family=third))
    bench.finish()
    assert (bench.items(ReadDraft)[0].begin > 0) == known
    assert bench.job(3).tokens == expected(bench, 3, 100)
