"""Measure how long a short prompt waits behind long ones: `python -m benchmarks.queue`.

Seconds from a request of 5 tokens to its first token while k prompts of 2,000 tokens, sent just
before it, are read; and the same of the long ones. No prompt begins like another. A short one is
to wait for the slice that is being read and not for whole prompts, so that its time does not grow
with k: the ratio is to that at k = 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import httpx
import msgspec

from benchmarks import servers
from benchmarks.report import describe_machine, format_machine, format_table, write_json
from tests.support.tiny import FAMILIES, VOCABULARY, write_model

_AHEAD = (0, 1, 2, 4, 8)
_SHORT = 5  # tokens
_HEAD_START = 0.1  # seconds, for the long ones to be in the engine before the short one comes
_TIMEOUT = 600.0
_MOST_RATIO = 3.0


class Wait(msgspec.Struct, frozen=True):
    """Seconds to the first token of the short prompt, and of each long one ahead of it."""

    ahead: int
    short: float
    long: list[float]


async def measure(url: str, ahead: int, tokens: int, dice: random.Random) -> Wait:
    """Ask for `ahead` long prompts, and at once for a short one."""
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT) as client:
        long = [asyncio.create_task(_first(client, _draw(tokens, dice))) for _ in range(ahead)]
        await asyncio.sleep(_HEAD_START)
        short = await _first(client, _draw(_SHORT, dice))
        return Wait(ahead, short, list(await asyncio.gather(*long)))


def _draw(tokens: int, dice: random.Random) -> list[int]:
    return dice.choices(range(VOCABULARY // 2), k=tokens)


async def _first(client: httpx.AsyncClient, prompt: Sequence[int]) -> float:
    """Seconds to the first token; waits for the last."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    sent = time.perf_counter()
    first = None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if first is None and line.startswith("data: "):
                first = time.perf_counter() - sent
    assert first is not None
    return first


def format_waits(waits: Sequence[Wait]) -> str:
    shorts = {k: median(each.short for each in waits if each.ahead == k) for k in _AHEAD}
    table = [["long ahead", "short: s", "of k = 1", "long: mean s", "longest s"]]
    for k, short in shorts.items():
        rounds = [each.long for each in waits if each.ahead == k and each.long]
        table.append(
            [
                str(k),
                f"{short:.2f}",
                f"{short / shorts[1]:.2f}",
                f"{median(map(mean, rounds)):.2f}" if rounds else "-",
                f"{median(map(max, rounds)):.2f}" if rounds else "-",
            ]
        )
    worst = max(shorts.values()) / shorts[1]
    told = "kept" if worst <= _MOST_RATIO else "MISSED"
    return f"{format_table(table)}\nat most {_MOST_RATIO:g} times k = 1: {told} ({worst:.2f})"


def main() -> None:
    arguments = _parse()
    dice = random.Random(1)
    waits: list[Wait] = []
    with tempfile.TemporaryDirectory(prefix="mlxsrv-bench-") as folder:
        model = write_model(
            Path(folder), arguments.family, plain=True, max_position_embeddings=32768
        )
        with servers.serve(servers.ours(model, "--no-hf-cache")) as running:
            asyncio.run(measure(running.url, 1, arguments.tokens, dice))  # warm-up
            for _ in range(arguments.rounds):
                waits += [
                    asyncio.run(measure(running.url, ahead, arguments.tokens, dice))
                    for ahead in _AHEAD
                ]
    print(format_machine(describe_machine()))
    print(
        f"random {arguments.family}, long prompts of {arguments.tokens} tokens, a short one of "
        f"{_SHORT}, medians of {arguments.rounds} rounds\n"
    )
    print(format_waits(waits))
    if arguments.json:
        write_json(arguments.json, waits)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.queue",
        description="Measure what a short prompt waits behind long ones.",
    )
    parser.add_argument("--family", choices=FAMILIES, default="qwen3-46m")
    parser.add_argument("--tokens", type=int, default=2000, help="of each long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
