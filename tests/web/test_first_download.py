"""A default model that is not here when the server starts, or is no model: what is told of it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

import mlxsrv
from mlxsrv.version import __version__
from tests.support.client import Body, ask, chat
from tests.support.hub import Hub
from tests.support.serving import Server, serving, wait_for
from tests.support.tiny import write_model

WEIGHTS = "model.safetensors"
HELD = 100_000
"""A byte of the weights behind which the hub waits."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model", "qwen3", plain=True)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


def listed(client: httpx.Client) -> dict[str, Body]:
    return {model["id"]: model for model in client.get("/v1/models").json()["data"]}


@contextmanager
def starting(
    root: Path, hub: Hub, *arguments: str, log_format: str = "json"
) -> Iterator[tuple[Server, httpx.Client]]:
    """A server whose default model, org/first, is not here when it starts."""
    variables = {
        "HF_HUB_CACHE": str(root / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_ENDPOINT": hub.url,
    }
    options = ("--model", "org/first", *arguments)
    with (
        serving(root, *options, variables=variables, log_format=log_format) as server,
        server.client() as client,
    ):
        yield server, client


def of_default(client: httpx.Client) -> tuple[Body, Body]:
    """The default model as OpenAI's list and Ollama's list it."""
    tags = {each["name"]: each for each in client.get("/api/tags").json()["models"]}
    return listed(client)["org/first"], tags["org/first:latest"]


def test_the_download_of_the_default_model_is_told_everywhere(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    hub.add("org/first", model)
    total = sum(file.stat().st_size for file in model.iterdir())
    half = total // 2
    hub.hold(WEIGHTS, at=half)
    with starting(tmp_path, hub) as (server, client):
        told = wait_for(
            lambda: [line for line in server.log("downloading") if 40 <= line["percent"] < 100],
            why="the half is logged",
        )
        assert (told[-1]["model"], told[-1]["total"]) == ("org/first", total)
        response = client.get("/health")
        health = response.json()
        assert (response.status_code, health["status"]) == (503, "loading")
        assert half <= health["download"]["completed"] < health["download"]["total"] == total
        [state] = client.get("/health?verbose=1").json()["models"]
        assert state["state"] == "downloading"
        assert half <= state["download"]["completed"] < total
        entry, tag = of_default(client)
        assert (entry["state"], tag["state"], entry["loaded"]) == ("downloading",) * 2 + (False,)
        assert half <= entry["download"]["completed"] < entry["download"]["total"] == total
        assert client.get("/v1/models/default").json()["id"] == "org/first"
        hub.hurry(WEIGHTS)
        server.logged("model downloaded")
        assert server.logged("ready")["model"] == "org/first"
        assert client.get("/health").status_code == 200
        entry, tag = of_default(client)
        assert (entry["state"], tag["state"], entry["download"]) == ("loaded",) * 2 + (None,)
        assert len(server.log("downloading")) <= 11, "a line for each tenth"


def test_a_default_model_that_cannot_be_had_is_told_until_it_is_loaded(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    with starting(tmp_path, hub) as (server, client):
        reason = server.logged("load failed")["reason"]
        assert "no repository" in reason
        assert server.logged("not ready")["model"] == "org/first"
        wait_for(lambda: client.get("/health").json()["status"] != "loading", why="the start ends")
        response = client.get("/health")
        assert response.status_code == 503
        assert response.json() == {"status": "failed", "reason": reason}
        assert client.get("/health/live").status_code == 200
        for entry in of_default(client):
            assert (entry["state"], entry["reason"]) == ("failed", reason)
        assert ask(client, chat(model="demo", max_tokens=5))["model"] == "demo"
        hub.add("org/first", model)
        assert ask(client, chat(max_tokens=5))["model"] == "org/first"
        assert client.get("/health").json() == {"status": "ok"}
        entry, tag = of_default(client)
        assert (entry["state"], entry["reason"], tag["state"]) == ("loaded", None, "loaded")
        assert "reason" not in tag


def test_without_a_key_health_tells_no_more_than_the_status(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    with starting(tmp_path, hub, "--api-key", "secret") as (server, client):
        server.logged("load failed")
        wait_for(lambda: client.get("/health").json()["status"] != "loading", why="the start ends")
        assert client.get("/health").json() == {"status": "failed"}
        headers = {"Authorization": "Bearer secret"}
        told = client.get("/health?verbose=1", headers=headers).json()
        assert "no repository" in told["reason"]


def test_a_terminal_shows_a_banner_then_the_download_then_that_it_is_ready(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    hub.add("org/first", model)
    hub.hold(WEIGHTS, at=HELD)
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    command = [sys.executable, "-m", "mlxsrv", "org/first", "--port", "0"]
    own = hub.environment(tmp_path) | {"NO_COLOR": "1"}
    with subprocess.Popen(command, env=own, stderr=theirs) as process, open(ours, "rb", 0) as seen:
        os.close(theirs)

        def read_until(pattern: str, before: str = "") -> str:
            while not re.search(pattern, before):
                before += seen.read(1000).decode(errors="replace")
            return before

        text = read_until(r"org/first: +[1-9]\d?%")
        banner, _, _ = text.partition("%")
        assert f"mlxsrv {__version__}\r\n" in banner
        url = re.search(r"Chat +(http://127.0.0.1:\d+) ", banner)
        assert url is not None, banner
        assert re.search(rf"Clients +{url[1]}/v1 ", banner)
        assert all(len(line) < 80 for line in banner.splitlines())
        for told in ("Model    org/first, which is downloaded first", "GB in this", "Ctrl-C"):
            assert told in banner
        assert re.search(r"\r\d\d:\d\d:\S+ info +downloading +model=org/first percent=0", text)
        hub.hurry(WEIGHTS)
        text = read_until(r"Ready in \S+ s: ", text)
        assert "model loaded" in text
        assert not re.search(r"patch|divided|listening|\x1b\[\d+m", text)
        assert len(re.findall(" downloading ", text)) == 1, "the bar tells the rest"
        process.terminate()
        assert process.wait(60) == 0


def test_a_mounted_app_lists_its_default_model_though_its_files_are_wrong(
    model: Path, tmp_path: Path
) -> None:
    """It cannot end the process, as the command line does."""
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "tokenizer.json").unlink()
    app = mlxsrv.create_app(mlxsrv.Settings(model=(str(broken),), hf_cache=False))
    models = TestClient(app).get("/v1/models").json()["data"]  # nothing is loaded at a start
    [entry] = [each for each in models if each["id"] != "demo"]
    assert (entry["id"], entry["state"]) == ("broken", "failed")
    assert "tokenizer.json" in entry["reason"]
