"""Rounds of a draft model's proposals, driven by plans made by hand."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.plans import Keep
from mlxsrv.generation.parameters import Sampling
from tests.support.driver import GREEDY, Driver, Failing, Parity, prompt
from tests.support.tiny import write_model


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=7)])
@pytest.mark.parametrize("draft", ["itself", "another"])
def test_speculative_steps_and_steps_give_one_text(
    models: Any, draft: str, sampling: Sampling
) -> None:
    model = models("qwen3")
    driver = Driver(model, draft=model if draft == "itself" else models("llama"))
    assert driver.runner.facts.drafts
    dice = random.Random(0)
    for row in range(2):
        driver.admit(row, prompt(row), sampling=sampling)
        driver.read(row)
        driver.must((row,))
        driver.runner.read_draft(row, 0, 30)
        while len(driver.drawn[row]) < 30:
            count = dice.choice([0, 1, 3, 5])
            before = len(driver.drawn[row])
            done = driver.must(proposals=(count,))
            new = driver.drawn[row][before:]
            if count:
                assert len(new) == done.accepted[row] + 1
                assert done.waited > 0
                assert draft == "another" or done.accepted[row] == count
                following = done.following[row]
                assert driver.must().tokens == ((row, following),)
            _check_lengths(driver, row)
        [kept] = driver.release(row, keep=Keep(row, 45))
        assert driver.runner._kept[kept.entry].cache.layers[0].size() == 45
        plain = Driver(model)
        plain.admit(row, prompt(row), sampling=sampling)
        plain.read(row)
        plain.run((row,), rows=[row], count=len(driver.drawn[row]))
        assert plain.drawn[row] == driver.drawn[row]


def _check_lengths(driver: Driver, row: int) -> None:
    """The KV caches hold the row's text, or a beginning of it."""
    length = len(driver.prompts[row]) + len(driver.drawn[row])
    [sub_batch] = driver.runner._decoder.sub_batches
    assert sub_batch.caches.lengths == [length]
    draft: Any = driver.runner._draft
    assert draft._cache[0].size() == draft._read <= length


def test_a_constraint_that_wakes_up_in_a_speculative_step_binds_the_next_token(models: Any) -> None:
    for proposals in ((0,), (4,)):
        driver = Driver(models("qwen3"), draft=models("qwen3"))
        driver.admit(0, prompt(0), Parity(asleep=8))
        driver.read(0)
        driver.must((0,))
        bound: tuple[int, ...] = ()
        while not bound:
            bound = driver.must(proposals=proposals).bound
        assert len(driver.drawn[0]) == 8
        driver.run(rows=[0], count=14)
        assert [token % 2 for token in driver.drawn[0][8:]] == [1, 0] * 3
        if proposals == (0,):
            plain = driver.drawn[0]
    assert driver.drawn[0] == plain


def test_a_draft_that_fails_is_forgotten(models: Any) -> None:
    draft = Failing(models("qwen3"))
    driver = Driver(models("qwen3"), draft=draft)
    driver.admit(0, prompt(0))
    driver.read(0)
    driver.must((0,))
    read: Any = driver.runner._draft
    driver.runner.read_draft(0, 0, 30)
    draft.when = lambda _: True
    with pytest.raises(RuntimeError, match="says the test"):
        driver.runner.read_draft(0, 30, 5)
    assert read._read == 0
    assert read._row is None
    driver.must()
    draft.when = lambda _: False
    driver.runner.read_draft(0, 0, 30)
    draft.when = lambda tokens: tokens.shape[1] == 1  # the second of its passes
    _, fault = driver.step(proposals=(3,))
    assert fault is not None
    assert read._read == 0
    assert read._row is None
    driver.read(0)
    driver.run((0,), rows=[0])
    driver.check(0)


def test_a_draft_of_another_vocabulary_is_refused(models: Any, tmp_path: Path) -> None:
    other, _ = load_model(write_model(tmp_path / "other", "qwen3", vocab_size=400))
    with pytest.raises(ValueError, match="vocabulary"):
        Driver(models("qwen3"), draft=other)
    assert not Driver(models("mamba2"), draft=models("qwen3")).runner.facts.drafts
    bounded = KVCacheFactory(models("qwen3"), max_size=20)
    assert not Driver(models("qwen3"), bounded, draft=models("qwen3")).runner.facts.drafts
