"""Whatever clients and devices do by chance, a record of it is replayed to the same plans."""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from random import Random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsrv.engine.orders import (
    Attach,
    Budget,
    Close,
    Detach,
    Job,
    Load,
    MakeReport,
    Order,
    Unload,
    Watch,
)
from mlxsrv.engine.outcomes import EmbedFacts, TextFacts
from mlxsrv.engine.plans import Rewind
from mlxsrv.generation.parameters import Sampling
from tests.support.chance_device import END, STEERINGS, ChanceDevice, Rates, text_facts
from tests.support.effort import examples
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.recording import recorded, replay
from tests.support.scheduling import Bench


class Chances:
    """Two clients that do something by chance, recorded."""

    def __init__(self, path: Path, device: ChanceDevice, random: Random) -> None:
        with recorded(path):
            self.bench = Bench(device, clients=(1, 2))
        self._random = random
        self._numbers = count(1)
        self._load = Load(
            model="m", path="/m", max_rows=random.randint(1, 8), prefill_chunk=64, max_gap=0.1
        )
        for client in (1, 2):
            self.bench.load(self._load, client)

    def play(self) -> None:
        random, bench = self._random, self.bench
        for _ in range(random.randint(5, 30)):
            client = random.choice([1, 1, 1, 2])
            self._act(random.randint(1, 12), client)
            bench.rounds(random.choice([0, 0, 1, 3, 12]))
        bench.send(Close(), 2)
        bench.finish()

    def _act(self, action: int, client: int) -> None:
        random, bench = self._random, self.bench
        numbers = [number for owner, number in bench.jobs if owner == client]
        match action:
            case 1 if numbers:
                bench.cancel(random.choice(numbers), client=client)
            case 2:
                texts = tuple((1,) * random.randint(1, 90) for _ in range(3))
                bench.submit(Job(next(self._numbers), "m", texts=texts), client=client)
            case 3:
                orders: list[Order] = [Unload("n"), Detach("m"), Watch("m", (), 1)]
                bench.send(random.choice(orders), client)
            case 4:
                bench.ask(msgspec.structs.replace(self._load, model="n", path="/n"), client)
            case 5:
                bench.ask(
                    Attach("m", next(self._numbers), random.choice(["/s", "/bad"]), 1), client
                )
                bench.ask(MakeReport(), client)
            case _:
                self._submit([*numbers], client)

    def _submit(self, numbers: list[int], client: int) -> None:
        """Begin a chat, or go on with one: then its prompt and its answer begin the prompt."""
        random = self._random
        size = random.choice([1, 9, 65, 100, 200])
        prompt = tuple(Random(random.randint(0, 1)).choices(range(10, 90), k=size))
        log = self.bench.job(random.choice(numbers), client) if numbers else None
        if log is not None and log.order.prompt and random.random() < 0.5:
            prompt = (*log.order.prompt, *log.tokens, random.randint(10, 12))
        scores = random.choice([None, None, None, 2])
        for _ in range(random.randint(1, 3)):
            asked = Job(
                next(self._numbers),
                "m",
                prompt,
                max_tokens=random.choice([1, 3, 10, 40]),
                end_tokens=frozenset([END]),
                sampling=Sampling(),
                scores=scores,
                checkpoints=random.choice([(), (64,)]),
                steering=random.choice(STEERINGS),
            )
            self.bench.submit(asked, client=client)


@settings(max_examples=examples(60))
@given(
    facts=text_facts(),
    rates=st.builds(
        Rates,
        fault=st.sampled_from([0.0, 0.1]),
        memory=st.sampled_from([0.0, 0.5]),
        nan=st.sampled_from([0.0, 0.02]),
        stop=st.sampled_from([0.0, 0.05]),
        refusal=st.sampled_from([0.0, 0.5]),
        end=st.sampled_from([0.0, 0.1]),
        lost=st.sampled_from([0.0, 0.3]),
    ),
    seed=st.integers(0, 1 << 30),
)
def test_whatever_happens_is_replayed(facts: TextFacts, rates: Rates, seed: int) -> None:
    device = ChanceDevice(facts, EmbedFacts(slices=True), seed, rates)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record"
        chances = Chances(path, device, Random(seed))
        chances.play()
        summary = replay(path)
    assert summary.difference is None
    assert summary.ended is None
    assert summary.rounds == len(chances.bench.plans)
    assert summary.tokens == sum(len(log.tokens) for log in chances.bench.jobs.values())


def test_what_is_done_where_memory_is_short_is_replayed(tmp_path: Path) -> None:
    """The budget is an order, and a round without work items may ask for another."""
    with recorded(tmp_path / "record"):
        bench = Bench(FakeDevice())
    load = Load(model="m", path="/m", max_rows=8, prefill_chunk=64, max_gap=0.1)
    bench.load(load)
    row = FACTS.kv_bytes(256)
    bench.send(Budget(4 * row))
    for number in range(1, 6):
        prompt = tuple(range(number, number + 100))
        bench.submit(Job(number, "m", prompt, 600, frozenset(), Sampling()))
    bench.submit(Job(6, "m", tuple(range(2000)), 4, frozenset(), Sampling()))
    answered = 0
    while not bench.done or answered < len(bench.shortages):
        if answered < len(bench.shortages):
            answered = len(bench.shortages)
            bench.send(Budget(4 * row))
        bench.round()
    assert bench.items(Rewind)
    assert bench.job(6).failed is not None
    summary = replay(tmp_path / "record")
    assert summary.difference is None
    assert summary.tokens == 5 * 600
