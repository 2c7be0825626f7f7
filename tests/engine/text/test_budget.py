"""Ten times more work than fits into a memory budget, with real models: every text is that which
its job has without a budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.events import Event, Failed, Token
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.speculation_controller import SpeculationController
from mlxsrv.generation.parameters import Constraint, DryPenalty, Sampling
from tests.support.effort import often
from tests.support.faulty_text import Odd
from tests.support.heavy import PER_TOKEN, write_heavy
from tests.support.text_engine import TextEngine

JOBS = 12
ROWS = 6
SLOTS = 4
"""Rows of 256 tokens that there is room for."""


def make_jobs(seed: int) -> list[Job]:
    """The first half has prompts of 20 to 200 tokens and answers of 460, for which arrays grow once
    or twice; the others have prompts of 460 tokens, which take little time to read, and short
    answers. So have those that are seeded: rounding, which depends on who shares a pass, may change
    a token that is drawn by chance, if there are many."""
    random = Random(seed)
    jobs: list[Job] = []
    for number in range(JOBS):
        grows, seeded = number < JOBS // 2, number % 4 == 1
        length = random.choice([20, 60, 200]) if grows else 460
        prompt = tuple(random.choices(range(5, 300), k=length))
        dry = DryPenalty(3.0) if number % 4 == 2 else None
        sampling = Sampling(temperature=float(seeded), seed=number, dry=dry)
        answer = 460 if grows and not seeded else 60
        jobs.append(Job(number, "m", prompt, answer, frozenset(), sampling))
    return jobs


def constrain(job: Job) -> Constraint | None:
    """Every third job has a grammar."""
    return Odd() if job.id % 3 == 0 else None


def run(engine: TextEngine, jobs: list[Job]) -> list[Event]:
    events: list[Event] = []
    for job in jobs:
        events += engine.submit(job, constrain(job))
    while not engine.idle:
        events += engine.round()
    return events


def texts(events: list[Event]) -> dict[int, list[int]]:
    assert not [event for event in events if isinstance(event, Failed)]
    found: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, Token):
            found.setdefault(event.job, []).append(event.id)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kept", often([0, 1 << 22], [1 << 22]))
@pytest.mark.parametrize("family", often(["qwen3", "gemma3_text", "qwen3_next"], ["qwen3"]))
def test_texts_are_those_without_a_budget(models: Any, family: str, kept: int) -> None:
    model, jobs = models(family), make_jobs(3)
    expected = texts(run(TextEngine(model, max_rows=ROWS), jobs))
    assert {number: len(text) for number, text in expected.items()} == {
        job.id: job.max_tokens for job in jobs
    }
    facts = TextEngine(model, max_rows=1).runner.facts
    budget = SLOTS * facts.kv_bytes(256)
    work = sum(facts.kv_bytes(len(job.prompt) + job.max_tokens) for job in jobs)
    assert family != "qwen3" or work > 5 * budget
    engine = TextEngine(model, max_rows=ROWS, budget=budget, cache_bytes=kept)
    assert texts(run(engine, jobs)) == expected
    statistics = engine.schedule.statistics()
    assert family != "qwen3" or statistics["preemptions"] > 0
    assert statistics["row_bytes"] == statistics["reading_bytes"] == 0


@pytest.mark.slow
def test_mlx_never_has_more_than_the_budget_and_what_a_step_takes(tmp_path: Path) -> None:
    model, _ = load_model(write_heavy(tmp_path / "heavy"))
    mx.eval(model.parameters())
    greedy = Sampling(temperature=0)

    def peak(budget: int, jobs: list[Job]) -> int:
        """Bytes that MLX had in use at most, beside the weights."""
        engine = TextEngine(model, max_rows=ROWS, budget=budget)
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        texts(run(engine, jobs))
        mx.synchronize()
        return mx.get_peak_memory() - before

    slot = 256 * PER_TOKEN
    short = [Job(n, "m", (5 + n, 6, 7), 4, frozenset(), greedy) for n in range(ROWS)]
    step = peak(100 * slot, short) - ROWS * slot
    budget = SLOTS * slot
    jobs = [Job(n, "m", (5 + n,) * 400, 120, frozenset(), greedy) for n in range(5)]
    # Attention on a CPU copies the keys and values of a layer, and two steps are under way at a
    # time. Where arrays grow, one of a layer's two is there twice.
    layer = budget // 4  # it has four
    assert peak(budget, jobs) <= budget + max(step, 0) + 2 * layer + layer // 2


class Always(SpeculationController):
    """Finds proposals worth it at all times."""

    def affords(self, unread: int) -> bool:
        return True

    def choose(self, found: Sequence[int], *, known: bool = True) -> int:
        return min(4, *found)

    def saw_reading(self, tokens: int, seconds: float) -> None:
        """Nothing to find out."""

    def saw_speculative_step(self, *args: Any, **more: Any) -> None:
        """Nothing to find out."""


@pytest.mark.long
def test_a_draft_follows_a_row_where_there_is_room_and_gives_way(tmp_path: Path) -> None:
    """With as much KV cache for each token as the model itself."""
    model, _ = load_model(write_heavy(tmp_path / "heavy"))
    mx.eval(model.parameters())
    greedy = Sampling(temperature=0)
    jobs = [Job(1, "m", (5,) * 200, 600, frozenset(), greedy)]

    def run_with(draft: Any, slots: int) -> tuple[dict[int, list[int]], TextEngine, int]:
        engine = TextEngine(model, max_rows=1, budget=slots * slot, draft=draft)
        engine.speculate(Always)
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        found = texts(run(engine, jobs))
        mx.synchronize()
        return found, engine, mx.get_peak_memory() - before

    slot = 256 * PER_TOKEN
    plain, _, alone = run_with(None, 4)
    short, engine, peak = run_with(model, 4)
    assert short == plain
    assert engine.statistics()["drafted"] > 0
    assert peak <= max(alone, 4 * slot) + slot // 4, "one of a layer's arrays is there twice"
    assert engine.statistics()["draft_bytes"] == 0, "it has given way"
    _, engine, peak = run_with(model, 12)
    assert peak > 6 * slot, "where there is room it follows the row to its end"
