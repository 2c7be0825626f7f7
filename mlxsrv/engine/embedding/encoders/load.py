"""Loading encoders: models that read a text in both directions and give a vector for each token.

They come in Hugging Face's layout: `config.json` and safetensors. Modules have the names that they
have in transformers, so a weight's name says where it belongs. A config that asks for something
that is not computed here is refused: see `mlxsrv.formats.encoders`.

Used on the device thread only.
"""

from __future__ import annotations

from pathlib import Path

from mlxsrv.engine.embedding.encoders.bert import Bert
from mlxsrv.engine.embedding.encoders.layers import Dense, Encoder, fill, map_weights
from mlxsrv.engine.embedding.encoders.modernbert import ModernBert
from mlxsrv.formats.encoders import check_encoder, check_no_adapter, is_encoder
from mlxsrv.formats.files import read_object
from mlxsrv.formats.pooling import read_dense_config


def load_encoder(folder: Path) -> Encoder:
    """The encoder in `folder`. Its weights are mapped now, and read when they are evaluated.

    Raises ValueError if it is of no type that runs here, or its weights do not fit its config.
    """
    config = read_object(folder / "config.json")
    if not is_encoder(config):
        raise ValueError(f"there is no encoder of the type {config.get('model_type')!r}")
    check_encoder(config)
    check_no_adapter(folder)
    encoder = ModernBert(config) if config["model_type"] == "modernbert" else Bert(config)
    fill(encoder, map_weights(folder))
    encoder.eval()
    return encoder


def load_dense(folder: Path) -> Dense:
    """A Dense module of sentence-transformers, its weights mapped. Raises ValueError."""
    dense = Dense(read_dense_config(folder))
    fill(dense, map_weights(folder))
    return dense
