"""List the functions that one chat runs through: `python -m benchmarks.path`.

It streams one chat from a warm server in this process, and records each function of the package
that is called, on every thread. Two sizes come of it: how many files and functions a reader meets
who follows a request from its route to its last token, and how many calls each token costs.

The server is a real one, under uvicorn, with the demo model. The first chat loads what is loaded
when it is first needed; the second is recorded. A third, of twice as many tokens, tells what a
token costs: the difference, divided by the tokens that it has more. With `--streams`, so many chats
go on at once, and share each step.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
import msgspec
import uvicorn

import mlxsrv
from mlxsrv.settings import Settings

PACKAGE = Path(mlxsrv.__file__).parent
TOKENS = 32


class Place(msgspec.Struct, frozen=True, order=True):
    """A function of the package: its file, seen from the package's folder, and its name."""

    file: str
    function: str


class Recorder:
    """Counts the calls of functions of the package, on all threads that start while it is
    installed. The threads only add to it; it is read when they are quiet."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.on = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have each thread that starts from now on be watched."""
        threading.setprofile(self._note)
        try:
            yield
        finally:
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.on and event == "call":
            self.calls[frame.f_code] += 1

    def take(self) -> Counter[Place]:
        """The calls since the last time, without those of comprehensions and of module bodies."""
        found: Counter[Place] = Counter()
        for code, times in self.calls.items():
            path = Path(code.co_filename)
            if PACKAGE in path.parents and not code.co_name.startswith("<"):
                found[Place(str(path.relative_to(PACKAGE)), code.co_qualname)] += times
        self.calls.clear()
        return found


@contextmanager
def serving(recorder: Recorder) -> Iterator[httpx.Client]:
    """A server with the demo model in threads of this process, watched from their start."""
    app = mlxsrv.create_app(Settings())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
    with recorder.installed():
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the server did not start")
                thread.join(0.05)
            port = server.servers[0].sockets[0].getsockname()[1]
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


def chat(client: httpx.Client, tokens: int) -> None:
    """Stream a chat to its end."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        assert "data: [DONE]" in [*answer.iter_lines()]


def chat_at_once(client: httpx.Client, streams: int, tokens: int) -> None:
    """Stream so many chats to their ends."""
    with ThreadPoolExecutor(streams) as pool:
        for done in [pool.submit(chat, client, tokens) for _ in range(streams)]:
            done.result()


def trace(streams: int = 1) -> tuple[Counter[Place], Counter[Place]]:
    """The calls of warm chats of TOKENS tokens, and of as many of twice as many tokens."""
    recorder = Recorder()
    taken: list[Counter[Place]] = []
    with serving(recorder) as client:
        for tokens in (TOKENS, TOKENS, 2 * TOKENS):
            recorder.take()
            recorder.on = True
            chat_at_once(client, streams, tokens)
            recorder.on = False
            taken.append(recorder.take())
    return taken[1], taken[2]


def count_by_room(short: Counter[Place], long: Counter[Place], tokens: int) -> dict[str, float]:
    """The calls of each token by room, the most first."""
    rooms: Counter[str] = Counter()
    for place, calls in long.items():
        rooms[str(Path(place.file).parent)] += calls - short[place]
    return {room: calls / tokens for room, calls in rooms.most_common()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.path", description=_DESCRIPTION)
    parser.add_argument("--functions", action="store_true", help="list each function, too")
    parser.add_argument("--streams", type=int, default=1, help="chats at once (default: 1)")
    arguments = parser.parse_args(argv)
    listed, streams = arguments.functions, arguments.streams
    short, long = trace(streams)
    files = Counter(place.file for place in short)
    for file, functions in sorted(files.items()):
        print(f"{functions:4}  {file}")
        for place in sorted(short) if listed else ():
            if place.file == file:
                print(f"      {short[place]:6}  {place.function}")
    rooms = count_by_room(short, long, streams * TOKENS)
    print("calls a token: " + ", ".join(f"{room} {n:.1f}" for room, n in rooms.items() if n > 0.1))
    print(f"{len(files)} files, {len(short)} functions, {sum(rooms.values()):.1f} calls a token")
    return 0


_DESCRIPTION = "Record which functions one warm streamed chat runs through."


if __name__ == "__main__":
    sys.exit(main())
