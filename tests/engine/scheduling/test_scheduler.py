"""Situations that the scheduler decides, without a model: who is read, kept, and leaves.

Random orders and outcomes are tried in `test_scheduler_chances`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from mlxsrv.engine.events import Finished, KVCost, PromptRead, Token
from mlxsrv.engine.orders import (
    Watch,
)
from mlxsrv.engine.plans import (
    Decode,
    Forget,
    Read,
    Release,
)
from mlxsrv.generation.parameters import Steering
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.scheduling import (
    CHUNK,
    MODEL,
    STEERED,
    Bench,
    job,
    make,
    prompt,
    read_order,
)


def heads(bench: Bench) -> list[int]:
    """The job of each slice's first prompt."""
    return [work.spans[0].rows[0] for work in bench.items(Read)]


# Which prompt is read.


@pytest.mark.parametrize("ahead", [1, 2, 4, 7])
def test_a_short_prompt_waits_for_two_slices_whatever_is_ahead(ahead: int) -> None:
    bench = make()
    bench.submit(*(job(number, 600) for number in range(1, ahead + 1)))
    bench.rounds(3)
    bench.submit(job(99, 5))
    bench.rounds(4)
    assert bench.job(99).tokens
    bench.finish()
    assert read_order(bench) == [99, *range(1, ahead + 1)]


