"""A bound on thoughts: exact, in each format, in each dialect, beside other rows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

import mlxsrv
from mlxsrv.text.formats import THOUGHTS
from tests.support.client import Body
from tests.support.fixtures import ModelFolder
from tests.support.tiny import CHAT_TEMPLATE
from tests.support.turns import write_turns

THOUGHT = "abcdefghijklmnopqrstuvwxyz0123456789"
ANSWER = "So it is, and so it was, and so it will be for ever."
FORMATS = [name for name, each in THOUGHTS.items() if each.thinks and each.thought[0]]
QUESTION = [{"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module")
def client(
    tmp_path_factory: pytest.TempPathFactory, model_folder: ModelFolder
) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("budgets")
    models = [f"random={model_folder('qwen3')}"]
    formats = []
    for name in FORMATS:
        each = THOUGHTS[name]
        (opened, closed), (before, behind) = each.thought, each.answer
        said = f"{opened}{THOUGHT}{closed}{before}{ANSWER}{behind}"
        path = write_turns(
            folder / name, {"true": said}, template=CHAT_TEMPLATE, markers=each.marks
        )
        models.append(f"{name}={path}")
        formats.append(f"{name}={name}")
    settings = mlxsrv.Settings(
        model=tuple(models),
        thinking_format=tuple(formats),
        hf_cache=False,
        trust_remote_code=True,
        default_thinking_budget=20,
    )
    with TestClient(mlxsrv.create_app(settings)) as client:
        yield client


def ask(client: TestClient, model: str, **fields: Any) -> Body:
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 150, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0]["message"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_thought_is_closed_in_its_own_way(client: TestClient, name: str) -> None:
    free = ask(client, name, thinking_budget=-1)
    assert (free["reasoning_content"], free["content"]) == (THOUGHT, ANSWER)
    messages = {budget: ask(client, name, thinking_budget=budget) for budget in (30, 24)}
    # Markers are tokens of the thought; where they are spelled, so is each of their letters.
    opening = len(THOUGHT) - len(messages[30]["reasoning_content"]) - 6
    for budget, message in messages.items():
        assert message["reasoning_content"] == THOUGHT[: budget - opening], name
        assert message["content"].endswith(ANSWER[-20:]), name
        assert "<" not in message["content"], name


def test_the_default_is_the_operators(client: TestClient) -> None:
    assert ask(client, "think")["reasoning_content"] == THOUGHT[:19]
    assert ask(client, "think", thinking_budget=5)["reasoning_content"] == THOUGHT[:4]


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": 10},
        {"thinking_token_budget": 10},
        {"reasoning_budget_tokens": 10},
        {"reasoning": {"max_tokens": 10}},
    ],
)
def test_each_name_of_the_field_is_read(client: TestClient, fields: Body) -> None:
    assert ask(client, "think", **fields)["reasoning_content"] == THOUGHT[:9]


def test_other_dialects_have_it_too(client: TestClient) -> None:
    body: Body = {"model": "think", "max_tokens": 150, "messages": QUESTION, "temperature": 0}
    thinking = {"type": "enabled", "budget_tokens": 10}
    message = client.post("/v1/messages", json={**body, "thinking": thinking}).json()
    assert message["content"][0]["thinking"] == THOUGHT[:9]
    asked: Body = {"model": "think", "input": "Why?", "temperature": 0}
    answer = client.post("/v1/responses", json={**asked, "reasoning": {"max_tokens": 10}}).json()
    assert answer["output"][0]["content"][0]["text"] == THOUGHT[:9]
    asked = {"model": "think", "messages": QUESTION, "stream": False, "thinking_budget": 10}
    said = client.post("/api/chat", json={**asked, "options": {"temperature": 0}}).json()
    assert said["message"]["thinking"] == THOUGHT[:9]


def test_two_values_that_differ_are_refused(client: TestClient) -> None:
    body = {
        "model": "think",
        "messages": QUESTION,
        "thinking_budget": 1,
        "reasoning_budget_tokens": 2,
    }
    response = client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (
        400,
        "reasoning_budget_tokens",
    )


def test_rows_with_and_without_a_bound_share_a_batch(client: TestClient) -> None:
    """Each has the text that it has alone, with a seed and with a grammar."""
    asked: list[Body] = [
        {"enable_thinking": True, "temperature": 1, "seed": seed, "thinking_budget": budget}
        for seed, budget in enumerate((3, -1, 7, 7, -1, 0))
    ]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    asked += [{**asked[2], "response_format": form}, {**asked[1], "response_format": form}]
    asked = [{**each, "max_tokens": 40} for each in asked]
    alone = [ask(client, "random", **each) for each in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda each: ask(client, "random", **each), asked))
    assert together == alone
    assert alone[6]["content"].lstrip("-").isdigit()
    assert alone[6]["reasoning_content"] == alone[2]["reasoning_content"]
