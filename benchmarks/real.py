"""Compare with mlx_lm.server on a real model: `python -m benchmarks.real`.

The model is SmolLM2-135M-Instruct in four bits, which `make test-real` makes. By turns, each server
answers the same short prompts greedily, all at once: tokens per second. MLX's CPU back end
multiplies quantized matrices row by row, so there a batch saves no work, and the ratio tells what
the servers add to it.

Tokens a pass: with `--draft-model ngram`, one answer that repeats its prompt, over the passes that
it took. How many tokens are proposed follows from measured times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import urllib.request
from pathlib import Path
from statistics import median

import msgspec

from benchmarks import servers
from benchmarks.load import Load, run_load
from benchmarks.report import BIAS, describe_machine, format_machine, format_table

MODEL = Path(__file__).parent.parent / ".real" / "smollm2-4bit"
_LINE = "The server reads what is new, and it keeps what it has read for the next turn.\n"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Compare with mlx_lm.server on a real model.")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each server (default: 5)")
    parser.add_argument("--streams", type=int, default=4, help="requests at once (default: 4)")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer (default: 16)")
    arguments = parser.parse_args()
    if not MODEL.exists():
        sys.exit("benchmarks.real: `make test-real` makes the model, and has not yet")
    servers.exit_on_sigterm()
    print(format_machine(describe_machine()))
    sides = servers.ours(MODEL), servers.peer(MODEL)
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    for pair in range(arguments.pairs):
        for side in sides if pair % 2 == 0 else sides[::-1]:
            rates[side.name].append(measure_rate(side, arguments.streams, arguments.tokens))
            print(f"pair {pair + 1}: {side.name} {rates[side.name][-1]:.1f}", file=sys.stderr)
    ours, theirs = rates.values()
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    names = [f"greedy, {arguments.streams} streams, tokens/s", "mlxsrv", "mlx_lm.server", "ratio"]
    figures = [f"{median(ours):.1f}", f"{median(theirs):.1f}", f"{median(ratios):.2f}"]
    span = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(format_table([[*names, "of the pairs"], ["SmolLM2-135M, 4 bits", *figures, span]]))
    print(f"tokens a pass, where an answer repeats its prompt: {measure_lookup():.2f}")
    print(BIAS)


def measure_rate(side: servers.Side, streams: int, tokens: int) -> float:
    """Tokens per second of one run, behind a request that warms the server up."""
    with servers.serve(side) as running:
        load = Load(
            url=running.url,
            concurrency=streams,
            requests=streams,
            max_tokens=tokens,
            prompt_words=4,
            chat=False,
            timeout=600.0,
        )
        warming = msgspec.structs.replace(load, concurrency=1, requests=1, max_tokens=2)
        asyncio.run(run_load(warming))
        report = asyncio.run(run_load(load))
    if report.errors:
        sys.exit(f"benchmarks.real: {side.name} failed: {report.errors}")
    return report.tokens_per_second


def measure_lookup() -> float:
    """Tokens of one answer for each pass that it took."""
    with servers.serve(servers.ours(MODEL, "--draft-model", "ngram")) as running:
        body = {"prompt": _LINE * 4, "max_tokens": 64, "temperature": 0}
        request = urllib.request.Request(
            f"{running.url}/v1/completions", json.dumps(body).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            tokens: int = json.load(response)["usage"]["completion_tokens"]
        with urllib.request.urlopen(f"{running.url}/health?verbose=1", timeout=60) as response:
            accepted: int = json.load(response)["models"][0]["engine"]["accepted"]
    return tokens / (tokens - accepted)


if __name__ == "__main__":
    main()
