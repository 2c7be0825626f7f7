"""Faults in a running server: who is concerned hears why, all others' answers are right."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support import faulty
from tests.support.client import (
    CHAT,
    COMPLETIONS,
    FIRST_CONTENT,
    Body,
    RawClient,
    answer,
    ask,
    chat,
    refused,
    stream,
)
from tests.support.fixtures import Folders
from tests.support.poisoning import FOR_EVER, at_rest, engine, health, poisoned
from tests.support.serving import Server, serving_faulty, wait_for


@pytest.fixture(scope="module")
def server(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("faulty")
    odd = {}
    templates = {
        "raising": "{{ raise_exception('no chats today') }}",
        "recursing": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    }
    for name, template in templates.items():
        odd[name] = shutil.copytree(folders.other, folder / name)
        file = odd[name] / "tokenizer_config.json"
        settings = json.loads(file.read_text("utf-8")) | {"chat_template": template}
        file.write_text(json.dumps(settings), "utf-8")
    models = [f"t={folders.endless}", *(f"{name}={path}" for name, path in odd.items())]
    arguments = [part for model in models for part in ("--model", model)]
    with serving_faulty(folder, *arguments, "--step-timeout", "1") as server:
        yield server


def refusal_beside_others(client: httpx.Client, bodies: Sequence[Body]) -> list[httpx.Response]:
    """Send `bodies` while other requests are answered; those must get their right text."""
    others = [chat(f"Tell me of number {i}.", max_tokens=40) for i in range(3)]
    others += [each | {"temperature": 0.8, "seed": 7} for each in others]
    expected = [answer(ask(client, body)) for body in others]
    with ThreadPoolExecutor(16) as threads:
        streams = [threads.submit(stream, client, body) for body in others]
        asked = [threads.submit(client.post, COMPLETIONS, json=body) for body in bodies]
        assert [each.result().content for each in streams] == expected
        return [each.result() for each in asked]


def test_of_many_requests_only_those_to_blame_fail(server: Server) -> None:
    with server.client() as client:
        before = answer(ask(client, chat()))
        bodies = [poisoned(each) for each in (faulty.RAISES, faulty.NAN, faulty.MEMORY)]
        raised, nan, memory = refusal_beside_others(client, bodies)
        told = refused(raised, 500, "internal_error")["message"]
        assert "failed while generating" in told
        assert "refused" not in told, "what a bug says is for the log"
        assert "the model computed NaN" in refused(nan, 500, "internal_error")["message"]
        assert "out of memory" in refused(memory, 500, "internal_error")["message"]
        cause = server.logged("stream error", request=raised.headers["x-request-id"])
        assert "this token is refused" in json.dumps(cause)
        assert client.get("/health").json()["status"] == "ok"
        wait_for(lambda: at_rest(client), why="all rows are free")
        assert answer(ask(client, chat())) == before


def test_a_fault_gives_its_memory_back(server: Server) -> None:
    with server.client() as client:

        def burst() -> int:
            refusal_beside_others(client, [poisoned(faulty.RAISES, max_tokens=100)] * 4)
            wait_for(lambda: at_rest(client), why="all rows are free")
            return int(health(client)["memory"]["active"]) - engine(client)["prompt_cache_bytes"]

        burst()  # the prompts of others are kept from here on
        before = burst()
        assert abs(burst() - before) < 100_000


def test_a_stream_that_fails_ends_with_an_error_frame(server: Server) -> None:
    with server.client() as client:
        response = client.post(COMPLETIONS, json=poisoned(faulty.NAN, stream=True))
        assert '"finish_reason":"error"' in response.text or response.status_code == 500
        assert "the model computed NaN" in response.text


def test_a_template_or_a_tokenizer_that_fails_is_told(server: Server) -> None:
    with server.client() as client:
        for name in ("raising", "recursing"):
            for streaming in (False, True):
                body = chat(model=name, stream=streaming)
                headers = {"Accept": "application/json"}
                response = client.post(CHAT, json=body, headers=headers)
                refused(response, 400, "invalid_value", param="messages")
        for _ in range(2):
            error = refused(client.post(CHAT, json=chat(faulty.PANIC)), 500, "internal_error")
            assert "panicked" not in error["message"]
        assert server.logged("admission failed")
        assert answer(ask(client, chat(max_tokens=3)))


def test_a_step_that_takes_long_is_reported_while_it_lasts(server: Server) -> None:
    with server.client() as client, ThreadPoolExecutor(1) as threads:
        assert health(client)["engine"] == {"stalled_seconds": 0}
        before = len(server.log("slow step")), len(server.log("slow step ended"))
        slow = threads.submit(client.post, COMPLETIONS, json=poisoned(faulty.HELD, max_tokens=2))
        line = wait_for(lambda: server.log("slow step")[before[0] :], why="it is told")[0]
        assert (line["level"], line["model"], line["what"]) == ("warning", "t", "decoding")
        assert line["seconds"] > 1
        assert len(server.log("slow step ended")) == before[1]
        # Although the thread does not answer.
        for path in ("/health", "/health/live"):
            response = client.get(path)
            assert (response.status_code, response.json()) == (503, {"status": "stalled"})
        told = health(client)
        assert told["status"] == "stalled"
        assert told["engine"]["stalled_seconds"] > 1
        server.signal(faulty.RELEASE)
        assert slow.result().status_code == 200
        ended = wait_for(lambda: server.log("slow step ended")[before[1] :], why="it has ended")
        assert ended[0]["seconds"] > line["seconds"]
        assert len(server.log("slow step")) == before[0] + 1
        assert health(client)["engine"] == {"stalled_seconds": 0}
        for path in ("/health", "/health/live"):
            assert client.get(path).json() == {"status": "ok"}


@pytest.mark.parametrize("exits", [False, True])
def test_when_the_device_thread_dies(folders: Folders, tmp_path: Path, exits: bool) -> None:
    options = ["--exit-on-failure"] if exits else []
    with (
        serving_faulty(tmp_path, "--model", f"t={folders.endless}", *options) as server,
        server.client() as client,
        RawClient(server, chat(max_tokens=FOR_EVER, stream=True)) as running,
    ):
        running.until(FIRST_CONTENT)
        with RawClient(server, poisoned(faulty.DEADLY), COMPLETIONS) as deadly:
            tail = running.until(rb"\[DONE\]").rpartition(b"data: {")[2]
            assert b'"code":"engine_failed"' in tail
            deadly.until(rb'"code":"engine_failed"')
        assert server.logged("the device thread died")
        if exits:
            assert server.exit_status() == 3
            return
        for path in ("/health", "/health/live"):
            response = client.get(path)
            assert (response.status_code, response.json()["status"]) == (503, "failed")
        told = {"status": "failed", "engine": {"stalled_seconds": 0}}
        assert health(client).items() >= told.items()
        for body in (chat(), chat(stream=True)):
            headers = {"Accept": "application/json"}
            refused(client.post(CHAT, json=body, headers=headers), 503, "engine_failed")
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0
