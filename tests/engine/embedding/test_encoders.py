"""Encoders against what transformers and sentence-transformers make of the same weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.embedding.embedding_models import EmbeddingDecoder
from mlxsrv.engine.embedding.encoders.layers import Encoder
from mlxsrv.engine.embedding.encoders.load import load_dense, load_encoder
from mlxsrv.engine.embedding.pooling import pool
from mlxsrv.formats.pooling import parse_pooling, read_pooling_config
from tests.support.effort import often
from tests.support.encoders import (
    CONFIGS,
    FIRSTS,
    LENGTHS,
    MINILM,
    POOLINGS,
    Array,
    make_weights,
    recorded,
    references,
    write_encoder,
    write_json,
    write_safetensors,
    write_sentence_transformer,
)

ENCODERS = [name for name in CONFIGS if name != "qwen3"]
CLASSIFIERS = [name for name in ENCODERS if f"{name}/logits" in recorded()]
WEIGHTS = {name: make_weights(name, references()["shapes"][name]) for name in ENCODERS}
TOKENS: dict[str, list[list[int]]] = references()["tokens"]


def run(
    encoder: Encoder, rows: list[list[int]], *, firsts: tuple[int, ...] | None, padding: int = 0
) -> tuple[mx.array, mx.array]:
    """The last hidden state of a batch, and its mask."""
    length = max(map(len, rows))
    tokens = mx.array([row + [padding] * (length - len(row)) for row in rows])
    mask = mx.array([[i < len(row) for i in range(length)] for row in rows])
    return encoder(tokens, mask, firsts), mask


def least_cosine(made: Array, wanted: Array) -> float:
    product = (made * wanted).sum(-1)
    norms = np.linalg.norm(made, axis=-1) * np.linalg.norm(wanted, axis=-1)
    return float((product / norms).min())


@pytest.fixture(params=ENCODERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def encoder(name: str, tmp_path: Path) -> Encoder:
    return load_encoder(write_encoder(tmp_path, name))


def test_hidden_states_are_those_of_transformers(name: str, encoder: Encoder) -> None:
    hidden, mask = run(encoder, TOKENS[name], firsts=FIRSTS)
    real = np.array(mask)
    made, wanted = np.array(hidden)[real], recorded()[f"{name}/hidden"][real]
    assert made.shape == (sum(LENGTHS), encoder.width)
    assert least_cosine(made, wanted) >= 0.9999
    np.testing.assert_allclose(made, wanted, atol=2e-5)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_logits_are_those_of_transformers(name: str, encoder: Encoder) -> None:
    hidden, mask = run(encoder, TOKENS[name], firsts=FIRSTS)
    logits = encoder.classify(hidden, mask)
    assert logits.shape == (len(LENGTHS), encoder.labels)
    np.testing.assert_allclose(np.array(logits), recorded()[f"{name}/logits"], atol=2e-5)


def test_a_text_is_the_same_alone_and_among_longer_ones(name: str, encoder: Encoder) -> None:
    """Whatever the padding is: nothing of it gets through, and nothing of it is not a number."""
    hidden, mask = run(encoder, TOKENS[name], firsts=FIRSTS, padding=7)
    assert mx.isfinite(hidden).all().item()
    judged = encoder.classify(hidden, mask) if encoder.labels else None
    for i, row in enumerate(TOKENS[name]):
        alone, own = run(encoder, [row], firsts=FIRSTS[i : i + 1])
        np.testing.assert_allclose(
            np.array(hidden)[i, : len(row)], np.array(alone)[0], atol=1e-5, rtol=0
        )
        if judged is not None:
            np.testing.assert_allclose(
                np.array(judged)[i], np.array(encoder.classify(alone, own))[0], atol=1e-5, rtol=0
            )


def test_the_second_text_of_a_pair_counts_in_bert_alone(name: str, encoder: Encoder) -> None:
    paired, _ = run(encoder, TOKENS[name], firsts=FIRSTS)
    single, _ = run(encoder, TOKENS[name], firsts=None)
    differ = bool(np.abs(np.array(paired) - np.array(single)).max() > 0.01)
    assert differ == (CONFIGS[name]["model_type"] == "bert")


def test_sentence_transformers_vectors_with_a_dense_layer(tmp_path: Path) -> None:
    write_sentence_transformer(tmp_path)
    config = read_pooling_config(tmp_path, decoder=False)
    dense = load_dense(config.dense[0])
    encoder = load_encoder(tmp_path)
    for row, wanted in zip(TOKENS["bert"], recorded()["layout/vectors"], strict=True):
        hidden, _ = run(encoder, [row], firsts=None)
        vector = np.array(dense(hidden.mean(1)))[0]
        np.testing.assert_allclose(vector / np.linalg.norm(vector), wanted, atol=1e-5)


def test_a_decoders_hidden_states_are_those_of_transformers(tmp_path: Path) -> None:
    model, _ = load_model(write_encoder(tmp_path, "qwen3"))
    rows = TOKENS["qwen3"]
    tokens = mx.array([row + [0] * (max(LENGTHS) - len(row)) for row in rows])
    hidden = np.array(EmbeddingDecoder(model).run(tokens, tokens > 0, None))
    for made, wanted, length in zip(hidden, recorded()["qwen3/hidden"], LENGTHS, strict=True):
        np.testing.assert_allclose(made[:length], wanted[:length], atol=2e-5)


@pytest.mark.parametrize("mode", POOLINGS)
def test_pooled_vectors_are_those_of_sentence_transformers(mode: str) -> None:
    mask = mx.arange(max(LENGTHS))[None] < mx.array(LENGTHS)[:, None]
    made = pool(mx.array(recorded()["bert/hidden"]), mask, parse_pooling({"pooling_mode": mode}))
    np.testing.assert_allclose(np.array(made), recorded()[f"pooling/{mode}"], atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec(MINILM) is None, reason=f"needs {MINILM}")
@pytest.mark.slow
def test_minilm_vectors_are_those_of_sentence_transformers() -> None:
    found = importlib.util.find_spec(MINILM)
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "model"
    config = read_pooling_config(folder, decoder=False)
    assert (config.pooling, config.normalize, config.max_length) == (
        "mean",
        True,
        256,
    )
    rows = [sentence["tokens"] for sentence in references()["minilm"]]
    hidden, mask = run(load_encoder(folder), rows, firsts=None)
    sums = mx.where(mask[:, :, None], hidden, 0).sum(1)
    made = np.array(sums / mx.linalg.norm(sums, axis=-1, keepdims=True))
    wanted = recorded()["minilm/vectors"]
    assert least_cosine(made, wanted) >= 0.9999
    np.testing.assert_allclose(made, wanted, atol=1e-5)


# Weights as they are found.


def same_as(folder: Path, name: str) -> bool:
    """Whether the model in the folder computes what the reference has computed."""
    hidden, mask = run(load_encoder(folder), TOKENS[name], firsts=FIRSTS)
    real = np.array(mask)
    return bool(np.allclose(np.array(hidden)[real], recorded()[f"{name}/hidden"][real], atol=2e-5))


@pytest.mark.parametrize(
    ("name", "spell"),
    [
        ("bert", lambda key: f"bert.{key}"),
        ("bert", lambda key: key.replace("LayerNorm.weight", "LayerNorm.gamma")),
        ("bert", lambda key: "bert." + key.replace("LayerNorm.bias", "LayerNorm.beta")),
        ("roberta", lambda key: f"roberta.{key}"),
        ("xlm-roberta", lambda key: f"roberta.{key}"),
        ("modernbert", lambda key: f"model.{key}"),
    ],
)
def test_weights_by_other_names(name: str, spell: Any, tmp_path: Path) -> None:
    weights = {spell(key): array for key, array in WEIGHTS[name].items()}
    weights["embeddings.position_ids"] = np.zeros((1, 40), np.float32)
    weights["lm_head.decoder.weight"] = np.zeros((90, 32), np.float32)
    assert same_as(write_encoder(tmp_path, name, weights), name)


def test_weights_in_shards(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    (tmp_path / "model.safetensors").unlink()
    halves: list[dict[str, Array]] = [{}, {}]
    for i, (key, array) in enumerate(WEIGHTS["bert"].items()):
        halves[i % 2][key] = array
    for i, half in enumerate(halves):
        write_safetensors(tmp_path / f"model-0000{i + 1}-of-00002.safetensors", half)
    assert same_as(tmp_path, "bert")


def test_rope_parameters_as_transformers_writes_them_now(tmp_path: Path) -> None:
    kinds = {"full_attention": 500.0, "sliding_attention": 20.0}
    write_encoder(
        tmp_path,
        "modernbert",
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in kinds.items()
        },
        layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"],
        global_rope_theta=None,
        local_rope_theta=None,
    )
    assert same_as(tmp_path, "modernbert")


@pytest.mark.parametrize("name", often(ENCODERS, ["bert-classifier", "modernbert-classifier"]))
def test_half_precision_stays_half_precision(name: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, name)
    halves = {key: mx.array(array).astype(mx.float16) for key, array in WEIGHTS[name].items()}
    mx.save_safetensors(str(folder / "model.safetensors"), halves)
    encoder = load_encoder(folder)
    hidden, mask = run(encoder, TOKENS[name], firsts=FIRSTS)
    assert hidden.dtype == mx.float16
    real = np.array(mask)
    wanted = recorded()[f"{name}/hidden"][real]
    assert least_cosine(np.array(hidden.astype(mx.float32))[real], wanted) >= 0.999
    if encoder.labels:
        assert encoder.classify(hidden, mask).dtype == mx.float16


# Refusals.


def test_missing_weights_are_named(tmp_path: Path) -> None:
    weights = {key: w for key, w in WEIGHTS["bert"].items() if ".layer.1." not in key}
    folder = write_encoder(tmp_path, "bert", weights)
    with pytest.raises(ValueError, match=r"lack encoder\.layer\.1\.\S+, .* and 13 more"):
        load_encoder(folder)


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert", intermediate_size=50)
    with pytest.raises(ValueError, match="shape"):
        load_encoder(folder)


def test_weights_in_other_files_are_not_read(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no model\*\.safetensors"):
        load_encoder(tmp_path)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_encoder(tmp_path)


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("bert", {"model_type": "distilbert"}, "no encoder of the type"),
        ("bert", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("bert", {"hidden_act": "quick_gelu"}, "activation"),
        ("bert", {"num_attention_heads": 5}, "5 heads"),
        ("bert", {"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ("bert", {"hidden_size": "32"}, "hidden_size"),
        ("roberta", {"pad_token_id": 40}, "pad_token_id"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("modernbert", {"rope_scaling": {"rope_type": "yarn"}}, "scaled"),
    ],
)
def test_what_is_not_computed_is_refused(
    name: str, overrides: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = write_encoder(tmp_path, name, **overrides)
    with pytest.raises(ValueError, match=reason):
        load_encoder(folder)


def test_no_vector_is_made_of_more_tokens_than_there_are_positions(tmp_path: Path) -> None:
    encoder = load_encoder(write_encoder(tmp_path, "roberta"))
    assert encoder.longest == 38
    run(encoder, [[5] * 38], firsts=None)
    with pytest.raises(ValueError, match="39 tokens"):
        run(encoder, [[5] * 39], firsts=None)


def test_an_encoder_without_a_head_does_not_judge(tmp_path: Path) -> None:
    encoder = load_encoder(write_encoder(tmp_path, "bert"))
    hidden, mask = run(encoder, [[5]], firsts=None)
    assert encoder.labels == 0
    with pytest.raises(ValueError, match="classification head"):
        encoder.classify(hidden, mask)


def test_a_dense_layer_whose_activation_is_not_known_is_refused(tmp_path: Path) -> None:
    write_sentence_transformer(tmp_path)
    folder = tmp_path / "2_Dense"
    config = references()["layout"]["2_Dense/config.json"]
    write_json(folder / "config.json", {**config, "activation_function": "my.code.Softly"})
    with pytest.raises(ValueError, match=r"my\.code\.Softly"):
        load_dense(folder)
