"""Tokens of their own texts are proposed to rows, where that pays; without a model."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsrv.engine.orders import Job, Load
from mlxsrv.engine.outcomes import Decoded, Fault, Outcome, RowFailure
from mlxsrv.engine.plans import Decode, WorkItem
from mlxsrv.engine.scheduling.prompt_index import as_tokens
from mlxsrv.engine.scheduling.prompt_lookup import AT_ONCE
from mlxsrv.engine.scheduling.proposers import Lookup
from mlxsrv.engine.scheduling.row import Incident, Row, RowState
from mlxsrv.engine.scheduling.speculation import Speculation
from mlxsrv.engine.scheduling.speculation_controller import SpeculationController
from mlxsrv.generation.parameters import Bans, Sampling
from tests.support.effort import examples
from tests.support.fake_device import FACTS, FakeDevice, Pass
from tests.support.scheduling import Bench

FILE = tuple(range(10, 60))


class Eager(SpeculationController):
    """Finds proposals worth it from the start, with three proposals."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, ...]] = []
        self.known: list[bool] = []

    def affords(self, unread: int) -> bool:
        return True

    def choose(self, found: Sequence[int], *, known: bool = True) -> int:
        self.known.append(known)
        return min(3, max(found))

    def saw_speculative_step(self, *args: Any, **more: Any) -> None:
        self.steps.append(args)

    def saw_inputs(self, *args: Any) -> None:
        self.steps.append(("inputs", *args))

    def saw_delay(self, seconds: float) -> None:
        self.steps.append(("delay", seconds))


def make_row(number: int, *tail: int, max_tokens: int = 99, **more: Any) -> Row:
    """A row that is decoded, with a prompt of FILE and a tail."""
    prompt = (*FILE, *tail)
    more.setdefault("end_tokens", frozenset())
    more.setdefault("sampling", Sampling())
    row = Row(Job(number, "m", prompt, max_tokens, **more), as_tokens(prompt))
    for state in (RowState.WAITING, RowState.PREFILLING, RowState.FRESH, RowState.DECODING):
        row.enter(state)
    return row


def reported(**fields: Any) -> Outcome:
    return Outcome(0.0, 3.0, Decoded(waited=1.0, **fields))


def test_a_guess_is_the_next_input_and_what_followed_it_before() -> None:
    rows = [make_row(1, 1, 12, 13, 14), make_row(2, 99), make_row(3, 30, 31, 32, 33, 34)]
    assert Speculation(Lookup(), Eager).propose(rows) == ((15, 16, 17), (), (35, 36, 37, 38))


def test_nothing_is_planned_where_no_text_repeats_itself() -> None:
    assert Speculation(Lookup(), Eager).propose([make_row(1, 99), make_row(2, 98)]) == ()


def test_behind_a_speculative_step_the_next_input_is_known() -> None:
    rows, controller = [make_row(1, 1, 12, 13, 14, 15), make_row(2, 99)], Eager()
    speculation = Speculation(Lookup(), lambda: controller)
    assert speculation.propose(rows) == ((16, 17, 18, 19), ())
    for token in [16, 17, 18, 19]:
        rows[0].draw(token)
    rows[1].draw(5)
    speculation.saw_step(reported(accepted={1: 3}, following={1: 20, 2: 6}), None, plain=True)
    assert speculation.propose(rows) == ((20, 21, 22, 23), ())
    for token in [20, 21, 22]:
        rows[0].draw(token)
    rows[1].draw(6)
    speculation.saw_step(reported(accepted={1: 2}, following={1: 40, 2: 11}), None, plain=True)
    assert speculation.propose(rows) == (), "it goes another way than before"
    rows[0].draw(40)
    rows[1].draw(11)
    speculation.saw_step(reported(), None, plain=True)
    assert speculation.propose(rows) == ()
    rows[0].draw(41)
    rows[1].draw(12)
    speculation.saw_step(reported(), None, plain=True)
    rows[0].draw(42)
    speculation.saw_step(reported(), None, plain=True)
    assert speculation.propose(rows) == ((43, 44, 45), ())
    assert controller.known == [False, True, False]


