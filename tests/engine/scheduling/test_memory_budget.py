"""The memory budget: whose text is read, what is evicted where room is short, and the event
MemoryShort."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any

import msgspec
import pytest

from mlxsrv.engine.events import Finished, KVCost, Progress, Shortage, Token
from mlxsrv.engine.orders import Budget, Job, MakeReport
from mlxsrv.engine.plans import Decode, Forget, LoadSlice, Read, Rewind, WorkItem
from mlxsrv.engine.scheduling.groups import STEP
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.engine.scheduling.row_memory import RowMemory
from tests.support.fake_device import FACTS, FakeDevice, Pass
from tests.support.scheduling import (
    ORDER,
    Bench,
    FaultyDevice,
    expected,
    job,
    make,
    prompt,
    read_order,
)

COLUMN = FACTS.kv_bytes(1)
SLOT = STEP * COLUMN  # a row of up to STEP tokens
NOTHING_KEPT = msgspec.structs.replace(FACTS, prompt_cache_bytes=0)


def bounded(slots: float, facts: object = NOTHING_KEPT, **changes: object) -> Bench:
    """A model whose KV caches may take so many times SLOT."""
    bench = make(FakeDevice(facts), **changes)  # type: ignore[arg-type]
    bench.send(Budget(int(slots * SLOT)))
    return bench


def own(tokens: int) -> float:
    """Return what the KV cache of a text that is read takes, in slots."""
    return (tokens + STEP - 1) / STEP


def answer(bench: Bench) -> None:
    """Go on to the end. Each MemoryShort is answered: there is no more."""
    answered = 0
    while True:
        bench.finish()
        if answered == len(bench.shortages):
            return
        answered += 1
        assert bench.runner.budget is not None
        bench.send(Budget(bench.runner.budget))


def check_answers(bench: Bench, *jobs: Job) -> None:
    for each in jobs:
        log = bench.job(each.id)
        assert log.failed is None, log.failed
        assert log.tokens == expected(bench, each.id, each.max_tokens)
        last = log.events[-1]
        assert isinstance(last, Token)
        assert last.finish == "length"


def test_without_a_budget_nothing_is_bounded() -> None:
    bench = make()
    jobs = [job(number, 100, 300) for number in range(1, 9)]
    bench.submit(*jobs)
    bench.finish()
    check_answers(bench, *jobs)
    assert not bench.items(Rewind)
    assert not bench.shortages


def test_a_prompt_waits_until_there_is_room_for_it() -> None:
    # A row of 100 + 50 tokens takes a slot, and a bit more until it is decoded.
    bench = bounded(own(100))
    jobs = [job(number, 100, 50) for number in (1, 2, 3)]
    bench.submit(*jobs)
    bench.finish()
    check_answers(bench, *jobs)
    assert read_order(bench) == [1, 2, 3]
    assert not bench.items(Rewind), "nobody is read whose memory is not there"
    spans = [work for work in bench.items(Read) if work.spans[0].joins]
    assert len(spans) == 3, "one at a time"


def test_nobody_overtakes_a_prompt_that_waits_for_memory() -> None:
    bench = bounded(3)
    first, large, small = job(1, 100, 100), job(2, 300, 20), job(3, 20, 4)
    bench.submit(first)
    bench.rounds(4)
    bench.submit(large, small)
    bench.finish()
    check_answers(bench, first, large, small)
    assert read_order(bench) == [1, 2, 3]
    assert not bench.items(Rewind), "nor is it begun before there is room"


def test_what_fits_is_read_in_any_order() -> None:
    bench = bounded(40)
    bench.submit(job(1, 300, 20), job(2, 20, 4))
    bench.finish()
    assert read_order(bench) == [2, 1]


def test_the_youngest_row_gives_its_memory_to_older_ones() -> None:
    # Two rows are let in, with a growth step of both; then they grow twice.
    bench = bounded(4.1)
    jobs = [job(1, 100, 700), job(2, 100, 700)]
    bench.submit(*jobs)
    bench.finish()
    check_answers(bench, *jobs)
    rewound = [row for work in bench.items(Rewind) for row in work.rows]
    assert rewound
    assert {*rewound} == {2}
    assert len(rewound) <= 2, "it comes back when the older row has gone, or for a growth step"
    read = [event for event in bench.job(2).events if type(event).__name__ == "PromptRead"]
    assert len(read) == 1, "nothing is sent twice"


def test_a_preempted_row_is_heard_of() -> None:
    bench = bounded(4.1)
    bench.submit(job(1, 100, 600), job(2, 100, 600))
    while not bench.items(Rewind):
        bench.round()
    reported = len(bench.job(2).events)
    while not bench.job(1).ended:
        bench.round()
    assert any(isinstance(event, Progress) for event in bench.job(2).events[reported:])
    bench.finish()


@pytest.mark.parametrize("watched", [False, True])
def test_a_prompt_that_is_half_read_goes_before_an_older_row(watched: bool) -> None:
    bench = bounded(9)
    older, younger = job(1, 100, 600), job(2, 900, 4)
    bench.submit(older)
    bench.rounds(10)
    bench.submit(younger)
    bench.rounds(2)
    assert [work for work in bench.items(Read) if work.spans[0].rows == (2,)]
    bench.send(Budget(int(4 * SLOT)))
    bench.rounds(1)
    assert [work.rows for work in bench.items(Rewind)] == [(2,)]
    bench.send(Budget(int(9 * SLOT)))
    bench.finish()
    check_answers(bench, older, younger)


def test_kept_prompts_give_way_first() -> None:
    bench = bounded(3.2, FACTS)
    bench.submit(job(1, 200, 4))
    bench.finish()
    assert bench.runner.text(1).kept_bytes
    bench.submit(job(2, 500, 4))
    bench.finish()
    check_answers(bench, job(2, 500, 4))
    assert bench.items(Forget)
    assert not bench.items(Rewind)
    assert not bench.shortages


def test_prompts_of_a_model_without_rows_give_way_first_and_no_more_than_are_needed() -> None:
    bench = bounded(5.1, FACTS)
    bench.load(msgspec.structs.replace(ORDER, model="n", path="/b"))
    bench.submit(job(1, 200), msgspec.structs.replace(job(2, 200), model="n"))
    bench.finish()
    assert bench.runner.text(1).kept_bytes == bench.runner.text(2).kept_bytes > 0
    bench.submit(job(3, 20, 200))
    bench.rounds(10)
    assert not bench.items(Forget)
    bench.submit(job(4, 500))
    bench.rounds(10)
    assert [work.model for work in bench.items(Forget)] == [2]
    assert bench.runner.text(1).kept_bytes
    bench.finish()
    check_answers(bench, job(3, 20, 200), job(4, 500))


def test_a_prompt_that_never_fits_is_refused_with_the_numbers() -> None:
    bench = bounded(3)
    bench.submit(job(1, 2000, 4), job(2, 20, 4))
    bench.finish()
    [(client, missing)] = bench.shortages
    assert client == 1
    needed = missing + 3 * SLOT
    assert needed >= 2000 * COLUMN
    assert bench.job(1).failed is None, "the client may unload models"
    assert not bench.job(2).ended, "its turn is not yet"
    bench.send(Budget(int(3 * SLOT)))
    bench.finish()
    failed = bench.job(1).failed
    assert failed is not None
    assert failed.shortage == Shortage(needed, 3 * SLOT, 2000)
    check_answers(bench, job(2, 20, 4))


def test_a_refused_prompt_leaves_its_place_to_the_next() -> None:
    bench = bounded(3, max_rows=1)
    bench.submit(job(1, 2000), job(2, 1900), job(3, 20))
    answer(bench)
    assert [bench.job(number).failed is not None for number in (1, 2, 3)] == [True, True, False]
    check_answers(bench, job(3, 20))


def test_prompts_are_kept_within_the_budget_where_they_cannot_be_cut_back() -> None:
    """Copies are made while prompts are read, and older ones give way."""
    costs = (KVCost(COLUMN), KVCost(0, fixed=1))
    bench = bounded(5.5, msgspec.structs.replace(FACTS, cuts=False, kv_costs=costs))
    for number in range(1, 8):
        bench.submit(job(number, 300, 4), job(10 + number, 200, 20))
        bench.finish()
    assert bench.runner.text(1).kept_bytes
    assert bench.items(Forget)


def test_a_larger_budget_is_an_answer() -> None:
    bench = bounded(3)
    large = job(1, 2000, 4)
    bench.submit(large)
    bench.finish()
    [(_, missing)] = bench.shortages
    bench.send(Budget(3 * SLOT + missing))
    bench.finish()
    check_answers(bench, large)
    assert len(bench.shortages) == 1


def test_a_row_that_has_all_the_memory_ends_where_it_is_full() -> None:
    bench = bounded(6)
    bench.submit(job(1, 100, 5000), job(2, 100, 20))
    bench.finish()
    log = bench.job(1)
    last = log.events[-1]
    assert isinstance(last, Token)
    assert last.finish == "length"
    assert 6 * STEP - 3 <= 100 + len(log.tokens) <= 6 * STEP
    check_answers(bench, job(2, 100, 20))


def test_a_row_that_is_read_no_more_ends_with_what_it_has_said() -> None:
    bench = bounded(20)
    bench.submit(job(1, 100, 5000))
    bench.rounds(1000)
    said = bench.job(1).tokens
    assert len(said) > 900
    bench.send(Budget(2 * SLOT))
    answer(bench)
    assert isinstance(bench.job(1).events[-1], Finished)
    assert bench.job(1).tokens == said


def test_memory_is_asked_for_before_a_row_goes() -> None:
    bench = bounded(4.1)
    bench.submit(job(1, 100, 600), job(2, 100, 600))
    while not bench.shortages:
        bench.round()
    assert not bench.items(Rewind)
    bench.send(Budget(20 * SLOT))
    bench.finish()
    assert not bench.items(Rewind)
    assert len(bench.shortages) == 1


def test_it_is_not_asked_again_and_again() -> None:
    bench = bounded(4.1)
    bench.submit(*(job(number, 100, 400) for number in range(1, 9)))
    asked = 0
    while not bench.done:
        bench.round()
        if len(bench.shortages) > asked:
            asked = len(bench.shortages)
            assert bench.runner.budget is not None
            bench.send(Budget(bench.runner.budget))
    assert asked < len(bench.plans) / 50


def test_a_load_begins_when_rows_have_made_room_for_it() -> None:
    found: list[int] = []

    class Watching(FakeDevice):
        def time(self, work: WorkItem, passes: Sequence[Pass]) -> float:
            if isinstance(work, LoadSlice) and work.model == 2:
                found.append(bench.runner.text(1).bytes)
            return super().time(work, passes)

    bench = make(Watching(NOTHING_KEPT))
    jobs = [job(number, 200, 200) for number in range(1, 6)]
    bench.submit(*jobs)
    bench.rounds(60)
    taken = bench.runner.text(1).bytes
    bench.send(Budget(taken - SLOT))
    bench.ask(msgspec.structs.replace(ORDER, model="n", path="/b"))
    bench.finish()
    check_answers(bench, *jobs)
    assert bench.items(Rewind)
    assert found
    assert max(found) <= taken - SLOT


def test_rows_of_all_models_of_a_client_share_its_budget() -> None:
    bench = bounded(4.1)
    bench.load(msgspec.structs.replace(ORDER, model="n", path="/b"))
    jobs = [msgspec.structs.replace(job(n, 100, 400), model="mn"[n % 2]) for n in range(1, 7)]
    bench.submit(*jobs)
    bench.finish()
    check_answers(bench, *jobs)
    first = [log.first_at or 0.0 for _, log in sorted(bench.jobs.items())]
    for earlier, later in pairwise(first):
        assert earlier < later + 0.01, "the first come is the first served"


def test_choices_of_one_prompt_are_read_once() -> None:
    bench = bounded(4 * 2)
    jobs = [job(number, 300, 20, family=5) for number in (1, 2, 3, 4)]
    bench.submit(*jobs)
    bench.finish()
    check_answers(bench, *jobs)
    [rows] = {span.rows for work in bench.items(Read) for span in work.spans}
    assert rows == (1, 2, 3, 4)


def test_choices_for_which_there_is_no_room_wait() -> None:
    """Their text takes 2.2 slots, and each of their rows 2."""
    bench = bounded(7)
    jobs = [job(number, 300, 20, family=5) for number in (1, 2, 3, 4)]
    bench.submit(*jobs)
    bench.finish()
    check_answers(bench, *jobs)
    assert {span.rows for work in bench.items(Read) for span in work.spans} == {(1, 2, 3), (4,)}
    assert not bench.items(Rewind), "nobody is read whose rows have no room"


def test_arrays_grow_by_less_where_memory_is_short() -> None:
    def slots(budget: float) -> int:
        bench = bounded(budget)
        bench.submit(*(job(number, 100, 40) for number in range(1, 6)))
        bench.finish()
        rooms = [group for work in bench.items(Decode) for group in work.groups or ()]
        return max(room.slots for room in rooms)

    assert slots(40) == 8
    assert slots(6.5) == 5


def test_the_statistics_have_preemptions_and_bytes() -> None:
    bench = bounded(4.1)
    bench.submit(job(1, 100, 600), job(2, 100, 600), job(3, 100, 4))
    while not bench.items(Rewind):
        bench.round()
    number = bench.ask(MakeReport())
    bench.round()
    report = bench.answers[1, number]
    assert report.budget == int(4.1 * SLOT)
    numbers = report.models["m"]
    assert numbers["preemptions"] >= 1
    assert numbers["row_bytes"] % SLOT == 0
    assert numbers["row_bytes"] > 0
    assert prompt(1)
    bench.finish()


@pytest.mark.parametrize(("part", "left"), [(0.9, 4), (0.7, 3), (0.5, 2), (0.38, 1)])
def test_where_the_budget_shrinks_as_many_of_the_oldest_rows_stay_as_fit(
    part: float, left: int
) -> None:
    bench = bounded(40)
    jobs = [job(number, 200, 40) for number in range(1, 6)]
    bench.submit(*jobs)
    bench.rounds(20)
    bench.send(Budget(int(part * bench.runner.text(1).bytes)))
    bench.round()
    [rewound] = bench.items(Rewind)
    assert sorted(rewound.rows) == list(range(left + 1, 6))
    bench.finish()
    check_answers(bench, *jobs)


def test_a_row_that_was_lost_is_tried_where_nothing_else_fits() -> None:
    device = FaultyDevice(lambda work: isinstance(work, Decode), memory=True, text=NOTHING_KEPT)
    bench = make(device)
    bench.send(Budget(int(2.1 * SLOT)))
    bench.submit(job(1, 100, 100))
    bench.finish()
    check_answers(bench, job(1, 100, 100))
    assert len(bench.items(Rewind)) == 1, "it is not preempted while it is tried"


@pytest.mark.parametrize("slots", [4.1, 4.6, 5.1, 6.1])
def test_rows_on_trial_join_the_others_within_the_budget(slots: float) -> None:
    steps = count()
    device = FaultyDevice(
        lambda work: isinstance(work, Decode) and next(steps) == 20, text=NOTHING_KEPT
    )
    bench = make(device)
    bench.send(Budget(int(slots * SLOT)))
    jobs = [job(number, 100, 100) for number in (1, 2, 3)]
    bench.submit(*jobs)
    bench.finish()
    check_answers(bench, *jobs)
    assert len(bench.items(Rewind)) == 1, "only the fault has taken KV caches"


@pytest.mark.parametrize("slots", [4, 40, 400])
def test_prompts_that_wait_for_a_place_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    bench = bounded(slots, max_rows=16)
    counted: list[Row] = []
    real = RowMemory.count_candidate

    def note(memory: RowMemory, row: Row, *more: Any) -> int:
        counted.append(row)
        return real(memory, row, *more)

    monkeypatch.setattr(RowMemory, "count_candidate", note)
    bench.submit(*(job(number, 100 + number % 7, 40) for number in range(1, 200)))
    bench.rounds(5)
    assert counted, "those that have a place are counted"
    assert len(counted) <= 5 * 2 * 16
