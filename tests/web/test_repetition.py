"""An answer that repeats itself ends where a request or the operator asks for it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

import mlxsrv
from tests.support.client import Body
from tests.support.tiny import CHAT_TEMPLATE
from tests.support.turns import write_turns

LINE = "The same line, again and again.\n"
LIMIT = {"max_pattern_size": 64, "min_pattern_size": 4, "min_count": 3}


@pytest.fixture(scope="module", params=[False, True])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestClient]:
    """A server with the option and one without it."""
    folder = write_turns(
        tmp_path_factory.mktemp("loops") / "m",
        {"true": "So: " + LINE * 20 + "The end."},
        template=CHAT_TEMPLATE,
        markers=(),
    )
    settings = mlxsrv.Settings(
        model=(f"m={folder}",),
        hf_cache=False,
        trust_remote_code=True,
        repetition_detection=request.param,
    )
    with TestClient(mlxsrv.create_app(settings)) as client:
        client.headers["x-guarded"] = str(request.param)
        yield client


def body(**fields: Any) -> Body:
    asked = {"model": "m", "messages": [{"role": "user", "content": "?"}], "temperature": 0}
    return {**asked, "max_tokens": 1000, **fields}


def ask(client: TestClient, **fields: Any) -> Body:
    response = client.post("/v1/chat/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0])


def test_a_request_says_what_is_too_much(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mlxsrv"):
        choice = ask(client, repetition_detection=LIMIT)
    assert choice["message"]["content"].count(LINE) in (2, 3)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition_detected")
    assert "answer repeated itself" in caplog.messages
    streamed = client.post(
        "/v1/chat/completions", json=body(repetition_detection=LIMIT, stream=True)
    )
    lines = (line.removeprefix("data: ") for line in streamed.text.splitlines() if line)
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == choice["message"]["content"]
    assert "repetition_detected" in streamed.text


def test_the_operator_says_what_happens_otherwise(client: TestClient) -> None:
    choice = ask(client)
    if client.headers["x-guarded"] == "True":
        assert choice["message"]["content"].count(LINE) in (3, 4)
        assert choice["stop_reason"] == "repetition_detected"
    else:
        assert choice["message"]["content"].endswith("The end.")
        assert "stop_reason" not in choice
    whole = ask(client, repetition_detection={"max_pattern_size": 0})
    assert whole["message"]["content"].endswith("The end.")
    assert "stop_reason" not in whole


def test_what_is_no_limit_is_refused(client: TestClient) -> None:
    wrong = {**LIMIT, "min_count": 1}
    response = client.post("/v1/chat/completions", json=body(repetition_detection=wrong))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "repetition_detection.min_count"
