"""Schedules of loads and attachments: what a round brings on, and how long its slices are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.engine.events import Attached, Loaded
from mlxsrv.engine.orders import Ask, Attach, Load, Open
from mlxsrv.engine.outcomes import AttachStep, EmbedFacts, Fault, LoadStep, Outcome, Refusal
from mlxsrv.engine.plans import AttachSlice, LoadSlice
from mlxsrv.engine.scheduling.load_schedule import LoadSchedule
from mlxsrv.engine.scheduling.scheduler import Received, Scheduler

MIB = 1024 * 1024
LOADED = LoadStep(loaded=Loaded("m", True, True, 1), embed=EmbedFacts(slices=True))
ATTACHED = AttachStep(attached=Attached(7, 1))


def load(path: str = "/a", max_gap: float = 0.2) -> Load:
    return Load(model="m", path=path, max_rows=4, prefill_chunk=64, max_gap=max_gap)


def attach(number: int = 7) -> Attach:
    return Attach("m", number, "/sae", 1)


def outcome(
    done: LoadStep | AttachStep | None, seconds: float = 0.1, fault: str | None = None
) -> Outcome:
    return Outcome(5.0, 5.0 + seconds, done, None if fault is None else Fault(fault))


def models(schedule: LoadSchedule) -> list[int]:
    """The models that a round loads."""
    return [work.model for work in schedule.plan() if isinstance(work, LoadSlice)]


def next_limit(schedule: LoadSchedule, read: int, seconds: float) -> int:
    """The bytes of a load's next slice, after one that has read so many in this time."""
    [work] = schedule.plan()
    assert schedule.note_outcome(work, outcome(LoadStep(bytes=read), seconds)) is None
    [work] = schedule.plan()
    assert isinstance(work, LoadSlice)
    return work.limit


@pytest.mark.parametrize(
    ("read", "seconds", "expected"),
    [
        (16 * MIB, 0.1, 16 * MIB),
        (16 * MIB, 0.2, 8 * MIB),
        (16 * MIB, 0.08, 20 * MIB),
        (16 * MIB, 0.001, 32 * MIB),  # at most doubled
        (16 * MIB, 0.0, 32 * MIB),
        (16 * MIB, 100.0, MIB),  # the least
        (40 * MIB, 0.1, 32 * MIB),  # one array was larger than the slice
        (0, 3.0, 16 * MIB),  # nothing was read, so nothing is learnt
    ],
)
def test_a_slice_takes_half_a_gap(read: int, seconds: float, expected: int) -> None:
    schedule = LoadSchedule()
    schedule.start(load(max_gap=0.2), 1, 10)
    assert next_limit(schedule, read, seconds) == pytest.approx(expected, rel=1e-6)


def test_slices_grow_to_the_most_there_is() -> None:
    schedule = LoadSchedule()
    schedule.start(load(), 1, 10)
    limits = [next_limit(schedule, MIB, 1e-6) for _ in range(6)]
    assert limits == [size * MIB for size in (32, 64, 128, 256, 256, 256)]


def test_each_load_learns_for_itself() -> None:
    schedule = LoadSchedule()
    schedule.start(load("/a"), 1, 10)
    schedule.start(load("/b"), 2, 11)
    items = schedule.plan()
    for work, seconds in zip(items, (0.1, 0.4), strict=True):
        schedule.note_outcome(work, outcome(LoadStep(bytes=16 * MIB), seconds))
    limits = [work.limit for work in schedule.plan() if isinstance(work, LoadSlice)]
    assert limits == pytest.approx([16 * MIB, 4 * MIB], rel=1e-6)


def test_the_order_goes_with_the_first_slice() -> None:
    schedule = LoadSchedule()
    first, second = load(), attach()
    schedule.start(first, 1, 10)
    schedule.start(second, 2, 11)
    assert schedule.plan() == [
        LoadSlice(model=1, limit=16 * MIB, order=first),
        AttachSlice(model=2, number=1, order=second),
    ]
    assert schedule.plan() == [LoadSlice(model=1, limit=16 * MIB), AttachSlice(model=2, number=1)]


def test_attachments_to_which_two_clients_gave_one_number_end_both() -> None:
    schedule = LoadSchedule()
    schedule.start(attach(7), 1, 10)
    schedule.start(attach(7), 2, 11)
    items = schedule.plan()
    assert [work.model for work in items] == [1, 2]
    settled = [schedule.note_outcome(work, outcome(ATTACHED)) for work in items]
    assert settled == [(10, 1, attach(7), ATTACHED), (11, 2, attach(7), ATTACHED)]
    assert schedule.empty


def test_a_model_has_its_name_from_the_start() -> None:
    scheduler = Scheduler()
    scheduler.plan([Received(1, Open())])
    [work] = scheduler.plan([Received(1, Ask(10, load()))]).items
    assert scheduler.name(work.model) == "m"
    scheduler.settle(work, outcome(LOADED))
    assert scheduler.name(work.model) == "m"
    assert scheduler.name(work.model + 1) == ""


