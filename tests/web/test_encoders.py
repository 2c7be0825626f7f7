"""Encoders over HTTP: vectors by PyTorch's reference, documents by a cross-encoder's judgement."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from tokenizers import Tokenizer, processors

from mlxsrv.engine.embedding.encoders.load import load_encoder
from tests.support.client import chat, refused
from tests.support.encoder_folders import make_tokenizer, write
from tests.support.encoders import make_weights, recorded, references, write_encoder
from tests.support.serving import Server, serving
from tests.support.tiny import Array, write_model

EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
SCORE = "/score"
END = "<|endoftext|>"
DOCUMENTS = ["the cat sat", "a dog", "cats and dogs and more of them", "zzz"]


def write_labels(folder: Path, names: dict[str, str]) -> Path:
    """`bert-classifier` with a head of as many labels."""
    shapes = references()["shapes"]["bert-classifier"]
    heads = {"classifier.weight": [len(names), 32], "classifier.bias": [len(names)]}
    weights = make_weights("bert-classifier", shapes | heads)
    write(folder, "bert-classifier", id2label=names)
    write_encoder(folder, "bert-classifier", weights, id2label=names)
    return folder


def write_decoder(folder: Path, *, ends: bool) -> None:
    """A decoder that embeds by its last token, as Qwen3-Embedding does: what its tokenizer `ends`
    texts with, as the post-processor of that model's does, is part of them."""
    write_model(folder, "qwen3")
    kinds = ("models.Transformer", "models.Pooling", "models.Normalize")
    modules = [
        {"idx": i, "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(zip(("", "1_Pooling", "2_Normalize"), kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    if ends:
        file = folder / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(file))
        end = tokenizer.token_to_id(END)
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(),
                processors.TemplateProcessing(
                    single=f"$A {END}", pair=f"$A $B {END}", special_tokens=[(END, end)]
                ),
            ]
        )
        tokenizer.save(str(file))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("encoders")
    for name in ("bert", "roberta", "modernbert"):
        write(root / name, name)
    write(root / "judge", "bert-classifier")
    linear = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.0.0"}
    write(root / "raw", "bert-classifier", sentence_transformers=linear)
    old = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}
    write(root / "tanh", "bert-classifier", **old)
    write(root / "two", "roberta-classifier")
    names = {str(i): f"LABEL_{i}" for i in range(3)}
    write_labels(root / "three", names)
    for name, ends in (("last", False), ("ended", True)):
        write_decoder(root / name, ends=ends)
    prompted = write(root / "prompted", "bert")
    (prompted / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "Instruct: find it\nQuery:", "document": "doc "}})
    )
    return root


@pytest.fixture(scope="module")
def encoders(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("--models-dir", str(root), "--no-hf-cache")
    with serving(tmp_path_factory.mktemp("server"), *arguments) as server:
        yield server


@pytest.fixture(scope="module")
def client(encoders: Server) -> Iterator[httpx.Client]:
    with encoders.client() as client:
        yield client


def embed(client: httpx.Client, input: object, model: str = "bert", **fields: Any) -> Array:
    body = {"model": model, "input": input, **fields}
    response = client.post(EMBEDDINGS, json=body)
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]], dtype=np.float32)


def test_the_catalogue_tells_what_they_are_for(client: httpx.Client) -> None:
    found = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
    assert found["bert"]["type"] == found["judge"]["type"] == "embedding"
    assert found["bert"]["capabilities"] == ["embedding"]
    assert found["judge"]["capabilities"] == ["rerank"]
    assert found["bert"]["context_length"] == 40
    assert found["raw"]["capabilities"] == found["two"]["capabilities"] == ["rerank"]
    assert found["tanh"]["capabilities"] == found["three"]["capabilities"] == []


# BERT's own were recorded with pairs of texts.
@pytest.mark.parametrize("name", ["roberta", "modernbert"])
def test_vectors_are_the_references(client: httpx.Client, name: str) -> None:
    tokens = references()["tokens"][name]
    hidden = recorded()[f"{name}/hidden"]
    for ids, states, vector in zip(tokens, hidden, embed(client, tokens, name), strict=True):
        mean = states[: len(ids)].mean(axis=0)
        assert vector @ (mean / np.linalg.norm(mean)) > 0.9999


