"""Adapters: what they share with their base, and which cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model, quantize_model, save_config

from mlxsrv.engine.loading.load import ResidentModel
from tests.support.adapters import arrays, write_adapter
from tests.support.effort import often
from tests.support.fixtures import ModelFolder
from tests.support.loading import Refused, generate, load, nothing_left
from tests.support.tiny import write_model

PROMPT = (5, 6, 7, 8, 9, 10)


def quantized(folder: Path, base: Path) -> Path:
    model, config = load_model(base)
    model, config = quantize_model(model, config, 32, 4)
    folder.mkdir()
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    save_config(config, folder / "config.json")
    return folder


ADAPTERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lora": ("qwen3", "lora", {}),
    "dora": ("qwen3", "dora", {"keys": ["self_attn.q_proj", "mlp.down_proj"]}),
    "full": ("qwen3", "full", {}),
    "quantized": ("quantized", "lora", {}),
    "quantized dora": ("quantized", "dora", {"keys": ["self_attn.v_proj"]}),
    "experts": ("qwen3_moe", "lora", {}),
    "tied": ("tied", "lora", {"keys": ["embed_tokens", "model.embed_tokens", "mlp.up_proj"]}),
    "recurrent": ("qwen3_next", "lora", {}),
}


@pytest.mark.parametrize("name", often(ADAPTERS, ["dora", "full", "quantized", "tied"]))
@pytest.mark.slow
def test_adapters_on_one_base_share_its_arrays(
    name: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    family, kind, parameters = ADAPTERS[name]
    if family == "quantized":
        folder = quantized(tmp_path / "base", model_folder("qwen3"))
    elif family == "tied":
        folder = write_model(tmp_path / "base", "qwen3", tie_word_embeddings=True)
    else:
        folder = model_folder(family)
    adapters = [
        write_adapter(tmp_path / str(seed), folder, kind, seed=seed, **parameters)
        for seed in (1, 2)
    ]
    expected = []
    for adapter in adapters:
        model = load_adapters(load_model(folder)[0], str(adapter))
        model.eval()
        expected.append(logits(model))
    del model
    own = [sum(array.nbytes for array in arrays(adapter)) for adapter in adapters]
    with nothing_left():
        before = mx.get_active_memory()
        base = load(folder)
        one = load(folder, [base], adapter=str(adapters[0]))
        two = load(folder, [base, one], adapter=str(adapters[1]))
        size = base.loaded.bytes
        for each, bytes in zip((one, two), own, strict=True):
            # A full fine-tune has arrays in the place of the base's, others beside them.
            assert each.loaded.bytes == (size if kind == "full" else size + bytes)
            assert each.loaded.shared == each.loaded.bytes - bytes
        mx.synchronize()
        assert mx.get_active_memory() - before == pytest.approx(size + sum(own), abs=4096)
        for each in (base, one):
            assert np.abs(logits_of(each) - expected[1]).max() > 0.1
        del base
        np.testing.assert_allclose(logits_of(one), expected[0], atol=1e-4)
        del one
        np.testing.assert_allclose(logits_of(two), expected[1], atol=1e-4)
        assert len(generate(two, PROMPT)[0]) == 30
        del two, each


def logits_of(resident: ResidentModel) -> Any:
    assert resident.text is not None
    return logits(resident.text._model)


def logits(model: Any) -> Any:
    return np.array(model(mx.array([PROMPT])))


def test_the_base_may_come_after_its_adapter_and_of_a_full_one_in_parts(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("qwen3")
    adapter = write_adapter(tmp_path / "a", folder, "full")
    tuned = load(folder, adapter=str(adapter))
    base = load(folder, [tuned])
    own = sum(array.nbytes for array in arrays(adapter))
    assert (tuned.loaded.shared, base.loaded.shared) == (0, base.loaded.bytes - own)
    assert generate(base, PROMPT) == generate(load(folder), PROMPT)


def test_files_that_have_changed_are_read_anew(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3")
    old = load(folder)
    write_model(folder, "qwen3", seed=1)
    new = load(folder, [old])
    assert new.loaded.shared == 0
    assert generate(new, PROMPT) != generate(old, PROMPT)


@pytest.mark.parametrize("damage", ["missing", "config", "names", "pickled"])
def test_an_adapter_that_cannot_be_used_says_why(
    model_folder: ModelFolder, tmp_path: Path, damage: str
) -> None:
    folder = model_folder("qwen3")
    adapter = write_adapter(tmp_path / "a", folder)
    file = adapter / "adapters.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage == "config":
        (adapter / "adapter_config.json").write_text('{"num_layers": 2, "lora_parameters": {}}')
    elif damage == "names":
        mx.save_safetensors(str(file), {"no.such.lora_a": mx.zeros((4, 4))})
    else:
        np.save(file.with_suffix(".npy"), np.array([{}]), allow_pickle=True)
        file.with_suffix(".npy").rename(file)
    with nothing_left():
        with pytest.raises(Refused, match="its adapter cannot be used: ") as error:
            load(folder, adapter=str(adapter))
        del error
