"""One model's rows and texts: they share rounds, and fail apart. With a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.engine.events import Embedded, Event, Failed, Progress, Token
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import LoadStep
from mlxsrv.engine.plans import LoadSlice
from mlxsrv.engine.runner import Runner
from mlxsrv.engine.scheduling.memory_budget import MemoryBudget
from mlxsrv.engine.scheduling.model_schedule import ModelSchedule
from mlxsrv.generation.parameters import Sampling
from tests.support.fixtures import ModelFolder
from tests.support.loading import MIB, make_load
from tests.support.tiny import write_model

TEXTS = tuple(tuple(range(5, 5 + length)) for length in (90, 91, 92))


class Bench:
    """A model in memory, and its schedule."""

    def __init__(self, model_folder: ModelFolder, **settings: Any) -> None:
        order = make_load(model_folder("qwen3"), **settings)
        self.runner = Runner()
        step = self._load(LoadSlice(model=1, limit=MIB, order=order))
        while step.loaded is None:
            step = self._load(LoadSlice(model=1, limit=MIB))
        assert step.embed is not None
        self.budget = MemoryBudget()
        self.schedule = ModelSchedule(1, 1, order, step.text, step.embed, self.budget)

    def _load(self, work: LoadSlice) -> LoadStep:
        step = self.runner.run(work).done
        assert isinstance(step, LoadStep)
        assert step.refusal is None
        return step

    def round(self, *, beside: bool = False) -> list[Event]:
        schedule = self.schedule
        self.budget.begin_round()
        items = [*schedule.plan_changes(), *schedule.plan(beside=beside)]
        for work in items:
            schedule.settle(work, self.runner.run(work))
        events = [*self.budget.events]
        self.budget.events.clear()
        return events

    def start_stream(self) -> None:
        self.schedule.submit(job(1))
        while not any(isinstance(event, Token) for event in self.round()):
            pass


def job(number: int, tokens: int = 3) -> Job:
    prompt = tuple(range(5, 5 + tokens))
    return Job(number, "m", prompt, 10**6, frozenset(), Sampling(temperature=0))


def test_prompts_and_texts_take_turns_beside_a_stream(model_folder: ModelFolder) -> None:
    bench = Bench(model_folder, prefill_chunk=8)
    bench.start_stream()
    bench.schedule.submit(job(2, tokens=400))
    bench.schedule.submit(Job(3, "m", texts=TEXTS))
    moved = [
        {event.job for event in bench.round() if isinstance(event, Progress)} for _ in range(12)
    ]
    assert moved[:2] in ([{2}, {3}], [{3}, {2}])
    assert moved == moved[:2] * 6


def test_without_streams_a_round_reads_both(model_folder: ModelFolder) -> None:
    bench = Bench(model_folder, prefill_chunk=8)
    bench.schedule.submit(job(2, tokens=400))
    bench.schedule.submit(Job(3, "m", texts=TEXTS))
    assert {event.job for event in bench.round() if isinstance(event, Progress)} == {2, 3}


def test_an_error_in_a_step_spares_the_texts(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(model_folder)
    bench.start_stream()
    bench.schedule.submit(Job(3, "m", texts=TEXTS))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("lost")

    events: list[Event] = []
    for module in ("decode.Decoder.run_step", "text_runner.TextRunner.read"):
        monkeypatch.setattr(f"mlxsrv.engine.execution.{module}", fail)
    for _ in range(100):
        if bench.schedule.idle:
            break
        events += bench.round()
    ended = {event.job: type(event) for event in events if isinstance(event, (Failed, Embedded))}
    assert ended == {1: Failed, 3: Embedded}


POISON = 300
POISONED = f"""
import mlx.core as mx
from mlx_lm.models import qwen3
from mlx_lm.models.qwen3 import ModelArgs

class Inner(qwen3.Qwen3Model):
    def __call__(self, tokens, *args, **named):
        if mx.any(tokens == {POISON}).item():
            raise RuntimeError("lost")
        return super().__call__(tokens, *args, **named)

class Model(qwen3.Model):
    def __init__(self, args):
        super().__init__(args)
        self.model = Inner(args)
"""
"""The code of a model that reads all tokens but one."""


def test_an_error_in_texts_spares_the_rows(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    (folder / "own.py").write_text(POISONED)
    bench = Bench(lambda _: folder, trust_remote_code=True)
    bench.start_stream()
    bench.schedule.submit(Job(3, "m", texts=((5, 6, POISON), *TEXTS)))
    events = [event for _ in range(4) for event in bench.round()]
    assert [event for event in events if isinstance(event, Failed)] == [
        Failed(3, "RuntimeError: lost")
    ]
    assert sum(isinstance(event, Token) for event in events) >= 3


def test_statistics_begin_with_the_texts(model_folder: ModelFolder) -> None:
    """`/health?verbose=1` shows them in this order."""
    assert [*Bench(model_folder).schedule.statistics()] == [
        *("texts", "queued", "rows", "groups", "reading", "waiting", "waiting_for_memory"),
        *("row_bytes", "reading_bytes", "preemptions"),
        *("prompt_cache_bytes", "prompt_cache_entries", "tokens"),
    ]
