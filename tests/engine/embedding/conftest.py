"""A tiny encoder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxsrv.engine.embedding.encoders.bert import Bert


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a tiny encoder; with labels, of a cross-encoder."""

    @cache
    def write(labels: int = 0) -> Path:
        folder = tmp_path_factory.mktemp("bert")
        config = {
            "model_type": "bert",
            "architectures": ["BertForSequenceClassification" if labels else "BertModel"],
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 512,
            "max_position_embeddings": 128,
            "type_vocab_size": 2,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "num_labels": labels,
        }
        (folder / "config.json").write_text(json.dumps(config))
        mx.random.seed(0)
        model: Any = Bert(config)
        weights = {
            name: mx.random.normal(array.shape) * 0.2
            for name, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
        }
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        return folder

    return write
