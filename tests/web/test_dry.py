"""DRY over HTTP: an answer that would repeat itself does not, where a request asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

import mlxsrv
from tests.support.client import Body
from tests.support.tiny import CHAT_TEMPLATE
from tests.support.turns import write_turns

LINE = "The same line, again and again.\n"
# More than what the model would write has over other tokens.
DRY = {"dry_multiplier": 50, "dry_allowed_length": 8, "dry_sequence_breakers": []}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = write_turns(
        tmp_path_factory.mktemp("dry") / "m",
        {"true": "So: " + LINE * 20 + "The end."},
        template=CHAT_TEMPLATE,
        markers=(),
    )
    settings = mlxsrv.Settings(model=(f"m={folder}",), hf_cache=False, trust_remote_code=True)
    with TestClient(mlxsrv.create_app(settings)) as client:
        yield client


def body(**fields: Any) -> Body:
    asked = {"model": "m", "messages": [{"role": "user", "content": "?"}], "temperature": 0}
    return {**asked, "max_tokens": 200, **fields}


def ask(client: TestClient, **fields: Any) -> str:
    response = client.post("/v1/chat/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers
    return str(response.json()["choices"][0]["message"]["content"])


def test_an_answer_repeats_itself_only_where_nobody_asks(client: TestClient) -> None:
    plain = ask(client)
    assert plain.count(LINE) == 6
    for off in ({"dry_multiplier": 0}, {"dry_penalty_last_n": 0}, {"dry_multiplier": None}):
        assert ask(client, **{**DRY, **off}) == plain
    dried = ask(client, **DRY)
    assert dried.startswith("So: " + LINE[:-1])
    assert dried.count(LINE) == 1


def test_the_end_of_a_repetition_lies_behind_a_breaker(client: TestClient) -> None:
    """Each token of this model is a byte."""
    assert ask(client, **{**DRY, "dry_sequence_breakers": ["a"]}).count(LINE) == 1
    assert ask(client, **{**DRY, "dry_sequence_breakers": ["a", "e"]}).count(LINE) == 6


def test_only_so_many_tokens_count(client: TestClient) -> None:
    assert ask(client, **DRY, dry_penalty_last_n=len(LINE) + 7).count(LINE) == 6
    assert ask(client, **DRY, dry_penalty_last_n=len(LINE) + 8).count(LINE) == 1


def test_text_completions_take_the_fields_too(client: TestClient) -> None:
    asked = {"model": "m", "prompt": "<|turn 0|>", "temperature": 0, "max_tokens": 200}
    texts = [
        client.post("/v1/completions", json={**asked, **fields}).json()["choices"][0]["text"]
        for fields in ({}, DRY)
    ]
    assert [text.count(LINE) for text in texts] == [6, 1]


def test_rows_of_a_batch_ask_for_themselves(client: TestClient) -> None:
    asked: list[Body] = [{}, DRY, {"seed": 3, "temperature": 1, **DRY}, {"dry_multiplier": 9}] * 2
    alone = [ask(client, **fields) for fields in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(lambda fields: ask(client, **fields), asked)) == alone


def test_breakers_of_no_token_are_named(client: TestClient) -> None:
    fields = {"dry_multiplier": 1, "dry_sequence_breakers": ["a", "ab", ""]}
    response = client.post("/v1/chat/completions", json=body(**fields))
    assert response.status_code == 200
    named = "dry_sequence_breakers[1], dry_sequence_breakers[2]"
    assert response.headers["x-ignored-params"] == named
