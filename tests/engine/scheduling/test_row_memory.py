"""The memory of rows: what is counted is what the runner has, and what it will have."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from mlxsrv.engine.orders import Budget
from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.plans import Decode, Read, Rewind
from mlxsrv.engine.scheduling.groups import STEP
from mlxsrv.engine.scheduling.row_memory import RowMemory
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.scheduling import MODEL, ORDER, Bench, FaultyDevice, job, make, prompt

SLOT = STEP * FACTS.kv_bytes(1)
NOTHING_KEPT = msgspec.structs.replace(FACTS, prompt_cache_bytes=0)


def memory(bench: Bench) -> RowMemory:
    return bench.scheduler._models[MODEL].rows.memory


def failing_step(number: int, facts: TextFacts = NOTHING_KEPT) -> FaultyDevice:
    """A device whose step of this number fails; for want of memory where only one row is in it, so
    that it does not end."""
    steps = count()
    return FaultyDevice(
        lambda work: isinstance(work, Decode) and next(steps) == number,
        memory=not facts.batched,
        text=facts,
    )


@pytest.mark.parametrize("batched", [True, False])
def test_what_is_counted_is_there(batched: bool) -> None:
    """When texts are read, when rows go over to arrays, and when rows are tried one by one."""
    bench = make(failing_step(20, msgspec.structs.replace(NOTHING_KEPT, batched=batched)))
    bench.submit(*(job(number, 5 * number, 200) for number in range(1, 4)))
    read = tried = 0
    for _ in range(60):
        plan = bench.round()
        taken = bench.runner.text(MODEL).bytes
        assert taken <= memory(bench).held < taken + SLOT / 2, plan
        slices = [work for work in plan.items if isinstance(work, Read)]
        read += any(span.begin < span.end for work in slices for span in work.spans)
        tried += any(isinstance(work, Decode) and work.suspect for work in plan.items)
    rows = 3 if batched else 1
    assert read == 1 + rows, "each row was read again"
    assert tried == 2 * rows, "and tried"


def test_nothing_is_counted_of_rows_that_have_ended() -> None:
    bench = make(FakeDevice(NOTHING_KEPT))
    for number, tokens in ((1, 0), (2, 5)):
        bench.submit(job(number, 30, tokens))
        while not bench.items(Read):
            bench.round()
        assert bool(memory(bench).held) == bool(bench.runner.text(MODEL).bytes) == bool(tokens)
        bench.cancel(number)
        bench.finish()
        assert not memory(bench).held
        bench.runner.items.clear()


def test_a_text_that_begins_with_a_part_of_a_cached_prompt_may_take_as_much_as_that() -> None:
    bench = make()
    bench.submit(job(1, 900, family=3))
    bench.finish()
    kept = bench.runner.text(MODEL).kept_bytes
    bench.submit(job(2, 0, prompt=(*prompt(300, 3), 7, 8)))
    while bench.items(Read)[-1].spans[0].joins != (2,):
        bench.round()
    assert bench.items(Read)[-1].spans[0].begin == 300
    assert memory(bench).reading_bytes >= kept > 3 * SLOT


def arranged(bench: Bench) -> list[list[tuple[int, ...]]]:
    """The rows of each group, of each step before which they changed."""
    return [[group.rows for group in work.groups] for work in bench.items(Decode) if work.groups]


def lose_two(slots: float) -> Bench:
    """Two long rows lose their KV caches in their first step together. They are tried in turn."""
    device = FaultyDevice(
        lambda work: isinstance(work, Decode) and arranged(bench)[-1:] == [[(1, 2)]],
        text=NOTHING_KEPT,
    )
    bench = make(device)
    bench.send(Budget(int(slots * SLOT)))
    bench.submit(job(1, 990, 60), job(2, 990, 60))
    while not bench.items(Rewind):
        bench.round()
    return bench


def check_end(bench: Bench) -> None:
    bench.finish()
    assert all(len(log.tokens) == 60 for log in bench.jobs.values())
    rewound = [work.rows for work in bench.items(Rewind)]
    assert rewound == [(1, 2)], "only the fault has taken KV caches"


@pytest.mark.parametrize("slots", [10, 12, 13.5])
def test_a_lost_row_waits_until_its_text_fits_beside_those_that_it_joins(slots: float) -> None:
    check_end(lose_two(slots))


def test_a_row_that_comes_waits_until_a_suspect_fits_beside_all() -> None:
    bench = lose_two(14.5)
    while not any(work.suspect == 2 for work in bench.items(Decode)):
        bench.round()
    bench.submit(job(3, 20, 60))
    check_end(bench)


@pytest.mark.parametrize(("slots", "groups"), [(1000, [{1, 2}]), (9, [{1}, {2}])])
@pytest.mark.parametrize("first", [True, False])
def test_padding_takes_half_of_what_rows_leave_of_the_budget_at_most(
    slots: float, groups: list[set[int]], first: bool
) -> None:
    """Whether the budget comes before the model or behind it."""
    bench = Bench(FakeDevice(NOTHING_KEPT))
    budget = Budget(int(slots * SLOT))
    if first:
        bench.send(budget)
        bench.load(ORDER)
    else:
        bench.load(ORDER)
        bench.send(budget)
    bench.submit(job(1, 1000, 60), job(2, 20, 60))
    bench.finish()
    assert groups in [[{*rows} for rows in each] for each in arranged(bench)]
