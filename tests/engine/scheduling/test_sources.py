"""Sources: a cached prompt is moved to its row, and others begin with a copy of what rows hold."""

from __future__ import annotations

import msgspec
import pytest

from mlxsrv.engine.events import KVCost, PromptRead
from mlxsrv.engine.plans import Decode, Forget, Read, Span, WorkItem
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.scheduling import MODEL, STEERED, Bench, FaultyDevice, job, make, prompt

HEAD = prompt(200)


def opened(bench: Bench, number: int) -> Span:
    """The first span of a job's prompt."""
    spans = [span for work in bench.items(Read) for span in work.spans]
    return next(span for span in spans if number in span.rows and span.opens)


def kept(bench: Bench) -> int:
    return bench.runner.text(MODEL).kept_bytes


def entries(bench: Bench) -> int:
    return len(bench.runner.text(MODEL)._kept)


def answered(bench: Bench, number: int) -> tuple[int, ...]:
    return (*bench.job(number).order.prompt, *bench.job(number).tokens)


def test_the_only_row_that_goes_on_from_a_prompt_takes_it() -> None:
    bench = make()
    bench.submit(job(1, 0, prompt=HEAD))
    bench.finish()
    assert kept(bench) == FACTS.kv_bytes(204)
    bench.submit(job(2, 0, prompt=answered(bench, 1) + prompt(20, 2), max_tokens=9))
    bench.rounds(3)
    assert opened(bench, 2).moves
    assert bench.job(2).read == PromptRead(2, 204, bench.job(2).read.seconds)  # type: ignore[union-attr]
    assert kept(bench) == 0, "while the row has it"
    bench.finish()
    assert kept(bench) == FACTS.kv_bytes(204 + 20 + 9), "once"


def test_what_other_chats_ask_stays_for_them() -> None:
    """A prompt of another chat shares the beginning only, so it has a copy."""
    bench = make()
    bench.submit(job(1, 0, prompt=HEAD + prompt(100, 2)))
    bench.finish()
    bench.submit(job(2, 0, prompt=HEAD + prompt(50, 3)))
    bench.finish()
    assert opened(bench, 2) == msgspec.structs.replace(
        opened(bench, 2), source=opened(bench, 2).source, moves=False, begin=200
    )
    assert entries(bench) == 2


@pytest.mark.parametrize("lost", [0, 1, 4, 5, 30])
def test_an_answer_that_is_not_taken_up_goes_with_the_prompt(lost: int) -> None:
    """Behind the last tokens of the prompt, which may open thoughts that the next turn lacks."""
    bench = make()
    bench.submit(job(1, 0, prompt=HEAD, max_tokens=50))
    bench.finish()
    bench.submit(job(2, 0, prompt=HEAD[: 200 - lost] + prompt(50, 3)))
    bench.finish()
    assert opened(bench, 2).moves is (lost <= 4)
    assert opened(bench, 2).begin == 200 - lost


def test_of_several_that_wait_for_a_prompt_the_last_takes_it() -> None:
    bench = make(prefill_chunk=512)
    bench.submit(job(1, 0, prompt=HEAD))
    bench.finish()
    bench.submit(*(job(n, 0, prompt=HEAD + prompt(30, n), max_tokens=9) for n in (2, 3, 4)))
    bench.rounds(2)
    spans = [opened(bench, number) for number in (2, 3, 4)]
    assert [span.moves for span in spans] == [False, False, True]
    assert {span.source for span in spans} == {spans[0].source}
    assert all(span.begin == 200 for span in spans)
    bench.finish()


def test_a_row_that_runs_lends_its_prompt() -> None:
    bench = make()
    bench.submit(job(1, 0, prompt=HEAD + prompt(9, 2), max_tokens=60))
    bench.rounds(10)
    assert kept(bench) == 0
    bench.submit(job(2, 0, prompt=HEAD + prompt(30, 3)))
    bench.submit(job(3, 0, prompt=HEAD + prompt(30, 4), steering=STEERED))
    bench.finish()
    assert (opened(bench, 2).from_row, opened(bench, 2).begin) == (1, 200)
    assert (opened(bench, 3).from_row, opened(bench, 3).begin) == (None, 0), "steered"


def test_a_text_that_is_half_read_lends_what_is_read() -> None:
    bench = make()
    bench.submit(job(1, 0, prompt=HEAD + prompt(500, 2)))
    bench.rounds(4)
    bench.submit(job(2, 0, prompt=HEAD[:150] + prompt(9, 3)))
    bench.submit(job(3, 0, prompt=HEAD[:150] + prompt(9, 4), steering=STEERED))
    bench.finish()
    first = opened(bench, 2)
    assert first.from_row == 1
    assert 64 <= first.begin <= 150
    assert opened(bench, 3).from_row is None, "steered"


def test_no_row_lends_what_cannot_be_cut_back() -> None:
    for costs in ((KVCost(64, window=10_000),), (KVCost(0, fixed=100),)):
        bench = make(FakeDevice(msgspec.structs.replace(FACTS, cuts=False, kv_costs=costs)))
        bench.submit(job(1, 0, prompt=HEAD, max_tokens=60))
        bench.rounds(6)
        bench.submit(job(2, 0, prompt=HEAD + prompt(30, 3)))
        bench.finish()
        assert opened(bench, 2).from_row is None
        assert not any(span.moves for work in bench.items(Read) for span in work.spans)
        assert opened(bench, 2).source is not None


