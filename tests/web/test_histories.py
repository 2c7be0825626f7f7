"""Earlier messages over HTTP: they are answered, and what is left out of them is named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from starlette.testclient import TestClient

import mlxsrv
from tests.support.client import Body
from tests.support.scripted import write_scripted
from tests.support.tiny import CHAT_TEMPLATE

IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:,"}}
BLOCK = {"type": "image", "source": {"type": "url", "url": "x"}}
QUESTION = {"role": "user", "content": "What is it?"}
ANSWER = {"role": "assistant", "content": "A cat."}


def messages(content: Any, **fields: Any) -> Body:
    return {"messages": [{"role": "user", "content": content, **fields}, ANSWER, QUESTION]}


BODIES = {
    "/v1/chat/completions": messages([IMAGE_URL]) | {"reasoning_effort": "high", "max_tokens": 5},
    "/v1/messages": messages([BLOCK])
    | {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}, "max_tokens": 5},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
            {"role": "assistant", "content": "A cat."},
            QUESTION,
        ],
        "reasoning": {"effort": "high"},
    },
    "/api/chat": messages("See", images=["aGk="]) | {"model": "m", "think": "high"},
}
"""An image in an old message, and a level of effort that the template does not know."""

LEFT_OUT = {
    "/v1/chat/completions": {"messages[0].content[0]", "reasoning_effort"},
    "/v1/messages": {"messages[0].content[0]", "output_config.effort"},
    "/v1/responses": {"input[0].content[0]", "reasoning.effort"},
    "/api/chat": {"messages[0].images", "think"},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("histories")
    template = CHAT_TEMPLATE.replace("enable_thinking", "false")
    model = write_scripted(folder / "m", ["Yes", "."], template=template)
    settings = mlxsrv.Settings(model=(f"m={model}",), hf_cache=False)
    with TestClient(mlxsrv.create_app(settings)) as client:
        yield client


def left_out(headers: Mapping[str, str]) -> set[str]:
    return {*headers["x-ignored-params"].split(", ")}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_what_is_left_out_is_named(client: TestClient, path: str, *, stream: bool) -> None:
    response = client.post(path, json={**BODIES[path], "stream": stream})
    assert response.status_code == 200, response.text
    assert left_out(response.headers) >= LEFT_OUT[path]


@pytest.mark.parametrize("path", BODIES)
def test_an_image_in_the_newest_message_is_refused(client: TestClient, path: str) -> None:
    body = json.loads(json.dumps(BODIES[path]))
    field = "input" if "input" in body else "messages"
    body[field] = body[field][:1]
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert f"{field}[0]." in response.text


def test_counts_are_of_the_same_prompt(client: TestClient) -> None:
    counted = client.post("/v1/messages/count_tokens", json=BODIES["/v1/messages"])
    answered = client.post("/v1/messages", json=BODIES["/v1/messages"])
    assert "messages[0].content[0]" in left_out(counted.headers)
    usage = answered.json()["usage"]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json()["input_tokens"] == read
    body = BODIES["/v1/responses"]
    counted = client.post("/v1/responses/input_tokens", json=body)
    assert "input[0].content[0]" in left_out(counted.headers)
    answered = client.post("/v1/responses", json=body)
    assert counted.json()["input_tokens"] == answered.json()["usage"]["input_tokens"]


def test_a_template_that_is_applied_has_the_same_notes(client: TestClient) -> None:
    applied = client.post("/apply-template", json=BODIES["/v1/chat/completions"])
    assert "[image left out" in applied.json()["prompt"]
    assert "messages[0].content[0]" in left_out(applied.headers)


@pytest.mark.parametrize("stop", ["", [""], ["", "zz"]])
def test_a_stop_string_of_nothing_is_none(client: TestClient, stop: Any) -> None:
    response = client.post("/v1/chat/completions", json={"messages": [QUESTION], "stop": stop})
    assert response.json()["choices"][0]["message"]["content"] == "Yes."
