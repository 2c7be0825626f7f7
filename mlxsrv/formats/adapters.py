"""LoRA adapters that mlx-lm has trained: whether one can be used, and its size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlxsrv.formats.files import JSONObject, UnusableFile, read_object, reading
from mlxsrv.formats.safetensors import Tensor, read_header


def adapter_bytes(folder: Path) -> int:
    """Return the bytes of the tensors of an adapter.

    Raises:
        UnusableFile: mlx-lm cannot load it; the message says why.
    """
    with reading(folder):
        config = read_object(folder / "adapter_config.json")
        lora = config.get("fine_tune_type", "lora") != "full"
        if lora:
            if "peft_type" in config:
                raise UnusableFile("it is a PEFT adapter; mlx-lm reads its own format only")
            _check_lora(config)
        tensors, _ = read_header(folder / "adapters.safetensors")
        if lora:
            _check_rank(config["lora_parameters"]["rank"], tensors)
        return sum(tensor.bytes for tensor in tensors.values())


def _check_lora(config: JSONObject) -> None:
    if type(config.get("num_layers")) is not int:
        raise UnusableFile("'adapter_config.json' has no num_layers")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise UnusableFile("'adapter_config.json' has no lora_parameters")
    for key in ("rank", "scale", "dropout"):
        if type(parameters.get(key)) not in (int, float):
            raise UnusableFile(f"'adapter_config.json' has no lora_parameters.{key}")


def _check_rank(rank: object, tensors: Mapping[str, Tensor]) -> None:
    """Raise UnusableFile if an adapter of this rank could not have these tensors."""
    for name, tensor in tensors.items():
        if name.endswith(".lora_a") and rank in tensor.shape:
            return
    raise UnusableFile(f"its rank is {str(rank)[:100]}, and it has no such lora_a")
