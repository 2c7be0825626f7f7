"""Open WebUI, as PyPI ships it, over OpenAI's API and over Ollama's.

`make test-long` installs it into an environment of its own, without PyTorch, and says where it is.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.serving import serving, stop
from tests.clients.talk import ANSWER, MODEL, QUESTION, WEATHER_QUESTION, GetWeather

OPEN_WEBUI = os.environ.get("MLXSRV_OPEN_WEBUI", "")

START = 300.0
"""Seconds that it has to start: it makes a database first, and imports a thousand modules."""

pytestmark = [
    pytest.mark.skipif(
        not Path(OPEN_WEBUI).is_file(),
        reason="Open WebUI is not installed: `make test-long` does it where Python is 3.11 or 3.12",
    ),
    pytest.mark.timeout(START + 120),
]

BOTH = pytest.mark.parametrize("model", [MODEL, f"{MODEL}:latest"], ids=["openai", "ollama"])
"""The model as each of the two APIs lists it."""


@pytest.fixture(scope="module")
def webui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of an Open WebUI that knows nothing but the server, and asks for no password."""
    folder = tmp_path_factory.mktemp("open-webui")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(folder / "server.log") as server, (folder / "log").open("wb") as log:
        settings = {
            "DATA_DIR": str(folder),
            "HOME": str(folder),
            "PATH": os.environ["PATH"],
            "WEBUI_AUTH": "False",
            "WEBUI_SECRET_KEY": "sesame",
            "OFFLINE_MODE": "True",
            "OPENAI_API_BASE_URL": f"{server}/v1",
            "OPENAI_API_KEY": "none",
            "OLLAMA_BASE_URL": server,
            "RAG_EMBEDDING_ENGINE": "openai",  # its own would need PyTorch
        }
        process = subprocess.Popen(
            [OPEN_WEBUI, "serve", "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            env=settings,
            stdout=log,
            stderr=log,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=100) as client:
                _wait(client, process, folder / "log")
                nobody = {"email": "", "password": ""}
                token = client.post("/api/v1/auths/signin", json=nobody).json()["token"]
                client.headers["Authorization"] = f"Bearer {token}"
                client.get("/api/models").raise_for_status()  # it answers for those it has listed
                yield client
        finally:
            stop(process)


def _wait(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START
    while True:
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            pass
        told = log.read_text("utf-8", "replace")
        assert process.poll() is None, f"Open WebUI ended:\n{told}"
        assert time.monotonic() < deadline, f"not started after {START:g} s:\n{told}"
        time.sleep(0.1)


def ask(webui: httpx.Client, path: str, **body: Any) -> Any:
    response = webui.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chat(model: str, question: str = QUESTION, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": question}], **more}


def test_open_webui_lists_the_models_of_both_apis(webui: httpx.Client) -> None:
    owners = {model["id"]: model["owned_by"] for model in webui.get("/api/models").json()["data"]}
    assert (owners[MODEL], owners[f"{MODEL}:latest"]) == ("openai", "ollama")


@BOTH
def test_open_webui_chats(webui: httpx.Client, model: str) -> None:
    answer = ask(webui, "/api/chat/completions", **chat(model, stream=False))
    assert ANSWER in answer["choices"][0]["message"]["content"]


@BOTH
def test_open_webui_streams(webui: httpx.Client, model: str) -> None:
    response = webui.post("/api/chat/completions", json=chat(model, stream=True))
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    choices = [choice for line in lines for choice in json.loads(line).get("choices", ())]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert ANSWER in text, response.text


@BOTH
def test_open_webui_calls_tools(webui: httpx.Client, model: str) -> None:
    weather = {
        "name": "get_weather",
        "description": GetWeather.__doc__,
        "parameters": GetWeather.model_json_schema(),
    }
    tools = [{"type": "function", "function": weather}]
    asked = chat(model, WEATHER_QUESTION, stream=False, tools=tools)
    [choice] = ask(webui, "/api/chat/completions", **asked)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert "Paris" in json.dumps(call["function"]["arguments"])


@BOTH
@pytest.mark.parametrize("task", ["title", "follow_up", "tags"])
def test_open_webui_has_its_tasks_done(webui: httpx.Client, model: str, task: str) -> None:
    answer = ask(webui, f"/api/v1/tasks/{task}/completions", **chat(model))
    assert answer["choices"][0]["message"]["content"]


@BOTH
def test_open_webui_embeds(webui: httpx.Client, model: str) -> None:
    answer = ask(webui, "/api/embeddings", model=model, input=["a", "b"])
    assert [len(one["embedding"]) > 1 for one in answer["data"]] == [True, True]


def test_open_webui_speaks_messages_for_the_server(webui: httpx.Client) -> None:
    answer = ask(webui, "/api/v1/messages", **chat(MODEL, max_tokens=50))
    assert ANSWER in answer["content"][0]["text"]
