"""The text runner keeps prompts, and rows go on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.outcomes import KeptPrompt
from mlxsrv.engine.plans import FreedRow, Keep
from mlxsrv.generation.parameters import Sampling
from tests.support.driver import BATCHED, COUNT, GREEDY, SMALL, Driver, prompt
from tests.support.effort import per_cache
from tests.support.heavy import write_heavy
from tests.support.tiny import FAMILIES


@pytest.mark.parametrize("family", per_cache(SMALL))
def test_what_a_row_leaves_is_where_another_begins(models: Any, family: str) -> None:
    driver = Driver(models(family))
    driver.admit(0, prompt(0))
    driver.read(0)
    driver.run((0,), rows=[0])
    [kept] = driver.release(0, keep=Keep(5, len(prompt(0)) + COUNT))
    # All windows are full.
    assert kept == KeptPrompt(5, kept.bytes, cuts={*FAMILIES[family].caches} == {"KVCache"})
    assert kept.bytes > 0
    text = (*prompt(0), *driver.drawn[0])
    for row in (1, 2):  # the entry stays as it is
        driver.admit(row, (*text, *prompt(row, 9)))
        driver.read(row, source=5, begin=len(text), cuts=(len(text) + 3,))
        driver.run((row,), rows=[row])
        driver.check(row)
        driver.release(row)
    driver.runner.forget([5], spare=True)
    assert not driver.runner._kept


@pytest.mark.parametrize("rows", [1, 2])
def test_the_last_rows_of_their_arrays_are_not_there_twice(tmp_path: Path, rows: int) -> None:
    """One layer of twelve is, while it is copied; and a step may be under way."""
    driver = Driver(load_model(write_heavy(tmp_path / "m", layers=12))[0])
    for row in range(rows):
        driver.admit(row, prompt(row, 500))
        driver.read(row)
    driver.run((*range(rows),), rows=[0], count=3)
    begun = mx.get_active_memory()
    mx.reset_peak_memory()
    gone = [FreedRow(row, Keep(row, 500)) for row in range(rows)]
    kept = driver.runner.release(gone).prompts
    assert len(kept) == rows
    assert mx.get_peak_memory() - begun < sum(each.bytes for each in kept) / 2
    driver.admit(9, (*prompt(0, 500), *prompt(9)))
    driver.read(9, source=0, begin=500)
    driver.run((9,), rows=[9])
    driver.check(9)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "falcon_h1", "llama4"])
def test_a_prompt_is_kept_after_a_span_and_cut_where_it_can_be(models: Any, family: str) -> None:
    driver = Driver(models(family))
    driver.admit(0, prompt(0))
    [kept] = driver.read(0, cuts=(30,), keep=Keep(1, 39))
    driver.run((0,), rows=[0])
    driver.check(0)
    begin = 25 if kept.cuts else 39
    driver.admit(1, (*prompt(0)[:begin], *prompt(1)))
    driver.release(0)
    driver.read(1, source=1, begin=begin)
    driver.run((1,), rows=[1])
    driver.check(1)


@pytest.mark.parametrize("family", per_cache(BATCHED))
def test_prompts_are_kept_after_a_padded_pass(models: Any, family: str) -> None:
    driver = Driver(models(family))
    sizes = (30, 18) if driver.runner.facts.pads else (30, 30)
    for row, size in enumerate(sizes):
        driver.admit(row, prompt(row, size))
    spans = [driver.span(row, keep=Keep(row, sizes[row] - 1))[0] for row in range(2)]
    assert [kept.entry for kept in driver.runner.read(spans).kept] == [0, 1]
    driver.run((0, 1), rows=[0, 1])
    driver.release(0, 1)
    for row, size in enumerate(sizes):
        driver.admit(row, prompt(row, size)[:-1] + prompt(9, 7))
        driver.read(row, source=row, begin=size - 1)
    driver.run((1, 0), rows=[0, 1])
    driver.check(0, 1)


def test_tokens_behind_what_is_kept_are_cut_off_or_nothing_is_kept(models: Any) -> None:
    for family, cut in (("qwen3", True), ("mamba2", False)):
        driver = Driver(models(family))
        driver.admit(0, prompt(0))
        driver.read(0)
        driver.run((0,), rows=[0])
        kept = driver.release(0, keep=Keep(1, 42))
        assert [each.entry for each in kept] == [1] * cut
        if cut:
            assert driver.runner._kept[1].cache.layers[0].size() == 42


def test_a_row_that_was_never_decoded_leaves_what_is_read(models: Any) -> None:
    driver = Driver(models("mamba2"))
    driver.admit(0, prompt(0))
    driver.admit(1, prompt(1, 30))
    driver.read_together([0], [1])
    [kept] = driver.release(0, keep=Keep(3, 39))
    driver.admit(2, (*prompt(0)[:-1], *prompt(2)))
    driver.read(2, source=kept.entry, begin=39)
    driver.run((1,), (2,), rows=[1, 2])
    driver.check(1, 2)


def test_half_read_twins_leave_one_after_the_other(models: Any) -> None:
    driver = Driver(models("qwen3_next"))
    for row in range(4):
        driver.admit(row, prompt(0))
    first, last = driver.span(0, 1, 2, cuts=(20,))
    driver.runner.read([first])
    [kept] = driver.release(1, keep=Keep(1, 20))
    driver.runner.rewind([2])
    driver.runner.read([msgspec.structs.replace(last, rows=(0,), joins=(0,))])
    driver.read(3, source=kept.entry, begin=20)
    first, _ = driver.span(2, cuts=(20,))
    driver.runner.read([first])
    [kept] = driver.release(2, keep=Keep(2, 20))
    assert kept.entry == 2
    assert not driver.runner._texts
    driver.run((0, 3), rows=[0, 3])
    driver.check(0, 3)


def test_a_prompt_is_not_scored_on_when_who_asked_has_left(models: Any) -> None:
    driver = Driver(models("qwen3"))
    driver.admit(0, prompt(0), scores=2)
    driver.admit(1, prompt(0))
    first, last = driver.span(0, 1, cuts=(20,), scored=True)
    driver.runner.read([first])
    driver.release(0)
    last = msgspec.structs.replace(last, rows=(1,), joins=(1,), scored=False)
    assert driver.runner.read([last]).scores is None
    driver.run((1,), rows=[1])
    driver.check(1)


def test_a_row_leaves_whatever_happens_to_those_that_are_ready(models: Any) -> None:
    driver = Driver(models("qwen3"))
    for row in range(4):
        driver.admit(row, prompt(row))
    driver.read_together([0], [1])
    driver.read(2)
    driver.runner._ready[0].cache.layers = None  # type: ignore[assignment]  # whatever is done with it fails
    with pytest.raises(TypeError):
        driver.release(0, 2, keep=Keep(1, 20))
    driver.release(1, 3)
    assert driver.is_empty


def test_rows_that_are_rewound_go_on_where_they_were(models: Any) -> None:
    driver = Driver(models("qwen3"))
    seeded = Sampling(temperature=1, seed=3)
    for row in range(3):
        driver.admit(row, prompt(row), sampling=seeded if row == 2 else GREEDY)
    driver.read_together([0], [1], [2])
    driver.run((0, 1, 2), rows=range(3), count=5)
    driver.runner.rewind([0, 2])
    driver.must((1,))
    driver.read(0)
    driver.read(2)
    driver.run((1, 0, 2), rows=range(3))
    driver.check(0, 1)
    alone = Driver(models("qwen3"))
    alone.admit(2, prompt(2), sampling=seeded)
    alone.read(2)
    alone.run((2,), rows=[2], count=len(driver.drawn[2]))
    assert alone.drawn[2] == driver.drawn[2]
