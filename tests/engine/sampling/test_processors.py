"""Penalties, biases, likelihoods, constraints and scores, against mlx-lm and against the maths."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from mlxsrv.engine.events import (
    Event,
    Failed,
    Finished,
    Likelihood,
    PromptRead,
    PromptScored,
    Started,
    Token,
)
from mlxsrv.engine.live_row import LiveRow
from mlxsrv.engine.orders import Job
from mlxsrv.engine.sampling.processors import Penalties
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.generation.parameters import Mask, Sampling
from tests.support.effort import often, per_cache
from tests.support.text_engine import TextEngine
from tests.support.tiny import FAMILIES

GREEDY = Sampling(temperature=0)


def prompt(seed: int, size: int = 30) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(5, 300), k=size))


def job(number: int, tokens: tuple[int, ...], max_tokens: int = 12, **more: Any) -> Job:
    more.setdefault("sampling", GREEDY)
    return Job(number, "m", tokens, max_tokens, frozenset(), **more)


def make(model: Any, max_rows: int = 8, chunk: int = 512) -> TextEngine:
    return TextEngine(model, max_rows=max_rows, pace=Pace(chunk, 10.0), cache_bytes=0)


def run(batch: TextEngine) -> list[Event]:
    events: list[Event] = []
    while not batch.idle:
        events += batch.decode() + batch.prefill()
    return events


def tokens_of(events: list[Event], number: int) -> list[Token]:
    return [event for event in events if isinstance(event, Token) and event.job == number]


SMALL = [name for name in FAMILIES if name != "qwen3-46m"]


def ids_of(events: list[Event], number: int) -> list[int]:
    return [token.id for token in tokens_of(events, number)]


def reference(model: Any, tokens: tuple[int, ...], count: int, **processors: Any) -> Any:
    """mlx-lm's tokens and log-probabilities `(vocabulary,)` at each."""
    steps = generate_step(
        mx.array(tokens),
        model,
        max_tokens=count,
        logits_processors=make_logits_processors(**processors),
    )
    return [(int(token), np.asarray(logprobs)) for token, logprobs in steps]


@pytest.mark.parametrize("family", often(SMALL, ["qwen3", "qwen3_next"]))
def test_log_probabilities_equal_mlx_lm(models: Any, family: str) -> None:
    model = models(family)
    batch = make(model)
    asked = [(prompt(i, 10 + 7 * i), top) for i, top in enumerate((None, 0, 5, 20))]
    for number, (tokens, top) in enumerate(asked):
        batch.submit(job(number, tokens, logprobs=top))
    events = run(batch)
    assert all(token.likelihood is None for token in tokens_of(events, 0))
    for number, (tokens, top) in list(enumerate(asked))[1:]:
        assert top is not None
        for token, (expected, logprobs) in zip(
            tokens_of(events, number), reference(model, tokens, 12), strict=True
        ):
            assert token.id == expected
            assert token.likelihood is not None
            assert token.likelihood.logprob == pytest.approx(logprobs[expected], abs=1e-3)
            order = np.argsort(-logprobs)[:top]
            assert [each for each, _ in token.likelihood.top] == order.tolist()
            assert [value for _, value in token.likelihood.top] == pytest.approx(
                logprobs[order].tolist(), abs=1e-3
            )


def test_likelihoods_stay_with_their_tokens_when_rows_come_and_go(models: Any) -> None:
    model = models("qwen3")
    batch = make(model, max_rows=4)
    lengths = [3, 9, 5, 7, 4, 8]
    for number, length in enumerate(lengths):
        batch.submit(job(number, prompt(number), length, logprobs=number % 3))
    events = run(batch)
    for number, length in enumerate(lengths):
        for token, (expected, logprobs) in zip(
            tokens_of(events, number), reference(model, prompt(number), length), strict=True
        ):
            assert token.id == expected
            assert token.likelihood is not None
            assert token.likelihood.logprob == pytest.approx(logprobs[expected], abs=1e-3)