@pytest.mark.parametrize("name", ["last", "ended"])
def test_the_last_token_is_the_tokenizers_own(client: httpx.Client, root: Path, name: str) -> None:
    """Nothing is appended, as in sentence-transformers; of ids that a client gives neither."""
    tokenizer = Tokenizer.from_file(str(root / name / "tokenizer.json"))
    text = "a fine day"
    ids = tokenizer.encode(text).ids
    assert (ids[-1] == tokenizer.token_to_id(END)) == (name == "ended")
    model, _ = load_model(root / name)
    for given, tokens in ((text, ids), (ids, ids), (ids[:3], ids[:3])):
        response = client.post(EMBEDDINGS, json={"model": name, "input": given}).json()
        assert response["usage"]["prompt_tokens"] == len(tokens)
        hidden = np.array(model.model(mx.array(tokens)[None]))[0, -1]
        vector = np.array(response["data"][0]["embedding"])
        assert vector @ (hidden / np.linalg.norm(hidden)) > 0.99999
    longer = {"model": name, "input": text, "truncate_prompt_tokens": 4}
    cut = client.post(EMBEDDINGS, json=longer).json()["data"][0]["embedding"]
    kept = [*ids[:3], ids[-1]] if name == "ended" else ids[:4]
    alike = client.post(EMBEDDINGS, json={"model": name, "input": kept}).json()
    assert np.allclose(cut, alike["data"][0]["embedding"], atol=1e-6)


def test_base64_is_the_floats(client: httpx.Client) -> None:
    body = {"model": "bert", "input": "a cat", "encoding_format": "base64"}
    [item] = client.post(EMBEDDINGS, json=body).json()["data"]
    vector = np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4")
    assert vector.tobytes() == embed(client, "a cat")[0].astype("<f4").tobytes()


def test_the_input_type_picks_the_models_own_prompt(client: httpx.Client) -> None:
    def same(one: Array, other: Array) -> bool:
        return bool(np.allclose(one, other, atol=1e-6))

    asked = embed(client, "cat", "prompted", input_type="document")
    assert same(asked, embed(client, "doc cat"))
    asked = embed(client, "cat", "prompted", input_type="query")
    assert same(asked, embed(client, "Instruct: find it\nQuery:cat"))
    asked = embed(client, "cat", "prompted", instruction="look for dogs")
    assert same(asked, embed(client, "Instruct: look for dogs\nQuery:cat"))
    assert same(embed(client, "cat", "prompted"), embed(client, "cat"))


def logits(root: Path, query: str, documents: list[str], model: str = "judge") -> list[float]:
    """The last label's of each pair, less the first one's where there are two."""
    encoder = load_encoder(root / model)
    found = []
    for document in documents:
        encoded = make_tokenizer().encode(query, document)
        tokens = mx.array(encoded.ids)[None]
        mask = mx.ones(tokens.shape, dtype=mx.bool_)
        first = encoded.type_ids.index(1)
        hidden = encoder(tokens, mask, [first])
        [made] = np.array(encoder.classify(hidden, mask))
        found.append(float(made[0] if len(made) == 1 else made[1] - made[0]))
    return found


def test_documents_come_in_the_order_of_their_judgement(client: httpx.Client, root: Path) -> None:
    body = {"model": "judge", "query": "cat", "documents": DOCUMENTS, "return_documents": True}
    answer = client.post(RERANK, json=body).json()
    expected = logits(root, "cat", DOCUMENTS)
    order = sorted(range(len(DOCUMENTS)), key=lambda i: -expected[i])
    assert [one["index"] for one in answer["results"]] == order
    for one in answer["results"]:
        score = 1 / (1 + np.exp(-expected[one["index"]]))
        assert one["relevance_score"] == pytest.approx(score, abs=1e-5)
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    few = client.post(RERANK, json=body | {"top_n": 2}).json()
    assert few["results"] == answer["results"][:2]
    assert few["usage"] == answer["usage"]


def test_each_does_only_what_it_is_for(client: httpx.Client) -> None:
    def refusal(path: str, body: dict[str, Any]) -> str:
        response = client.post(path, json=body)
        error = refused(response, 400, "unsupported_parameter", param="model")
        return str(error["message"])

    pair = {"query": "a", "documents": ["b"]}
    assert "/v1/rerank" in refusal(EMBEDDINGS, {"model": "judge", "input": "a"})
    assert "not a cross-encoder" in refusal(RERANK, {"model": "bert", **pair})
    for model in ("bert", "judge"):
        assert "generates no text" in refusal("/v1/chat/completions", chat(model=model))


