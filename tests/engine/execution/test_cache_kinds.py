"""KV caches as few models have them: of a kind of their own, in lists, or not used by a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import KVCache

from mlxsrv.engine.cache.quantized import QuantizedCache
from mlxsrv.engine.events import Answered
from mlxsrv.engine.plans import Keep
from tests.support.driver import COUNT, Driver, prompt
from tests.support.fixtures import ModelFolder
from tests.support.loading import HandRunner, generate, load
from tests.support.stored import StoringEngine, make_job
from tests.support.tiny import RARE, WINDOW

pytestmark = pytest.mark.slow

LISTS = ("deepseek_v32", "glm_moe_dsa", "longcat_flash", "minimax_m3_vl")
PROMPT = tuple(range(5, 45))
LONG = tuple(20 + i * 7 % 300 for i in range(300))


@pytest.mark.parametrize("family", RARE)
def test_what_a_row_leaves_is_kept_and_gone_on_from(models: Any, family: str) -> None:
    driver = Driver(models(family))
    whole = family == "deepseek_v41"  # a kind of the model's own
    driver.admit(0, prompt(0))
    driver.read(0, cuts=(7, 20))
    driver.run((0,), rows=[0])
    driver.check(0)
    [kept] = driver.release(0, keep=Keep(5, len(prompt(0)) + COUNT))
    assert (kept.cuts, driver.runner.facts.cuts) == (not whole,) * 2
    text = (*prompt(0), *driver.drawn[0])
    for row, begin in ((1, len(text)), (2, len(text)), (3, len(text) if whole else 17)):
        driver.admit(row, (*text[:begin], *prompt(row, 9)))
        driver.read(row, source=5, begin=begin, cuts=(begin + 3,))
        driver.run((row,), rows=[row])
        driver.check(row)
        driver.release(row)


@pytest.mark.parametrize("family", RARE)
def test_rows_take_what_was_foreseen(models: Any, family: str) -> None:
    driver = Driver(models(family))
    most = 0.0
    for row, size in enumerate((2, 10, WINDOW + 1, 40, 300, 1021)):
        driver.admit(row, prompt(row, size + 1))
        driver.read(row)
        driver.must((row,))
        driver.must()
        [kept] = driver.release(row, keep=Keep(row, size + 2))
        foreseen = driver.runner.facts.kv_bytes(size + 2)
        assert kept.bytes <= foreseen, size
        most = foreseen / kept.bytes
    assert most < 1.01, "windows count little in the end"


def test_nothing_is_stored_of_a_kind_that_is_not_known(
    model_folder: ModelFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is kept in memory, and the load says why it is not on disk."""
    folder = model_folder("deepseek_v41", plain=True)
    engine = StoringEngine(folder, tmp_path / "store")
    [notes] = [event.value.notes for event in engine.events if isinstance(event, Answered)]
    assert notes[-1].startswith("prompt_cache_dir: KV caches of this model's own kind (LayerCache)")
    answer, _ = engine.ask(make_job(1, LONG))
    _, cached = engine.ask(make_job(2, (*LONG, *answer, 7, 8)))
    assert cached >= len(LONG) + len(answer) - 1
    engine.end()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("family", LISTS)
def test_tokens_are_proposed_to_rows_whose_layers_have_several(
    model_folder: ModelFolder, family: str
) -> None:
    resident = load(model_folder(family), draft=str(model_folder("llama")), lookup=True)
    assert not any("draft_model" in note for note in resident.loaded.notes)
    hand = HandRunner(resident)
    assert hand.text.facts.drafts
    assert hand.text.facts.lookup
    [text] = hand.step(hand.start(PROMPT), 40, proposals=3)
    assert [text[:40]] == generate(load(model_folder(family)), PROMPT, max_tokens=40)


def test_a_layer_that_does_not_use_its_cache_is_none_of_its_business(
    model_folder: ModelFolder,
) -> None:
    plain, quantized = (load(model_folder("nemotron-nas"), kv_bits=bits) for bits in (None, 8))
    assert plain.loaded.notes == quantized.loaded.notes == ()
    assert generate(quantized, PROMPT, max_tokens=8) == generate(plain, PROMPT, max_tokens=8)
    hand = HandRunner(quantized)
    [first] = hand.generate(PROMPT, max_tokens=8)
    assert hand.kept
    assert hand.generate(PROMPT, max_tokens=8) == [first]


@pytest.mark.parametrize("start", [0, 20, 1000])
def test_only_the_first_of_a_layers_several_is_quantized_where_the_model_needs_that(
    model_folder: ModelFolder, start: int
) -> None:
    """Its index is used as an array, and its mask is another for each head."""
    folder = model_folder("minimax_m3_vl")
    resident = load(folder, kv_bits=8, quantized_kv_start=start)
    assert not any("kv_bits" in note for note in resident.loaded.notes)
    assert resident.text is not None
    layers = resident.text._caches.make().layers
    kinds = {tuple(type(each) for each in layer.caches) for layer in layers}
    assert kinds == {(QuantizedCache, KVCache)}
    plain = load(folder)
    assert generate(resident, PROMPT, max_tokens=8) == generate(plain, PROMPT, max_tokens=8)