@pytest.mark.parametrize("guilty", [False, True])
def test_a_source_row_that_is_lost_in_the_same_round_costs_a_second_reading(guilty: bool) -> None:
    """Its step fails after the round was planned. Both rows end well, unless it was alone in it."""

    def fails(work: WorkItem) -> bool:
        return isinstance(work, Decode) and work.suspect is None and armed

    armed = False
    bench = make(FaultyDevice(fails))
    bench.submit(job(1, 0, prompt=HEAD, max_tokens=40), job(9, 5, 2 if guilty else 60))
    bench.rounds(9)
    armed = True
    bench.submit(job(2, 0, prompt=HEAD + prompt(30, 3), max_tokens=5))
    bench.round()
    row = bench.scheduler._models[MODEL].rows._book.rows[2]
    bench.finish()
    assert opened(bench, 2).from_row == 1, "the first attempt"
    assert [each.explained for each in row.incidents] == [True], "it does not count against the row"
    assert (bench.job(1).failed is not None) == guilty
    assert bench.job(2).failed is None
    assert (len(bench.job(1).tokens) == 40) != guilty
    assert len(bench.job(2).tokens) == 5


def test_a_prompt_that_fails_behind_what_a_row_holds_ends_soon() -> None:
    device = FaultyDevice(lambda w: isinstance(w, Read) and w.spans[0].rows == (2,), times=999)
    bench = make(device)
    bench.submit(job(1, 0, prompt=HEAD, max_tokens=200))
    bench.rounds(9)
    bench.submit(job(2, 0, prompt=HEAD + prompt(30, 3)))
    bench.rounds(5)
    assert opened(bench, 2).from_row == 1
    assert bench.job(2).failed is not None
    bench.finish()
    assert len(bench.job(1).tokens) == 200


def test_nobody_goes_on_from_a_suspect_whose_next_step_may_lose_what_it_holds() -> None:
    bench = make(FaultyDevice(lambda work: isinstance(work, Decode) and armed))
    armed = False
    bench.submit(job(1, 0, prompt=HEAD, max_tokens=40), job(9, 5, 60))
    bench.rounds(9)
    armed = True
    while not any(work.suspect == 1 for work in bench.items(Decode)):
        bench.round()
    bench.submit(job(2, 0, prompt=HEAD + prompt(30, 3)))
    bench.round()
    assert opened(bench, 2).from_row is None
    bench.finish()


def test_a_slice_that_fails_loses_what_was_lent_to_it_and_nothing_else() -> None:
    def fails(work: WorkItem) -> bool:
        return isinstance(work, Read) and any(span.moves for span in work.spans)

    bench = make(FaultyDevice(fails))
    bench.submit(job(1, 0, prompt=HEAD))
    bench.finish()
    bench.submit(job(2, 0, prompt=HEAD + prompt(30, 3)))
    bench.finish()
    assert bench.job(2).failed is None
    assert len(bench.job(2).tokens) == 4
    assert bench.items(Forget), "the runner has nothing of it"
    assert entries(bench) == 1


def test_a_row_that_is_cancelled_before_it_has_read_leaves_what_it_was_lent() -> None:
    bench = make()
    bench.submit(job(1, 0, prompt=HEAD))
    bench.finish()
    bench.submit(job(2, 0, prompt=HEAD + prompt(500, 3)))
    bench.rounds(2)
    assert opened(bench, 2).moves
    bench.cancel(2)
    bench.finish()
    assert kept(bench) >= FACTS.kv_bytes(200)
    assert bench.runner.empty


def test_prompts_that_draw_nothing_are_kept() -> None:
    bench = make()
    bench.submit(job(1, 0, prompt=HEAD, max_tokens=0, scores=0))
    bench.finish()
    assert kept(bench) == FACTS.kv_bytes(199)


def test_bytes_that_are_lent_count_once() -> None:
    """Either as a kept prompt's or as the row's."""
    bench = make()
    schedule = bench.scheduler._models[MODEL].rows
    assert schedule is not None

    def check(plan: object) -> None:
        assert schedule._index.bytes <= kept(bench)

    bench.checks.append(check)
    text = HEAD
    for turn in range(1, 6):
        bench.submit(job(turn, 0, prompt=text))
        bench.rounds(2)
        if turn > 1:
            assert schedule._index.bytes == 0
        bench.finish()
        text = answered(bench, turn) + prompt(20, turn + 5)
        assert schedule._index.bytes == kept(bench) == FACTS.kv_bytes(len(text) - 20)


def test_faults_of_memory_leave_nothing_lent_behind() -> None:
    def fails(work: WorkItem) -> bool:
        return isinstance(work, Read) and any(span.from_row is not None for span in work.spans)

    bench = make(FaultyDevice(fails, memory=True))
    bench.submit(job(1, 0, prompt=HEAD, max_tokens=60))
    bench.rounds(10)
    bench.submit(job(2, 0, prompt=HEAD + prompt(30, 3)))
    bench.finish()
    assert opened(bench, 2).from_row == 1, "the first attempt"
    assert {len(bench.job(number).tokens) for number in (1, 2)} == {60, 4}
    assert bench.runner.empty


def test_a_chat_that_comes_back_is_worth_its_uses_though_its_prompt_is_lent() -> None:
    """Prompts that come once do not push it out."""
    size = 300
    bytes = FACTS.kv_bytes(size) * 4
    bench = make(FakeDevice(msgspec.structs.replace(FACTS, prompt_cache_bytes=bytes)))
    text, number = HEAD, 0
    for turn in range(1, 6):
        bench.submit(job(turn, 0, prompt=text))
        bench.finish()
        text = answered(bench, turn) + prompt(9, turn + 5)
    for number in range(10, 30):
        bench.submit(job(number, size - 4))
        bench.finish()
    bench.submit(job(99, 0, prompt=text))
    bench.finish()
    assert opened(bench, 99).begin == len(text) - 9