def test_what_a_speculative_step_has_won_is_counted_for_all_rows() -> None:
    controllers: list[Eager] = []

    def make() -> Eager:
        controllers.append(Eager())
        return controllers[-1]

    speculation = Speculation(Lookup(), make)
    rows = [make_row(1, 1, 12, 13, 14, 15), make_row(2, 99), make_row(3, 1, 30, 31, 32, 33)]
    speculation.propose(rows)
    speculation.saw_step(reported(accepted={1: 3, 3: 0}, following={}), None, plain=True)
    speculation.propose(rows)
    speculation.saw_step(reported(accepted={}), None, plain=True)
    speculation.propose(rows)
    speculation.saw_step(Outcome(3.0, 4.5, Decoded(waited=3.2)), 3.0, plain=True)
    speculation.propose(rows[:1])
    speculation.saw_step(reported(accepted={1: 1}), None, plain=True)
    # Inputs that were right, and those that were guessed; what was proposed to rows whose input was
    # right and what held, rows, seconds. Behind a speculative step a plain step has no time of its
    # own. A wrong guess costs what the step takes longer than others, so all its time is counted.
    assert [each.steps for each in controllers] == [
        [
            ("inputs", 2, 2),
            ([3, 3], [3, 0], 3, 2.0),
            ("inputs", 0, 2),
            ("inputs", 0, 2),
            ("delay", 1.5),
        ],
        [("inputs", 1, 1), ([3], [1], 1, 2.0)],
    ]
    assert speculation.counters() == {"speculating": 0, "drafted": 9, "accepted": 4}


def test_a_speculative_step_behind_another_takes_all_the_time_since() -> None:
    """Behind a plain step what is left of that step is not its own."""
    controller = Eager()
    speculation, row = Speculation(Lookup(), lambda: controller), make_row(1, 1, 12, 13, 14, 15)
    speculation.propose([row])
    speculation.saw_step(
        Outcome(1.0, 3.0, Decoded(waited=1.8, accepted={1: 3}, following={1: 20})), None, plain=True
    )
    for token in [16, 17, 18, 19]:
        row.draw(token)
    speculation.propose([row])
    speculation.saw_step(
        Outcome(3.4, 4.5, Decoded(waited=3.5, accepted={1: 3}, following={1: 24})), 3.0, plain=True
    )
    for token in [20, 21, 22, 23]:
        row.draw(token)
    speculation.propose([row])
    speculation.saw_step(
        Outcome(5.0, 6.0, Decoded(waited=5.5, accepted={1: 3}, following={1: 28})), None, plain=True
    )
    seconds = [each[-1] for each in controller.steps if each[0] != "inputs"]
    assert seconds == pytest.approx([1.2, 1.5, 0.5])


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": 0},
        {"sampling": Sampling(presence_penalty=1.0)},
        {"sampling": Sampling(logit_bias=((7, 1.0),))},
        {"bans": Bans(min_tokens=5)},
    ],
    ids=["logprobs", "penalty", "bias", "bans"],
)
def test_plain_steps_while_a_row_needs_a_look_at_each_token(more: dict[str, Any]) -> None:
    rows = [make_row(1, 1, 12, 13, 14), make_row(2, 1, 12, 13, 14, **more)]
    assert Speculation(Lookup(), Eager).propose(rows) == ()
    assert Speculation(Lookup(), Eager).propose(rows[:1])


def test_plain_steps_while_a_constraint_binds_the_next_token() -> None:
    rows = [make_row(1, 1, 12, 13, 14), make_row(2, 99)]
    speculation = Speculation(Lookup(), Eager)
    speculation.saw_step(reported(bound=(2,)), None, plain=True)
    assert speculation.propose(rows) == ()
    speculation.saw_step(reported(), None, plain=True)
    assert speculation.propose(rows) == ((15, 16, 17), ())


def test_plain_steps_for_a_row_that_was_in_a_fault() -> None:
    rows = [make_row(1, 1, 12, 13, 14)]
    rows[0].incidents.append(Incident(Fault("why")))
    assert Speculation(Lookup(), Eager).propose(rows) == ()


@pytest.mark.parametrize(
    ("max_tokens", "guess"), [(4, (15, 16, 17)), (3, (15, 16, 17)), (2, (15, 16)), (1, ())]
)
def test_no_more_is_proposed_than_a_row_may_draw(max_tokens: int, guess: tuple[int, ...]) -> None:
    row = make_row(1, 1, 12, 13, 14, max_tokens=max_tokens)
    assert Speculation(Lookup(), Eager).propose([row]) == ((guess,) if guess else ())


def test_nothing_is_proposed_behind_an_end_token() -> None:
    row = make_row(1, 1, 12, 13, 14, end_tokens=frozenset({15}))
    assert Speculation(Lookup(), Eager).propose([row]) == ()


