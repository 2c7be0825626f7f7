"""Embeddings and rerank on the wire."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import pytest

from mlxsrv.errors import InvalidRequest, MissingParameter
from mlxsrv.generation.texts import PairScores, TextVectors
from mlxsrv.wire.openai.embeddings import (
    EMBEDDING_REQUESTS,
    RERANK_REQUESTS,
    EmbeddingRequest,
    RerankRequest,
    embedding_list,
    rerank_response,
)
from tests.support.schemas import Body, as_sent, check_schema

VECTORS = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


def decode(**fields: Any) -> EmbeddingRequest:
    return EMBEDDING_REQUESTS.decode(msgspec.json.encode(fields))[0]


def answer(**fields: Any) -> Body:
    spec = decode(input=["a", "b", "c"], **fields).to_spec()
    return as_sent(embedding_list(spec, TextVectors("m", VECTORS, 7, 0.0)))


@pytest.mark.parametrize(
    ("given", "texts", "paths"),
    [
        ("a", ["a"], ["input"]),
        (["a", "b"], ["a", "b"], ["input[0]", "input[1]"]),
        ([1, 2], [[1, 2]], ["input"]),
        ([[1], [2, 3]], [[1], [2, 3]], ["input[0]", "input[1]"]),
    ],
)
def test_the_four_forms_of_input(given: object, texts: list[object], paths: list[str]) -> None:
    assert decode(input=given).to_spec().texts == list(zip(texts, paths, strict=True))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1, -1]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": None}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 1.5}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "input_type": "passage"}, "input_type"),
        ({"input": "a", "instruction": ""}, "instruction"),
    ],
)
def test_what_is_wrong_is_named(fields: Body, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        decode(**fields)
    assert error.value.param == param


def test_input_is_required_and_as_many_as_openai_takes_are_taken() -> None:
    with pytest.raises(MissingParameter):
        decode(model="m")
    assert len(decode(input=["a"] * 2048).to_spec().texts) == 2048
    asked, ignored = EMBEDDING_REQUESTS.decode(b'{"input": "a", "user": "u", "task": "x"}')
    assert (asked.user, ignored) == ("u", ["task"])


def test_floats_are_openais_answer_in_order() -> None:
    body = answer()
    check_schema(body, "CreateEmbeddingResponse")
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    floats = np.array([item["embedding"] for item in body["data"]], dtype=np.float32)
    assert floats.tobytes() == VECTORS.tobytes()


def test_base64_is_the_floats_bit_for_bit() -> None:
    floats = answer()["data"]
    coded = answer(encoding_format="base64")["data"]
    for one, other in zip(floats, coded, strict=True):
        vector = np.frombuffer(base64.b64decode(other["embedding"]), dtype="<f4")
        assert vector.tobytes() == np.array(one["embedding"], dtype="<f4").tobytes()


# Rerank.


def rank(scores: list[float], **fields: Any) -> list[Body]:
    documents = ["a", {"text": "b"}, "c"][: len(scores)]
    body = msgspec.json.encode({"query": "q", "documents": documents, **fields})
    request: RerankRequest = RERANK_REQUESTS.decode(body)[0]
    made = rerank_response(request, PairScores("m", np.array(scores, dtype=np.float32), 9))
    return list(as_sent(made)["results"])


def test_the_most_relevant_comes_first_and_equals_keep_their_order() -> None:
    assert [one["index"] for one in rank([0.0, 2.0, 1.0])] == [1, 2, 0]
    assert [one["index"] for one in rank([1.0, 1.0, 1.0])] == [0, 1, 2]
    assert [one["index"] for one in rank([0.0, 2.0, 1.0], top_n=2)] == [1, 2]
    assert len(rank([0.0, 2.0], top_n=9)) == 2


def test_documents_come_back_if_asked_for() -> None:
    assert [one["document"] for one in rank([2.0, 1.0], return_documents=True)] == [
        {"text": "a"},
        {"text": "b"},
    ]
    assert all("document" not in one for one in rank([2.0, 1.0]))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": [{"text": ""}]}, "documents[0].text"),
        ({"documents": [1]}, "documents[0]"),
        ({"query": ""}, "query"),
        ({"top_n": 0}, "top_n"),
    ],
)
def test_what_is_wrong_with_a_rerank_is_named(fields: Body, param: str) -> None:
    body = msgspec.json.encode({"query": "q", "documents": ["a"]} | fields)
    with pytest.raises(InvalidRequest) as error:
        RERANK_REQUESTS.decode(body)
    assert error.value.param == param
