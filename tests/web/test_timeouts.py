"""The three clocks of a request: its turn, a standstill, and the whole; and asking again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support import faulty
from tests.support.client import (
    CHAT,
    COMPLETIONS,
    FIRST_CONTENT,
    RawClient,
    answer,
    ask,
    chat,
    completion,
    refused,
    stream,
)
from tests.support.effort import often
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, Server, serving, serving_faulty, wait_for

FOR_EVER = 500_000
QUEUE = 2.0
STALL = 1.5
CHUNK = 16


def long(first: int, slices: int) -> list[int]:
    """A prompt that takes so many slices, each at least a tenth of a second."""
    return [first, *[faulty.SLUGGISH] * (CHUNK * slices)]


READING = 45  # slices: three times as long as a standstill may be


@pytest.fixture(scope="module")
def busy(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One row, and little patience in its queue."""
    options = ["--max-concurrency", "1", "--queue-timeout", f"{QUEUE}", "--keepalive", "0.3"]
    folder = tmp_path_factory.mktemp("busy")
    with serving(folder, "--model", f"t={folders.endless}", *options) as server:
        with server.client() as client:
            ask(client, chat())
        yield server


@pytest.fixture(scope="module")
def patient(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Slow to read, and impatient with what stands still."""
    options = ["--prefill-chunk", f"{CHUNK}", "--stall-timeout", f"{STALL}"]
    folder = tmp_path_factory.mktemp("patient")
    with serving_faulty(folder, "--model", f"t={folders.endless}", *options) as server:
        server.logged("model loaded")
        yield server


# Its turn.


def test_a_row_that_does_not_come_is_an_overload(busy: Server) -> None:
    with (
        RawClient(busy, chat(max_tokens=FOR_EVER, stream=True)) as running,
        busy.client() as client,
    ):
        running.until(FIRST_CONTENT)
        begun = time.monotonic()
        response = client.post(CHAT, json=chat())
        error = refused(response, 503, "overloaded")
        assert time.monotonic() - begun > QUEUE * 0.9
        assert "--queue-timeout" in error["message"]
        assert int(response.headers["retry-after"]) >= 1

        streamed = stream(client, chat())  # kept alive meanwhile, so it is open
        assert (streamed.status, streamed.finish_reason) == (200, "error")
        assert streamed.comments >= 1
        assert streamed.chunks[-1]["error"]["code"] == "overloaded"

        # Those who have a row are not concerned.
        seen = len(running.data)
        running.until(rb"(?s).{%d}" % (seen + 1000))
        assert b'"error"' not in running.data
        running.hang_up()
        wait_for(lambda: client.post(CHAT, json=chat()).is_success, why="the row is free")


def test_a_stream_hears_of_an_overload_before_its_first_byte(
    folders: Folders, tmp_path: Path
) -> None:
    options = ["--max-concurrency", "1", "--queue-timeout", "0.5"]
    with (
        serving(tmp_path, "--model", f"t={folders.endless}", *options) as server,
        server.client() as client,
    ):
        server.logged("model loaded")
        with RawClient(server, chat(max_tokens=FOR_EVER, stream=True)) as running:
            running.until(FIRST_CONTENT)
            refused(client.post(CHAT, json=chat(stream=True)), 503, "overloaded")
            embeddings = client.post("/v1/embeddings", json={"input": "one"})
            refused(embeddings, 503, "overloaded")
            assert embeddings.headers["retry-after"]


def test_a_load_is_no_queue(folders: Folders, tmp_path: Path) -> None:
    """The first request waits for the load of its model, however long that takes."""
    options = ["--queue-timeout", "0.5", "--keepalive", "0.2"]
    options += ["--model", f"{faulty.HELD_MODEL}={folders.endless}"]
    with (
        serving_faulty(tmp_path, *options) as server,
        RawClient(server, chat(stream=True)) as client,
    ):
        client.until(rb"(: keep-alive\n\n[^:]*){4}")
        server.signal(faulty.RELEASE)
        client.until(rb'"finish_reason":"length"')


def test_choices_that_wait_for_a_row_go_on_when_one_comes(busy: Server) -> None:
    """More choices than rows: each waits for the one before it, which is in nobody's way."""
    with busy.client() as client:
        body = ask(client, chat(n=3, max_tokens=200))
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 3


# A standstill.


def test_a_prompt_may_be_read_for_as_long_as_it_is_read(patient: Server) -> None:
    with patient.client() as client:
        begun = time.monotonic()
        body = ask(client, completion(long(30, READING), max_tokens=1), COMPLETIONS)
    assert time.monotonic() - begun > 2 * STALL
    assert body["usage"]["completion_tokens"] == 1


def test_a_prompt_that_waits_for_those_before_it_does_not_stand_still(patient: Server) -> None:
    body = completion(long(31, READING), max_tokens=1)
    with RawClient(patient, body, COMPLETIONS) as first, patient.client() as client:
        patient.logged("stream start", request=first.request)
        begun = time.monotonic()
        ask(client, completion(long(32, READING), max_tokens=1), COMPLETIONS)
        assert time.monotonic() - begun > 4 * STALL
        first.until(rb'"finish_reason":"length"')


def test_an_engine_that_stands_still_is_a_timeout(folders: Folders, tmp_path: Path) -> None:
    options = ["--model", f"t={folders.endless}", "--stall-timeout", f"{STALL}"]
    held = completion([30, 31, faulty.HELD], max_tokens=1)
    with serving_faulty(tmp_path, *options) as server, server.client() as client:
        ask(client, chat())
        begun = time.monotonic()
        error = refused(client.post(COMPLETIONS, json=held), 504, "timeout")
        assert time.monotonic() - begun > STALL * 0.9
        assert "--stall-timeout" in error["message"]
        server.signal(faulty.RELEASE)
        wait_for(lambda: client.post(CHAT, json=chat()).is_success, why="it goes on")

        with RawClient(server, chat(max_tokens=FOR_EVER, stream=True)) as running:
            running.until(FIRST_CONTENT)
            with RawClient(server, held | {"stream": True}, COMPLETIONS) as opened:
                opened.until(rb'"finish_reason":"error"')
                assert b'"code":"timeout"' in opened.data
            # It has text: that is its answer.
            running.until(rb"\[DONE\]")
            assert b'"finish_reason":"timeout"' in running.data
            assert b'"error"' not in running.data
        server.signal(faulty.RELEASE)
        wait_for(lambda: client.post(CHAT, json=chat()).is_success, why="it works again")
        wait_for(lambda: not _engine(server)["rows"], why="the rows are free")


def test_there_is_no_limit_to_the_whole_unless_one_is_set(folders: Folders, tmp_path: Path) -> None:
    limit = 3.0
    options = ["--stall-timeout", f"{limit}", "--queue-timeout", f"{limit}"]
    options += ["--request-timeout", "0"]
    with (
        serving(tmp_path, "--model", f"t={folders.endless}", *options) as server,
        RawClient(server, chat(max_tokens=FOR_EVER, stream=True)) as running,
    ):
        running.until(FIRST_CONTENT)
        begun = time.monotonic()
        while time.monotonic() - begun < limit + 0.5:
            running.until(rb"(?s).{%d}" % (len(running.data) + 1))
        assert b'finish_reason":"' not in running.data


# Asking again.


@pytest.fixture(scope="module")
def hasty(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Slow to read, and with little time for a request."""
    options = ["--prefill-chunk", f"{CHUNK}", "--request-timeout", "1.2"]
    folder = tmp_path_factory.mktemp("hasty")
    with (
        serving_faulty(folder, "--model", f"t={folders.endless}", *options) as server,
        server.client() as client,
    ):
        server.logged("model loaded")
        yield client


@pytest.mark.parametrize(
    ("first", "more"),
    often(
        [(33, {}), (50, {"return_token_ids": True}), (51, {"echo": True})],
        [(50, {"return_token_ids": True})],
    ),
    ids=["plain", "return_token_ids", "echo"],
)
def test_who_asks_again_after_a_timeout_gets_an_answer_in_the_end(
    hasty: httpx.Client, first: int, more: dict[str, bool]
) -> None:
    """Information about the prompt, sent before any text, does not count as an answer."""
    body = completion(long(first, 30), max_tokens=1, **more)
    statuses: list[int] = []
    while not statuses or statuses[-1] != 200:
        response = hasty.post(COMPLETIONS, json=body)
        statuses.append(response.status_code)
        assert len(statuses) < 15
    assert len(statuses) >= 3
    assert {*statuses[:-1]} == {504}
    usage = response.json()["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


@pytest.mark.parametrize("streaming", often([True, False], [False]))
def test_what_was_read_for_one_who_hung_up_is_there_for_the_next(
    patient: Server, streaming: bool
) -> None:
    body = completion(long(34 + streaming, READING), max_tokens=1)
    with patient.client() as client:
        with RawClient(patient, body | {"stream": streaming}, COMPLETIONS) as leaver:
            patient.logged("stream start", request=leaver.request)
            time.sleep(READING / 3 * faulty.SLUGGISH_SECONDS)  # its slices take longer than that
            leaver.hang_up()
        patient.logged("stream end", request=leaver.request)
        usage = ask(client, body, COMPLETIONS)["usage"]
    assert 4 * CHUNK <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def test_a_short_prompt_does_not_wait_for_long_ones(patient: Server) -> None:
    with ExitStack() as stack, patient.client() as client:
        for number in range(4):
            body = completion(long(40 + number, 200))
            ahead = stack.enter_context(RawClient(patient, body, COMPLETIONS))
            patient.logged("stream start", request=ahead.request)
        assert answer(ask(client, completion([30, 31, 32], max_tokens=1), COMPLETIONS))
        engine = _engine(patient)
        assert engine["reading"] + engine["waiting"] == 4, "the long ones are not read by far"


def test_one_who_hangs_up_frees_what_is_half_read(patient: Server) -> None:
    with RawClient(patient, completion(long(36, 300), stream=True), COMPLETIONS) as leaver:
        wait_for(lambda: _engine(patient)["reading"], why="it is read")
        leaver.hang_up()
    wait_for(lambda: not _engine(patient)["reading"], why="it is read no more")


def _engine(server: Server) -> dict[str, int]:
    response = httpx.get(f"{server.url}/health?verbose=1", timeout=PATIENCE)
    [model] = response.json()["models"]
    return dict(model["engine"])