def test_a_repetition_penalty_equals_mlx_lms_over_the_whole_context(models: Any) -> None:
    model = models("qwen3")
    sampling = Sampling(temperature=0, repetition_penalty=1.4)
    batch = make(model)
    for number in range(3):
        batch.submit(job(number, prompt(number), 30, sampling=sampling if number else GREEDY))
    events = run(batch)
    assert ids_of(events, 0) == [token for token, _ in reference(model, prompt(0), 30)]
    for number in (1, 2):
        expected = reference(
            model, prompt(number), 30, repetition_penalty=1.4, repetition_context_size=1000
        )
        assert ids_of(events, number) == [token for token, _ in expected]


def assert_by_hand(
    model: Any, tokens: tuple[int, ...], drawn: list[int], count: int, sampling: Sampling
) -> None:
    """Fails unless these tokens follow from OpenAI's formula for frequency and presence. One pass
    over them all has the logits for each."""
    assert len(drawn) == count
    passed = model(mx.array([*tokens, *drawn[:-1]])[None])[0, len(tokens) - 1 :]
    for i, logits in enumerate(np.array(passed, dtype=np.float64)):
        for token, bias in sampling.logit_bias:
            logits[token] += bias
        for token in set(drawn[:i]):
            logits[token] -= sampling.frequency_penalty * drawn[:i].count(token)
            logits[token] -= sampling.presence_penalty
        assert drawn[i] == logits.argmax()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, frequency_penalty=1.5),
        Sampling(temperature=0, presence_penalty=2),
        Sampling(temperature=0, frequency_penalty=-0.5, presence_penalty=-1),
        Sampling(temperature=0, logit_bias=((7, 100.0),)),
        Sampling(temperature=0, logit_bias=((7, 4.0), (9, -3.0)), frequency_penalty=1.0),
    ],
)
def test_penalties_and_biases_equal_openais_formula(models: Any, sampling: Sampling) -> None:
    model = models("qwen3")
    batch = make(model, max_rows=3)
    for number in range(5):  # rows join and leave while the first is counted
        own = sampling if number in (0, 3) else GREEDY
        batch.submit(job(number, prompt(number), 24 if number == 0 else 9, sampling=own))
    events = run(batch)
    assert_by_hand(model, prompt(0), ids_of(events, 0), 24, sampling)
    assert_by_hand(model, prompt(3), ids_of(events, 3), 9, sampling)
    assert_by_hand(model, prompt(1), ids_of(events, 1), 9, GREEDY)


@pytest.mark.slow
def test_penalties_are_exact_however_many_tokens_a_row_has_had() -> None:
    """Against tables of the whole vocabulary; some rows have nothing penalised, or biases alone."""
    vocabulary, steps = 300, 200
    settings = [
        Sampling(repetition_penalty=1.3, frequency_penalty=0.2),
        Sampling(frequency_penalty=-0.3, presence_penalty=0.7, logit_bias=((0, -2.0), (17, 3.0))),
        GREEDY,
        Sampling(logit_bias=((5, -100.0),)),
        Sampling(repetition_penalty=0.8, logit_bias=((9, 1.5),)),
    ]
    rows = [LiveRow(job(i, prompt(i), sampling=each)) for i, each in enumerate(settings)]
    rows[1].fresh, rows[1].drawn = False, [17, 17, 4]
    dice = np.random.default_rng(2)
    penalties = Penalties(rows, vocabulary)
    counts = np.zeros((len(rows), vocabulary))
    np.add.at(counts[1], [17, 17, 4], 1)
    for step in range(steps):
        inputs = dice.integers(0, vocabulary if step % 3 else 20, len(rows))
        for i, token in enumerate(inputs):
            counts[i, token] += step > 0 or i == 1
        if not step:
            inputs[[0, 2, 3, 4]] = [rows[i].job.prompt[-1] for i in (0, 2, 3, 4)]
        logits = dice.standard_normal((len(rows), vocabulary)).astype(np.float32)
        found = np.array(penalties(mx.array(logits), mx.array(inputs.astype(np.uint32))))
        for i, each in enumerate(settings):
            expected = logits[i].astype(np.float64)
            for token, bias in each.logit_bias:
                expected[token] += bias
            had = counts[i] > 0
            if each.repetition_penalty != 1:
                again = had | np.isin(np.arange(vocabulary), rows[i].job.prompt)
                factor = np.where(
                    expected > 0, 1 / each.repetition_penalty, each.repetition_penalty
                )
                expected = np.where(again, expected * factor, expected)
            expected -= each.frequency_penalty * counts[i] + each.presence_penalty * had
            np.testing.assert_allclose(found[i], expected, rtol=1e-5, atol=1e-5)


