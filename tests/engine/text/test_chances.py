"""Random scripts for a real model: each text is that of its job alone, and nothing is left.

Rows come, leave and fail by chance, in any mixture of what jobs may ask for. The scheduler alone is
tried so without a model; here the KV caches are real.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
import pytest

from mlxsrv.engine.events import Event, Failed, Finished, Token
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.generation.parameters import Mask, Sampling, Steering
from tests.support.effort import often
from tests.support.faulty_text import Faulty
from tests.support.text_engine import TextEngine

ACTIONS = 60
CASES = [
    (family, rate, seed)
    for family in ("qwen3", "gemma3_text", "qwen3_next", "llama4")
    for rate in (0.0, 0.03)
    for seed in range(6)
]
NO_SUCH = Steering(vectors=(("no", 1.0),))


class Odd:
    """A constraint: any tokens at first, then odd ones and even ones by turns."""

    failure = None

    def __init__(self, first: int) -> None:
        self._first = first
        self._accepted = 0

    @property
    def dormant(self) -> bool:
        return self._accepted < self._first

    def fill(self, mask: Mask) -> None:
        mask[:] = 0x55555555 if self._accepted % 2 else 0x55555555 * 2 - 2**32

    def accept(self, token: int) -> None:
        assert self.dormant or token % 2 != self._accepted % 2, "each is accepted once, in order"
        self._accepted += 1


class Asked(NamedTuple):
    """A job, and how many tokens its constraint lets pass; None: it has no constraint."""

    job: Job
    first: int | None

    @property
    def constraint(self) -> Odd | None:
        return None if self.first is None else Odd(self.first)


class Script:
    """Jobs by chance, given to an engine, and what came of them.

    Args:
        engine: does the jobs.
        seed: of all that is chosen.
    """

    def __init__(self, engine: TextEngine, seed: int) -> None:
        self.asked: dict[int, Asked] = {}
        self.drawn: dict[int, list[int]] = {}
        self.ended: dict[int, Event] = {}
        self._engine = engine
        self._random = Random(seed)
        self._bases = [tuple(self._random.choices(range(5, 300), k=300)) for _ in range(2)]

    def play(self) -> None:
        for _ in range(ACTIONS):
            choice = self._random.random()
            if choice < 0.4:
                asked = self._ask()
                for _ in range(self._random.choice([1, 1, 3])):
                    self._submit(asked)
            elif choice < 0.5:
                self._cancel()
            else:
                self._hear(self._engine.round())
        for _ in range(5000):
            if self._engine.idle:
                return
            self._hear(self._engine.round())
        raise AssertionError("it does not end")

    def _ask(self) -> Asked:
        chance = self._random
        size = chance.choice([1, 2, 9, 64, 65, 100, 200, 300])
        prompt = (*chance.choice(self._bases)[: size - 1], chance.choice([7, 8]))
        sampling = Sampling(temperature=chance.choice([0.0, 1.0]), seed=chance.randrange(5))
        scores = chance.choice([None, None, None, 0])
        job = Job(
            0,
            "m",
            prompt,
            chance.choice([1 if scores is None else 0, 3, 20]),
            frozenset(),
            sampling,
            checkpoints=chance.choice([(), (), (70,)]),
            scores=scores,
            steering=chance.choice([None] * 9 + [NO_SUCH]),
        )
        return Asked(job, chance.choice([None, None, 0, 5]))

    def _submit(self, asked: Asked) -> None:
        number = len(self.asked)
        job = msgspec.structs.replace(asked.job, id=number)
        self.asked[number] = asked
        self.drawn[number] = []
        self._hear(self._engine.submit(job, asked.constraint))

    def _cancel(self) -> None:
        running = [number for number in self.asked if number not in self.ended]
        gone = self._random.sample(running, min(2, len(running)))
        self._engine.cancel(gone)
        self.ended |= {number: Failed(number, "cancelled") for number in gone}

    def _hear(self, events: list[Event]) -> None:
        for event in events:
            number = event.job  # type: ignore[union-attr]
            if isinstance(self.ended.get(number), Failed):  # on its way when it was cancelled
                continue
            assert number not in self.ended, f"{event} behind the end"
            if isinstance(event, Token):
                self.drawn[number].append(event.id)
            if isinstance(event, (Failed, Finished)) or (isinstance(event, Token) and event.finish):
                self.ended[number] = event


def draw_alone(model: Any, asked: Asked) -> list[int]:
    engine = TextEngine(model, max_rows=1, pace=Pace(1000, 10.0))
    engine.submit(asked.job, asked.constraint)
    drawn: list[int] = []
    while not engine.idle:
        drawn += [event.id for event in engine.round() if isinstance(event, Token)]
    return drawn


@pytest.mark.parametrize(
    ("family", "rate", "seed"), often(CASES, [case for case in CASES if case[1:] == (0.03, 0)])
)
def test_any_script_draws_what_each_job_draws_alone(
    models: Any, family: str, rate: float, seed: int
) -> None:
    chance, faults = Random(seed), 0

    def fault(step: int, tokens: mx.array) -> None:
        nonlocal faults
        if chance.random() < rate:
            faults += 1
            raise RuntimeError(chance.choice(["by chance", "out of memory, by chance"]))

    faulty = Faulty(models(family))
    engine = TextEngine(
        faulty,
        max_rows=chance.choice([2, 4, 8]),
        pace=Pace(chance.choice([16, 64]), chance.choice([0.001, 10.0])),
        cache_bytes=chance.choice([100_000, 1 << 26]),
        padding=chance.choice([0, 30_000, 30_000, 1 << 26]),
    )
    faulty.fault = fault
    script = Script(engine, seed)
    script.play()
    alone: dict[Asked, list[int]] = {}
    for number, asked in script.asked.items():
        end = script.ended[number]
        if asked.job.steering is not None:
            assert isinstance(end, Failed)
        elif isinstance(end, Failed):
            assert faults or end.reason == "cancelled"
        else:
            if asked not in alone:
                alone[asked] = draw_alone(models(family), asked)
            assert script.drawn[number] == alone[asked]
    runner = engine.runner
    assert [*runner._rows, *runner._texts, *runner._ready, *runner._decoder.rows] == []
    assert len(runner._kept) == engine.schedule.statistics()["prompt_cache_entries"]