def test_loads_of_one_folder_come_one_after_the_other() -> None:
    schedule = LoadSchedule()
    for model, path in ((1, "/a"), (2, "/b"), (3, "/a"), (4, "/a")):
        schedule.start(load(path), model, model)
    assert models(schedule) == [1, 2]
    one, _ = schedule.plan()
    assert schedule.note_outcome(one, outcome(LOADED)) is not None
    assert models(schedule) == [2, 3]
    schedule.abandon(3)
    assert models(schedule) == [2, 4]


def test_what_is_over_answers_its_question() -> None:
    schedule = LoadSchedule()
    schedule.start(load(), 1, 10)
    schedule.start(attach(), 2, 11)
    loading, attaching = schedule.plan()
    assert schedule.note_outcome(loading, outcome(LoadStep(bytes=5))) is None
    assert schedule.note_outcome(attaching, outcome(AttachStep())) is None
    assert schedule.note_outcome(loading, outcome(LOADED)) == (10, 1, load(), LOADED)
    assert not schedule.empty
    assert schedule.note_outcome(attaching, outcome(ATTACHED)) == (11, 2, attach(), ATTACHED)
    assert schedule.plan() == []


@pytest.mark.parametrize("kind", ["refusal", "fault"])
def test_what_fails_is_over(kind: str) -> None:
    schedule = LoadSchedule()
    schedule.start(load(), 1, 10)
    schedule.start(attach(), 2, 11)
    reasons = []
    for work in schedule.plan():
        refusal = Refusal("model not loaded", "damaged")
        step = LoadStep(refusal=refusal) if work.model == 1 else AttachStep(refusal=refusal)
        failed = outcome(step) if kind == "refusal" else outcome(None, fault="damaged")
        finished = schedule.note_outcome(work, failed)
        assert finished is not None
        assert finished.step.refusal is not None
        reasons.append((finished.step.refusal.kind, finished.step.refusal.reason))
    attachment = "model not loaded" if kind == "refusal" else "engine failed"
    assert reasons == [("model not loaded", "damaged"), (attachment, "damaged")]
    assert schedule.empty


def test_what_is_under_way_of_a_model_that_goes_is_given_up() -> None:
    schedule = LoadSchedule()
    schedule.start(load(), 1, 10)
    schedule.start(attach(7), 2, 11)
    schedule.start(attach(8), 2, 12)
    schedule.start(attach(9), 3, 13)
    planned = schedule.plan()
    assert schedule.abandon(4) == []
    [given_up] = schedule.abandon(1)
    assert (given_up.question, given_up.step.refusal) == (
        10,
        Refusal("model not loaded", "it was unloaded before it was there"),
    )
    gone = schedule.abandon(2)
    assert [finished.question for finished in gone] == [11, 12]
    assert {finished.step.refusal for finished in gone} == {
        Refusal("model not loaded", "its model was unloaded")
    }
    # What they were doing in this round says nothing any more.
    settled = [
        schedule.note_outcome(work, outcome(LOADED if isinstance(work, LoadSlice) else ATTACHED))
        for work in planned
    ]
    assert settled[:3] == [None] * 3
    assert settled[3] == (13, 3, attach(9), ATTACHED)
    assert schedule.empty


TASKS = st.lists(
    st.tuples(st.sampled_from(["/a", "/b", "attach"]), st.integers(1, 5), st.booleans()),
    min_size=1,
    max_size=8,
)


@given(TASKS)
def test_every_task_is_over_once_and_none_waits_but_for_its_folder(
    tasks: Sequence[tuple[str, int, bool]],
) -> None:
    """A task of n slices is over after n rounds, and those of the loads of its folder that were
    there before it."""
    schedule = LoadSchedule()
    left: dict[int, int] = {}  # slices, by question
    for number, (path, slices, _) in enumerate(tasks):
        left[number] = slices
        if path == "attach":
            schedule.start(attach(number), number, number)
        else:
            schedule.start(load(path), number, number)
    bounds = {
        number: slices
        + sum(n for other, n, _ in tasks[:number] if other == path and path != "attach")
        for number, (path, slices, _) in enumerate(tasks)
    }
    over: dict[int, int] = {}  # rounds, by question
    for round in range(1, 1 + sum(left.values())):
        items = schedule.plan()
        folders = [tasks[work.model][0] for work in items if isinstance(work, LoadSlice)]
        assert len(folders) == len(set(folders))
        for work in items:
            left[work.model] -= 1
            ended = not left[work.model]
            finished = schedule.note_outcome(
                work, outcome(_step(work, ended, tasks[work.model][2]))
            )
            assert ended == (finished is not None)
            if finished is not None:
                assert finished.question not in over
                over[finished.question] = round
        if schedule.empty:
            break
    assert over == bounds


def _step(work: LoadSlice | AttachSlice, ended: bool, well: bool) -> LoadStep | AttachStep:
    refusal = Refusal("engine failed", "no") if ended and not well else None
    if isinstance(work, LoadSlice):
        return LOADED if ended and well else LoadStep(bytes=MIB, refusal=refusal)
    return ATTACHED if ended and well else AttachStep(refusal=refusal)
