"""The text runner, driven by plans made by hand: the text of rows is mlx-lm's, however they are
read and decoded."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxsrv.engine.orders import Job
from mlxsrv.engine.plans import Keep
from mlxsrv.generation.parameters import Steering
from tests.support.driver import BATCHED, COUNT, GREEDY, SMALL, Driver, Failing, Parity, prompt
from tests.support.effort import per_cache


@pytest.mark.parametrize("family", per_cache(SMALL))
def test_a_text_read_in_parts(models: Any, family: str) -> None:
    driver = Driver(models(family))
    driver.admit(1, prompt(1, 60))
    driver.read(1, cuts=(7, 8, 33))
    driver.run((1,), rows=[1])
    driver.check(1)
    driver.release(1)
    assert driver.is_empty


@pytest.mark.parametrize("family", per_cache(BATCHED))
def test_texts_read_together_of_one_length_or_padded(models: Any, family: str) -> None:
    driver = Driver(models(family))
    sizes = (30, 9, 41) if driver.runner.facts.pads else (30, 30, 30)
    for row, size in enumerate(sizes):
        driver.admit(row, prompt(row, size))
    driver.admit(3, driver.prompts[1])
    driver.read_together([0], [1, 3], [2])
    driver.run((0, 1, 3, 2), rows=range(4))
    driver.check(0, 1, 2, 3)
    assert driver.drawn[1] == driver.drawn[3]


@pytest.mark.parametrize("family", per_cache(BATCHED))
def test_twins_groups_that_merge_and_rows_that_leave(models: Any, family: str) -> None:
    driver = Driver(models(family))
    for row in range(5):
        driver.admit(row, prompt(row, 11 + 6 * row))
    driver.admit(5, driver.prompts[4])
    driver.read(0)
    driver.must((0,))
    driver.read(1)
    driver.read(4, 5, cuts=(16,))
    driver.must((4, 5), (0,), (1,))  # groups of their own, in another order than before
    for _ in range(3):
        driver.must()
    driver.read(2)
    driver.must((4, 5), (0, 1, 2))
    driver.must()
    driver.release(4, 1)
    driver.read(3)
    driver.must((5,), (0, 2), (3,))
    driver.run((3, 5, 0, 2), rows=[0, 2, 3, 5])
    driver.check(*range(6))
    assert driver.drawn[5][: len(driver.drawn[4])] == driver.drawn[4]


@pytest.mark.parametrize("family", per_cache(BATCHED))
def test_rows_change_from_any_group_to_any_other(models: Any, family: str) -> None:
    driver = Driver(models(family))
    for row in range(6):
        driver.admit(row, prompt(row, 11 + 6 * row))
        driver.read(row)
    driver.must((0, 1, 2), (3, 4))
    driver.must()
    driver.must((0, 4), (2, 3), (1, 5))  # each of the two gives a row to another
    driver.must()
    driver.must((5, 3, 4), (1, 0), (2,))
    driver.run((2, 1, 0, 3, 4, 5), rows=range(6))
    driver.check(*range(6))


def test_a_row_in_no_group_is_a_fault_and_all_can_be_read_anew(models: Any) -> None:
    driver = Driver(models("qwen3"))
    for row in range(3):
        driver.admit(row, prompt(row))
        driver.read(row)
    driver.must((0, 1), (2,))
    driver.must()
    driver.admit(3, prompt(3))
    driver.admit(4, prompt(4))
    driver.read_together([3], [4])
    _, fault = driver.step((0, 2), (4,))
    assert fault is not None
    assert [*driver.runner._ready] == [3]
    for row in range(3):
        driver.read(row)
    driver.run((0, 2), (1,), rows=range(3))
    driver.check(0, 1, 2)


def test_rows_that_are_ready_may_wait(models: Any) -> None:
    driver = Driver(models("qwen3"))
    for row in range(3):
        driver.admit(row, prompt(row))
        driver.read(row)
    driver.must((0,))
    driver.must()
    driver.release(1)
    driver.run((0, 2), rows=[0, 2])
    driver.check(0, 2)


def test_a_row_on_trial_joins_the_others(models: Any) -> None:
    driver = Driver(models("qwen3"))
    for row in range(2):
        driver.admit(row, prompt(row), logprobs=2)
        driver.read(row, joins=None if row else (row,))
    driver.must((0,))
    for _ in range(3):
        driver.must()
        done = driver.must(suspect=1)
        assert [row for row, _ in done.tokens] == [1]
        assert [*done.likelihoods] == [1]
    driver.join(1)
    done = driver.must((0, 1))
    assert [row for row, _ in done.tokens] == [0]
    driver.run(rows=[0, 1])
    driver.check(0, 1)


def test_a_row_that_is_only_read_is_nowhere(models: Any) -> None:
    driver = Driver(models("qwen3"))
    driver.admit(0, prompt(0), max_tokens=0, scores=2, ranks=True)
    first, last = driver.span(0, cuts=(20,), scored=True, joins=())
    assert driver.runner.read([first]).scores is None
    scores = driver.runner.read([last]).scores
    assert scores is not None
    assert scores.job == 0
    logits = models("qwen3")(mx.array([prompt(0)]))[0]
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert len(scores.scores) == 40
    for place, likelihood in enumerate(scores.scores[1:]):
        token = prompt(0)[place + 1]
        assert likelihood.logprob == pytest.approx(expected[place, token].item(), abs=1e-3)
    driver.release(0)
    assert driver.is_empty


def test_nan_in_a_prompt_is_told_and_no_row_is_ready(models: Any) -> None:
    class Spoiled(Failing):
        def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
            return mx.where(tokens[..., None] == 7, mx.nan, super().__call__(tokens, cache))

    driver = Driver(Spoiled(models("qwen3")))
    driver.admit(0, (5, 6, 7, 8, 9), scores=0)
    done = driver.runner.read(driver.span(0, scored=True, keep=Keep(1, 4)))
    assert done.broken == (0,)
    assert not done.kept
    driver.release(0)
    assert driver.is_empty


def test_nan_in_a_step_is_of_one_row(models: Any) -> None:
    class Spoiled(Failing):
        def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
            logits = super().__call__(tokens, cache)
            if tokens.shape[1] > 1:
                return logits
            return mx.where(tokens[..., None] == 7, mx.nan, logits)

    driver = Driver(Spoiled(models("qwen3")))
    driver.admit(0, prompt(0))
    driver.admit(1, (*prompt(1), 7))
    driver.read_together([0], [1])
    driver.must((0, 1))
    done = driver.must()
    assert done.broken == (1,)
    assert [row for row, _ in done.tokens] == [0]
    driver.release(1)
    driver.model = models("qwen3")
    driver.run((0,), rows=[0])
    driver.check(0)


def test_a_row_whose_steering_is_not_there_fails_alone(models: Any) -> None:
    model = models("qwen3")
    runner = Driver(model).runner
    bad = Job(0, "m", (5, 6), 9, frozenset(), GREEDY, steering=Steering(vectors=(("no", 1.0),)))
    done = runner.admit([bad, Job(1, "m", (5, 6), 9, frozenset(), GREEDY)])
    assert [failure.row for failure in done.failures] == [0]
    assert "no control vector" in done.failures[0].reason
    assert [*runner._rows] == [1]


def test_a_slice_passes_over_rows_that_were_not_admitted(models: Any) -> None:
    driver = Driver(models("qwen3"))
    bad = Job(9, "m", prompt(0), 9, frozenset(), GREEDY, steering=Steering(vectors=(("no", 1.0),)))
    driver.runner.admit([bad])
    driver.prompts[9], driver.drawn[9] = prompt(0), []
    for row in (0, 1):
        driver.admit(row, prompt(row))
    assert driver.runner.read(driver.span(9, keep=Keep(1, 39))).kept == ()
    driver.read_together([9], [0])
    # A twin of one that was to be scored is not scored in its place.
    driver.prompts[9] = prompt(1)
    assert driver.runner.read(driver.span(9, 1, scored=True)).scores is None
    driver.release(9)
    driver.run((0,), (1,), rows=[0, 1])
    driver.check(0, 1)
    driver.release(0, 1)
    assert driver.is_empty


class PanicException(BaseException):
    """As Rust's panics come out of pyo3."""


