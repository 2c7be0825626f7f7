"""Adapters in a folder: their bytes, and all the ways to be broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlxsrv.formats.adapters import adapter_bytes
from mlxsrv.formats.files import JSONObject, UnusableFile
from tests.support.model_folders import change, original

__all__ = ["original"]


@pytest.fixture
def adapter(original: Path, tmp_path: Path) -> Path:
    """A LoRA adapter as mlx-lm's trainer saves one."""
    made = tmp_path / "adapter"
    made.mkdir()
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0}
    model, _ = mlx_lm.utils.load_model(original)
    model.freeze()
    linear_to_lora_layers(model, 1, parameters)
    weights = dict(tree_flatten(model.trainable_parameters()))
    mx.save_safetensors(str(made / "adapters.safetensors"), weights)
    change(made / "adapter_config.json", num_layers=1, lora_parameters=parameters)
    return made


def test_an_adapter_has_the_bytes_of_its_tensors(adapter: Path, original: Path) -> None:
    model, _ = mlx_lm.utils.load_model(original)
    mlx_lm.utils.load_adapters(model, str(adapter))
    parameters: Any = tree_flatten(model.parameters())
    lora = [value.nbytes for name, value in parameters if "lora_" in name]
    assert adapter_bytes(adapter) == sum(lora) > 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_layers": ...}, "num_layers"),
        ({"lora_parameters": ...}, "lora_parameters"),
        ({"lora_parameters": {"rank": 4, "scale": 2.0}}, "lora_parameters.dropout"),
        ({"peft_type": "LORA", "num_layers": ...}, "PEFT"),
    ],
)
def test_an_adapter_that_mlx_lm_cannot_read(
    values: JSONObject, expected: str, adapter: Path
) -> None:
    change(adapter / "adapter_config.json", **values)
    with pytest.raises(UnusableFile, match=expected):
        adapter_bytes(adapter)


def test_a_full_fine_tune_needs_no_parameters_of_lora(adapter: Path) -> None:
    config = {"num_layers": ..., "lora_parameters": ..., "fine_tune_type": "full"}
    change(adapter / "adapter_config.json", **config)
    assert adapter_bytes(adapter) > 0


@pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
def test_an_adapter_that_is_not_all_there(name: str, adapter: Path) -> None:
    (adapter / name).unlink()
    with pytest.raises(UnusableFile, match=f"'{name}' is not there"):
        adapter_bytes(adapter)
