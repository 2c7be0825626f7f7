"""Adapters, written as mlx-lm's trainer writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model


def write_adapter(
    folder: Path, base: Path, kind: str = "lora", *, seed: int = 0, **parameters: Any
) -> Path:
    """An adapter of random numbers, large enough to change the text."""
    folder.mkdir()
    model, _ = load_model(base, lazy=True)
    config = {
        "fine_tune_type": kind,
        "num_layers": 2,
        "lora_parameters": {"rank": 4, "scale": 4.0, "dropout": 0.1, **parameters},
    }
    if kind == "full":
        chosen = [name for name in names(model) if "q_proj" in name]
    else:
        linear_to_lora_layers(model, 2, config["lora_parameters"], use_dora=kind == "dora")
        leaves = ("lora_a", "lora_b", "m")
        chosen = [name for name in names(model) if name.split(".")[-1] in leaves]
    shapes = names(model)
    dice = np.random.default_rng(seed)
    arrays = {
        name: mx.array(dice.standard_normal(shapes[name]) / 8 + name.endswith(".m"))
        for name in chosen
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def names(model: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's arrays."""
    return {name: array.shape for name, array in dict(tree_flatten(model.parameters())).items()}


def arrays(adapter: Path) -> list[mx.array]:
    loaded: dict[str, mx.array] = mx.load(str(adapter / "adapters.safetensors"))  # type: ignore[assignment]
    return list(loaded.values())
