"""Loads hold on to nothing, also where Python's own account would not show it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import mlx.core as mx

from mlxsrv.engine.loading.weights import ByteBudget, WeightReader
from tests.support.encoders import write_encoder
from tests.support.tiny import write_model


def test_a_load_leaves_no_keys_to_be_split(tmp_path: Path) -> None:
    decoder = write_model(tmp_path / "decoder", "qwen3")
    encoder = write_encoder(tmp_path / "encoder", "bert")
    for folder, is_encoder in ((decoder, False), (encoder, True)):
        reader = WeightReader(ByteBudget(), list, trust_remote_code=False)
        for _ in reader.map(str(folder), encoder=is_encoder):
            pass
        graph = tmp_path / "graph"
        mx.export_to_dot(str(graph), *cast(list[mx.array], mx.random.state))
        assert "->" not in graph.read_text(), "a key waits to be computed of others"
