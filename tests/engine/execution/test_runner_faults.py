"""A work of the text runner that fails: what it touched is dropped, and all can be read anew."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxsrv.engine.cache.row_cache import RowCache
from mlxsrv.engine.plans import Keep
from tests.support.driver import COUNT, Driver, Failing, Parity, prompt


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "llama4"])
def test_a_pass_that_fails_while_reading_drops_its_texts(models: Any, family: str) -> None:
    model = Failing(models(family))
    driver = Driver(model)
    driver.admit(0, prompt(0))
    driver.admit(1, prompt(1))
    first, last = driver.span(0, cuts=(20,))
    driver.runner.read([first])
    model.when = lambda tokens: tokens.shape[1] > 1
    with pytest.raises(RuntimeError, match="says the test"):
        driver.runner.read([last])
    if driver.runner.facts.batched:
        with pytest.raises(RuntimeError, match="says the test"):
            driver.read_together([0], [1])
    assert not driver.runner._texts
    model.when = lambda _: False
    driver.read(0, cuts=(20,))
    driver.run((0,), rows=[0])
    driver.check(0)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "mamba2"])
def test_a_step_that_fails_drops_the_caches_of_its_rows(models: Any, family: str) -> None:
    model = Failing(models(family))
    driver = Driver(model)
    for row in range(4):
        driver.admit(row, prompt(row))
        driver.read(row, joins=None if row == 2 else (row,))
    driver.must((0, 1))
    for _ in range(3):
        driver.must()
        driver.must(suspect=2)
    before = {row: list(drawn) for row, drawn in driver.drawn.items()}
    model.when = lambda tokens: tokens.shape[0] == 3
    done, fault = driver.step((0, 1, 3))
    assert fault is not None
    assert fault.memory
    assert not done.tokens
    assert driver.drawn == before
    assert [*driver.runner._texts] == [2]
    model.when = lambda _: False
    for row in (0, 1, 3):
        driver.read(row)
    driver.join(2)
    driver.must((3, 0), (1,))
    driver.run((3, 0, 1, 2), rows=range(4))
    driver.check(*range(4))


def test_the_step_of_a_suspect_that_fails_drops_its_cache_alone(models: Any) -> None:
    model = Failing(models("qwen3"))
    driver = Driver(model)
    driver.admit(0, prompt(0))
    driver.read(0)
    driver.must((0,))
    driver.admit(1, prompt(1))
    driver.read(1, joins=None)
    driver.must(suspect=1)
    model.when = lambda _: True
    done, fault = driver.step(suspect=1)
    assert fault is not None
    assert not done.tokens
    assert not driver.runner._texts
    model.when = lambda _: False
    driver.read(1)
    driver.run((0, 1), rows=(0, 1))
    driver.check(0, 1)


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_suspect_whose_constraint_raises_fails_and_the_step_does_not(
    models: Any, method: str
) -> None:
    driver = Driver(models("qwen3"))
    driver.admit(0, prompt(0), Parity((method, 2), ValueError("bad")))
    driver.read(0, joins=None)
    assert [token % 2 for _, token in driver.must(suspect=0).tokens] == [1]
    done = driver.must(suspect=0)
    assert [failure.row for failure in done.failures] == [0]
    assert len(done.tokens) == (method == "accept"), "a token without a mask is not delivered"


def test_a_suspect_draws_nothing_where_the_model_computes_nan(models: Any) -> None:
    class Spoiled(Failing):
        def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
            return super().__call__(tokens, cache) * mx.nan

    driver = Driver(Spoiled(models("qwen3")))
    driver.admit(0, prompt(0))
    driver.read(0, joins=None)
    done = driver.must(suspect=0)
    assert (done.broken, done.tokens) == ((0,), ())


def test_tokens_count_that_were_told_before_a_step_failed(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(models("qwen3"))
    driver.admit(0, prompt(0), Parity())
    driver.read(0)
    driver.must((0,))
    driver.must()
    with monkeypatch.context() as patched:
        patched.setattr("mlxsrv.engine.sampling.processors.np.unpackbits", _fail)
        done, fault = driver.step()
    assert fault is not None
    assert len(done.tokens) == 1
    driver.read(0)
    driver.run((0,), rows=[0])
    assert [token % 2 for token in driver.drawn[0]] == [1, 0] * (COUNT // 2)
    alone = Driver(models("qwen3"))
    alone.admit(0, prompt(0), Parity())
    alone.read(0)
    alone.run((0,), rows=[0])
    assert alone.drawn[0] == driver.drawn[0]


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no")


def test_a_release_that_fails_frees_its_rows_and_drops_what_it_touched(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(models("qwen3"))
    for row in range(4):
        driver.admit(row, prompt(row))
        driver.read(row)
    driver.must((0, 1), (2,))
    driver.must()
    with monkeypatch.context() as patched:
        patched.setattr(RowCache, "materialize", _fail)
        with pytest.raises(RuntimeError):
            driver.release(0, keep=Keep(1, 41))
    assert not driver.runner._kept
    assert [*driver.runner._rows] == [1, 2, 3]
    for row in (1, 2):
        driver.read(row)
    driver.run((3, 1), (2,), rows=[1, 2, 3])
    driver.check(1, 2, 3)
