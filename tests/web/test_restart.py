"""The end of the process, asked for or not, in the middle of its work; and its next beginning."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import faulty
from tests.support.client import (
    CHAT,
    FIRST_CONTENT,
    ROLE,
    Body,
    RawClient,
    answer,
    ask,
    chat,
    refused,
)
from tests.support.effort import often
from tests.support.fixtures import Folders
from tests.support.hub import Hub
from tests.support.serving import PATIENCE, Server, serving, serving_faulty, wait_for
from tests.support.tiny import write_model

ROWS = 32
FOR_EVER = 500_000
WEIGHTS = "model.safetensors"
SLOW = 2.0
"""Seconds between two parts of a download: it takes longer than all else, on a busy machine too."""

END = rb"\[DONE\]|\r\n\r\n\{.*\}"
"""The end of a stream, or of an answer that is not streamed."""


def left_in_peace(server: Server) -> None:
    """Fails unless the process ends, of itself and with nothing to complain of."""
    assert server.exit_status() == 0
    assert "raceback" not in server.log_text()


# Asked for.


def test_a_full_house_is_drained(folders: Folders, tmp_path: Path) -> None:
    options = ["--max-concurrency", str(ROWS), "--shutdown-grace", "600"]
    with (
        serving(tmp_path, "--model", f"t={folders.endless}", *options) as server,
        server.client(headers={"Accept": "application/json"}) as client,
        ExitStack() as stack,
    ):
        ask(client, chat())

        def come(tokens: int, *, stream: bool) -> RawClient:
            return stack.enter_context(RawClient(server, chat(max_tokens=tokens, stream=stream)))

        # Half of those who have a row are done in time; of those who wait, some get their turn.
        # The grace ends when these are done, with a second signal.
        short = [come(60, stream=bool(i % 2)) for i in range(ROWS // 2)]
        long = [come(FOR_EVER, stream=bool(i % 2)) for i in range(ROWS // 2)]
        queued = [come(20, stream=bool(i % 2)) for i in range(ROWS)]
        for client_ in long[1::2]:
            client_.until(FIRST_CONTENT)
        server.signal(signal.SIGTERM)
        server.logged("shutting down")
        refused(client.post(CHAT, json=chat()), 503, "shutting_down")
        refused(client.post(CHAT, json=chat(stream=True)), 503, "shutting_down")
        assert client.get("/health").json()["status"] == "draining"

        assert {outcome(each) for each in short} == {"length"}
        server.signal(signal.SIGTERM)
        assert {outcome(each) for each in queued} <= {"length", "shutting_down"}
        assert {outcome(each) for each in long} == {"shutting_down"}
        left_in_peace(server)
        begun = {line["request"] for line in server.log("stream start")}
        assert begun <= {line["request"] for line in server.log("stream end")}


def outcome(client: RawClient) -> str:
    """Return how the answer ends: the finish_reason, or the code of an error in the right form."""
    data = client.until(END)
    head, _, body = data.partition(b"\r\n\r\n")
    if b"text/event-stream" not in head:
        told = json.loads(body)
        return str(told["error"]["code"] if "error" in told else finish(told))
    assert head.startswith(b"HTTP/1.1 200 ")
    chunks = [json.loads(data) for data in re.findall(rb"data: (\{.*\})\n\n", body)]
    chunk = next(each for each in reversed(chunks) if "usage" not in each)
    if "error" in chunk:
        assert finish(chunk) == "error"
        return str(chunk["error"]["code"])
    return finish(chunk)


def finish(body: Body) -> str:
    return str(body["choices"][0]["finish_reason"])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights come in more than one slice."""
    return write_model(tmp_path_factory.mktemp("large"), "qwen3-46m", plain=True)


@pytest.mark.parametrize("awaited", often([True, False], [True]))
def test_sigterm_while_a_model_loads(large: Path, tmp_path: Path, awaited: bool) -> None:
    # Where nobody waits for it, the grace is not for the model.
    grace = "0.2" if awaited else "600"
    options = ["--model", f"{faulty.SLOW_MODEL}={large}", "--shutdown-grace", grace]
    with serving_faulty(tmp_path, *options) as server:
        with ExitStack() as stack:
            if awaited:
                client = stack.enter_context(RawClient(server, chat(stream=True)))
            wait_for(lambda: has_room(server), why="its weights come")
            server.signal(signal.SIGTERM)
            if awaited:
                client.until(rb'"code":"shutting_down"')
        left_in_peace(server)
        assert not server.log("model loaded")


def has_room(server: Server) -> bool:
    with server.client() as client:
        memory = client.get("/health?verbose=1").json().get("memory")
    return memory is not None and memory["weights"] > 0


