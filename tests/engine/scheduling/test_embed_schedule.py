"""Schedules of texts, without a model: how long slices are, whose turn it is, and how jobs end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.engine.events import Embedded, Event, Failed, Progress
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import Admitted, EmbedFacts, Fault, Outcome, RowFailure, TextsRead
from mlxsrv.engine.plans import Admit, EmbedSlice, FreedRow, Release, TextSpan
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.scheduling.text_schedule import TextSchedule
from tests.support.embedding import make_schedule, take_events

MODEL = 3
CHUNK = 64
DECODER = EmbedFacts(slices=True)
ENCODER = EmbedFacts(slices=False, longest=512)
VECTORS = np.zeros((1, 2), np.float32)


def order(number: int, *lengths: int, firsts: tuple[int, ...] = ()) -> Job:
    return Job(number, "m", texts=tuple((1,) * length for length in lengths), firsts=firsts)


def make(facts: EmbedFacts = DECODER, chunk: int = CHUNK, max_gap: float = 1.0) -> TextSchedule:
    return make_schedule(facts, Pace(chunk, max_gap), MODEL)


def padded(slice: EmbedSlice) -> int:
    """The tokens of a pass, padding included."""
    return len(slice.texts) * max(text.end - text.begin for text in slice.texts)


class FakeRunner:
    """Does what a runner would, without a model: keeps track of jobs and of what was read.

    Args:
        speed: tokens a second.
    """

    def __init__(self, schedule: TextSchedule, speed: float = 1000.0) -> None:
        self.schedule = schedule
        self.jobs: dict[int, Job] = {}
        self.read: dict[tuple[int, int], int] = {}  # tokens, by job and text
        self.speed = speed
        self.now = 0.0

    def change(self) -> None:
        """Do the work items that come before a slice."""
        self.schedule.budget.begin_round()
        for work in self.schedule.plan_rows():
            match work:
                case Admit():
                    assert not any(job.id in self.jobs for job in work.jobs)
                    self.jobs |= {job.id: job for job in work.jobs}
                case Release():
                    for freed in work.rows:
                        del self.jobs[freed.row]
            assert work.model == MODEL
            self.schedule.settle(work, Outcome(self.now, self.now))
        assert take_events(self.schedule) == []

    def is_idle(self) -> bool:
        return self.schedule.idle

    def plan(self, *, decoding: bool = False, beside: bool = False) -> EmbedSlice:
        self.change()
        slice = self.schedule.embeddings.plan(decoding=decoding, beside=beside)
        assert slice is not None
        return slice

    def finish(self, slice: EmbedSlice, fault: str | None = None) -> list[Event]:
        began = self.now
        self.now += padded(slice) / self.speed
        if fault is not None:
            self.schedule.settle(slice, Outcome(began, self.now, None, Fault(fault)))
            return take_events(self.schedule)
        for text in slice.texts:
            assert self.read.get((text.job, text.index), 0) == text.begin
            assert text.begin < text.end <= len(self.jobs[text.job].texts[text.index])
            self.read[text.job, text.index] = text.end
        vectors = {}
        for job in slice.completes:
            texts = self.jobs[job].texts
            assert [self.read[job, i] for i in range(len(texts))] == [*map(len, texts)]
            vectors[job] = VECTORS
        done = TextsRead(padded(slice), vectors)
        self.schedule.settle(slice, Outcome(began, self.now, done))
        return take_events(self.schedule)

    def step(
        self, *, decoding: bool = False, beside: bool = False, fault: str | None = None
    ) -> tuple[EmbedSlice, list[Event]]:
        slice = self.plan(decoding=decoding, beside=beside)
        return slice, self.finish(slice, fault)


def ended(events: Iterable[Event]) -> list[int]:
    return [event.job for event in events if isinstance(event, (Embedded, Failed))]


# How long slices are.


def test_nothing_is_planned_without_texts() -> None:
    schedule = make()
    assert (schedule.idle, schedule.embeddings.pending) == (True, False)
    assert schedule.embeddings.plan(decoding=False, beside=False) is None
    assert schedule.plan_rows() == []
    assert schedule.memory.book.count_texts() == 0


def test_a_slice_grows_to_a_quarter_of_a_second_where_nothing_streams() -> None:
    runner = FakeRunner(make(), speed=2000)
    runner.schedule.submit(order(1, *[20] * 100))
    sizes = [padded(runner.step()[0]) for _ in range(3)]
    assert sizes == [60, 500, 500]


def test_a_slice_has_an_end_however_fast_the_model() -> None:
    runner = FakeRunner(make(chunk=1024), speed=1e9)
    runner.schedule.submit(order(1, *[1000] * 40, 30_000, 10))
    slices = [runner.step()[0] for _ in range(8)]
    assert max(map(padded, slices)) == 16_000
    assert max(text.end - text.begin for slice in slices for text in slice.texts) == 4096


@pytest.mark.parametrize(
    ("decoding", "beside", "expected"), [(True, False, 64), (False, True, 16), (True, True, 64)]
)
def test_a_slice_whose_speed_is_unknown(decoding: bool, beside: bool, expected: int) -> None:
    """As much as prompts may have; beside other models' streams alone, the least."""
    runner = FakeRunner(make())
    runner.schedule.submit(order(1, *[100] * 3))
    assert padded(runner.step(decoding=decoding, beside=beside)[0]) == expected