def test_the_oldest_has_every_second_slice() -> None:
    bench = make()
    bench.submit(job(1, 1000, 1))
    bench.round()
    for number in range(2, 40):  # one more comes with each slice
        bench.submit(job(number, 50, 1))
        bench.round()
        if bench.job(1).ended:
            break
    order = heads(bench)[1:]
    last = max(place for place, head in enumerate(order) if head == 1)
    assert all(1 in pair for pair in pairwise(order[: last + 1]))
    bench.finish()
    assert bench.job(1).rounds <= 2 * (1000 // CHUNK + 1) + 3


def test_long_prompts_are_read_one_after_the_other() -> None:
    bench = make()
    bench.submit(job(1, 500), job(2, 500), job(3, 500))
    bench.finish()
    order = heads(bench)
    assert order == sorted(order), "slices by turns make all as late as the last"


def test_of_equal_prompts_the_first_is_first() -> None:
    bench = make(max_rows=1)
    bench.submit(*(job(number, 30) for number in range(1, 6)))
    bench.finish()
    assert read_order(bench) == [1, 2, 3, 4, 5]


def test_short_prompts_share_a_slice_while_they_fit() -> None:
    bench = make()
    bench.submit(*(job(number, 16) for number in range(1, 7)))
    bench.round()
    [first] = bench.items(Read)
    assert [span.rows for span in first.spans] == [(1,), (2,), (3,), (4,)]
    bench.finish()
    assert len(bench.items(Read)) == 2


@pytest.mark.parametrize(
    ("facts", "expected"),
    [({"pads": False}, [[1, 3], [2, 4]]), ({"batched": False}, [[1], [2], [3], [4]])],
)
def test_prompts_share_a_slice_only_if_the_model_can(
    facts: dict[str, Any], expected: list[list[int]]
) -> None:
    bench = make(FakeDevice(msgspec.structs.replace(FACTS, **facts)))
    bench.submit(job(1, 10), job(2, 12), job(3, 10), job(4, 12))
    bench.finish()
    slices = [[row for span in work.spans for row in span.rows] for work in bench.items(Read)]
    assert slices == expected


def test_twins_share_one_reading() -> None:
    bench = make()
    bench.submit(*(job(number, 100, family=5) for number in range(1, 5)))
    bench.finish()
    assert all(span.rows == (1, 2, 3, 4) for work in bench.items(Read) for span in work.spans)
    assert sum(span.end - span.begin for w in bench.items(Read) for span in w.spans) == 99
    assert all(len(bench.job(number).tokens) == 4 for number in range(1, 5))


def test_twins_beyond_the_free_rows_wait() -> None:
    bench = make(max_rows=3)
    bench.submit(*(job(number, 40, number, family=5) for number in range(1, 6)))
    bench.finish()
    assert [work.spans[0].rows for work in bench.items(Read)] == [(1, 2, 3), (4,), (5,)]


def test_twins_do_not_take_the_place_of_an_older_prompt() -> None:
    """Shorter prompts are read first, but only as many as leave the longer one its row."""
    bench = make(max_rows=2)
    bench.submit(job(1, 3000, 2), *(job(number, 20, 200, family=5) for number in range(2, 5)))
    bench.finish()
    assert bench.job(1).end_round < bench.job(2).end_round


@pytest.mark.parametrize("steering", [None, STEERED])
def test_the_next_turn_of_a_chat_goes_on_from_the_kept_prompt(steering: Steering | None) -> None:
    bench = make()
    bench.submit(job(1, 200, 10, steering=steering))
    bench.finish()
    answer = bench.job(1).tokens
    tokens = (*prompt(200), *answer, 5, 6, 7)
    bench.submit(job(2, 0, prompt=tokens, steering=steering))
    bench.finish()
    found = bench.job(2).read
    assert found is not None
    # The last token of the answer was drawn, and not fed to the model when the row ended: it is.
    assert found.cached == 210


def test_a_prompt_that_is_steered_in_another_way_is_read_anew() -> None:
    bench = make()
    bench.submit(job(1, 200))
    bench.finish()
    bench.submit(job(2, 200, family=1, steering=STEERED))
    bench.finish()
    assert bench.job(2).read == PromptRead(2, 0)


def test_prompts_are_read_anew_while_activations_are_watched() -> None:
    bench = make()
    bench.submit(job(1, 200))
    bench.finish()
    bench.send(Watch("m", (), 3))
    bench.submit(job(2, 200, family=1))
    bench.finish()
    assert bench.job(2).read == PromptRead(2, 0)
    bench.send(Watch("m"))
    bench.round()
    bench.submit(job(3, 200, family=1))
    bench.finish()
    assert bench.job(3).read == PromptRead(3, 199)


@pytest.mark.parametrize("size", [64, 100, 128])
def test_a_system_message_is_kept_at_its_end(size: int) -> None:
    """Where KV caches cannot be cut back, prompts that begin alike have a slice end there."""
    facts = msgspec.structs.replace(FACTS, cuts=False, kv_costs=(KVCost(64), KVCost(0, fixed=9)))
    bench = make(FakeDevice(facts))
    system = prompt(size)
    bench.submit(job(1, 0, prompt=system + prompt(100, 2), checkpoints=(size,)))
    bench.finish()
    bench.submit(job(2, 0, prompt=system + prompt(100, 3), checkpoints=(size,)))
    bench.finish()
    assert bench.job(2).read == PromptRead(2, size)


def test_kept_prompts_are_forgotten_beyond_their_bytes() -> None:
    facts = msgspec.structs.replace(FACTS, prompt_cache_bytes=64 * 500)
    bench = make(FakeDevice(facts))
    for number in range(1, 6):
        bench.submit(job(number, 200, 1))
        bench.finish()
    assert bench.runner.text(MODEL).kept_bytes <= 64 * 500
    assert bench.items(Forget)


# Rows that leave.


def test_rows_are_free_before_the_next_step() -> None:
    bench = make()
    bench.submit(job(1, 5, 2), job(2, 5, 9))
    bench.finish()
    for plan in bench.plans:
        kinds = [type(work) for work in plan.items]
        if Release in kinds and Decode in kinds:
            assert kinds.index(Release) < kinds.index(Decode)
    [first, second] = bench.items(Release)
    assert [leave.row for leave in first.rows] == [1]
    assert [leave.row for leave in second.rows] == [2]


def test_rows_that_are_cancelled_together_leave_together() -> None:
    bench = make()
    bench.submit(*(job(number, 5, 50) for number in range(1, 6)))
    bench.rounds(4)
    bench.cancel(1, 3, 5)
    bench.finish()
    assert {leave.row for leave in bench.items(Release)[0].rows} == {1, 3, 5}
    assert len(bench.job(2).tokens) == len(bench.job(4).tokens) == 50


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 6, 9])
def test_a_job_can_be_cancelled_at_any_stage(rounds: int) -> None:
    bench = make()
    bench.submit(job(1, 150, 5), job(2, 150, 5, family=1), job(3, 20, 5))
    bench.rounds(rounds)
    bench.cancel(1)
    bench.finish()
    assert bench.job(2).tokens == [bench.runner.device.draw(job(2, 1), i) for i in range(5)]
    assert bench.runner.empty


@pytest.mark.parametrize("scores", [None, 2])
def test_a_job_ends_as_it_asks(scores: int | None) -> None:
    bench = make()
    bench.submit(job(1, 100, 0, scores=2), job(2, 100, 3, scores=scores))
    bench.finish()
    assert isinstance(bench.job(1).events[-1], Finished)
    last = bench.job(2).events[-1]
    assert isinstance(last, Token)
    assert last.finish == "length"


def test_an_end_token_ends_a_row() -> None:
    bench = make()
    third = FakeDevice().draw(job(1, 1), 2)
    bench.submit(job(1, 5, 50, end_tokens=frozenset([third])))
    bench.finish()
    assert bench.job(1).events[-1] == Token(1, third, "stop")
    assert len(bench.job(1).tokens) == 3