class OddThenEven:
    """Allows odd tokens and even ones by turns, and so many."""

    def __init__(self, most: int = 1000) -> None:
        self.accepted: list[int] = []
        self.most = most

    @property
    def dormant(self) -> bool:
        return False

    @property
    def failure(self) -> str | None:
        return "no more" if len(self.accepted) >= self.most else None

    def fill(self, mask: Mask) -> None:
        mask[:] = 0x55555555 if len(self.accepted) % 2 else 0x55555555 * 2 - 2**32

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def test_a_constraint_binds_its_row_and_no_other(models: Any) -> None:
    model = models("qwen3")
    batch = make(model, max_rows=3)
    constraints = [OddThenEven(), OddThenEven()]
    sampled = Sampling(temperature=1, seed=3)
    batch.submit(job(0, prompt(0), 20), constraints[0])
    batch.submit(job(1, prompt(1), 20))
    batch.submit(job(2, prompt(2), 11, sampling=sampled), constraints[1])
    batch.submit(job(3, prompt(3), 6))
    events = run(batch)
    for number, constraint in ((0, constraints[0]), (2, constraints[1])):
        drawn = ids_of(events, number)
        assert [token % 2 for token in drawn] == [(i + 1) % 2 for i in range(len(drawn))]
        assert constraint.accepted[: len(drawn)] == drawn
    assert_by_hand(model, prompt(1), ids_of(events, 1), 20, GREEDY)
    assert_by_hand(model, prompt(3), ids_of(events, 3), 6, GREEDY)


class Dormant(OddThenEven):
    """Never asked for a mask."""

    @property
    def dormant(self) -> bool:
        return True

    def fill(self, mask: Mask) -> None:
        raise AssertionError("it is dormant")


@pytest.mark.parametrize("beside", [None, OddThenEven()], ids=["alone", "beside another"])
def test_a_dormant_constraint_sees_all_tokens_and_binds_none(
    models: Any, beside: OddThenEven | None
) -> None:
    model = models("qwen3")
    batch = make(model)
    constraint = Dormant()
    batch.submit(job(0, prompt(0), 20), constraint)
    batch.submit(job(1, prompt(1), 10), beside)
    events = run(batch)
    assert_by_hand(model, prompt(0), ids_of(events, 0), 20, GREEDY)
    assert ids_of(events, 0)[:19] == constraint.accepted[:19]


def test_a_constraint_that_cannot_go_on_fails_its_row_and_no_other(models: Any) -> None:
    model = models("qwen3")
    batch = make(model)
    batch.submit(job(0, prompt(0), 20), OddThenEven(most=5))
    batch.submit(job(1, prompt(1), 20))
    events = run(batch)
    assert len(ids_of(events, 0)) == 5
    clear = "the grammar cannot go on: no more"
    failed = [event for event in events if isinstance(event, Failed)]
    assert failed == [Failed(0, "no more", clear=clear)]
    assert_by_hand(model, prompt(1), ids_of(events, 1), 20, GREEDY)