def test_a_document_that_is_too_long_is_named(client: httpx.Client) -> None:
    body = {"model": "judge", "query": "cat", "documents": ["a", "b " * 50]}
    response = client.post(RERANK, json=body)
    refused(response, 400, "context_length_exceeded", param="documents[1]")


@pytest.mark.parametrize("model", ["judge", "raw", "two"])
def test_scores_are_made_as_the_model_has_saved_it(
    client: httpx.Client, root: Path, model: str
) -> None:
    """An Identity's are the logits themselves; the order is the same."""
    body = {"model": model, "query": "cat", "documents": DOCUMENTS}
    answer = client.post(RERANK, json=body).json()
    expected = np.array(logits(root, "cat", DOCUMENTS, model))
    scores = expected if model == "raw" else 1 / (1 + np.exp(-expected))
    told = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert [told[i] for i in range(len(DOCUMENTS))] == pytest.approx(list(scores), abs=1e-5)
    values = [one["relevance_score"] for one in answer["results"]]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(("model", "reason"), [("three", "3 labels"), ("tanh", "Tanh")])
def test_a_head_that_is_not_known_to_judge_relevance_judges_nothing(
    client: httpx.Client, model: str, reason: str
) -> None:
    for path, body in (
        (RERANK, {"query": "a", "documents": ["b"]}),
        (SCORE, {"text_1": "a", "text_2": "b"}),
    ):
        response = client.post(path, json={"model": model, **body})
        error = refused(response, 400, "unsupported_parameter", param="model")
        assert reason in error["message"]
    response = client.post(EMBEDDINGS, json={"model": model, "input": "a"})
    refused(response, 400, "unsupported_parameter", param="model")


# Score.


def score(client: httpx.Client, model: str, path: str = SCORE, **fields: Any) -> dict[str, Any]:
    response = client.post(path, json={"model": model, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    assert re.fullmatch(r"score-[0-9a-f]{32}", body["id"])
    assert body["object"] == "list"
    assert body["model"] == model
    assert abs(body["created"] - time.time()) < 60
    assert [one["index"] for one in body["data"]] == list(range(len(body["data"])))
    assert {one["object"] for one in body["data"]} == {"score"}
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0
    return body


def scores(body: dict[str, Any]) -> list[float]:
    return [one["score"] for one in body["data"]]


@pytest.mark.parametrize(
    ("one", "other", "pairs"),
    [
        ("cat", "the cat sat", [("cat", "the cat sat")]),
        ("cat", DOCUMENTS, [("cat", text) for text in DOCUMENTS]),
        (["cat"], DOCUMENTS[:2], [("cat", text) for text in DOCUMENTS[:2]]),
        (["cat", "dog"], ["a dog", "zzz"], [("cat", "a dog"), ("dog", "zzz")]),
    ],
)
def test_pairs_have_a_score_each(
    client: httpx.Client, root: Path, one: Any, other: Any, pairs: list[tuple[str, str]]
) -> None:
    expected = [logits(root, a, [b])[0] for a, b in pairs]
    raw = score(client, "raw", text_1=one, text_2=other)
    assert scores(raw) == pytest.approx(expected, abs=1e-5)
    judged = score(client, "judge", "/v1/score", queries=one, documents=other)
    sigmoids = [1 / (1 + np.exp(-value)) for value in expected]
    assert scores(judged) == pytest.approx(sigmoids, abs=1e-5)
    # An embedder's are how near the vectors are.
    vectors = [embed(client, list(pair)) for pair in pairs]
    near = [float(a @ b) for a, b in vectors]
    assert scores(score(client, "bert", text_1=one, text_2=other)) == pytest.approx(near, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, "missing_required_parameter", "text_1"),
        ({"text_1": "a"}, "missing_required_parameter", "text_2"),
        ({"items": "a"}, "missing_required_parameter", "queries"),
        ({"text_1": "a", "text_2": "b", "items": "c"}, "invalid_value", "items"),
        ({"text_1": ["a", "b"], "text_2": "c"}, "invalid_value", "text_1"),
        ({"text_1": "a", "text_2": []}, "invalid_value", "text_2"),
        ({"text_1": "a", "text_2": ["b", ""]}, "invalid_value", "text_2[1]"),
        ({"text_1": "a", "text_2": ["b", "c " * 50]}, "context_length_exceeded", "text_2[1]"),
    ],
)
@pytest.mark.parametrize("model", ["judge", "bert"])
def test_what_is_wrong_with_a_score_is_named(
    client: httpx.Client, model: str, fields: dict[str, Any], code: str, param: str
) -> None:
    refused(client.post(SCORE, json={"model": model, **fields}), 400, code, param=param)


