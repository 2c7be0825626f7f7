"""Files of SAEs, whole and damaged, and the reasons for which they are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.formats.sae_files import read_sae
from tests.support.saes import Kind, Layout, make_arrays, write_sae, write_safetensors

WEIGHTS = "sae_weights.safetensors"


def write(
    folder: Path, layout: Layout = "saelens", kind: Kind = "standard", **options: Any
) -> Path:
    sizes = {"d_in": 8, "d_sae": 16, "k": 3} | options
    return write_sae(folder, layout=layout, architecture=kind, **sizes)


def reason(path: Path) -> str:
    """Why it is refused: one line that does not say where the files are."""
    with pytest.raises(ValueError, match=r".") as error:
        read_sae(path)
    text = str(error.value)
    assert len(text.splitlines()) == 1
    assert str(path.parent) not in text
    assert len(text) < 300
    return text


def write_second_scope(folder: Path, **config: Any) -> Path:
    """As Gemma Scope 2 is: safetensors with lowercase names, and a config.json."""
    folder.mkdir(parents=True)
    arrays = make_arrays("jumprelu", d_in=8, d_sae=16)
    renamed = {name.replace("W_", "w_"): array for name, array in arrays.items()}
    write_safetensors(folder / "params.safetensors", renamed)
    said: dict[str, Any] = {
        "hf_hook_point_in": "model.layers.17.output",
        "hf_hook_point_out": "model.layers.17.output",
        "width": 16,
        "model_name": "google/gemma-3-1b-it",
        "architecture": "jump_relu",
        "l0": 20,
        "affine_connection": False,
        "type": "sae",
    }
    (folder / "config.json").write_text(json.dumps(said | config))
    return folder


def header(fields: Any, data: int = 64) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)