def test_what_a_constraint_forbids_has_still_its_log_probability(models: Any) -> None:
    model = models("qwen3")
    batch = make(model)
    batch.submit(job(0, prompt(0), 4, logprobs=3), OddThenEven())
    [first, *_] = tokens_of(run(batch), 0)
    logits = np.array(model(mx.array(prompt(0))[None])[0, -1], dtype=np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    assert first.likelihood is not None
    assert first.likelihood.logprob == pytest.approx(expected[first.id], abs=1e-3)
    assert [each for each, _ in first.likelihood.top] == np.argsort(-expected)[:3].tolist()


def expected_scores(model: Any, tokens: tuple[int, ...]) -> np.ndarray[Any, Any]:
    logits = np.array(model(mx.array(tokens)[None])[0], dtype=np.float64)
    logprobs: np.ndarray[Any, Any] = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logprobs


@pytest.mark.parametrize("family", per_cache(SMALL))
def test_a_scored_prompt_equals_one_pass_of_the_model(models: Any, family: str) -> None:
    model = models(family)
    tokens = prompt(5, 70)
    batch = make(model, chunk=32)
    batch.submit(job(9, prompt(1), 20))
    batch.submit(job(0, tokens, 0, scores=4))
    batch.submit(job(1, tokens, 5, scores=0))
    events = run(batch)
    expected = expected_scores(model, tokens)
    for number, top in ((0, 4), (1, 0)):
        [scored] = [e for e in events if isinstance(e, PromptScored) and e.job == number]
        assert scored.scores[0] == Likelihood(None)
        assert len(scored.scores) == len(tokens)
        for i, score in enumerate(scored.scores[1:]):
            assert score.logprob == pytest.approx(expected[i][tokens[i + 1]], abs=1e-3)
            assert len(score.top) == top
            if top:
                assert score.top[0][0] == expected[i].argmax()
    mine = [event for event in events if getattr(event, "job", None) == 0]
    assert [type(event) for event in mine] == [PromptRead, PromptScored, Finished]
    assert len(ids_of(events, 1)) == 5


@pytest.mark.parametrize("family", often(SMALL, ["qwen3", "llama4"]))
def test_jobs_with_one_prompt_read_it_once(models: Any, family: str) -> None:
    model = models(family)
    read: list[int] = []

    class Counting:
        layers = model.layers

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def __call__(self, tokens: Any, cache: Any) -> Any:
            read.append(tokens.shape[0] * (tokens.shape[1] - 1))
            return model(tokens, cache=cache)

    batch = make(Counting())
    read.clear()
    tokens = prompt(3, 40)
    other = prompt(4, 20)
    for number in range(4):
        batch.submit(job(number, tokens, sampling=Sampling(temperature=1, seed=number)))
    batch.submit(job(7, other))
    events = run(batch)
    if FAMILIES[family].batchable:
        assert sum(read) <= 2 * 40  # one row of 39, or two padded to it
    for number in range(4):
        alone = make(model)
        alone.submit(job(number, tokens, sampling=Sampling(temperature=1, seed=number)))
        assert ids_of(run(alone), number) == ids_of(events, number)
    assert len({tuple(ids_of(events, number)) for number in range(4)}) > 1


def test_a_twin_can_be_cancelled_while_its_prompt_is_read(models: Any) -> None:
    model = models("qwen3")
    batch = make(model, chunk=16)
    tokens = prompt(3, 80)
    for number in range(3):
        assert batch.submit(job(number, tokens)) == [Started(number)]
    batch.decode()
    batch.prefill()
    assert batch.statistics()["reading"] == 3
    batch.cancel([0])
    events = run(batch)
    assert not ids_of(events, 0)
    for number in (1, 2):
        assert_by_hand(model, tokens, ids_of(events, number), 12, GREEDY)


def test_more_twins_than_rows_all_get_their_turn(models: Any) -> None:
    model = models("qwen3")
    batch = make(model, max_rows=2)
    for number in range(5):
        batch.submit(job(number, prompt(3), 6))
    events = run(batch)
    for number in range(5):
        assert_by_hand(model, prompt(3), ids_of(events, number), 6, GREEDY)
