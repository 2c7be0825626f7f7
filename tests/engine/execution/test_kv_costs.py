"""KV caches of real rows take what the facts of their model say."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.events import kv_bytes
from mlxsrv.engine.orders import Job
from mlxsrv.engine.plans import Keep
from tests.support.driver import GREEDY, SMALL, Driver, prompt
from tests.support.text_engine import TextEngine
from tests.support.tiny import FAMILIES, write_model


@pytest.mark.parametrize("family", SMALL)
def test_kv_costs_are_those_of_real_rows(models: Any, family: str) -> None:
    model = models(family)
    driver = Driver(model)
    facts = driver.runner.facts
    assert facts.vocabulary == FAMILIES[family].vocabulary
    assert facts.batched == FAMILIES[family].batchable
    assert len(facts.kv_costs) <= 3
    for row, size in enumerate((2, 10, 17, 40, 300)):
        driver.admit(row, prompt(row, size + 1))
        driver.read(row)
        driver.must((row,))
        driver.must()
        [kept] = driver.release(row, keep=Keep(row, size + 2))
        cache = driver.runner._kept[row].cache
        assert facts.kv_bytes(size + 2) == _count_used(cache.layers)
        if facts.batched:
            assert facts.kv_bytes(size + 2) == kept.bytes


def _count_used(cache: Iterable[Any]) -> int:
    """Bytes of a row's KV cache but for what is allocated for later tokens."""
    total = 0
    for layer in cache:
        if hasattr(layer, "caches"):
            total += _count_used(layer.caches)
        elif hasattr(layer, "keys_and_values"):
            total += sum(array.nbytes for array in layer.keys_and_values())
        else:
            total += layer.nbytes
    return total


@pytest.mark.parametrize(
    "more",
    [{"max_size": 20}, {"group": 32, "bits": 8}, {"group": 32, "bits": 4, "start": 20}],
)
def test_kv_costs_of_bounded_and_quantized_caches(tmp_path: Path, more: Any) -> None:
    model, _ = load_model(write_model(tmp_path / "wide", "qwen3", head_dim=32))
    driver = Driver(model, KVCacheFactory(model, **more))
    facts = driver.runner.facts
    for row, size in enumerate((12, 18, 256, 300)):
        driver.admit(row, prompt(row, size - 1))
        driver.read(row)
        driver.must((row,))
        driver.must()
        [kept] = driver.release(row, keep=Keep(row, size))
        if facts.batched:
            assert facts.kv_bytes(size) == kept.bytes
        else:  # as many tokens as were allocated
            assert facts.kv_bytes(-(-size // 256) * 256) == kept.bytes


def test_long_rows_whose_first_tokens_are_not_quantized_can_be_cut(tmp_path: Path) -> None:
    """These take more for a while, and none is ever lost, as it is behind a window."""
    model, _ = load_model(write_model(tmp_path / "wide", "qwen3", head_dim=32))
    facts = Driver(model, KVCacheFactory(model, group=32, bits=4, start=20)).runner.facts
    plain = Driver(model).runner.facts
    assert facts.cuts_at(1000)
    assert facts.kv_bytes(20) == plain.kv_bytes(20)
    later = facts.kv_bytes(21) - facts.kv_bytes(20)
    assert 0 < later < plain.kv_bytes(1) / 4
    assert facts.kv_bytes(1000) == facts.kv_bytes(20) + 980 * later
    # While it is read a row has no slice more of them, as it has of a window.
    read = kv_bytes(facts.kv_costs, 1000, slice=512)
    assert facts.kv_bytes(1000) == read


@pytest.mark.parametrize("family", SMALL)
def test_what_is_counted_is_what_arrays_take_at_each_step(models: Any, family: str) -> None:
    """Rows of random lengths come and go."""
    engine, random = TextEngine(models(family), max_rows=5), Random(7)
    for number in range(9):
        size, answer = random.choice([3, 40, 250, 300]), random.choice([4, 12])
        engine.submit(Job(number, "m", prompt(number, size), answer, frozenset(), GREEDY))
        for _ in range(3):
            check_counts(engine)
    while not engine.idle:
        check_counts(engine)


def check_counts(engine: TextEngine) -> None:
    """One round. Where a layer has states, free slots have none. Rows that have just ended are
    freed in the next one."""
    runner, facts = engine.runner, engine.runner.facts
    engine.decode()
    batches, groups = runner._decoder.sub_batches, engine.schedule._groups
    if sum(len(batch.rows) for batch in batches) == groups.count:
        layers = [layer for batch in batches for layer in batch.caches.layers]
        counted = engine.schedule.statistics()["row_bytes"]
        if facts.batched:
            state: Any = tree_flatten([layer.state for layer in layers])
            taken = sum(array.nbytes for _, array in state if isinstance(array, mx.array))
            free = sum(group.slots for group in groups._groups) - groups.count
            assert counted == taken + free * sum(cost.fixed for cost in facts.kv_costs)
        else:  # mlx-lm's own KV caches
            assert counted >= _count_used(layers)
    engine.prefill()
    caches = {id(text): text.cache for text in runner._texts.values()}.values()
    # A chunk of mlx-lm's has up to a step more than it uses.
    read = [each.nbytes if facts.batched else _count_used(each.layers) for each in caches]
    assert sum(read) <= engine.schedule.memory.reading_bytes