@pytest.mark.long
def test_sigterm_in_the_middle_of_everything(folders: Folders, tmp_path: Path) -> None:
    """A download, the reading of a long prompt, the embedding of many texts."""
    with Hub() as hub, ExitStack() as stack:
        hub.add("org/slow", folders.plain)
        hub.drip(WEIGHTS, SLOW)
        options = ["--allow-download", "--prefill-chunk", "16", "--shutdown-grace", "1"]
        server = stack.enter_context(
            serving(
                tmp_path,
                "--model",
                f"t={folders.endless}",
                *options,
                variables=hub_variables(hub, tmp_path),
            )
        )

        def send(path: str, body: Body) -> RawClient:
            return stack.enter_context(RawClient(server, body, path))

        fetching = send(CHAT, chat(model="org/slow"))
        wait_for(lambda: partial_bytes(tmp_path), why="the download has begun")
        long = "ä" * 40_000
        reading = send(CHAT, chat(long, stream=True))
        reading.until(ROLE)
        embedding = send("/v1/embeddings", {"input": ["a text of some length " * 40] * 2000})
        wait_for(lambda: working(server, "texts"), why="texts are embedded")
        assert working(server, "reading")
        server.signal(signal.SIGTERM)
        for client in (fetching, reading, embedding):
            client.until(rb'"code":"shutting_down"')
        assert fetching.data.startswith(b"HTTP/1.1 503 ")
        assert embedding.data.startswith(b"HTTP/1.1 503 ")
        assert b'"finish_reason":"error"' in reading.data
        left_in_peace(server)


def hub_variables(hub: Hub, folder: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def partial_bytes(folder: Path) -> int:
    """Return how many bytes of unfinished downloads have arrived."""
    found = (folder / "cache").glob("*/blobs/*.incomplete")
    return sum(path.stat().st_size for path in found)


def working(server: Server, what: str) -> int:
    with server.client() as client:
        models = client.get("/health?verbose=1").json()["models"]
    return sum(model["engine"].get(what, 0) for model in models)


# Not asked for.


class Writer(threading.Thread):
    """Makes profiles one after the other, and knows which were acknowledged."""

    def __init__(self, server: Server, name: str) -> None:
        super().__init__()
        self._server = server
        self._name = name
        self.acknowledged: list[str] = []

    def run(self) -> None:
        with self._server.client() as client:
            for i in range(10_000):
                name = f"{self._name} {i}"
                body: dict[str, Any] = {"name": name, "steering": {"1": i % 100}, "layer": 1}
                body |= {"model_id": "t", "sae_id": "x"}
                try:
                    response = client.post("/api/profiles", json=body)
                except httpx.TransportError:
                    return
                assert response.status_code == 201, response.text
                self.acknowledged.append(name)


@pytest.mark.parametrize("seconds", [0.0, pytest.param(0.11, marks=pytest.mark.long)])
def test_after_sigkill_all_is_as_it_was(folders: Folders, tmp_path: Path, seconds: float) -> None:
    with Hub() as hub:
        hub.add("org/slow", folders.other)
        hub.drip(WEIGHTS, SLOW)
        options = ["--model", f"t={folders.endless}", "--data-dir", str(tmp_path / "data")]
        options += ["--allow-download"]
        variables = hub_variables(hub, tmp_path)
        with serving(tmp_path, *options, variables=variables) as server, ExitStack() as stack:
            port = server.address[1]
            fetching = RawClient(server, chat(model="org/slow"))
            streaming = RawClient(server, chat(max_tokens=FOR_EVER, stream=True))
            stack.enter_context(fetching)
            stack.enter_context(streaming).until(FIRST_CONTENT)
            writers = [Writer(server, name) for name in ("a", "b")]
            for writer in writers:
                writer.start()
            wait_for(lambda: all(len(w.acknowledged) > 3 for w in writers), why="they write")
            # Of the weights, which come last: a smaller file might be there before the server ends.
            wait_for(
                lambda: any(sent.path == WEIGHTS for sent in hub.sent) and partial_bytes(tmp_path),
                why="the download of the weights has begun",
            )
            time.sleep(seconds)  # another moment of a write
            server.signal(signal.SIGKILL)
            for writer in writers:
                writer.join(PATIENCE)
                assert not writer.is_alive()
            assert server.exit_status() == -signal.SIGKILL
        there = partial_bytes(tmp_path)
        assert there

        hub.mend()
        again = (*options, "--port", str(port))
        with (
            serving(tmp_path, *again, variables=variables) as server,
            server.client() as client,
        ):
            assert server.address[1] == port
            kept = {profile["name"] for profile in client.get("/api/profiles").json()["data"]}
            written = {name for writer in writers for name in writer.acknowledged}
            assert written <= kept
            assert len(kept - written) <= len(writers), "one each may have been under way"
            fetched = ask(client, chat(model="org/slow"))
            assert fetched["model"] == "org/slow"
            [sent] = [sent for sent in hub.sent if sent.path == WEIGHTS]
            assert sent.start >= there > 0, "it goes on where it was"
            assert answer(ask(client, chat(max_tokens=20)))
        with closing(sqlite3.connect(tmp_path / "data" / "profiles.sqlite3")) as store:
            assert store.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
