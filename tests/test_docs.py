"""The README's commands are run as they stand, but for the port."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
URL = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(*command: str, port: int, path: str, cwd: Path = ROOT) -> Iterator[str]:
    """A server, from when `path` answers to the end of the block."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(200):
            try:
                if httpx.get(url + path).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    port = free_port()
    with running(
        sys.executable, "-m", "mlxsrv", "--port", str(port), port=port, path="/health"
    ) as url:
        yield url


NAMED_FEATURES = README[README.index("| feature | value |") :].split("\n\n")[0]
CURLS = [block for block in blocks("sh") if block.startswith("curl")]


@pytest.mark.parametrize("block", CURLS, ids=range(len(CURLS)))
def test_a_curl_line_answers(server: str, block: str) -> None:
    result = subprocess.run(
        block.replace(URL, server), shell=True, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    if "/api/" in block:
        assert json.loads(result.stdout)["success"]
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
            assert message["content"] in NAMED_FEATURES
            return
        assert len((message.get("content") or message.get("text", "")).split()) > 3
        if "enable_thinking" in block:
            assert message["reasoning_content"]


def test_the_sdk_example_prints_an_answer(server: str) -> None:
    [block] = [block for block in blocks("python") if "OpenAI(" in block]
    result = subprocess.run(
        [sys.executable, "-c", block.replace(URL, server)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "mlxsrv" in result.stdout


MOUNTS = [block for block in blocks("python") if "Mount(" in block]


@pytest.mark.parametrize("block", MOUNTS, ids=range(len(MOUNTS)))
def test_a_mount_example_serves(tmp_path: Path, block: str) -> None:
    (tmp_path / "example.py").write_text(block)
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "example:app", "--port", str(port)]
    with running(*command, port=port, path="/llm/health", cwd=tmp_path) as url:
        answer = httpx.post(
            f"{url}/llm/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "What is mlxsrv?"}]},
            timeout=60,
        )
        assert answer.status_code == 200
        assert "mlxsrv" in answer.json()["choices"][0]["message"]["content"]


def test_json_examples_are_json() -> None:
    assert blocks("json")
    for block in blocks("json"):
        json.loads(block)


def test_the_make_targets_it_names_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"^make ([\w-]+)", "\n".join(blocks("sh")), re.MULTILINE)
    assert {"serve", "test", "bench"} <= set(named)
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_house_it_draws_is_the_house() -> None:
    picture = README[README.index("floor 0") :].split("```")[0]
    named = re.findall(r"(\w+(?:\.py|/))[\s,]", picture)
    assert len(named) > 15
    for name in named:
        assert list((ROOT / "mlxsrv").rglob(name.rstrip("/"))), name


def test_every_cell_of_the_clients_table_is_a_test() -> None:
    folder = ROOT / "tests" / "clients"
    sources = "".join(
        path.read_text() for path in [*folder.rglob("test_*.py"), *folder.rglob("*.test.mjs")]
    )
    table = README[README.index("## Clients") :].split("\n\n")[2]
    names = [
        cell.strip(" `")
        for line in table.splitlines()[2:]
        for cell in line.split("|")[2:-1]
        if cell.strip()
    ]
    assert len(names) > 50
    for name in names:
        assert (
            f"def test_{name}(" in sources
            or f'test("{name}' in sources
            or f"test(`{name}" in sources
        ), name
