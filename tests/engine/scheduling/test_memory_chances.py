"""Random jobs, budgets, answers and faults: the fake runner counts the bytes of all KV caches after
each work, and none may exceed the budget. Every job ends once, with its own tokens, and in time."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

from mlxsrv.engine.events import Finished, KVCost, Token
from mlxsrv.engine.orders import Budget, Job
from mlxsrv.engine.outcomes import EmbedFacts, TextFacts
from mlxsrv.engine.plans import Rewind
from mlxsrv.engine.scheduling.groups import STEP
from mlxsrv.generation.parameters import Sampling
from tests.support.chance_device import END, ChanceDevice, Rates, most_rounds, text_facts
from tests.support.effort import examples
from tests.support.fake_device import FACTS
from tests.support.scheduling import ORDER, Bench, JobLog

ACTIONS = ("submit", "submit", "submit", "follow", "embed", "cancel", "budget")
DECODER = EmbedFacts(
    slices=True, kv_costs=(KVCost(300),), hidden_bytes=8, token_bytes=300, score_bytes=1
)
ENCODER = EmbedFacts(slices=False, token_bytes=200, score_bytes=1)


class Crowd:
    """One client with two models, whose budget changes, and who answers after a while.

    Args:
        facts: of both models.
        slots: rows of STEP tokens that the budget has room for.
    """

    def __init__(self, facts: TextFacts, device: ChanceDevice, slots: float, max_rows: int) -> None:
        self.slot = facts.kv_bytes(STEP)
        self.bench = Bench(device)
        self.shrunk = 0
        self._number = 0
        self._answered = 0
        for name, path in (("m", "/a"), ("n", "/b")):
            order = msgspec.structs.replace(ORDER, model=name, path=path, max_rows=max_rows)
            self.bench.load(order)
        self.budget = int(slots * self.slot)
        self.bench.send(Budget(self.budget))

    def act(self, random: Random) -> None:
        action = random.choice(ACTIONS)
        note(action)
        getattr(self, f"_{action}")(random)

    def _submit(self, random: Random) -> None:
        family = Random(random.randint(0, 2)).choices(range(10, 90), k=1200)
        size = random.choice([1, 5, 30, 100, 200, 300, 600, 1100])
        prompt = (*family[: size - 1], random.randint(10, 12))
        tokens = random.choice([1, 3, 20, 100, 300])
        for _ in range(random.choice([1, 1, 2, 4])):
            self._send(Job(0, random.choice("mmn"), prompt, tokens, frozenset([END]), Sampling()))

    def _embed(self, random: Random) -> None:
        sizes = random.choices([5, 30, 70, 200, 600, 1500], k=random.choice([1, 1, 3, 20]))
        self._number += 1
        texts = tuple((5,) * size for size in sizes)
        self.bench.submit(Job(self._number, random.choice("mn"), texts=texts))

    def _follow(self, random: Random) -> None:
        """A chat goes on: a prompt and its answer begin the next prompt."""
        logs = list(self.bench.jobs.values())
        if logs and (order := (log := random.choice(logs)).order).prompt:
            prompt = (*order.prompt, *log.tokens, random.randint(10, 90))
            self._send(msgspec.structs.replace(order, prompt=prompt))

    def _send(self, job: Job) -> None:
        self._number += 1
        self.bench.submit(msgspec.structs.replace(job, id=self._number))

    def _cancel(self, random: Random) -> None:
        self.bench.cancel(random.randint(1, self._number + 1))

    def _budget(self, random: Random) -> None:
        budget = int(random.choice([1.5, 3, 5, 8, 20]) * self.slot)
        self.shrunk += budget < self.budget
        self.budget = budget
        self._answered = len(self.bench.shortages)
        self.bench.send(Budget(budget))

    def answer(self) -> bool:
        """Answer MemoryShort, if it was not: there is no more. Returns whether it was not."""
        reported = len(self.bench.shortages)
        if reported == self._answered:
            return False
        self._answered = reported
        self.bench.send(Budget(self.budget))
        return True


def check(crowd: Crowd, device: ChanceDevice) -> None:
    bench = crowd.bench
    rewound = Counter(row for work in bench.items(Rewind) for row in work.rows)
    logs = [bench.job(number) for number in range(1, len(bench.jobs) + 1)]
    for place, log in enumerate(logs):
        assert log.ended, f"{log.order.id} does not end"
        if log.order.texts:
            assert log.failed is None or log.failed.shortage is not None or device.faults
            continue
        drawn = [device.draw(log.order, n) for n in range(len(log.tokens))]
        assert log.tokens == drawn
        if log.failed is not None and log.failed.shortage is not None:
            assert log.failed.shortage.needed > log.failed.shortage.available
            assert not log.tokens
        elif log.failed is not None:
            assert device.faults, log.failed
        elif not log.cancelled and not isinstance(log.events[-1], Finished):
            last = log.events[-1]
            assert isinstance(last, Token)
            at_end = last.id == END or len(log.tokens) == log.order.max_tokens
            assert at_end or last.finish == "length"
        if not device.faults:  # rows that are lost in a fault are rewound as well
            check_preemptions(rewound[log.order.id], crowd.shrunk, logs[: place + 1])


def check_preemptions(preemptions: int, others: int, logs: list[JobLog]) -> None:
    """Between two preemptions of a row each older one draws the tokens of a growth step, or all
    that it has left; but so many `others` may cost another one: smaller budgets."""
    most = 1 + others
    for log in logs:
        if log.order.prompt:
            most += 1 + len(log.tokens) // STEP
    assert preemptions <= most


def most_rounds_with_budget(logs: list[JobLog], faults: int, rewound: int) -> int:
    """As without one, but each row may be read anew whenever it is preempted."""
    return most_rounds(logs, faults) * (1 + rewound) + 64


RATES = st.builds(
    Rates,
    fault=st.sampled_from([0.0, 0.0, 0.01, 0.1]),
    memory=st.sampled_from([0.0, 0.5, 1.0]),
    end=st.sampled_from([0.0, 0.02]),
    lost=st.sampled_from([0.0, 0.3]),
)


# Not shrunk: a script of fewer actions takes as long to read, and shrinking takes minutes.
@settings(max_examples=examples(80), deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    facts=text_facts(),
    embed=st.sampled_from([DECODER, ENCODER]),
    seed=st.integers(0, 1 << 30),
    rates=RATES,
    slots=st.sampled_from([1.2, 2.5, 4, 7, 12, 40, 150]),
    max_rows=st.integers(1, 8),
    patience=st.sampled_from([1, 5, 40]),
    script=st.lists(st.integers(0, 1 << 20), min_size=4, max_size=16),
)
def test_kv_caches_stay_within_the_budget(
    facts: TextFacts,
    embed: EmbedFacts,
    seed: int,
    rates: Rates,
    slots: float,
    max_rows: int,
    patience: int,
    script: list[int],
) -> None:
    device = ChanceDevice(facts, embed, seed, rates)
    crowd = Crowd(facts, device, slots, max_rows)
    bench = crowd.bench
    for number in script:
        random = Random(number)
        crowd.act(random)
        for _ in range(random.choice([0, 1, 10, 100])):
            bench.round()
            if len(bench.plans) % patience == 0:
                crowd.answer()
    while not bench.done or crowd.answer():
        bench.round()
        if len(bench.plans) % patience == 0:
            crowd.answer()
    check(crowd, device)
    rewound = sum(len(work.rows) for work in bench.items(Rewind))
    most = most_rounds_with_budget(list(bench.jobs.values()), device.faults, rewound)
    assert len(bench.plans) <= most + 200 * len(script)
    assert bench.runner.empty, "rows are left"


def test_the_first_come_have_their_first_tokens_first() -> None:
    """Ten times more than fits: in the order in which they came, but for those read together."""
    device = ChanceDevice(FACTS, EmbedFacts(slices=True), 1, Rates())
    crowd = Crowd(FACTS, device, 6, 8)
    bench, random = crowd.bench, Random(5)
    sizes = [random.choice([50, 200, 400]) for _ in range(60)]
    for number, size in enumerate(sizes, 1):
        prompt = tuple((number * 31 + place) % 70 + 10 for place in range(size))
        bench.submit(Job(number, "mn"[number % 2], prompt, 60, frozenset([END]), Sampling()))
    while not bench.done or crowd.answer():
        bench.round()
    check(crowd, device)
    first = [bench.job(number).first_at for number in range(1, 61)]
    for place, at in enumerate(first):
        assert at is not None
        later = [other for other in first[place + 8 * 2 :] if other is not None]
        assert all(at <= other for other in later), "more than two batches ahead"
