"""Encoders over HTTP: vectors by PyTorch's reference, documents by a cross-encoder's judgement."""

from __future__ import annotations

import base64
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mlxsrv.engine.encoders import load_encoder
from tests.embeddings.models import recorded, references, write_encoder
from tests.tiny import Array
from tests.web.client import chat, refused
from tests.web.serving import Server, serving

EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
DOCUMENTS = ["the cat sat", "a dog", "cats and dogs and more of them", "zzz"]


def make_tokenizer() -> Tokenizer:
    """WordPiece of single letters, as BERT frames its texts and pairs."""
    words = [*SPECIAL, *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)]
    vocabulary = {word: i for i, word in enumerate(words)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return made


def write(folder: Path, name: str, **overrides: Any) -> Path:
    write_encoder(folder, name, **overrides)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "BertTokenizer",
        "model_max_length": 40,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        **{f"{token[1:-1].lower()}_token": token for token in SPECIAL},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("encoders")
    for name in ("bert", "roberta", "modernbert"):
        write(root / name, name)
    write(root / "judge", "bert-classifier")
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


# BERT's own were recorded with pairs of texts.
@pytest.mark.parametrize("name", ["roberta", "modernbert"])
def test_vectors_are_the_references(client: httpx.Client, name: str) -> None:
    tokens = references()["tokens"][name]
    hidden = recorded()[f"{name}/hidden"]
    for ids, states, vector in zip(tokens, hidden, embed(client, tokens, name), strict=True):
        mean = states[: len(ids)].mean(axis=0)
        assert vector @ (mean / np.linalg.norm(mean)) > 0.9999


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


def logits(root: Path, query: str, documents: list[str]) -> list[float]:
    encoder = load_encoder(root / "judge")
    found = []
    for document in documents:
        encoded = make_tokenizer().encode(query, document)
        tokens = mx.array(encoded.ids)[None]
        mask = mx.ones(tokens.shape, dtype=mx.bool_)
        first = encoded.type_ids.index(1)
        hidden = encoder(tokens, mask, [first])
        found.append(float(np.array(encoder.classify(hidden, mask))[0, 0]))
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
    assert "no cross-encoder" in refusal(RERANK, {"model": "bert", **pair})
    for model in ("bert", "judge"):
        assert "writes no text" in refusal("/v1/chat/completions", chat(model=model))


def test_a_document_that_is_too_long_is_named(client: httpx.Client) -> None:
    body = {"model": "judge", "query": "cat", "documents": ["a", "b " * 50]}
    response = client.post(RERANK, json=body)
    refused(response, 400, "context_length_exceeded", param="documents[1]")
