"""A model in memory: its two workers share rounds, and fail apart."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsrv.engine.events import Embedded, Event, Failed, Progress, Token
from mlxsrv.engine.loading.resident import ResidentModel
from mlxsrv.engine.orders import Embed, Job
from mlxsrv.generation.parameters import Sampling
from tests.engine.loading.test_load import load
from tests.support.fixtures import ModelFolder

TEXTS = tuple(tuple(range(5, 5 + length)) for length in (90, 91, 92))


def job(number: int, tokens: int = 3) -> Job:
    prompt = tuple(range(5, 5 + tokens))
    return Job(number, "m", prompt, 10**6, frozenset(), Sampling(temperature=0))


def round(model: ResidentModel, *, beside: bool = False) -> list[Event]:
    return model.decode() + model.prefill(beside=beside)


def start_stream(model: ResidentModel) -> None:
    model.batch.submit(job(1))
    while not any(isinstance(event, Token) for event in round(model)):
        pass


def test_prompts_and_texts_take_turns_beside_a_stream(model_folder: ModelFolder) -> None:
    model = load(model_folder("qwen3"), prefill_chunk=8)
    start_stream(model)
    model.batch.submit(job(2, tokens=400))
    model.embedder.submit(Embed(3, "m", TEXTS))
    moved = [
        {event.job for event in round(model) if isinstance(event, Progress)} for _ in range(12)
    ]
    assert moved[:2] in ([{2}, {3}], [{3}, {2}])
    assert moved == moved[:2] * 6


def test_without_streams_a_round_reads_both(model_folder: ModelFolder) -> None:
    model = load(model_folder("qwen3"), prefill_chunk=8)
    model.batch.submit(job(2, tokens=400))
    model.embedder.submit(Embed(3, "m", TEXTS))
    assert {event.job for event in round(model) if isinstance(event, Progress)} == {2, 3}


@pytest.mark.parametrize("work", ["decode", "prefill"])
def test_an_error_that_escapes_the_batch_spares_the_texts(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    model = load(model_folder("qwen3"))
    start_stream(model)
    model.embedder.submit(Embed(3, "m", TEXTS))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("lost")

    with monkeypatch.context() as patched:
        patched.setattr(model.batch, work, fail)
        events = round(model)
    assert Failed(1, "RuntimeError: lost in a step") in events
    while not model.idle:
        events += round(model)
    ended = [event for event in events if isinstance(event, (Failed, Embedded))]
    assert [(type(event), event.job) for event in ended] == [(Failed, 1), (Embedded, 3)]


def test_statistics_begin_with_the_texts(model_folder: ModelFolder) -> None:
    """`/health?verbose=1` shows them in this order."""
    names = [*load(model_folder("qwen3")).statistics()]
    assert names == [
        *("texts", "rows", "lanes", "reading", "waiting"),
        *("prompt_cache_bytes", "prompt_cache_entries", "tokens"),
    ]
