"""One memory limit for all ranks: each keeps it, and the text is that of a server with memory for
all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from mlxsrv.formats.safetensors import read_header
from tests.support.client import Body
from tests.support.heavy import PER_LAYER, ask_all, make_work, write_heavy
from tests.support.ranks import ranks
from tests.support.serving import serving
from tests.support.tiny import write_model

pytestmark = [pytest.mark.served, pytest.mark.slow, pytest.mark.ranks]

LAYERS = 2
WORK = [body | {"max_tokens": 400} for body in make_work(5, model="m", answer=300)]
"""Answers of one length: it is seen too late that they do not fit together."""

ROOM = 1200 * LAYERS * PER_LAYER // 2
"""Bytes for KV caches; a rank has half of each row."""


@pytest.mark.parametrize(
    ("split", "family"),
    [("tensor", "qwen3"), pytest.param("pipeline", "qwen3_moe", marks=pytest.mark.long)],
)
def test_more_work_than_fits_is_all_answered(tmp_path: Path, split: str, family: str) -> None:
    folder = write_heavy(tmp_path / "model", layers=LAYERS, family=family)
    with serving(tmp_path, "--model", f"m={folder}") as server:
        right = asyncio.run(ask_all(server.url, WORK))
    weights = (folder / "model.safetensors").stat().st_size
    limit = weights + ROOM
    options = ("--model", f"m={folder}", "--parallel", split, f"--memory-limit={limit}")
    with ranks(2, tmp_path / "ranks", *options, "--prefill-chunk=64") as running:
        assert asyncio.run(ask_all(running.server.url, WORK)) == right
        told = httpx.get(f"{running.server.url}/health?verbose=1", timeout=60).json()
        [model] = told["models"]
        assert model["engine"]["preemptions"] > 0, "some rows had to give way"
        assert told["memory"]["weights"] < weights, "a rank has a share of them"
        assert told["memory"]["kept"] <= told["memory"]["budget"] < limit


@pytest.mark.long
@pytest.mark.parametrize("option", ["--kv-bits=8", "--max-kv-size=32"])
def test_other_kinds_of_kv_caches_give_the_same_text(tmp_path: Path, option: str) -> None:
    folder = write_heavy(tmp_path / "model", layers=LAYERS)
    work = make_work(6, model="m", answer=80)
    options = ("--model", f"m={folder}", option)
    with serving(tmp_path, *options) as server:
        right = asyncio.run(ask_all(server.url, work))
    with ranks(2, tmp_path / "ranks", *options, "--parallel", "tensor") as running:
        assert asyncio.run(ask_all(running.server.url, work)) == right


def test_the_budget_counts_the_largest_share(tmp_path: Path) -> None:
    # Of a pipeline, rank 0 has the last layers. This first layer is by far the largest.
    sizes: Body = {"mlp_only_layers": [0], "intermediate_size": 2048}
    folder = write_model(tmp_path / "model", "qwen3_moe", plain=True, **sizes)
    tensors, _ = read_header(folder / "model.safetensors")
    largest = sum(each.bytes for name, each in tensors.items() if ".layers.1." not in name)
    options = ("--model", f"m={folder}", "--parallel", "pipeline")
    with ranks(2, tmp_path / "ranks", *options) as running:
        told = httpx.get(f"{running.server.url}/health?verbose=1", timeout=60).json()
        assert told["memory"]["weights"] == largest
