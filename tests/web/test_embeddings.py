"""Embeddings over HTTP, from a chat model: its last hidden state, averaged."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

import mlxsrv
from tests.support.client import Body, RawClient, answer, ask, chat, refused, stream
from tests.support.fixtures import CONTEXT, Folders
from tests.support.schemas import check_schema
from tests.support.serving import Server, hosted, wait_for
from tests.support.tiny import Array, make_tokenizer

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["The quick brown fox", "x", "a longer text, " * 9, "你好，世界 👩‍👩‍👧‍👦", " "]


def embed(client: httpx.Client, input: object, **fields: Any) -> Array:
    response = client.post(EMBEDDINGS, json={"input": input, **fields})
    assert response.status_code == 200, response.text
    body = response.json()
    check_schema(body, "CreateEmbeddingResponse")
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    return np.array([item["embedding"] for item in body["data"]], dtype=np.float32)


def ids(text: str) -> list[int]:
    return list(make_tokenizer().encode(text).ids)


def by_hand(folders: Folders, text: str) -> Array:
    model, _ = load_model(folders.plain)
    hidden = model.model(mx.array(ids(text))[None])[0]
    mean: Array = np.array(hidden.mean(axis=0))
    unit: Array = mean / np.linalg.norm(mean)
    return unit


def test_a_text_is_its_averaged_last_hidden_state(client: httpx.Client, folders: Folders) -> None:
    for text, vector in zip(TEXTS, embed(client, TEXTS), strict=True):
        assert vector @ by_hand(folders, text) > 0.99999
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_many_texts_are_what_each_is_alone_in_their_order(client: httpx.Client) -> None:
    together = embed(client, TEXTS * 8)
    alone = np.concatenate([embed(client, text) for text in TEXTS])
    assert np.abs(together - np.tile(alone, (8, 1))).max() < 1e-5


def test_token_ids_are_the_text_they_are(client: httpx.Client) -> None:
    text = TEXTS[0]
    assert np.allclose(embed(client, ids(text)), embed(client, text), atol=1e-6)
    assert np.allclose(embed(client, [ids(text)] * 2), embed(client, [text] * 2), atol=1e-6)


def test_usage_adds_up(client: httpx.Client) -> None:
    body = client.post(EMBEDDINGS, json={"input": TEXTS}).json()
    tokens = sum(len(ids(text)) for text in TEXTS)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert body["model"] == "t"


def test_a_text_that_is_too_long_is_named(client: httpx.Client) -> None:
    response = client.post(EMBEDDINGS, json={"input": [[1], [1] * (CONTEXT + 1)]})
    error = refused(response, 400, "context_length_exceeded", param="input[1]")
    assert str(CONTEXT) in error["message"]
    assert str(CONTEXT + 1) in error["message"]
    assert embed(client, [[1] * CONTEXT]).shape == (1, 64)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"input": ""}, "invalid_value", "input"),
        ({}, "missing_required_parameter", "input"),
        ({"input": [512]}, "invalid_value", "input[0]"),
        ({"input": [[1], [2, 600]]}, "invalid_value", "input[1][1]"),
        ({"input": "x", "dimensions": 65}, "invalid_value", "dimensions"),
        ({"input": "x", "instruction": "find"}, "unsupported_parameter", "instruction"),
    ],
)
def test_what_is_wrong_is_a_400(client: httpx.Client, body: Body, code: str, param: str) -> None:
    refused(client.post(EMBEDDINGS, json=body), 400, code, param=param)


def test_an_unknown_model_is_a_404(client: httpx.Client) -> None:
    response = client.post(EMBEDDINGS, json={"input": "x", "model": "nobody"})
    refused(response, 404, "model_not_found", param="model")


def test_a_chat_model_reranks_nothing(client: httpx.Client) -> None:
    body = {"query": "q", "documents": ["a", "b"]}
    error = refused(
        client.post("/v1/rerank", json=body), 400, "unsupported_parameter", param="model"
    )
    assert "cross-encoder" in error["message"]


def test_ignored_fields_are_named(client: httpx.Client) -> None:
    response = client.post(EMBEDDINGS, json={"input": "x", "task": "retrieval", "user": "u"})
    assert response.headers["x-ignored-params"] == "task"


def test_requests_share_batches_and_get_their_own(client: httpx.Client) -> None:
    texts = [f"text number {i} " * (1 + i % 7) for i in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda text: embed(client, text)[0], texts))
    assert np.abs(np.stack(together) - embed(client, texts)).max() < 1e-5


def test_chats_go_on_beside_embeddings_and_say_the_same(client: httpx.Client) -> None:
    alone = answer(ask(client, chat(max_tokens=100)))
    many = ["word " * 60] * 20
    over = threading.Event()

    def embed_on() -> int:
        for times in itertools.count(1):
            embed(client, many)
            if over.is_set():
                return times
        raise AssertionError("it counts without end")

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        embedding = pool.submit(embed_on)
        texts = {stream(client, chat(max_tokens=100)).content for _ in range(2)}
        over.set()
        assert embedding.result() > 0
    assert texts == {alone}


def test_a_failure_inside_is_told_to_the_log_and_not_to_the_client(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr("mlxsrv.engine.embedding.embedding_models.find_inner", broken)
    settings = mlxsrv.Settings(model=(f"t={folders.plain}",), hf_cache=False)
    with hosted(mlxsrv.create_app(settings)) as url, httpx.Client(base_url=url) as client:
        headers = {"X-Request-ID": "wanted"}
        response = client.post(EMBEDDINGS, json={"input": "x"}, headers=headers)
        error = refused(response, 500, "internal_error")
        assert "wanted" in error["message"]
        assert "secret" not in error["message"]
        assert answer(ask(client, chat(max_tokens=3))), "the model goes on"
    assert "secret" in caplog.text


def test_a_client_that_leaves_is_forgotten(narrow: Server) -> None:
    body = {"input": ["word " * 200] * 1000}
    with narrow.client() as client:
        embed(client, "x")
        leaver = RawClient(narrow, body, EMBEDDINGS)
        with leaver:
            wait_for(lambda: not _idle(client), why="its texts are embedded")
            leaver.hang_up()
        wait_for(lambda: _idle(client), why="the texts of who has left are dropped")
        assert embed(client, "x").shape == (1, 64)


def _idle(client: httpx.Client) -> bool:
    [model] = client.get("/health", params={"verbose": 1}).json()["models"]
    return bool(model["requests"] == 0 and model["rows"] == 0)
