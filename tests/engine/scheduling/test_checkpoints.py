"""Checkpoints: where KV caches that cannot be cut back are kept, and which of them go again."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.engine.events import KVCost
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import KeptPrompt
from mlxsrv.engine.plans import Keep, Read
from mlxsrv.engine.scheduling.checkpoints import (
    MOST_STEPS,
    STEP,
    WORTH,
    choose_checkpoints,
    widest_part,
)
from mlxsrv.engine.scheduling.prompt_index import LEAST, PromptIndex, as_tokens
from mlxsrv.generation.parameters import Sampling
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.scheduling import MODEL, Bench, make, prompt

RECURRENT = msgspec.structs.replace(
    FACTS,
    cuts=False,
    kv_costs=(KVCost(16), KVCost(0, fixed=1000)),
    prompt_cache_bytes=1 << 30,
)


@pytest.mark.parametrize(
    ("named", "cached", "last", "chosen"),
    [
        ((), 0, 1000, ()),
        ((100,), 0, 1000, (100,)),
        ((100,), 100, 1000, ()),
        ((100, 950), 100, 1000, (950,)),
        ((LEAST - 1,), 0, 1000, ()),
        ((LEAST,), 0, 1000, (LEAST,)),
        ((100, 100 + LEAST - 1, 300), 0, 1000, (100, 300)),
        ((999, 1000, 1001), 0, 1000, (999,)),
        ((), 0, 5000, (2048, 4096)),
        ((), 2050, 5000, (4096,)),
        ((), 0, 4100, (2048,)),
        ((2040,), 0, 5000, (2040, 4096)),
        ((3000,), 0, 5000, (2048, 3000, 4096)),
        ((), 0, 9 * STEP + 9, (4096, 8192, 12288, 16384)),
        ((), 16000, 9 * STEP + 9, (16384,)),
        ((), 0, 9 * STEP, tuple(range(STEP, 9 * STEP, STEP))),
    ],
)
def test_checkpoints_are_those_named_and_some_steps(
    named: tuple[int, ...], cached: int, last: int, chosen: tuple[int, ...]
) -> None:
    assert choose_checkpoints(named, cached, last, RECURRENT) == chosen


@given(
    named=st.lists(st.integers(1, 200_000), max_size=6),
    cached=st.integers(0, 100_000),
    more=st.integers(1, 100_000),
    memory=st.sampled_from([1 << 20, 1 << 24, 1 << 40]),
)
def test_checkpoints_are_few_apart_and_affordable(
    named: list[int], cached: int, more: int, memory: int
) -> None:
    facts = msgspec.structs.replace(RECURRENT, prompt_cache_bytes=memory)
    last = cached + more
    chosen = choose_checkpoints(named, cached, last, facts)
    assert all(cached < place < last for place in chosen)
    assert all(b - a >= LEAST for a, b in pairwise((cached, *chosen)))
    steps = [place for place in chosen if place not in named]
    assert len(steps) <= MOST_STEPS
    assert 4 * sum(map(facts.kv_bytes, steps)) <= memory
    # Whoever shares less than what is named reads at most what lies between two steps again.
    for place in named:
        if cached + LEAST <= place < last:
            assert any(place - LEAST < each <= place for each in chosen)


def test_a_widest_part() -> None:
    assert widest_part(10, ()) == 0
    assert widest_part(10, (20, 50, 70)) == 30


# The index.


@pytest.mark.parametrize("cuts", [True, False])
def test_an_answer_that_the_client_has_not_taken_up_is_outdated(cuts: bool) -> None:
    """Its tokens are others when it comes back, or its thoughts are gone."""
    index = PromptIndex(1 << 20, cuts=cuts)

    def put(tokens: list[int], asked: int) -> None:
        keep = index.promise(as_tokens(tokens), asked=asked)
        index.confirm([keep], [KeptPrompt(keep.entry, 10, cuts)])

    asked = [*range(100)]
    put([*asked, 500, 501, 502], 100)
    put([*asked, 600, 601, 602], 100)
    assert len(index) == 2, "two answers to one question"
    put([*asked, 500, 501, 700, 701], 104)
    assert index.find(as_tokens([*asked, 600, 601, 602, 9])).tokens == (100 if cuts else 0)
    assert index.find(as_tokens([*asked, 500, 501, 502, 9])).tokens == (102 if cuts else 0)
    put([*asked[:60], *range(800, 900)], 160)
    assert len(index) == 2, "another question"


# The schedule.


def marked(size: int, *checkpoints: int, number: int = 1, tail: int = 0, tokens: int = 9) -> Job:
    text = prompt(size)
    text = text[: size - 20] + prompt(20, tail + 3) if tail else text
    return Job(number, "m", text, tokens, frozenset(), Sampling(), checkpoints=checkpoints)


def keeps(bench: Bench) -> list[Keep]:
    return [span.keep for work in bench.items(Read) for span in work.spans if span.keep is not None]


@pytest.mark.parametrize("batched", [True, False])
def test_a_prompt_is_kept_at_its_checkpoints_and_at_its_end(batched: bool) -> None:
    bench = make(FakeDevice(msgspec.structs.replace(RECURRENT, batched=batched)))
    bench.submit(marked(600, 100, 400))
    bench.finish()
    assert [kept.tokens for kept in keeps(bench)] == [100, 400, 599]


def test_one_that_can_be_cut_back_in_the_end_needs_no_checkpoints() -> None:
    window = msgspec.structs.replace(RECURRENT, kv_costs=(KVCost(16, window=700),))
    for tokens, needed in ((50, False), (200, True)):
        bench = make(FakeDevice(window))
        bench.submit(marked(600, 100, tokens=tokens))
        bench.finish()
        assert (100 in [kept.tokens for kept in keeps(bench)]) is needed


def test_short_prompts_share_a_pass_unless_a_checkpoint_is_worth_more() -> None:
    bench = make(FakeDevice(RECURRENT), prefill_chunk=1024)
    for number in range(1, 4):
        bench.submit(marked(150, 140, number=number, tail=number))
    bench.finish()
    [read] = bench.items(Read)
    assert [span.keep.tokens for span in read.spans if span.keep] == [149] * 3
    bench = make(FakeDevice(RECURRENT), prefill_chunk=1024)
    for number in range(1, 4):
        bench.submit(marked(WORTH + 30, WORTH + 5, number=number, tail=number))
    bench.finish()
    assert {kept.tokens for kept in keeps(bench)} == {WORTH + 5, WORTH + 29}
    assert bench.runner.empty


def test_the_next_turn_reads_what_is_new() -> None:
    """The chat's template drops thoughts, so that its turns part before the end of a prompt. There
    is no room for all that is kept of it: what goes is of no use."""
    bound = 6 * RECURRENT.kv_bytes(1500)
    bench = make(FakeDevice(msgspec.structs.replace(RECURRENT, prompt_cache_bytes=bound)))
    text, reads = prompt(300), []
    for turn in range(1, 11):
        end = len(text)
        opened = text + prompt(3, 7)
        asked = Job(turn, "m", opened, 9, frozenset(), Sampling(), checkpoints=(100, end))
        bench.submit(asked)
        bench.finish()
        read = bench.job(turn).read
        assert read is not None
        reads.append(len(opened) - read.cached)
        text += prompt(100, turn + 20)
    assert reads == [303] + [103] * 9
    assert bench.runner.text(MODEL).kept_bytes <= bound
