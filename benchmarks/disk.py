"""Prompts on disk: what a restart costs a chat, and what writing costs streams.

    python -m benchmarks.disk [--quick]

- The first token of a chat's follow-up after a restart, with `--prompt-cache-dir` and without. The
  46M model, a chat of 2,000 tokens, a process of its own each time, by turns.
- The processor's time of a write, and of its longest piece, of a prompt of 2,048 tokens.
- The gaps of streams while other chats end all the time, each of which is written, against a server
  that writes nothing. Both run throughout and are measured by turns, so they have the same machine.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import shutil
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.report import describe_machine, format_machine
from benchmarks.servers import Running, exit_on_sigterm, ours, serve
from mlxsrv.engine.storage.prompt_store import HandedCache, PromptStore, Transfer
from mlxsrv.engine.storage.store_folder import StoreFolder
from tests.support.tiny import write_model

_WORDS = ("the", "sea", "is", "wide", "and", "ships", "sail", "far", "from", "any", "shore")
_ANSWER = 32  # tokens
_STREAMS = 4
_SEGMENT = 100  # tokens of each stream


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompts on disk, in figures.")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    quick = parser.parse_args().quick
    exit_on_sigterm()
    print(format_machine(describe_machine()))
    with tempfile.TemporaryDirectory() as folder:
        _report_writing(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(
            Path(folder) / "m", "qwen3-46m", plain=True, max_position_embeddings=8192
        )
        _report_restarts(model, Path(folder) / "kv", 1 if quick else 3)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(
            Path(folder) / "m", "qwen3-46m", plain=True, max_position_embeddings=8192
        )
        _report_gaps(model, Path(folder) / "kv", 2 if quick else 8)


# A write.


def _report_writing(disk: Path) -> None:
    store = PromptStore(StoreFolder(disk, 1 << 40), "0" * 32, cuts=True)
    dice = np.random.default_rng(0)
    names = [f"{layer}.{part}" for layer in range(12) for part in range(2)]
    arrays = {name: dice.random((1, 4, 2048, 64), np.float32) for name in names}
    text = np.arange(2048, dtype=np.uint32)
    handed = HandedCache(arrays, dict.fromkeys(names, 0), None)
    pieces: list[float] = []
    before = time.thread_time()
    for _ in store.write(text, Transfer(handed=handed)):
        now = time.thread_time()
        pieces.append(now - before)
        before = now
    gigabytes = sum(array.nbytes for array in arrays.values()) / 1e9
    print(f"a write: {sum(pieces) / gigabytes:.2f} s of a processor for a gigabyte, ", end="")
    print(f"in pieces of at most {1000 * max(pieces):.2f} ms")


# A restart.


def _report_restarts(model: Path, disk: Path, pairs: int) -> None:
    ratios: list[float] = []
    for pair in range(pairs):
        shutil.rmtree(disk, ignore_errors=True)
        stored = ("--prompt-cache-dir", str(disk))
        messages = [{"role": "user", "content": _make_text(1000, pair)}]
        with serve(ours(model, *stored)) as server:
            _warm(server)
            text, size, _, _ = _ask(server, messages, _ANSWER)
        follow_up = [
            *messages,
            {"role": "assistant", "content": text},
            {"role": "user", "content": "and then?"},
        ]
        seconds: dict[str, float] = {}
        for name, options in (("with", stored), ("without", ())):
            with serve(ours(model, *options)) as server:
                _warm(server)
                _, size, cached, gaps = _ask(server, follow_up, _ANSWER)
                seconds[name] = gaps[0]
                print(f"  {name:>8}: {1000 * gaps[0]:.0f} ms, {cached} of {size} tokens cached")
        ratios.append(seconds["with"] / seconds["without"])
    low, high = min(ratios), max(ratios)
    print(f"first token after a restart, to cold: {statistics.median(ratios):.3f} ", end="")
    print(f"({low:.3f} to {high:.3f})")


def _make_text(words: int, seed: int) -> str:
    order = [_WORDS[(place * (seed + 3) + place // 7) % len(_WORDS)] for place in range(words)]
    return f"{seed} {' '.join(order)}"


def _warm(server: Running) -> None:
    """Have the model loaded, and each kind of pass done once."""
    _ask(server, [{"role": "user", "content": "hello"}], 4)


# Streams beside writes.


def _report_gaps(model: Path, disk: Path, pairs: int) -> None:
    ratios: list[float] = []
    medians: list[float] = []
    with (
        serve(ours(model, "--prompt-cache-dir", str(disk))) as writing,
        serve(ours(model)) as plain,
    ):
        for server in (writing, plain):
            _warm(server)
        numbers = itertools.count()
        for pair in range(pairs):
            order = (writing, plain) if pair % 2 else (plain, writing)
            gaps = {server.url: _measure_gaps(server, numbers) for server in order}
            ours_, theirs = gaps[writing.url], gaps[plain.url]
            ratios.append(_percentile(ours_, 99) / _percentile(theirs, 99))
            medians.append(statistics.median(ours_) / statistics.median(theirs))
            figures = (_percentile(ours_, 99), _percentile(theirs, 99))
            print(
                "  gaps p99: {:.1f} ms writing, {:.1f} ms not".format(*(1000 * f for f in figures))
            )
        print(f"  written: {_count_writes(writing)}")
    print(f"gap p99 with writing, to without: {statistics.median(ratios):.2f} ", end="")
    print(f"({min(ratios):.2f} to {max(ratios):.2f}); p50: {statistics.median(medians):.2f}")


def _measure_gaps(server: Running, numbers: Iterator[int]) -> list[float]:
    """The gaps of some streams, while short chats begin and end beside them."""
    found: list[float] = []
    over = threading.Event()

    def stream(number: int) -> None:
        message = {"role": "user", "content": f"{number} {_make_text(20, number)}"}
        found.extend(_ask(server, [message], _SEGMENT)[3][1:])

    def come_and_go() -> None:
        while not over.is_set():
            _ask(server, [{"role": "user", "content": _make_text(60, next(numbers))}], 16)

    streams = [threading.Thread(target=stream, args=(next(numbers),)) for _ in range(_STREAMS)]
    guest = threading.Thread(target=come_and_go)
    for thread in (*streams, guest):
        thread.start()
    for thread in streams:
        thread.join()
    over.set()
    guest.join()
    return found


def _percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def _count_writes(server: Running) -> str:
    with urllib.request.urlopen(f"{server.url}/health?verbose=1") as response:
        [model] = json.load(response)["models"]
    engine = model["engine"]
    return f"{engine['prompt_cache_disk_writes']} files, {engine['prompt_cache_disk_bytes']} bytes"


def _ask(
    server: Running, messages: Sequence[dict[str, Any]], tokens: int
) -> tuple[str, int, int, list[float]]:
    """Stream one answer.

    Returns:
        Its text, the prompt's tokens, how many of these were cached, and the seconds to the first
        token and then between two of them.
    """
    body: dict[str, Any] = {"model": "bench", "messages": list(messages), "max_tokens": tokens}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    last = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    text, gaps = "", list[float]()
    usage: dict[str, Any] = {}
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            if content := choice["delta"].get("content"):
                now = time.perf_counter()
                gaps.append(now - last)
                text, last = text + content, now
    connection.close()
    details = usage["prompt_tokens_details"]
    return text, usage["prompt_tokens"], details["cached_tokens"], gaps


if __name__ == "__main__":
    main()
