"""Options that several ranks cannot have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from mlxsrv.options import SettingsError
from mlxsrv.server.ranks import check_parallel
from mlxsrv.settings import Settings

Split = Literal["tensor", "pipeline"]


def test_what_ranks_cannot_have_is_refused_by_name(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    refused: list[tuple[Split, str, dict[str, Any]]] = [
        ("tensor", "--draft-model", {"draft_model": ("ngram",)}),
        ("tensor", "--prompt-cache-dir", {"prompt_cache_dir": "x"}),
        ("pipeline", "an adapter", {"model": ("demo", f"org/model+{adapter}")}),
        ("pipeline", "--kv-bits", {"kv_bits": 4}),
        ("pipeline", "--control-vector", {"control_vector": ("x",)}),
    ]
    for split, name, options in refused:
        with pytest.raises(SettingsError, match=f"^{name} cannot be used with --parallel {split}$"):
            check_parallel(Settings(parallel=split, **options))
    check_parallel(Settings(parallel="tensor", kv_bits=4, control_vector=("x",)))


def test_a_folder_with_a_plus_in_its_name_is_no_adapter(tmp_path: Path) -> None:
    folder = tmp_path / "c++" / "model"
    folder.mkdir(parents=True)
    splits: tuple[Split, ...] = ("tensor", "pipeline")
    for split in splits:
        check_parallel(Settings(parallel=split, model=(f"m={folder}",)))
