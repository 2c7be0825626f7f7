"""The folder of a tiny model, to be described or broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxsrv.formats.files import UnusableFile
from mlxsrv.formats.model_folder import describe_model
from tests.support.tiny import write_model

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("original") / "tiny", "qwen3")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A model to break."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def change(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; a value of `...` removes one."""
    held = json.loads(path.read_text()) if path.exists() else {}
    held |= values
    path.write_text(json.dumps({k: v for k, v in held.items() if v is not ...}))


def split(folder: Path) -> None:
    """Store the weights as two shards with an index, as large models are."""
    whole = folder / "model.safetensors"
    weights = list(mx.load(str(whole)).items())  # type: ignore[union-attr]
    halves = dict(weights[::2]), dict(weights[1::2])
    for name, half in zip(SHARDS, halves, strict=True):
        mx.save_safetensors(str(folder / name), half, {"format": "mlx"})
    where = {key: name for name, half in zip(SHARDS, halves, strict=True) for key in half}
    change(folder / INDEX, weight_map=where)
    whole.unlink()


def reason(folder: Path, **options: Any) -> str:
    with pytest.raises(UnusableFile) as error:
        describe_model(folder, **options)
    return str(error.value)
