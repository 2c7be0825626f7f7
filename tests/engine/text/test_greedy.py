"""Greedy text is that of mlx-lm's own generator, token for token, however rows share passes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.events import Failed, PromptRead, Token
from mlxsrv.engine.execution import read
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.steering.plan import forward
from mlxsrv.generation.parameters import Sampling
from tests.support.effort import often, per_cache
from tests.support.text_engine import TextEngine, assert_greedy, make_caches
from tests.support.tiny import FAMILIES, write_model

GREEDY = Sampling(temperature=0)
SMALL = [name for name in FAMILIES if name != "qwen3-46m"]


def prompts(n: int, seed: int, low: int = 3, high: int = 60) -> list[tuple[int, ...]]:
    dice = random.Random(seed)
    return [tuple(dice.choices(range(5, 300), k=dice.randint(low, high))) for _ in range(n)]


def job(number: int, prompt: tuple[int, ...], max_tokens: int = 12, **more: Any) -> Job:
    more.setdefault("sampling", GREEDY)
    more.setdefault("end_tokens", frozenset())
    return Job(number, "m", prompt, max_tokens, **more)


def make(
    model: Any, max_rows: int, chunk: int, cache_bytes: int = 0, padding: int | None = None
) -> TextEngine:
    return TextEngine(
        model,
        max_rows=max_rows,
        pace=Pace(chunk, 10.0),
        cache_bytes=cache_bytes,
        padding=padding,
    )


def run(engine: TextEngine, later: Iterable[Job] = ()) -> dict[int, list[int]]:
    """Every job's tokens; one more of `later` is submitted at each step."""
    late = iter(later)
    drawn: dict[int, list[int]] = {}
    while True:
        joining = next(late, None)
        if joining is not None:
            engine.submit(joining)
        if engine.idle and joining is None:
            return drawn
        for event in engine.decode() + engine.prefill():
            if isinstance(event, PromptRead):
                continue
            assert isinstance(event, Token), event
            drawn.setdefault(event.job, []).append(event.id)