def test_slices_beside_other_streams_take_a_part_of_their_gap() -> None:
    """One slice may fill the gap of 0.04 s; where there are many, each takes a quarter of it."""
    runner = FakeRunner(make(chunk=4096, max_gap=0.04), speed=4000)
    runner.schedule.submit(order(1, *[100]))
    runner.step()
    runner.schedule.submit(order(2, *[10] * 16))
    assert padded(runner.step(beside=True)[0]) == 160
    runner.schedule.submit(order(3, *[10] * 17))
    assert padded(runner.step(beside=True)[0]) == 40


def test_slices_beside_own_streams_leave_time_for_steps() -> None:
    """The step and the pass take 0.02 s of a gap of 0.05 s; many slices take a step's time each."""
    pace = Pace(4096, 0.05)
    runner = FakeRunner(make_schedule(DECODER, pace, MODEL), speed=4000)
    runner.schedule.submit(order(1, 100))
    runner.step()
    pace.saw_step(None)
    pace.saw_step(0.01)
    runner.schedule.submit(order(2, *[10] * 12))
    assert padded(runner.step(decoding=True)[0]) == 120
    runner.schedule.submit(order(3, *[10] * 13))
    assert padded(runner.step(decoding=True)[0]) == 40


def test_a_long_text_is_read_in_parts_that_take_turns() -> None:
    runner = FakeRunner(make())
    runner.schedule.submit(order(1, 150))
    runner.schedule.submit(order(2, 40, 60))
    slices = [runner.step(decoding=True)[0] for _ in range(5)]
    assert [slice.texts for slice in slices] == [
        (TextSpan(1, 0, 0, 64),),
        (TextSpan(2, 1, 0, 60),),
        (TextSpan(1, 0, 64, 128),),
        (TextSpan(2, 0, 0, 40),),
        (TextSpan(1, 0, 128, 150),),
    ]
    assert [slice.completes for slice in slices] == [(), (), (), (2,), (1,)]


def test_an_encoder_reads_any_text_whole() -> None:
    runner = FakeRunner(make(ENCODER))
    runner.schedule.submit(order(1, 500, 3))
    assert runner.step(decoding=True)[0].texts == (TextSpan(1, 0, 0, 500),)


# What a model cannot do.


@pytest.mark.parametrize(
    ("facts", "asked", "why"),
    [
        (DECODER, order(1), "no tokens"),
        (DECODER, order(1, 3, 0), "no tokens"),
        (ENCODER, order(1, 3, 513), "513 tokens is too long: this model reads 512"),
        (DECODER, order(1, 3, firsts=(1,)), "does not judge pairs"),
        (EmbedFacts(slices=False, labels=2), order(1, 3), "makes no vectors"),
    ],
)
def test_what_a_model_cannot_do_is_refused(facts: EmbedFacts, asked: Job, why: str) -> None:
    schedule = make(facts)
    with pytest.raises(ValueError, match=why):
        schedule.submit(asked)
    assert schedule.idle
    assert schedule.plan_rows() == []


# Ends.


def test_an_id_is_given_to_one_job_at_a_time() -> None:
    runner = FakeRunner(make())
    runner.schedule.submit(order(1, 5))
    with pytest.raises(ValueError, match="of this id"):
        runner.schedule.submit(order(1, 7))
    assert ended(runner.step()[1]) == [1]
    runner.schedule.submit(order(1, 7))


def test_a_job_ends_with_its_last_text() -> None:
    runner = FakeRunner(make())
    runner.schedule.submit(order(1, 60, 50))
    runner.schedule.submit(order(2, 60))
    assert not runner.is_idle()
    assert runner.step(decoding=True)[1] == [Progress(2), Progress(1)]
    _, events = runner.step(decoding=True)
    assert ended(events) == [2]
    assert events[1:] == [Progress(1)]
    slice, [event] = runner.step(decoding=True)
    assert slice.completes == (1,)
    assert isinstance(event, Embedded)
    assert event.vectors is VECTORS
    runner.change()
    assert runner.is_idle()
    assert not runner.jobs


def test_a_fault_fails_the_jobs_of_its_slice_only() -> None:
    runner = FakeRunner(make())
    runner.schedule.submit(order(1, 11))
    runner.schedule.submit(order(2, 40, 25))
    runner.schedule.submit(order(3, 10, 30))
    slice, events = runner.step(fault="no room")
    assert slice.texts == (TextSpan(3, 0, 0, 10), TextSpan(1, 0, 0, 11))
    assert events == [Failed(3, "no room"), Failed(1, "no room")]
    runner.change()
    assert set(runner.jobs) == {2}