# Texts that are too long.

LONG = (
    "abcdefghij" * 7 + "klmnopqrst"
)  # each letter is a token, of which BERT's has 40 with its two special ones


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate": True}, LONG[:38]),
        ({"truncate": "END"}, LONG[:38]),
        ({"truncate": "START"}, LONG[-38:]),
        ({"truncate": True, "truncation_direction": "Left"}, LONG[-38:]),
        ({"truncate_prompt_tokens": -1}, LONG[:38]),
        ({"truncate_prompt_tokens": 12}, LONG[:10]),
        ({"truncate_prompt_tokens": 12, "truncation_direction": "left"}, LONG[-10:]),
    ],
)
def test_a_text_is_cut_if_that_is_asked_for(
    client: httpx.Client, fields: dict[str, Any], kept: str
) -> None:
    """Cut inside its special tokens, as the tokenizer itself has it."""
    tokenizer = make_tokenizer()
    whole, least = tokenizer.encode(LONG).ids, tokenizer.encode("a").ids
    side = slice(1, len(kept) + 1) if LONG.startswith(kept) else slice(-len(kept) - 1, -1)
    ids = [least[0], *whole[side], least[-1]]
    expected = embed(client, [ids])
    assert np.allclose(embed(client, LONG, **fields), expected, atol=1e-6)
    assert np.allclose(embed(client, ["a", LONG], **fields)[1:], expected, atol=1e-6)
    assert np.allclose(embed(client, "a", **fields), embed(client, "a"), atol=1e-6)


def test_token_ids_are_cut_as_they_are(client: httpx.Client) -> None:
    ids = [5 + i % 20 for i in range(60)]
    assert np.allclose(embed(client, ids, truncate=True), embed(client, ids[:40]), atol=1e-6)
    assert np.allclose(embed(client, ids, truncate="START"), embed(client, ids[-40:]), atol=1e-6)


def test_of_a_pair_the_longer_text_is_cut(client: httpx.Client) -> None:
    body = {"model": "raw", "query": "cat", "documents": [LONG]}
    refused(client.post(RERANK, json=body), 400, "context_length_exceeded", param="documents[0]")
    cut = client.post(RERANK, json=body | {"truncate": True}).json()
    # Three special tokens and the query's three leave 34.
    alike = client.post(RERANK, json=body | {"documents": [LONG[:34]]}).json()
    assert cut["results"] == alike["results"]
    assert cut["usage"]["prompt_tokens"] == 40
    # Cohere's second version cuts unasked.
    assert client.post("/v2/rerank", json=body).json()["results"] == cut["results"]
    uncut = client.post("/v2/rerank", json=body | {"truncate": "NONE"})
    refused(uncut, 400, "context_length_exceeded", param="documents[0]")
    made = score(client, "raw", text_1="cat", text_2=LONG, truncate="END")
    assert scores(made) == [cut["results"][0]["relevance_score"]]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, "context_length_exceeded", "input"),
        ({"truncate": False}, "context_length_exceeded", "input"),
        ({"truncate": "NONE"}, "context_length_exceeded", "input"),
        ({"truncate": "MIDDLE"}, "invalid_value", "truncate"),
        ({"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2}, "invalid_value", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 41}, "invalid_value", "truncate_prompt_tokens"),
    ],
)
def test_what_is_not_cut_is_refused(
    client: httpx.Client, fields: dict[str, Any], code: str, param: str
) -> None:
    body = {"model": "bert", "input": LONG, **fields}
    refused(client.post(EMBEDDINGS, json=body), 400, code, param=param)