def solo(model: Any, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """mlx-lm's own answer, end tokens taken for any other."""
    steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("family", often(SMALL, ["qwen3", "mamba2"]))
@pytest.mark.slow
def test_a_row_alone_equals_mlx_lm(models: Any, family: str) -> None:
    model = models(family)
    for number, prompt in enumerate(prompts(3, seed=1)):
        engine = make(model, 8, 512)
        engine.submit(job(number, prompt, 20))
        assert run(engine)[number] == solo(model, prompt, 20)


@pytest.mark.parametrize("family", per_cache(SMALL))
@pytest.mark.slow
def test_rows_that_join_and_leave_equal_mlx_lm(models: Any, family: str) -> None:
    model = models(family)
    asked = prompts(10, seed=2)
    lengths = [random.Random(3).randint(4, 24) for _ in asked]
    engine = make(model, 6, 64)
    jobs = [job(i, p, n) for i, (p, n) in enumerate(zip(asked, lengths, strict=True))]
    for early in jobs[:4]:
        engine.submit(early)
    drawn = run(engine, jobs[4:])
    for i, prompt in enumerate(asked):
        assert_greedy(model, prompt, drawn[i], lengths[i])
    assert engine.idle


@pytest.mark.parametrize("family", often(SMALL, ["qwen3", "gpt_oss", "qwen3_next"]))
@pytest.mark.slow
def test_rows_in_sub_batches_of_their_own_equal_mlx_lm(models: Any, family: str) -> None:
    model = models(family)
    asked = prompts(10, seed=12)
    lengths = [random.Random(13).randint(4, 24) for _ in asked]
    engine = make(model, 6, 64, padding=0)
    jobs = [job(i, p, n) for i, (p, n) in enumerate(zip(asked, lengths, strict=True))]
    drawn = run(engine, jobs)
    for i, prompt in enumerate(asked):
        assert_greedy(model, prompt, drawn[i], lengths[i])


@pytest.mark.slow
def test_a_row_much_longer_than_the_others_has_a_sub_batch_while_that_pays(models: Any) -> None:
    model = models("qwen3")
    short = prompts(4, seed=14, low=8, high=8)
    [long] = prompts(1, seed=15, low=3000, high=3000)
    engine = make(model, 8, 512)
    drawn: dict[int, list[int]] = {}

    def step() -> None:
        for event in engine.decode() + engine.prefill():
            if isinstance(event, Token):
                drawn.setdefault(event.job, []).append(event.id)

    for i, prompt in enumerate([*short, long]):
        engine.submit(job(i, prompt, 40))
    while 4 not in drawn:
        step()
    assert engine.statistics()["groups"] == 2
    for _ in range(5):
        step()
    engine.cancel([1, 2, 3])  # what is left of the padding costs less than a pass
    step()
    assert engine.statistics()["groups"] == 1
    while not engine.idle:
        step()
    assert_greedy(model, short[0], drawn[0], 40)
    assert_greedy(model, long, drawn[4], 40)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_rows_with_quantized_caches_equal_mlx_lm(tmp_path: Path, family: str) -> None:
    model, _ = load_model(write_model(tmp_path / "wide", family, head_dim=32))
    asked = prompts(8, seed=16)
    caches = KVCacheFactory(model, group=32, bits=8)
    engine = TextEngine(model, max_rows=4, pace=Pace(64, 10.0), caches=caches)
    assert engine.runner.facts.batched
    jobs = [job(i, prompt, 6 + 3 * i) for i, prompt in enumerate(asked)]
    for early in jobs[:3]:
        engine.submit(early)
    drawn = run(engine, jobs[3:])
    for each in jobs:
        cache = caches.make().layers
        steps = generate_step(
            mx.array(each.prompt), model, max_tokens=each.max_tokens, prompt_cache=cache
        )
        assert drawn[each.id] == [int(token) for token, _ in steps]


@pytest.mark.parametrize("family", per_cache(SMALL))
def test_a_prompt_in_chunks_equals_mlx_lm(models: Any, family: str) -> None:
    model = models(family)
    [long] = prompts(1, seed=4, low=200, high=200)
    engine = make(model, 4, 32)
    engine.submit(job(0, prompts(1, seed=5)[0], 30))
    engine.submit(job(1, long, 12))
    assert_greedy(model, long, run(engine)[1], 12)


@pytest.mark.slow
def test_a_full_batch_of_32_equals_mlx_lm(models: Any) -> None:
    model = models("qwen3")
    asked = prompts(32, seed=6)
    engine = make(model, 32, 512)
    for i, prompt in enumerate(asked):
        engine.submit(job(i, prompt, 40))
    drawn = run(engine)
    for i, prompt in enumerate(asked):
        assert_greedy(model, prompt, drawn[i], 40)


def test_a_prompt_of_one_token(models: Any) -> None:
    model = models("qwen3")
    engine = make(model, 4, 512)
    for i, prompt in enumerate([(7,), (8, 9, 10), (11,)]):
        engine.submit(job(i, prompt))
    drawn = run(engine)
    assert_greedy(model, (7,), drawn[0], 12)
    assert_greedy(model, (11,), drawn[2], 12)


def test_a_model_whose_caches_cannot_be_merged_runs_one_row_at_a_time(models: Any) -> None:
    unmerged = [name for name in SMALL if not FAMILIES[name].batchable]
    assert unmerged
    for family in unmerged:
        model = models(family)
        engine = make(model, 8, 512)
        assert not engine.runner.facts.batched
        for i, prompt in enumerate(prompts(3, seed=7)):
            engine.submit(job(i, prompt))
        engine.prefill()
        engine.decode()
        assert (
            engine.statistics().items()
            >= {"rows": 1, "groups": 1, "reading": 0, "waiting": 0}.items()
        )
        assert len(run(engine)) == 3


def test_an_end_token_ends_its_row_and_no_other(models: Any) -> None:
    model = models("qwen3")
    first, second = prompts(2, seed=8)
    expected = solo(model, first, 20)
    end = expected[6]
    cut = expected.index(end) + 1
    engine = make(model, 4, 512)
    engine.submit(job(0, first, 20, end_tokens=frozenset({end})))
    engine.submit(job(1, second, 20))
    drawn = run(engine)
    assert drawn[0] == expected[:cut]
    assert_greedy(model, second, drawn[1], 20)


def test_cancel_frees_a_row_at_every_stage(models: Any) -> None:
    model = models("qwen3")
    kept, *others = prompts(4, seed=9)
    [long] = prompts(1, seed=10, low=200, high=200)
    engine = make(model, 3, 64)
    engine.submit(job(0, kept, 30))
    engine.submit(job(1, others[0], 30))
    engine.submit(job(2, long, 30))
    engine.submit(job(3, others[1], 30))
    drawn: list[int] = []
    for _ in range(4):
        drawn += [e.id for e in engine.decode() if isinstance(e, Token) and e.job == 0]
        engine.prefill()
    assert (
        engine.statistics().items() >= {"rows": 2, "groups": 1, "reading": 1, "waiting": 0}.items()
    )
    engine.cancel([1, 2, 3])
    assert (
        engine.statistics().items() >= {"rows": 1, "groups": 1, "reading": 0, "waiting": 0}.items()
    )
    assert_greedy(model, kept, drawn + run(engine)[0], 30)


def test_an_error_while_reading_fails_only_what_is_read(models: Any) -> None:
    model = models("qwen3")

    class Fragile:
        """The real model, but for one token id that it refuses."""

        layers = model.layers

        def __call__(self, tokens: Any, cache: Any) -> Any:
            if 400 in tokens.tolist()[0]:
                raise RuntimeError("refused")
            return model(tokens, cache=cache)

    [kept] = prompts(1, seed=12)
    engine = make(Fragile(), 4, 64, padding=0)
    engine.submit(job(0, kept))
    engine.prefill()
    engine.submit(job(1, (400, 401, 402)))
    [failed] = engine.prefill()
    assert isinstance(failed, Failed)
    assert failed.job == 1
    assert "refused" in failed.reason
    drawn = run(engine)
    assert {*drawn} == {0}
    assert_greedy(model, kept, drawn[0], 12)


def test_padding_is_used_only_where_a_model_masks_it(models: Any) -> None:
    masked = {name for name in SMALL if FAMILIES[name].batchable and make_caches(models(name)).pads}
    assert "mamba" not in masked  # its layers read padding as if it were text
    assert {"qwen3", "gemma3_text", "qwen3_next", "mamba2"} <= masked


CACHE_BYTES = 1 << 28


@pytest.mark.parametrize("family", per_cache(SMALL))
def test_a_follow_up_prompt_is_read_from_where_the_answer_ended(models: Any, family: str) -> None:
    model = models(family)
    [first, more, other] = prompts(3, seed=20, low=70, high=70)
    engine = make(model, 8, 512, CACHE_BYTES)
    engine.submit(job(0, first, 10))
    engine.submit(job(1, other, 10))
    answers = run(engine)
    follow_up = (*first, *answers[0], *more)
    cached, drawn = run_counting(engine, job(2, follow_up, 15))
    if FAMILIES[family].batchable:
        assert cached == len(first) + 10
    assert_greedy(model, follow_up, drawn, 15)


@pytest.mark.parametrize("family", per_cache(SMALL))
@pytest.mark.slow
def test_a_prompt_that_shares_a_beginning_answers_as_if_alone(models: Any, family: str) -> None:
    model = models(family)
    [head, *tails] = prompts(5, seed=21, low=80, high=80)
    engine = make(model, 3, 64, CACHE_BYTES)
    asked = [(*head, *tail) for tail in tails]
    for i, prompt in enumerate(asked):
        engine.submit(job(i, prompt, 8))
    drawn = run(engine)
    again = [prompt[:100] for prompt in asked] + asked
    for i, prompt in enumerate(again):
        engine.submit(job(100 + i, prompt, 8))
    drawn |= run(engine)
    for i, prompt in enumerate(asked):
        assert_greedy(model, prompt, drawn[i], 8)
    for i, prompt in enumerate(again):
        assert_greedy(model, prompt, drawn[100 + i], 8)


def test_a_checkpoint_serves_models_whose_caches_cannot_be_cut(models: Any) -> None:
    model = models("mamba2")
    [head, *tails] = prompts(3, seed=22, low=100, high=100)
    engine = make(model, 4, 64, CACHE_BYTES)
    for i, tail in enumerate(tails):
        cached, drawn = run_counting(engine, job(i, (*head, *tail), 8, checkpoints=(100,)))
        assert cached == (100 if i else 0)
        assert_greedy(model, (*head, *tail), drawn, 8)


def run_counting(engine: TextEngine, asked: Job) -> tuple[int, list[int]]:
    """One job alone: how many prompt tokens were found, and what it drew."""
    engine.submit(asked)
    cached, drawn = -1, []
    while not engine.idle:
        for event in engine.decode() + engine.prefill():
            if isinstance(event, PromptRead):
                cached = event.cached
            elif isinstance(event, Token):
                drawn.append(event.id)
    return cached, drawn


def test_the_prompt_cache_stays_within_its_bytes(models: Any) -> None:
    model = models("qwen3")
    engine = make(model, 4, 512, 100_000)
    for i, prompt in enumerate(prompts(20, seed=23)):
        engine.submit(job(i, prompt))
    run(engine)
    assert 0 < engine.schedule._index.bytes <= 100_000
    assert engine.schedule._index.bytes == sum(
        entry.bytes for entry in engine.schedule._index._entries.values()
    )
    assert len(engine.schedule._index) > 1


def test_a_long_prompt_joins_in_a_slice_that_reads_nothing(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To join costs the next step as much as to read: a stream is not to wait for both at once."""
    engine = make(models("qwen3"), max_rows=2, chunk=32)
    [short] = prompts(1, seed=24, low=8, high=8)
    [long] = prompts(1, seed=25, low=100, high=100)
    engine.submit(job(0, short, 100))
    engine.prefill()
    engine.decode()
    fed: list[int] = []

    def feed(model: Any, plan: Any, tokens: mx.array, cache: Any) -> Any:
        fed.append(tokens.size)
        return forward(model, plan, tokens, cache)

    monkeypatch.setattr(read, "forward", feed)
    engine.submit(job(1, long, 4))
    slices: list[int] = []
    while not any(isinstance(event, PromptRead) for event in engine.prefill()):
        slices.append(sum(fed))
        fed.clear()
        engine.decode()
    assert sum(slices) == 99
    assert not fed
    assert_greedy(models("qwen3"), long, run(engine)[1], 4)


def test_short_prompts_do_not_wait_for_a_long_one(models: Any) -> None:
    model = models("qwen3")
    [long] = prompts(1, seed=24, low=1000, high=1000)
    engine = make(model, 8, 32)
    engine.submit(job(0, long, 4))
    engine.prefill()
    engine.submit(job(1, prompts(1, seed=25, low=8, high=8)[0], 4))
    order = []
    while not engine.idle:
        order += [e.job for e in engine.decode() + engine.prefill() if isinstance(e, PromptRead)]
    assert order == [1, 0]


def test_prompts_are_read_in_shorter_slices_beside_other_models_streams(models: Any) -> None:
    prompt = tuple(range(1, 200))
    slices: list[int] = []
    texts: list[list[int]] = []
    for beside in (True, False):
        engine = make(models("qwen3"), 4, 512)
        engine.submit(job(0, prompt, 5))
        slices.append(0)
        while not engine.streaming:
            engine.prefill(beside=beside)
            slices[-1] += 1
        texts.append(run(engine)[0])
    assert slices[0] > slices[1] == 1
    assert texts[0] == texts[1]