def test_a_fault_in_a_part_ends_the_long_text() -> None:
    runner = FakeRunner(make())
    runner.schedule.submit(order(1, 150))
    runner.step(decoding=True)
    assert ended(runner.step(fault="lost", decoding=True)[1]) == [1]
    assert not runner.is_idle(), "the runner has its texts and its KV cache yet"
    assert runner.schedule.plan_rows() == [Release(model=MODEL, rows=(FreedRow(1),))]
    assert runner.is_idle()
    runner.jobs.clear()
    runner.schedule.submit(order(2, 200))
    assert runner.step(decoding=True)[0].texts == (TextSpan(2, 0, 0, 64),)


def test_a_job_that_cannot_be_admitted_fails_alone() -> None:
    schedule = make()
    schedule.submit(order(1, 5))
    schedule.submit(order(2, 5))
    schedule.budget.begin_round()
    [admit] = schedule.plan_rows()
    schedule.settle(admit, Outcome(0, 0, Admitted((RowFailure(1, "no"),))))
    assert take_events(schedule) == [Failed(1, "no")]
    slice = schedule.embeddings.plan(decoding=False, beside=False)
    assert slice is not None
    assert {text.job for text in slice.texts} == {2}


def test_a_job_that_the_runner_has_not_seen_is_not_released() -> None:
    schedule = make()
    schedule.submit(order(1, 5))
    schedule.cancel([1, 2])
    schedule.budget.begin_round()
    assert schedule.plan_rows() == []
    assert schedule.idle


def test_a_model_that_goes_fails_all_its_jobs() -> None:
    runner = FakeRunner(make())
    for number in (1, 2):
        runner.schedule.submit(order(number, 100, 30))
    runner.step(decoding=True)
    assert runner.schedule.fail("gone") == [Failed(1, "gone"), Failed(2, "gone")]
    assert runner.schedule.plan_rows() == []


# Whatever comes.

LENGTHS = st.lists(st.integers(1, 3 * CHUNK), min_size=1, max_size=6)
STREAMS = st.fixed_dictionaries({"decoding": st.booleans(), "beside": st.booleans()})


@given(
    jobs=st.lists(LENGTHS, min_size=1, max_size=6),
    slices=st.booleans(),
    rounds=st.lists(
        st.tuples(STREAMS, st.sampled_from(["", "", "", "", "fault", "cancel"])),
        min_size=1,
        max_size=20,
    ),
    speed=st.sampled_from([10.0, 1000.0, 1e6]),
)
def test_every_job_ends_once_in_slices_within_their_limit(
    jobs: Sequence[Sequence[int]], slices: bool, rounds: Sequence[Any], speed: float
) -> None:
    schedule = make(EmbedFacts(slices=slices))
    runner = FakeRunner(schedule, speed)
    waiting = [order(i, *lengths) for i, lengths in enumerate(jobs)]
    over: list[int] = []
    number = 0
    while waiting or not schedule.idle:
        streams, what = rounds[number % len(rounds)]
        if what and number >= 5 * len(rounds):
            what = ""  # enough went wrong
        if waiting and (number % 2 == 0 or schedule.idle):
            schedule.submit(waiting.pop())
        if what == "cancel" and schedule.embeddings.pending:
            gone = next(iter(schedule.memory.book.texts.jobs))
            schedule.cancel([gone])
            over.append(gone)
        number += 1
        runner.change()
        if not schedule.embeddings.pending:
            continue
        slice = runner.plan(**streams)
        most = CHUNK if any(streams.values()) else max(CHUNK, min(speed / 4, 16 * 1024))
        assert len(slice.texts) == 1 or padded(slice) <= most
        if slices:
            assert all(text.end - text.begin <= most for text in slice.texts)
        over += ended(runner.finish(slice, "lost" if what == "fault" else None))
    assert sorted(over) == [*range(len(jobs))]
    assert not runner.jobs
    # Each slice reads a text to its end, or as much of one as may be: at least 8 tokens.
    assert number <= 2 * sum(ceil(length / 8) for job in jobs for length in job) + 2 * len(jobs)


@given(
    own=LENGTHS,
    before=st.lists(LENGTHS, max_size=4),
    after=st.lists(LENGTHS, min_size=1, max_size=8),
)
def test_no_job_starves(
    own: Sequence[int], before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> None:
    """A job beside at most five others, however many come behind it: each of its texts waits for
    one turn of each of the others. A turn takes a slice, or all slices of one long text, and every
    second slice may be another long text's."""
    schedule = make()
    runner = FakeRunner(schedule)
    for number, lengths in enumerate(before):
        schedule.submit(order(number, *lengths))
    schedule.submit(order(1000, *own))
    others = 5
    longest = max(ceil(length / CHUNK) for lengths in (*before, *after) for length in lengths)
    slices = sum(ceil(length / CHUNK) for length in own)
    bound = 2 * (slices + len(own) * others * longest)
    rows = schedule.memory.book.rows
    for number in range(bound):
        while len(rows) < 1 + others:
            name = 2000 + len(runner.read) + number * 100 + len(rows)
            schedule.submit(order(name, *after[name % len(after)]))
        if 1000 in ended(runner.step(decoding=True)[1]):
            return
    raise AssertionError(f"not done after {bound} slices")
