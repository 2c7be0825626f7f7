"""The scheduler under random orders and random outcomes: every plan may be done, every job ends
once, in time, and nothing is left."""

from __future__ import annotations

from random import Random

import msgspec
from hypothesis import given, note, settings
from hypothesis import strategies as st

from mlxsrv.engine.orders import (
    Attach,
    Close,
    Detach,
    GetMemory,
    Job,
    Load,
    MakeReport,
    Unload,
    Watch,
)
from mlxsrv.engine.outcomes import EmbedFacts, TextFacts
from mlxsrv.generation.parameters import Sampling
from tests.support.chance_device import END, STEERINGS, ChanceDevice, Rates, most_rounds, text_facts
from tests.support.effort import examples
from tests.support.scheduling import Bench

# What a client does, and how often.
ACTIONS = {
    "submit": 60,
    "follow": 12,
    "cancel": 8,
    "embed": 8,
    "load": 6,
    "unload": 1,
    "attach": 2,
    "detach": 2,
    "watch": 2,
    "ask": 2,
    "close": 1,
}


class Play:
    """Clients that do something by chance."""

    def __init__(self, device: ChanceDevice, max_rows: int, chunk: int, max_gap: float) -> None:
        self.bench = Bench(device, clients=(1, 2))
        self._order = Load(
            model="m", path="/a", max_rows=max_rows, prefill_chunk=chunk, max_gap=max_gap
        )
        self._next = {1: 1, 2: 1}
        self._number = 0
        self.bench.load(self._order)
        self.bench.load(self._order, client=2)

    def act(self, random: Random) -> None:
        """Have a client do something; what cannot be done is refused."""
        client = random.choice([client for client in (1, 1, 2) if client not in self.bench.closed])
        model = random.choice("mmmmmn")
        [action] = random.choices(list(ACTIONS), list(ACTIONS.values()))
        note(f"{client}: {action} {model}")
        getattr(self, f"_{action}")(random, client, model)

    def _take_id(self, client: int) -> int:
        self._next[client] += 1
        return self._next[client] - 1

    def _submit(self, random: Random, client: int, model: str) -> None:
        job = make_job(random, model)
        for _ in range(random.choice([1, 1, 1, 2, 4])):
            job = msgspec.structs.replace(job, id=self._take_id(client))
            self.bench.submit(job, client=client)

    def _follow(self, random: Random, client: int, model: str) -> None:
        """A chat goes on: a prompt and its answer begin the next prompt."""
        logs = [log for (owner, _), log in self.bench.jobs.items() if owner == client]
        log = random.choice(logs) if logs else None
        if log is not None and log.order.prompt:
            prompt = (*log.order.prompt, *log.tokens, random.randint(10, 90))
            job = msgspec.structs.replace(log.order, id=self._take_id(client), prompt=prompt)
            self.bench.submit(job, client=client)

    def _cancel(self, random: Random, client: int, model: str) -> None:
        self.bench.cancel(random.randint(1, self._next[client]), client=client)

    def _embed(self, random: Random, client: int, model: str) -> None:
        sizes = random.choices([1, 3, 10, 40, 90], k=random.randint(1, 4))
        texts = tuple((1,) * size for size in sizes)
        self.bench.submit(Job(self._take_id(client), model, texts=texts), client=client)

    def _load(self, random: Random, client: int, model: str) -> None:
        path = random.choice(["/a", "/a", "/b", "/bad"])
        name = random.choice("mnn")
        self.bench.ask(msgspec.structs.replace(self._order, model=name, path=path), client)

    def _unload(self, random: Random, client: int, model: str) -> None:
        self.bench.send(Unload(model), client)

    def _attach(self, random: Random, client: int, model: str) -> None:
        self._number += 1
        path = random.choice(["/sae", "/sae", "/bad"])
        self.bench.ask(Attach(model, self._number, path, 1), client)

    def _detach(self, random: Random, client: int, model: str) -> None:
        self.bench.send(Detach(model), client)

    def _watch(self, random: Random, client: int, model: str) -> None:
        self.bench.send(Watch(model, (), random.randint(0, 1)), client)

    def _ask(self, random: Random, client: int, model: str) -> None:
        self.bench.ask(GetMemory(), client)
        self.bench.ask(MakeReport(), client)

    def _close(self, random: Random, client: int, model: str) -> None:
        if client == 2:
            self.bench.send(Close(), client)
            self.bench.closed.add(client)


def make_job(random: Random, model: str) -> Job:
    scores = random.choice([None] * 8 + [0, 2])
    size = random.choice([1, 2, 5, 9, 15, 20, 30, 50, 80, 100, 150, 300])
    begins = Random(random.randint(0, 2)).choices(range(10, 90), k=size)  # one of three families
    prompt = (*begins[: size - 1], random.randint(10, 12))
    least = 1 if scores is None else 0
    return Job(
        0,
        model,
        prompt,
        random.choice([least, 1, 2, 5, 20, 60]),
        frozenset([END]),
        Sampling(presence_penalty=random.choice([0.0, 0.0, 1.0])),
        checkpoints=random.choice([(), (), (20,), (64,), (70, 200), (64, 128, 280)]),
        logprobs=random.choice([None, None, 2]),
        scores=scores,
        steering=random.choice(STEERINGS),
    )


def check_bounds(bench: Bench, faults: int) -> None:
    """Check that no job has waited for longer than those before it explain."""
    logs = list(bench.jobs.values())
    for place, log in enumerate(logs):
        if not log.ended:
            others = logs if faults else logs[: place + 1]
            meanwhile = [other for other in others if other.end_round >= log.sent_round]
            assert log.rounds <= most_rounds(meanwhile, faults), "a job is starved"


RATES = st.builds(
    Rates,
    fault=st.sampled_from([0.0, 0.01, 0.1]),
    memory=st.sampled_from([0.0, 0.5, 1.0]),
    nan=st.sampled_from([0.0, 0.01]),
    stop=st.sampled_from([0.0, 0.01]),
    refusal=st.sampled_from([0.0, 0.5]),
    end=st.sampled_from([0.0, 0.1]),
    lost=st.sampled_from([0.0, 0.3]),
)


@settings(max_examples=examples(150))
@given(
    facts=text_facts(),
    rates=RATES,
    seed=st.integers(0, 1 << 30),
    max_rows=st.integers(1, 8),
    chunk=st.sampled_from([8, 64, 128, 512]),
    max_gap=st.sampled_from([0.001, 0.1, 10.0]),
    script=st.lists(st.integers(0, 1 << 20), min_size=12, max_size=40),
)
def test_every_job_ends_once_and_nothing_is_left(
    facts: TextFacts,
    rates: Rates,
    seed: int,
    max_rows: int,
    chunk: int,
    max_gap: float,
    script: list[int],
) -> None:
    device = ChanceDevice(facts, EmbedFacts(slices=True), seed, rates)
    play = Play(device, max_rows, chunk, max_gap)
    bench = play.bench
    for number in script:
        random = Random(number)
        play.act(random)
        for _ in range(random.choice([0, 0, 0, 0, 1, 2, 10, 30])):
            bench.round()
            check_bounds(bench, device.faults)
    while not bench.done:
        bench.round()
        check_bounds(bench, device.faults)
    for (client, number), log in bench.jobs.items():
        assert log.ended, f"job {number} of {client} does not end"
    assert bench.runner.empty, "rows are left"
    assert bench.scheduler.plan().items == ()
