"""Measure the effect of models on each other: `python -m benchmarks.swap`.

One server, two models: a small one that streams, and one of 46 million parameters in float32.

- Gaps of a stream while the other model is loaded beside it, against its gaps alone. All that a
  load does falls between two decode steps, a slice at a time.
- A swap, with room for one model: how long from the last token of the one to the first of the
  other, and how much of that is the load.
- Memory: what is resident when the large model is loaded, and after it has been evicted, against
  what was before.

Figures are medians of so many rounds, each with a server of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import msgspec

from benchmarks import servers
from benchmarks.report import describe_machine, format_machine, format_table, write_json
from tests.support.tiny import write_model

_TOKENS = 600


class Round(msgspec.Struct, frozen=True):
    """Milliseconds, but `resident` in megabytes: before, with both models, after the eviction."""

    gap_alone: float
    gap_loading: float
    longest_alone: float
    longest_loading: float
    load: float
    swap: float
    resident: tuple[float, float, float]


def run_round(small: Path, large: Path, max_gap: float) -> Round:
    gap = ("--max-gap", str(max_gap))
    with servers.serve(_side(small, large, *gap)) as running:
        alone = _gaps(_stream(running.url, "bench"))
        times, load = _stream_beside(running.url)
    with servers.serve(_side(small, large, *gap, "--max-models", "1")) as running:
        assert running.pid is not None
        before = _resident(running.pid)
        swap = _swap(running.url)
        both = _resident(running.pid)
        _first(running.url, "bench")
        time.sleep(0.5)  # for the system to take its pages back
        after = _resident(running.pid)
    during = _gaps(times)
    return Round(
        _p99(alone), _p99(during), max(alone), max(during), load, swap, (before, both, after)
    )


def _side(small: Path, large: Path, *options: str) -> servers.Side:
    return servers.ours(small, "--model", f"large={large}", "--no-hf-cache", *options)


def _stream_beside(url: str) -> tuple[list[float], float]:
    """When the tokens came that were produced while another model was loading; and how long that
    took, in milliseconds."""
    span: list[float] = []

    def load() -> None:
        time.sleep(0.3)  # the stream is under way
        span.append(time.perf_counter())
        _first(url, "large")
        span.append(time.perf_counter())

    thread = threading.Thread(target=load)
    thread.start()
    times: list[float] = []
    while thread.is_alive():
        times += _stream(url, "bench")
    thread.join()
    begun, ended = span
    return [t for t in times if begun <= t <= ended], 1000 * (ended - begun)


def _swap(url: str) -> float:
    """Milliseconds from the end of the small model's stream to the large one's first token, asked
    for while the stream was running."""
    first: list[float] = []

    def ask() -> None:
        _first(url, "large")
        first.append(time.perf_counter())

    thread = threading.Thread(target=ask)
    times: list[float] = []
    for time_of_token in _tokens(url, "bench"):
        if not times:
            thread.start()
        times.append(time_of_token)
    thread.join()
    return 1000 * (first[0] - times[-1])


def _first(url: str, model: str) -> None:
    next(_tokens(url, model, max_tokens=1))


def _stream(url: str, model: str) -> list[float]:
    return list(_tokens(url, model))


def _tokens(url: str, model: str, max_tokens: int = _TOKENS) -> Iterator[float]:
    """When each token's frame arrived."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    with (
        httpx.Client(timeout=120) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(chunk["error"]["message"])
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                yield time.perf_counter()


def _gaps(times: list[float]) -> list[float]:
    return [1000 * (b - a) for a, b in pairwise(times)]


def _p99(gaps: list[float]) -> float:
    cut: float = quantiles(gaps, n=100, method="inclusive")[98]
    return cut


def _resident(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def format_rounds(rounds: list[Round]) -> str:
    def middle(name: str) -> float:
        return float(median(getattr(one, name) for one in rounds))

    before, both, after = (
        f"{median(values):.0f} MB" for values in zip(*(r.resident for r in rounds), strict=True)
    )
    rows = [
        ("p99 gap of a stream", f"{middle('gap_alone'):.1f} ms", f"{middle('gap_loading'):.1f} ms"),
        (
            "longest gap",
            f"{middle('longest_alone'):.1f} ms",
            f"{middle('longest_loading'):.1f} ms",
        ),
        ("load, to the first token", "", f"{middle('load'):.0f} ms"),
        ("swap, last token to first token", "", f"{middle('swap'):.0f} ms"),
        ("resident with the large model", before, both),
        ("resident after its eviction", before, after),
    ]
    return format_table([("what", "alone, or before", "beside a load, or after it"), *rows])


def main() -> None:
    arguments = _parse()
    machine = describe_machine()
    print(format_machine(machine), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        small = write_model(Path(folder) / "small", "qwen3", plain=True)
        large = write_model(Path(folder) / "large", "qwen3-46m", plain=True)
        rounds = [run_round(small, large, arguments.max_gap) for _ in range(arguments.rounds)]
    print(format_rounds(rounds))
    if arguments.json is not None:
        write_json(arguments.json, {"machine": machine, "rounds": rounds})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-gap", type=float, default=0.05, help="The server's, in seconds.")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