def test_texts_are_looked_at_a_part_at_a_time() -> None:
    size = AT_ONCE * 3 // 4
    prompt = (*range(100, 100 + size), 100, 101, 102, 103)
    rows = [make_row(number) for number in (1, 2)]
    for row in rows:
        row.job = Job(row.id, "m", prompt, 99, frozenset(), Sampling())
        row.prompt = as_tokens(prompt)
    speculation = Speculation(Lookup(), Eager)
    assert speculation.propose(rows) == ((104, 105, 106, 107), ())
    assert speculation.propose(rows) == ((104, 105, 106, 107), (104, 105, 106, 107))


class Repeating(FakeDevice):
    """Answers that repeat themselves, with slips; all else by chance."""

    def __init__(
        self, seed: int, slips: float, faults: float, waking: float, padding: int = 1 << 20
    ) -> None:
        super().__init__(msgspec.structs.replace(FACTS, lookup=True, padding=padding))
        self._seed, self._slips, self._waking = seed, slips, waking
        self.faults = faults
        self._random = Random(seed)

    def _happens(self, rate: float, *what: object) -> bool:
        return Random(repr((self._seed, *what))).random() < rate

    def time(self, work: WorkItem, passes: Sequence[Pass]) -> float:
        return 0.001 * self._random.uniform(0.9, 1.1) if passes else 0.0

    def draw(self, job: Job, place: int) -> int:
        slips = self._happens(self._slips, job.id, place)
        return super().draw(job, place if slips else place % (4 + job.id % 5))

    def fail(self, work: WorkItem) -> Fault | None:
        if isinstance(work, Decode) and work.proposals and self._random.random() < self.faults:
            return Fault("by chance")
        return None

    def tells(self, work: Decode) -> bool:
        return self._random.random() < 0.5

    def binds(self, job: Job, place: int) -> bool:
        return self._happens(self._waking, "binds", job.id, place // 6)

    def stop(self, job: Job, place: int) -> RowFailure | None:
        stops = self._happens(self._waking / 100, "stop", job.id, place)
        return RowFailure(job.id, "the grammar cannot go on") if stops else None


@settings(max_examples=examples(100))
@given(
    seed=st.integers(0, 1 << 30),
    slips=st.sampled_from([0.0, 0.05, 0.3]),
    faults=st.sampled_from([0.0, 0.3]),
    waking=st.sampled_from([0.0, 0.1]),
    padding=st.sampled_from([1 << 20, 0]),
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=9),
)
def test_whatever_is_proposed_each_row_gets_its_own_tokens(
    seed: int, slips: float, faults: float, waking: float, padding: int, lengths: list[int]
) -> None:
    device, dice = Repeating(seed, slips, faults, waking, padding), Random(seed)
    bench = Bench(device)
    bench.load(Load(model="m", path="/a", max_rows=4, prefill_chunk=64, max_gap=1.0))
    for number, length in enumerate(lengths, start=1):
        ends = frozenset({device.draw(Job(number, "m", (), 1, frozenset(), Sampling()), 40)})
        prompt = FILE[: dice.randint(1, 40)]
        end_tokens = ends if dice.random() < 0.2 else frozenset[int]()
        bench.submit(Job(number, "m", prompt, length, end_tokens, Sampling()))
        for _ in range(dice.choice([0, 0, 3, 30])):
            bench.round()
        if dice.random() < 0.1:
            bench.cancel(dice.randint(1, number))
    bench.finish()
    for number, length in enumerate(lengths, start=1):
        log = bench.job(number)
        job = log.order
        assert isinstance(job, Job)
        assert log.tokens == [device.draw(job, place) for place in range(len(log.tokens))]
        if log.failed is not None:
            assert waking, "a fault of a speculative step has ended a row"
        elif not log.cancelled:
            assert len(log.tokens) == length or log.tokens[-1] in job.end_tokens
    assert bench.runner.empty


def test_lookup_goes_on_behind_a_fault() -> None:
    device = Repeating(seed=1, slips=0.0, faults=1.0, waking=0.0)
    bench = Bench(device)
    bench.load(Load(model="m", path="/a", max_rows=4, prefill_chunk=64, max_gap=1.0))

    def answer(*numbers: int) -> int:
        """Return how many speculative steps were planned for these jobs."""
        before = len([work for work in bench.items(Decode) if work.proposals])
        bench.submit(*(Job(n, "m", FILE, 200, frozenset(), Sampling()) for n in numbers))
        bench.finish()
        assert all(len(bench.job(number).tokens) == 200 for number in numbers)
        return len([work for work in bench.items(Decode) if work.proposals]) - before

    assert answer(1, 2) == 1, "rows that were in a fault are decoded plainly"
    device.faults = 0.0
    assert answer(3, 4) == 0, "a fault is as bad as a step that was slow"
    assert sum(answer(n, n + 1) for n in range(5, 15, 2)) > 10