@pytest.mark.parametrize("error", [ValueError("no"), PanicException("no")])
@pytest.mark.parametrize("method", ["fill", "accept", "dormant"])
def test_a_constraint_that_fails_is_its_rows_failure(
    models: Any, method: str, error: BaseException
) -> None:
    driver = Driver(models("qwen3"))
    driver.admit(0, prompt(0), Parity((method, 3), error))
    driver.admit(1, prompt(1), Parity())
    driver.admit(2, prompt(2))
    driver.read_together([0], [1], [2])
    done = driver.must((0, 1, 2))
    assert done.bound == (0, 1)
    failures: list[tuple[int, str | None]] = []
    while not failures:
        done = driver.must()
        failures = [(failure.row, failure.clear) for failure in done.failures]
    assert failures == [(0, None)]
    driver.release(0)
    driver.run((2, 1), rows=[1, 2])
    driver.check(2)
    assert [token % 2 for token in driver.drawn[1]][:COUNT] == [1, 0] * (COUNT // 2)


def test_a_constraint_that_cannot_go_on_says_why(models: Any) -> None:
    driver = Driver(models("qwen3"))
    constraint = Parity()
    driver.admit(0, prompt(0), constraint)
    driver.read(0)
    driver.must((0,))
    constraint.failure = "too ambiguous"
    [failure] = driver.must().failures
    assert failure.clear == "the grammar cannot go on: too ambiguous"
