"""More work than fits into memory: `python -m benchmarks.memory`.

A model that is mostly KV cache, and chats of different lengths, asked all at once over HTTP: first
of a server with memory for all of them, then of one whose `--memory-limit` leaves room for about a
tenth. The table has the answers that are the same, how often a request was preempted, and the most
memory that MLX ever had in use. The times show what preemptions cost. The prompt cache is off, so
that all memory is for what runs.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks import servers
from benchmarks.report import describe_machine, format_machine, format_table, write_json
from tests.support.client import Body
from tests.support.heavy import PER_TOKEN, ask_all, make_work, write_heavy

_MB = 1e6
_ANSWER = 640  # tokens, at most


class Run(msgspec.Struct, frozen=True):
    """One server's work. Bytes, but `seconds`."""

    limit: int
    weights: int
    budget: int
    peak: int
    preemptions: int
    seconds: float
    texts: list[str]


def run_work(model: Path, bodies: list[Body], limit: int | None) -> Run:
    """Ask all at once.

    Args:
        limit: bytes of memory; None: as the server chooses it.
    """
    options = () if limit is None else ("--memory-limit", str(limit))
    side = servers.ours(model, "--no-hf-cache", "--prompt-cache-bytes", "0", *options)
    with servers.serve(side) as running:
        begun = time.perf_counter()
        texts = asyncio.run(ask_all(running.url, bodies))
        seconds = time.perf_counter() - begun
        state: dict[str, Any] = httpx.get(f"{running.url}/health?verbose=1").json()
    memory = state["memory"]
    [engine] = [each["engine"] for each in state["models"]]
    return Run(
        memory["limit"],
        memory["weights"],
        memory["budget"],
        memory["peak"],
        engine["preemptions"],
        seconds,
        texts,
    )


def format_runs(ample: Run, scarce: Run) -> str:
    same = sum(one == other for one, other in zip(ample.texts, scarce.texts, strict=True))
    rows = [
        ("what", "memory for all", "memory for a tenth"),
        ("requests answered", *(str(len(run.texts)) for run in (ample, scarce))),
        ("of these with the same text", "", str(same)),
        ("preemptions", *(str(run.preemptions) for run in (ample, scarce))),
        ("limit, MB", "", f"{scarce.limit / _MB:.1f}"),
        ("budget of KV caches, MB", "", f"{scarce.budget / _MB:.1f}"),
        ("peak of MLX's memory, MB", *(f"{run.peak / _MB:.1f}" for run in (ample, scarce))),
        ("seconds", *(f"{run.seconds:.1f}" for run in (ample, scarce))),
    ]
    return format_table(rows)


def main() -> None:
    arguments = _parse()
    machine = describe_machine()
    print(format_machine(machine), flush=True)
    bodies = make_work(arguments.requests, model="bench", answer=_ANSWER)
    with tempfile.TemporaryDirectory() as folder:
        model = write_heavy(Path(folder) / "model")
        ample = run_work(model, bodies, None)
        # A row has its KV cache twice while it joins others.
        rows = max(arguments.requests // 10, 2)
        limit = ample.weights + (rows + 1) * _ANSWER * PER_TOKEN
        scarce = run_work(model, bodies, limit)
    print(format_runs(ample, scarce))
    if arguments.json is not None:
        write_json(arguments.json, {"machine": machine, "ample": ample, "scarce": scarce})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
