"""Rows of very different lengths share a pass of the model, and each says what it says alone."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.events import Failed, Token
from mlxsrv.engine.execution.facts import shares_passes
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from tests.support.driver import BATCHED, Driver
from tests.support.effort import per_cache
from tests.support.faulty_text import alone, job, mixed, prompt, texts
from tests.support.faulty_text import make as make_steady
from tests.support.faulty_text import run as run_all
from tests.support.text_engine import TextEngine, assert_greedy
from tests.support.tiny import FAMILIES, write_model

GROUPED = [name for name in BATCHED if {*FAMILIES[name].caches} != {"ArraysCache"}]
"""Families whose rows take the more memory the longer they are."""


class Counting:
    """The real model, and how many rows and tokens of each it was fed, call by call."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.fed: list[tuple[int, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        self.fed.append(tokens.shape)
        return self._model(tokens, cache=cache)


def make(model: Any, max_rows: int = 6, **more: Any) -> TextEngine:
    """An engine that keeps rows of different lengths apart."""
    return TextEngine(model, max_rows=max_rows, pace=Pace(512, 10.0), padding=0, **more)


def run(engine: TextEngine, later: Iterable[Job] = ()) -> tuple[dict[int, list[int]], int]:
    """Every job's tokens, and the most groups that there were; one more of `later` comes at each
    round."""
    late, groups = list(later), 0
    drawn: dict[int, list[int]] = {}
    while late or not engine.idle:
        if late:
            engine.submit(late.pop(0))
        for event in engine.round():
            assert not isinstance(event, Failed), event
            if isinstance(event, Token):
                drawn.setdefault(event.job, []).append(event.id)
        groups = max(groups, engine.statistics()["groups"])
    return drawn, groups


@pytest.mark.parametrize("family", per_cache(GROUPED))
@pytest.mark.slow
def test_a_long_row_beside_short_ones_equals_mlx_lm(models: Any, family: str) -> None:
    """The short rows join it and leave it, and one grows beyond its first columns."""
    model = models(family)
    engine = make(model)
    assert engine.runner.facts.shares
    lengths = (1000, 300, 37, 54, 71, 88, 105)
    asked = [*(prompt(n, length) for n, length in enumerate(lengths)), (9,)]
    counts = [24, 10, 250, 6, 14, 3, 8, 12]
    jobs = [job(n, text, count) for n, (text, count) in enumerate(zip(asked, counts, strict=True))]
    for early in jobs[:3]:
        engine.submit(early)
    drawn, groups = run(engine, jobs[3:])
    assert groups > 2
    for n, text in enumerate(asked):
        assert_greedy(model, text, drawn[n], counts[n])


def test_a_step_is_one_pass(models: Any) -> None:
    model = Counting(models("qwen3"))
    assert step_apart(model) == [(3, 1)]


def test_without_the_patch_a_step_is_a_pass_of_each_group(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSRV_PATCHES", "openblas")
    model = Counting(models("qwen3"))
    assert step_apart(model) == [(1, 1), (2, 1)]


def step_apart(model: Counting) -> list[tuple[int, ...]]:
    """The passes of a step of a long row and of two short ones."""
    driver = Driver(model)
    for row, length in enumerate((300, 30, 31)):
        driver.admit(row, prompt(row, length))
        driver.read(row)
    driver.must((0,), (1, 2))
    model.fed.clear()
    driver.must()
    passes = [*model.fed]
    driver.run(rows=range(3))
    driver.check(0, 1, 2)
    return passes


def test_rows_of_all_kinds_say_the_same_as_alone(models: Any) -> None:
    """Samplings, penalties, log-probabilities and constraints, each in a group of its own."""
    model = models("qwen3")
    engine = make_steady(model, padding=0)
    assert engine.runner.facts.shares
    assert texts(run_all(engine, mixed())) == alone(model, mixed())


def test_quantized_rows_equal_mlx_lm(tmp_path: Path) -> None:
    model, _ = load_model(write_model(tmp_path / "wide", "qwen3", head_dim=32))
    caches = KVCacheFactory(model, group=32, bits=8)
    engine = make(model, caches=caches)
    assert engine.runner.facts.shares
    asked = [prompt(n, length) for n, length in enumerate((700, 20, 90, 21))]
    drawn, groups = run(engine, [job(n, text, 15 + n) for n, text in enumerate(asked)])
    assert groups > 1
    for n, text in enumerate(asked):
        steps = generate_step(
            mx.array(text), model, max_tokens=15 + n, prompt_cache=caches.make().layers
        )
        assert drawn[n] == [int(token) for token, _ in steps]


@pytest.mark.parametrize("broken", ["the long row", "a short row"])
def test_a_row_of_nan_fails_and_no_other(tmp_path: Path, broken: str) -> None:
    """NaN goes through all layers of the shared pass, and into the row's slots."""
    model, _ = load_model(write_model(tmp_path / "m", "qwen3"))
    asked = [prompt(n, length) for n, length in enumerate((700, 20, 24, 90))]
    number = 0 if broken == "the long row" else 2
    expected = {n: draw(model, text) for n, text in enumerate(asked)}
    others = {token for n, text in enumerate(asked) if n != number for token in text}
    others |= {token for n, text in expected.items() if n != number for token in text}
    place, poison = next((p, t) for p, t in enumerate(expected[number]) if t not in others)
    weight = model.model.embed_tokens.weight
    weight[poison] = float("nan")
    model.model.embed_tokens.weight = weight
    engine = make_steady(model, padding=0)
    events = run_all(engine, [(job(n, text), None) for n, text in enumerate(asked)])
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert (failed.job, failed.clear) == (number, "the model computed NaN")
    drawn = texts(events)
    assert drawn.pop(number) == expected.pop(number)[: place + 1]
    assert drawn == expected


def draw(model: Any, text: tuple[int, ...]) -> list[int]:
    engine = TextEngine(model, max_rows=1)
    engine.submit(job(0, text))
    return run(engine)[0][0]


ODD: dict[str, dict[str, Any]] = {
    "gemma2": {"intermediate_size": 128, "head_dim": 16, "rms_norm_eps": 1e-5},
    "deepseek_v3": {
        "intermediate_size": 128,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}
"""gemma2 has attention of its own, and deepseek_v3 makes keys of what the cache holds."""


@pytest.mark.parametrize("kind", ODD)
def test_a_model_that_computes_with_keys_has_a_pass_for_each_group(kind: str) -> None:
    module = import_module(f"mlx_lm.models.{kind}")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    mx.random.seed(0)
    arguments = module.ModelArgs(model_type=kind, **sizes, **heads, **ODD[kind])
    model = Counting(module.Model(arguments))
    assert not shares_passes(model, KVCacheFactory(model))
    engine = make(model)
    model.fed.clear()  # whether passes can be shared is tried with two rows
    asked = [prompt(n, length) for n, length in enumerate((300, 20))]
    drawn, groups = run(engine, [job(n, text, 6) for n, text in enumerate(asked)])
    assert groups == 2
    assert {rows for rows, tokens in model.fed if tokens == 1} == {1}
    for n, text in enumerate(asked):
        assert_greedy(model, text, drawn[n], 6)
