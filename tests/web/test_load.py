"""Very many clients at once, and clients that do not read what they have asked for."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.load import Load, prepare, run_streams
from tests.support.client import CHAT, RawClient, answer, ask, chat
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, Server, serving, wait_for

ROWS = 32
TOKENS = 4

STALLED = 50
MOST_HELD = 1_000_000
"""Bytes that the server may hold for each who does not read: 64 KiB of frames, and token ids."""
FOR_EVER = 500_000
MANY = 300
"""Tokens of an answer that nobody reads; the frames of all are far more than sockets hold."""
LONG_NAME = "/".join(["m" * 200] * 500)
"""It is in every frame, so a few frames fill the buffers between the two: tokens that wait for the
event loop are sent together, in few frames where it is late."""


@contextmanager
def descriptors(wanted: int) -> Iterator[None]:
    """This process and those it starts may open so many files; skips where that is forbidden."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"a process may open {hard} files here, and this takes {wanted}")
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        yield
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_hundreds_at_once_are_all_served(folders: Folders, tmp_path: Path) -> None:
    check_crowd(folders, tmp_path, 300)


@pytest.mark.long
def test_a_thousand_at_once_are_all_served(folders: Folders, tmp_path: Path) -> None:
    check_crowd(folders, tmp_path, 1000)


def check_crowd(folders: Folders, folder: Path, crowd: int) -> None:
    options = ["--max-concurrency", str(ROWS), "--max-queue", "2000"]
    with (
        descriptors(crowd + 200),
        serving(folder, "--model", f"t={folders.plain}", *options) as server,
        server.client() as client,
    ):
        expected = answer(ask(client, chat("Tell me.", max_tokens=TOKENS)))
        load = Load(
            url=server.url,
            concurrency=crowd,
            requests=crowd,
            bodies=(chat("Tell me.", max_tokens=TOKENS),),
            keep_text=True,
        )

        async def run() -> list[Any]:
            streams = prepare(load)
            for stream in streams:
                await stream.connect(load.timeout)
            await run_streams(streams, load)
            return [stream.sample for stream in streams]

        samples = asyncio.run(run())
        assert [sample.error for sample in samples if sample.error] == []
        assert {sample.text for sample in samples} == {expected}
        assert {sample.usage for sample in samples} == {TOKENS}
        wait_for(lambda: len(server.log("request", path=CHAT)) > crowd, why="all are logged")
        wait_for(lambda: idle(client), why="nothing is left")


def test_those_who_read_nothing_slow_nobody_and_hold_little(
    folders: Folders, tmp_path: Path
) -> None:
    options = ["--max-concurrency", "64", "--prompt-cache-bytes", "0", "--shutdown-grace", "1"]
    with (
        serving(tmp_path, "--model", f"{LONG_NAME}={folders.endless}", *options) as server,
        server.client() as client,
        ExitStack() as stack,
    ):
        ask(client, chat())
        before = resident(server)
        body = chat(max_tokens=MANY, stream=True)
        stalled = [stack.enter_context(RawClient(server, body)) for _ in range(STALLED)]
        for each in stalled:
            server.logged("stream start", request=each.request)

        read = ask(client, chat(max_tokens=MANY // 4))
        # Nobody has read, and all rows go on to their ends.
        wait_for(lambda: idle(client), seconds=60, why="the rows end")
        # Their frames fill the buffers of sockets many times, unless the event loop is far behind.
        wait_for(
            lambda: resident(server) - before < STALLED * MOST_HELD,
            why="what idle buffers there are goes back to the system",
        )

        # Their answers are there for those who read after all.
        late = read_all(stalled[0])
        assert b'"finish_reason":"length"' in late
        assert f'"completion_tokens":{MANY}'.encode() in late
        [_, *frames] = re.findall(rb'"content":("(?:[^"\\]|\\.)*")', late)
        assert "".join(map(json.loads, frames)).startswith(answer(read))

        # Nor do those who still read nothing keep the server.
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0
        assert "raceback" not in server.log_text()


def test_a_connection_that_takes_nothing_is_cut_off(folders: Folders, tmp_path: Path) -> None:
    model = f"{LONG_NAME}={folders.endless}"
    with (
        serving(tmp_path, "--model", model, "--stall-timeout", "1") as server,
        server.client() as client,
        ExitStack() as stack,
    ):
        server.logged("model loaded")
        ask(client, chat())
        before = descriptors_of(server)
        body = chat(max_tokens=FOR_EVER, stream=True)
        stalled = [stack.enter_context(RawClient(server, body)) for _ in range(4)]
        for each in stalled:
            assert server.logged("stream start", request=each.request)
        for each in stalled:
            server.logged("stream end", request=each.request)
        wait_for(lambda: descriptors_of(server) <= before, why="their connections are gone")
        wait_for(lambda: idle(client), why="their rows are free")
        assert server.log_text().count("Traceback") == 0


def read_all(client: RawClient) -> bytes:
    """Read the rest of the answer at full speed."""
    client.socket.settimeout(PATIENCE)
    data = bytearray()
    while b"[DONE]" not in data[-100:]:
        part = client.socket.recv(2**20)
        assert part, "it is cut off"
        data += part
    return bytes(data)


def rows(client: httpx.Client) -> int:
    """Answers that are being generated."""
    [model] = client.get("/health?verbose=1").json()["models"]
    return int(model["engine"]["rows"])


def idle(client: httpx.Client) -> bool:
    """Whether the server's account of its models tells of no request."""
    [model] = client.get("/health?verbose=1").json()["models"]
    return not (model["requests"] or model["rows"] or model["engine"]["rows"])


def resident(server: Server) -> int:
    """Bytes of memory that the server's process has."""
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def descriptors_of(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
