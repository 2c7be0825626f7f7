"""Streams in time: keep-alives, deadlines, tokens as they are made, and many streams at once."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
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
    stream_async,
)
from tests.support.effort import often
from tests.support.fixtures import KEEPALIVE, Folders
from tests.support.serving import Server, serving_faulty, wait_for

DEADLINE = 1.2
FOR_EVER = 500_000

CHUNK = 16
SLOW = completion([faulty.SLUGGISH] * (100 * CHUNK))
"""Its prompt is not read before the deadline, on any machine."""


@pytest.fixture(scope="module")
def hurried(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One row, and little time for a request."""
    options = ["--max-concurrency", "1", "--keepalive", "0.25", "--request-timeout", f"{DEADLINE}"]
    options += ["--prefill-chunk", f"{CHUNK}"]
    folder = tmp_path_factory.mktemp("hurried")
    with serving_faulty(folder, "--model", f"t={folders.endless}", *options) as server:
        server.logged("model loaded")
        with server.client() as client:  # from here on time is the tests' own
            wait_for(lambda: client.post(CHAT, json=chat()).is_success, why="it answers in time")
        yield server


# Keep-alives.


def test_a_queued_stream_is_opened_and_kept_alive_by_comments(narrow: Server) -> None:
    with RawClient(narrow, chat(max_tokens=FOR_EVER, stream=True)) as running:
        running.until(FIRST_CONTENT)
        begun = time.monotonic()
        with RawClient(narrow, chat(stream=True)) as queued:
            head = queued.until(rb": keep-alive\n\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"data:" not in head
            queued.until(rb"(: keep-alive\n\n[^:]*){4}")
            spent = time.monotonic() - begun
            assert spent > 3 * KEEPALIVE, f"comments come by the clock: {KEEPALIVE} s apart"
            assert b"data:" not in queued.data
            running.hang_up()
            queued.until(rb"\[DONE\]")
            assert b'"finish_reason":"length"' in queued.data


def test_nothing_is_kept_alive_while_tokens_flow(narrow: Server) -> None:
    """The machine may stand still for a moment. While it does not, there is no comment."""
    with RawClient(narrow, chat(max_tokens=FOR_EVER, stream=True)) as client:
        client.until(FIRST_CONTENT)
        wait_for(lambda: _flows(client, 3 * KEEPALIVE), why="tokens flow without a comment")


def _flows(client: RawClient, seconds: float) -> bool:
    """Whether something came all the time, and none of it was a comment."""
    seen = len(client.data)
    begun = last = time.monotonic()
    while last - begun < seconds:
        assert client.read()
        if time.monotonic() - last > KEEPALIVE / 2:
            return False
        last = time.monotonic()
    return b": keep-alive" not in client.data[seen:]


# Deadlines.


@pytest.fixture
def behind(hurried: Server) -> Iterator[httpx.Client]:
    """A client whose requests wait behind one that runs until its own deadline."""
    with RawClient(hurried, chat(max_tokens=FOR_EVER, stream=True)) as running:
        running.until(FIRST_CONTENT)
        with hurried.client() as client:
            yield client


def test_no_text_in_time_is_a_timeout(behind: httpx.Client) -> None:
    begun = time.monotonic()
    error = refused(behind.post(COMPLETIONS, json=SLOW), 504, "timeout")
    assert f"{DEADLINE:g} s" in error["message"]
    assert time.monotonic() - begun > DEADLINE * 0.9


def test_a_stream_that_was_kept_alive_fails_in_its_own_form(behind: httpx.Client) -> None:
    streamed = stream(behind, SLOW, COMPLETIONS)
    assert streamed.status == 200
    assert streamed.comments >= 1
    assert streamed.finish_reason == "error"
    assert streamed.content == ""
    error = streamed.chunks[-1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("server_error", "timeout")


@pytest.mark.parametrize("streaming", often([False, True], [True]))
def test_text_at_the_deadline_is_given(hurried: Server, streaming: bool) -> None:
    body = chat(max_tokens=FOR_EVER)
    with hurried.client() as client:
        begun = time.monotonic()
        if streaming:
            streamed = stream(client, body)
            text, reason, usage = streamed.content, streamed.finish_reason, streamed.usage
        else:
            whole = ask(client, body)
            text, usage = answer(whole), whole["usage"]
            reason = whole["choices"][0]["finish_reason"]
    assert time.monotonic() - begun > DEADLINE * 0.9
    assert reason == "timeout"
    assert text
    assert 0 < usage["completion_tokens"] < FOR_EVER


def test_a_deadline_frees_the_row(hurried: Server) -> None:
    with hurried.client() as client:
        assert client.post(COMPLETIONS, json=SLOW).status_code == 504
        # On a busy machine this one may be late, too; it has no chance if the row is not free.
        wait_for(lambda: client.post(CHAT, json=chat()).is_success, why="the row is free")


# Tokens.


def test_tokens_are_sent_as_they_are_made(narrow: Server) -> None:
    with RawClient(narrow, chat(max_tokens=FOR_EVER, stream=True)) as client:
        for _ in range(20):
            seen = len(client.text)
            while len(client.text) == seen:
                assert client.read()
        assert b'"finish_reason":"' not in client.data, "nothing waits for the rest"


def test_many_streams_at_once_say_what_each_says_alone(
    client: httpx.Client, server: Server
) -> None:
    bodies = [
        chat(f"Say {i}" + " and more" * (i % 7), max_tokens=16 + i % 9, temperature=0)
        for i in range(16)
    ]
    alone = [answer(ask(client, body)) for body in bodies]

    async def together() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as many:
            streams = await asyncio.gather(*(stream_async(many, body) for body in bodies))
            return [streamed.content for streamed in streams]

    assert asyncio.run(together()) == alone


@pytest.mark.parametrize(
    "prompt",
    often(["👩‍👩‍👧‍👦 🇫🇷 👍🏽", "你好，世界。", "안녕하세요 ❤️", "Žluťoučký kůň"], ["你好，世界。"]),
)
def test_characters_are_whole(client: httpx.Client, prompt: str) -> None:
    # With this seed the random model writes no byte by itself that begins no character.
    streamed = stream(client, chat(prompt, max_tokens=200, temperature=1, seed=8))
    assert any(not character.isascii() for character in streamed.content)
    assert "\ufffd" not in "".join(str(chunk) for chunk in streamed.chunks)


if sys.platform == "linux":

    def _cpu_seconds(process: int) -> float:
        """Processor time that all threads of a process have used."""
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _rests(server: Server) -> bool:
        """Whether the server needs nothing of a processor for two seconds."""
        before = _cpu_seconds(server.process.pid)
        time.sleep(2)
        return _cpu_seconds(server.process.pid) - before < 0.02 + 0.01  # 1 %, and one tick

    def test_an_idle_server_does_nothing(client: httpx.Client, server: Server) -> None:
        ask(client, chat())
        wait_for(lambda: _rests(server), why="it has ended what the request left to do")
