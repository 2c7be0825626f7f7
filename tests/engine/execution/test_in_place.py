"""Steps write KV caches in place: if anything holds a part of an array longer than it must, each
step copies the array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.plans import Decode, Keep, RowGroup
from tests.support.buffers import address_of
from tests.support.driver import GREEDY, Driver, Parity, prompt
from tests.support.tiny import write_model

STEPS = 5
COLUMNS = 1 << 16
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen3", {}),
    "window": ("gemma3_text", {}),
    "recurrent": ("qwen3_next", {}),
    "several": ("falcon_h1", {}),
    "bounded": ("qwen3", {"max_size": 20}),
}


def slots(driver: Driver) -> list[mx.array]:
    """The arrays of all layers in which rows have slots."""
    found: list[mx.array] = []
    for sub_batch in driver.runner._decoder.sub_batches:
        for layer in sub_batch.caches.layers:
            for each in getattr(layer, "caches", [layer]):
                if getattr(each, "keys", None) is not None:
                    for part in (each.keys, each.values):
                        found += part if isinstance(part, tuple) else [part]
    assert found
    return found


def addresses(driver: Driver) -> list[int]:
    return [address_of(array) for array in slots(driver)]


def start(driver: Driver, **more: Any) -> None:
    """Three rows that decode, with a slot for a fourth one."""
    for row in range(3):
        driver.admit(row, prompt(row, 20 + 10 * row), **more)
        driver.read(row)
    arrange(driver, 0, 1, 2)
    driver.must()


def arrange(driver: Driver, *rows: int) -> None:
    group = RowGroup(rows, 4, 256)
    done, fault = driver.runner.decode(Decode(model=0, groups=(group,)))
    assert fault is None
    for row, token in done.tokens:
        driver.drawn[row].append(token)


def assert_steps_write_in_place(driver: Driver, kept: list[int]) -> None:
    assert kept
    for _ in range(STEPS):
        driver.must()
        assert addresses(driver) == kept


@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_rows_that_come_and_go_leave_the_slots_where_they_are(
    models: Any, kind: str
) -> None:
    family, bounds = KINDS[kind]
    model = models(family)
    driver = Driver(model, KVCacheFactory(model, **bounds))
    start(driver)
    kept = addresses(driver)
    assert_steps_write_in_place(driver, kept)
    driver.admit(3, prompt(3))
    driver.read(3, keep=Keep(1, 39))
    arrange(driver, 0, 1, 2, 3)
    assert_steps_write_in_place(driver, kept)
    driver.release(1, keep=Keep(2, 30))
    arrange(driver, 0, 3, 2)
    assert_steps_write_in_place(driver, kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_groups_share_writes_all_their_slots_in_place(models: Any, kind: str) -> None:
    family, bounds = KINDS[kind]
    model = models(family)
    driver = Driver(model, KVCacheFactory(model, **bounds))
    assert driver.runner.facts.shares
    for row, length in enumerate((200, 20, 30)):
        driver.admit(row, prompt(row, length))
        driver.read(row)
    driver.must((0,), (1, 2))
    driver.must()
    kept = addresses(driver)
    assert len(kept) == len({*kept})
    assert_steps_write_in_place(driver, kept)


@pytest.mark.parametrize("begin", [0, 25, 1000])  # before, among and behind the rows' tokens
def test_quantized_slots_are_written_in_place(tmp_path: Path, begin: int) -> None:
    model, _ = load_model(write_model(tmp_path, "qwen3", head_dim=32))
    driver = Driver(model, KVCacheFactory(model, group=32, bits=8, start=begin))
    start(driver)
    assert_steps_write_in_place(driver, addresses(driver))


@pytest.mark.parametrize("asks", ["constraint", "logprobs"])
def test_steps_that_wait_write_in_place(models: Any, asks: str) -> None:
    driver = Driver(models("qwen3"))
    if asks == "constraint":
        start(driver, constraint=Parity())
    else:
        start(driver, logprobs=2, sampling=GREEDY)
    assert_steps_write_in_place(driver, addresses(driver))


def test_a_row_that_has_lent_its_beginning_is_written_in_place(models: Any) -> None:
    driver = Driver(models("qwen3"))
    start(driver)
    kept = addresses(driver)
    driver.admit(3, (*driver.prompts[0], *prompt(3, 9)))
    driver.read(3, from_row=0, begin=15)
    assert_steps_write_in_place(driver, kept)


def test_speculative_steps_of_proposals_write_in_place(models: Any) -> None:
    driver = Driver(models("qwen3"), draft=models("qwen3"))
    driver.admit(0, prompt(0))
    driver.read(0)
    driver.must((0,))
    driver.must()
    driver.runner.read_draft(0, 0, 30)
    kept = addresses(driver)
    for _ in range(STEPS):
        driver.must(proposals=(3,))
        assert addresses(driver) == kept


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (((0, 1, 2, 3),), ((0, 1), (2, 3))),
        (((0, 1), (2, 3)), ((0, 1, 2, 3),)),
        (((0, 1), (2, 3)), ((0, 2), (1, 3))),
    ],
    ids=["split", "merged", "crossed"],
)
def test_rows_that_change_groups_are_twice_in_one_layer_at_most(
    tmp_path: Path, before: tuple[tuple[int, ...], ...], after: tuple[tuple[int, ...], ...]
) -> None:
    layers = 8
    model, _ = load_model(write_model(tmp_path, "qwen3", num_hidden_layers=layers))
    driver = Driver(model)
    for row in range(4):
        driver.admit(row, prompt(row))
        driver.read(row)
    mx.synchronize()
    mx.clear_cache()
    begun = mx.get_active_memory()
    decoder = driver.runner._decoder
    shaped = [
        tuple(RowGroup(rows, len(rows), COLUMNS) for rows in each) for each in (before, after)
    ]
    driver.runner.decode(Decode(model=0, groups=shaped[0]))
    decoder.wait()
    taken = mx.get_active_memory() - begun
    mx.reset_peak_memory()
    decoder.arrange(shaped[1], {})
    mx.synchronize()
    assert mx.get_peak_memory() - begun < taken * (1 + 1.1 / layers)


@pytest.mark.parametrize("groups", [((0, 1),), ((0,), (1,))], ids=["together", "apart"])
def test_steps_that_are_launched_ahead_need_no_memory_for_a_copy(
    models: Any, groups: tuple[tuple[int, ...], ...]
) -> None:
    """Nobody waits for a step here, as in a server: what is under way holds the arrays, too."""
    driver = Driver(models("qwen3"))
    for row in range(2):
        driver.admit(row, prompt(row, 20 + 10 * row))
        driver.read(row)
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    shaped = tuple(RowGroup(rows, len(rows), COLUMNS) for rows in groups)
    driver.runner.decode(Decode(model=0, groups=shaped))
    mx.reset_peak_memory()
    for _ in range(4 * STEPS):
        driver.must()
    mx.synchronize()
    arrays = [array.nbytes for array in slots(driver)]
    assert mx.get_peak_memory() - before < sum(arrays) + min(arrays) / 2
