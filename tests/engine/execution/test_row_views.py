"""KV caches that a reading begins with: moved from a cached prompt, or copied from a running
row."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxsrv.engine.plans import Keep
from tests.support.driver import COUNT, Driver, prompt

SIZE = 300


def answered(driver: Driver, row: int) -> tuple[int, ...]:
    return (*driver.prompts[row], *driver.drawn[row])


def start(driver: Driver, size: int = SIZE) -> tuple[int, ...]:
    """Have row 0 leave its text as entry 1."""
    driver.admit(0, prompt(0, size))
    driver.read(0)
    driver.run((0,), rows=[0])
    driver.release(0, keep=Keep(1, size + COUNT))
    return answered(driver, 0)


@pytest.mark.parametrize("lost", [0, 3, COUNT])
def test_a_kept_prompt_that_is_moved_is_kept_no_more(models: Any, lost: int) -> None:
    driver = Driver(models("qwen3"))
    text = start(driver)
    begin = len(text) - lost
    driver.admit(1, (*text[:begin], *prompt(1, 9)))
    driver.read(1, source=1, begin=begin, moves=True, cuts=(begin + 3,))
    assert not driver.runner._kept
    driver.run((1,), rows=[1])
    driver.check(1)
    driver.runner.forget([1])


@pytest.mark.parametrize("begin", [70, SIZE - 1])
@pytest.mark.parametrize("place", ["half read", "ready", "decoded", "beside others"])
def test_a_row_lends_what_it_holds_wherever_it_is(models: Any, place: str, begin: int) -> None:
    driver = Driver(models("qwen3"))
    driver.admit(0, prompt(0, SIZE))
    driver.admit(2, prompt(2, 40))
    first, last = driver.span(0, cuts=(begin,))[:2] if begin < SIZE - 1 else (None, None)
    if place == "half read":
        if first is None:
            return
        driver.runner.read([first])
    else:
        driver.read(0)
    if place == "decoded":
        driver.run((0,), rows=[0])
    elif place == "beside others":
        driver.read(2)
        driver.run((2,), (0,), rows=[0, 2], count=COUNT // 2)
        driver.run((2, 0), rows=[0, 2])
    driver.admit(1, (*prompt(0, SIZE)[:begin], *prompt(1, 9)))
    driver.read(1, from_row=0, begin=begin)
    if place == "half read":
        assert last is not None
        driver.runner.read([last])
    order = {"half read": (0,), "ready": (0,), "decoded": (0,), "beside others": (2, 0)}[place]
    driver.run(order, (1,), rows=[0, 1], count=len(driver.drawn[0]) + COUNT)
    driver.check(0, 1)


def test_a_row_that_has_lost_its_kv_cache_lends_nothing(models: Any) -> None:
    driver = Driver(models("qwen3"))
    driver.admit(0, prompt(0, SIZE))
    driver.read(0)
    driver.runner.rewind([0])
    driver.admit(1, (*prompt(0, SIZE), *prompt(1, 9)))
    with pytest.raises(RuntimeError, match="row 0 has lost"):
        driver.read(1, from_row=0, begin=100)
    assert not driver.runner._texts
    driver.read(1)
    driver.run((1,), rows=[1])
    driver.check(1)


def test_a_short_beginning_of_a_long_text_takes_its_own_bytes_only(models: Any) -> None:
    driver = Driver(models("qwen3"))
    text = start(driver, 3000)
    cache = driver.runner._kept[1].cache
    short = cache.copy(100)
    mx.eval(short.state)
    assert short.nbytes * 20 < cache.nbytes
    assert cache.tokens == len(text)
    with pytest.raises(ValueError, match="cannot be cut"):
        cache.copy(len(text) + 1)
