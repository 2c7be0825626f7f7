"""Configs that no weights could fit are told by the headers; healthy models are left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlxsrv.formats.adapters import adapter_bytes
from mlxsrv.formats.files import UnusableFile
from mlxsrv.formats.model_folder import describe_model
from tests.support.encoders import write_encoder
from tests.support.tiny import FAMILIES, make_tokenizer, write_model

SMALL = [name for name in FAMILIES if name != "qwen3-46m"]


def change(folder: Path, **values: Any) -> None:
    """Change the config, of the text model where that is part of another."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    place = config.get("text_config", config)
    place |= values
    file.write_text(json.dumps(config))


def refusal(folder: Path) -> str:
    with pytest.raises(UnusableFile) as error:
        describe_model(folder)
    return str(error.value)


@pytest.mark.parametrize("family", SMALL)
def test_more_layers_than_weights_are_refused(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", family)
    assert describe_model(folder).layers
    for layers in (60_000, 10**18, 1001, 300):
        change(folder, num_hidden_layers=layers)
        assert f"has {layers} for num_hidden_layers" in refusal(folder)


@pytest.mark.parametrize("key", ["n_layer", "n_layers", "num_layers", "num_kv_reuse_layers"])
def test_whatever_a_family_calls_its_layers(key: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "llama")
    change(folder, **{key: 60_000})
    assert key in refusal(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"vocab_size": 10**9},
        {"hidden_size": 10**7},
        {"intermediate_size": 10**8},
        {"num_experts": 10**6},
        {"num_attention_heads": 10**6},
        {"layer_types": ["full_attention"] * 60_000},
        {"hybrid_override_pattern": "M" * 60_000},
        {"thinker": {"text_config": {"num_hidden_layers": 60_000}}},
    ],
)
def test_other_numbers_that_no_weights_fit(values: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3_moe")
    describe_model(folder)
    change(folder, **values)
    [key] = values
    assert ("num_hidden_layers" if key == "thinker" else key) in refusal(folder)


def test_an_encoders_layers_are_compared_too(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m", "bert")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    describe_model(folder)
    change(folder, num_hidden_layers=900)
    assert "900 for num_hidden_layers" in refusal(folder)


# Healthy ones.


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss", "llama4"])
def test_packed_weights_are_no_reason(family: str, bits: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", family)
    model, _ = load_model(folder)
    quantize(model, group_size=32, bits=bits)
    tree: Any = model.parameters()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(tree)))
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config))
    assert describe_model(folder).quantization_level == f"{bits}bit"


def test_parts_that_a_conversion_left_out_are_no_reason(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3")
    change(
        folder,
        vision_config={"num_hidden_layers": 45, "hidden_size": 3200, "intermediate_size": 12800},
        num_nextn_predict_layers=3,
        max_position_embeddings=10**7,
        max_window_layers=70,
        num_hidden_layers=6,
    )
    assert describe_model(folder).layers == 6


@pytest.mark.parametrize(
    "values",
    [
        {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["lm_head"] * 2000}},
        {"num_experts_per_layer": 512},
    ],
)
def test_numbers_that_are_not_of_layers_are_no_reason(
    values: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m", "qwen3")
    change(folder, **values)
    assert describe_model(folder).layers == 2


def test_stand_ins_are_not_compared(tmp_path: Path) -> None:
    """A download looks at a folder before its weights are there."""
    folder = write_model(tmp_path / "m", "qwen3")
    mx.save_safetensors(str(folder / "model.safetensors"), {"stand-in": mx.zeros((1,))})
    assert "no tensor in its weights" in refusal(folder)
    assert describe_model(folder, stand_ins=True).layers == 2


# Adapters.


def write_adapter(folder: Path, rank: object) -> Path:
    folder.mkdir()
    parameters = {"rank": rank, "scale": 1.0, "dropout": 0.0}
    config = {"num_layers": 1, "lora_parameters": parameters, "fine_tune_type": "lora"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "model.layers.1.self_attn.q_proj"
    arrays = {f"{name}.lora_a": mx.zeros((64, 4)), f"{name}.lora_b": mx.zeros((4, 64))}
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    return folder


def test_an_adapters_rank_is_that_of_its_tensors(tmp_path: Path) -> None:
    assert adapter_bytes(write_adapter(tmp_path / "a", 4)) == 2 * 64 * 4 * 4
    with pytest.raises(UnusableFile, match="its rank is 1000000000"):
        adapter_bytes(write_adapter(tmp_path / "b", 10**9))
