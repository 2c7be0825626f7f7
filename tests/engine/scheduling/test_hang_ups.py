"""Tokens that were read of a prompt stay when its client leaves; a new request goes on there."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from mlxsrv.engine.events import KVCost
from mlxsrv.engine.orders import Budget
from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.plans import Decode, Read, Rewind, Span, WorkItem
from mlxsrv.engine.scheduling.groups import STEP
from mlxsrv.generation.parameters import Sampling
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.scheduling import CHUNK, Bench, FaultyDevice, job, make, prompt

SIZE = 500
RECURRENT = msgspec.structs.replace(FACTS, cuts=False, kv_costs=(KVCost(16), KVCost(0, fixed=1000)))
ALONE = msgspec.structs.replace(FACTS, batched=False)
KINDS = {"attention": FACTS, "recurrent": RECURRENT, "not batched": ALONE}
EACH_KIND = pytest.mark.parametrize("facts", KINDS.values(), ids=KINDS)

LEAVES = 1
AGAIN = 99


class Situation:
    """A bench on which job `LEAVES` has come to some state.

    Attributes:
        text: the prompt, and perhaps the answer, with which its client asks again.
        read: how many tokens of it were read.
    """

    def __init__(self, bench: Bench, read: int, text: tuple[int, ...] = prompt(SIZE)) -> None:
        self.bench = bench
        self.read = read
        self.text = text


def rounds_until(bench: Bench, holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        bench.round()
    raise AssertionError("it does not come to that")


def spans_of(bench: Bench, number: int) -> list[Span]:
    return [span for work in bench.items(Read) for span in work.spans if number in span.rows]


def is_read(bench: Bench, *, joins: bool) -> bool:
    """Whether the prompt was read to its end in the last round, and the row joins or is to."""
    last = spans_of(bench, LEAVES)[-1:]
    return [(span.end, span.joins is not None) for span in last] == [(SIZE - 1, joins)]


def half_read(facts: TextFacts) -> Situation:
    bench = make(FakeDevice(facts))
    bench.submit(job(LEAVES, SIZE))
    bench.rounds(3)
    return Situation(bench, 3 * CHUNK)


def half_read_and_overtaken(facts: TextFacts) -> Situation:
    bench = make(FakeDevice(facts))
    bench.submit(job(LEAVES, SIZE))
    bench.rounds(2)
    bench.submit(job(2, 30))
    rounds_until(bench, lambda: bool(spans_of(bench, 2)))
    return Situation(bench, spans_of(bench, LEAVES)[-1].end)


def half_read_for_two(facts: TextFacts) -> Situation:
    """Both of them leave."""
    bench = make(FakeDevice(facts))
    bench.submit(job(LEAVES, SIZE), job(2, SIZE, family=LEAVES))
    bench.rounds(3)
    bench.cancel(2)
    return Situation(bench, 3 * CHUNK)


def half_read_again(facts: TextFacts) -> Situation:
    """It began with what another one had left."""
    bench = half_read(facts).bench
    bench.cancel(LEAVES)
    bench.submit(job(2, SIZE, family=LEAVES))
    bench.rounds(2)
    del bench.jobs[1, LEAVES]
    bench.cancel(2)
    bench.round()
    bench.submit(job(LEAVES, SIZE))
    bench.round()
    return Situation(bench, 6 * CHUNK)


def read_and_about_to_join(facts: TextFacts) -> Situation:
    """Its prompt is read, and it joins the stream beside it in the next round."""
    bench = make(FakeDevice(facts))
    bench.submit(job(2, 20, 200))
    bench.rounds(2)
    bench.submit(job(LEAVES, SIZE))
    rounds_until(bench, lambda: is_read(bench, joins=False))
    return Situation(bench, SIZE - 1)


def fresh(facts: TextFacts) -> Situation:
    bench = make(FakeDevice(facts))
    bench.submit(job(LEAVES, SIZE))
    rounds_until(bench, lambda: is_read(bench, joins=True))
    return Situation(bench, SIZE - 1)


def fresh_of_a_padded_group(facts: TextFacts) -> Situation:
    bench = make(FakeDevice(facts), prefill_chunk=400)
    bench.submit(job(LEAVES, 100), job(2, 90))
    bench.round()
    [work] = bench.items(Read)
    assert len(work.spans) == (2 if facts.batched else 1)
    if not facts.batched:  # the shorter one came first
        bench.cancel(2)
        bench.round()
    return Situation(bench, 99, prompt(100))


def decoding(facts: TextFacts) -> Situation:
    bench = make(FakeDevice(facts))
    bench.submit(job(LEAVES, SIZE, 100))
    rounds_until(bench, lambda: len(bench.job(LEAVES).tokens) == 5)
    text = (*prompt(SIZE), *bench.job(LEAVES).tokens)
    return Situation(bench, len(text), (*text, 7, 8, 9))


def fail_a_step(facts: TextFacts) -> Bench:
    """Its fifth step has failed for want of memory, so all of it is to be read again."""
    steps: list[Decode] = []

    def is_fifth(work: WorkItem) -> bool:
        steps.extend([work] if isinstance(work, Decode) else [])
        return isinstance(work, Decode) and len(steps) == 5

    bench = make(FaultyDevice(is_fifth, memory=True, text=facts))
    bench.submit(job(LEAVES, SIZE, 100))
    rounds_until(bench, lambda: len(steps) == 5)
    return bench


def half_read_after_a_fault(facts: TextFacts) -> Situation:
    bench = fail_a_step(facts)
    bench.rounds(3)
    [span] = spans_of(bench, LEAVES)[-1:]
    assert span.end < SIZE / 2
    return Situation(bench, span.end)


def on_trial_after_a_fault(facts: TextFacts) -> Situation:
    bench = fail_a_step(facts)
    drawn = len(bench.job(LEAVES).tokens)
    rounds_until(bench, lambda: len(bench.job(LEAVES).tokens) == drawn + 1)
    assert bench.items(Decode)[-1].suspect == LEAVES
    text = (*prompt(SIZE), *bench.job(LEAVES).tokens)
    return Situation(bench, len(text) - 1, (*text, 7, 8, 9))


def read_for_nothing_more(facts: TextFacts) -> Situation:
    """No token is drawn: it was to be read only."""
    bench = make(FakeDevice(facts))
    bench.submit(job(LEAVES, SIZE, 0))
    bench.finish()
    return Situation(bench, SIZE - 1)


def scored(facts: TextFacts) -> Situation:
    bench = make(FakeDevice(facts))
    bench.submit(job(LEAVES, SIZE, 0, scores=1))
    bench.rounds(3)
    return Situation(bench, 3 * CHUNK)


SITUATIONS = (
    half_read,
    half_read_and_overtaken,
    half_read_for_two,
    half_read_again,
    read_and_about_to_join,
    fresh,
    fresh_of_a_padded_group,
    decoding,
    half_read_after_a_fault,
    on_trial_after_a_fault,
    read_for_nothing_more,
    scored,
)


@pytest.mark.parametrize(
    ("come_to", "facts"),
    [
        pytest.param(come_to, facts, id=f"{come_to.__name__}, {name}")
        for come_to in SITUATIONS
        for name, facts in KINDS.items()
        # Where rows run one at a time, no prompt is read beside a stream.
        if facts.batched or come_to is not read_and_about_to_join
    ],
)
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "later"])
def test_who_leaves_and_asks_again_goes_on_from_what_was_read(
    come_to: Callable[[TextFacts], Situation], facts: TextFacts, at_once: bool
) -> None:
    situation = come_to(facts)
    bench = situation.bench
    bench.cancel(LEAVES)
    if not at_once:
        bench.round()
    bench.submit(job(AGAIN, 0, prompt=situation.text))
    bench.finish()
    read = bench.job(AGAIN).read
    assert read is not None
    assert read.cached == situation.read


@EACH_KIND
def test_a_prompt_that_waits_goes_on_from_what_another_client_left(facts: TextFacts) -> None:
    bench = make(FakeDevice(facts), max_rows=1)
    bench.submit(job(LEAVES, SIZE), job(AGAIN, SIZE, family=LEAVES, sampling=Sampling(seed=1)))
    bench.rounds(3)
    bench.cancel(LEAVES)
    bench.finish()
    read = bench.job(AGAIN).read
    assert read is not None
    assert read.cached == 3 * CHUNK


def test_what_was_read_again_after_a_preemption_stays() -> None:
    bench = make()
    bench.send(Budget(FACTS.kv_bytes(4 * STEP + 30)))
    bench.submit(job(2, 100, 700), job(LEAVES, 100, 700))
    rounds_until(bench, lambda: any(LEAVES in work.rows for work in bench.items(Rewind)))
    text = (*prompt(100), *bench.job(LEAVES).tokens)
    bench.cancel(2)  # so that there is room again
    begun = len(spans_of(bench, LEAVES))
    rounds_until(bench, lambda: len(spans_of(bench, LEAVES)) == begun + 2)
    read = spans_of(bench, LEAVES)[-1].end
    assert 0 < read < len(text) - 1, "it is half read"
    bench.cancel(LEAVES)
    bench.round()
    bench.submit(job(AGAIN, 0, prompt=text))
    bench.finish()
    again = bench.job(AGAIN).read
    assert again is not None
    assert again.cached == read


def test_what_is_kept_already_is_not_kept_again() -> None:
    bench = make(FakeDevice(RECURRENT))
    for number in range(1, 5):
        bench.submit(job(number, SIZE, 0, family=LEAVES))
        bench.finish()
    keeps = [span.keep for work in bench.items(Read) for span in work.spans if span.keep]
    assert [keep.tokens for keep in keeps if keep.tokens == SIZE - 1] == [SIZE - 1]
