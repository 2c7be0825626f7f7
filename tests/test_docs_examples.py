"""The code blocks of README and docs/ run as they stand, but for the port."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.effort import often
from tests.support.serving import Server, wait_for
from tests.test_docs import DOCS, PAGES, ROOT, blocks, read

URL = "http://127.0.0.1:8000"


def examples(language: str, containing: str) -> list[tuple[str, str]]:
    """The name of the page and the code, for each block of a language that has such a text."""
    return [
        (page.stem, block)
        for page in PAGES
        for block in blocks(page, language)
        if containing in block
    ]


CURLS = examples("sh", "curl ")
MOUNTS = examples("python", "Mount(")
SDKS = examples("python", "OpenAI(")
ELSEWHERE = [
    *examples("python", "Anthropic("),
    *examples("python", "from ollama import"),
    *examples("python", "from mlxsrv.replicas import"),
]
"""Examples that tests/clients and tests/ray run, where their libraries are."""


PROGRAMS = ("curl", "git", "launchctl", "make", "mlxsrv", "pip", "python", "source", "systemctl")
"""Programs that `sh` blocks begin with, besides those of an environment."""


def names(found: list[tuple[str, str]]) -> list[str]:
    return [f"{page}-{number}" for number, (page, _) in enumerate(found)]


@contextmanager
def running(*command: str, path: str, folder: Path, cwd: Path = ROOT) -> Iterator[str]:
    """A server on a port that it takes itself, from when `path` answers to the end of the block.

    Args:
        command: starts it.
        path: answers once it serves.
        folder: takes its log.
        cwd: the directory that it is started in.
    """
    with (folder / "log").open("wb") as stderr:
        process = subprocess.Popen([*command, "--port", "0"], cwd=cwd, stderr=stderr)
    server = Server(process, folder / "log")
    try:
        with server.client() as client:
            wait_for(lambda: client.get(path).status_code == 200, why=f"{path} answers")
        yield server.url
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with running(sys.executable, "-m", "mlxsrv", path="/health", folder=folder) as url:
        yield url


def test_every_block_is_run_or_only_read() -> None:
    """Other tests read the remaining `sh` blocks: make targets, options, extras."""
    pythons = [block for page in PAGES for block in blocks(page, "python")]
    assert len(pythons) == len(MOUNTS) + len(SDKS) + len(ELSEWHERE)
    for page in PAGES:
        for block in blocks(page, "sh"):
            program = block.split()[0]
            assert program in PROGRAMS or "env/bin/" in program, block
    fences = [
        language
        for page in PAGES
        for language in re.findall(r"^```(\w*)\n.*?^```", read(page), re.DOTALL | re.MULTILINE)
    ]
    assert {*fences} <= {"sh", "python", "json", "text", "ini", "xml", "nginx"}


@pytest.mark.parametrize(("page", "block"), CURLS, ids=names(CURLS))
def test_a_curl_line_answers(server: str, page: str, block: str) -> None:
    result = subprocess.run(
        block.replace(URL, server), shell=True, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    if "/api/chat" in block:
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        assert lines[-1]["done_reason"] == "stop"
        assert "mlxsrv" in "".join(line["message"]["content"] for line in lines)
        return
    if "/api/tags" in block:
        assert json.loads(result.stdout)["models"][0]["name"] == "demo:latest"
        return
    if "/api/" in block:
        assert json.loads(result.stdout)["success"]
        return
    if "/v1/responses" in block:
        assert json.loads(result.stdout)["status"] == "completed"
        return
    assert '"error"' not in result.stdout
    if "curl -N" in block:
        assert result.stdout.endswith("data: [DONE]\n\n")
        text = "".join(
            chunk["choices"][0]["delta"].get("content", "")
            for line in result.stdout.splitlines()
            if line.startswith("data: {")
            for chunk in [json.loads(line.removeprefix("data: "))]
        )
        assert "/v1/chat/completions" in text
    elif "/v1/messages" in block:
        assert "mlxsrv" in json.loads(result.stdout)["content"][0]["text"]
    elif "/v1/embeddings" in block:
        data = json.loads(result.stdout)["data"]
        assert [len(one["embedding"]) for one in data] == [64, 64]
    else:
        choice = json.loads(result.stdout)["choices"][0]
        message = choice.get("message", choice)
        if "tools" in block:
            [call] = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
            return
        if "guided_choice" in block:
            assert message["text"] in ("yes", "no")
            return
        if '"steering"' in block:
            assert f"| {message['content']} |" in read(DOCS / "steering.md")
            return
        assert len((message.get("content") or message.get("text", "")).split()) > 3
        if "enable_thinking" in block:
            assert message["reasoning_content"]


def test_the_example_of_an_error_is_what_a_server_answers(server: str) -> None:
    [example] = blocks(DOCS / "errors.md", "json")
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 3}
    answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json() == json.loads(example)


@pytest.mark.parametrize(("page", "block"), often(SDKS, SDKS[:1]), ids=names(SDKS))
def test_an_sdk_example_prints_an_answer(server: str, page: str, block: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", block.replace(URL, server)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "mlxsrv" in result.stdout


@pytest.mark.parametrize(("page", "block"), MOUNTS, ids=names(MOUNTS))
def test_a_mount_example_serves(tmp_path: Path, page: str, block: str) -> None:
    (tmp_path / "example.py").write_text(block)
    command = [sys.executable, "-m", "uvicorn", "example:app"]
    with running(*command, path="/llm/health", folder=tmp_path, cwd=tmp_path) as url:
        answer = httpx.post(
            f"{url}/llm/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "What is mlxsrv?"}]},
            timeout=60,
        )
        assert answer.status_code == 200
        assert "mlxsrv" in answer.json()["choices"][0]["message"]["content"]
