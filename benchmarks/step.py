"""The hot path without a socket: `python -m benchmarks.step`.

Tokens per second of the engine, driven as the device thread drives it, over those of
mlx-lm's generators, in one process and by turns on the same prompts. `generate_step` takes one
prompt after another. `BatchGenerator` draws all rows from one random stream, so seeded requests
have no counterpart there: to give each its own, `mlx_lm.server` takes them one after another, too.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, get_args

import mlx.core as mx
import msgspec
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_model

from benchmarks.hosts import SamplingKind, choose_sampling
from benchmarks.inprocess import SampleTokens, generate_batch
from benchmarks.report import describe_machine, format_machine, format_table, write_json
from mlxsrv.engine.events import Token
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.generation.parameters import Sampling
from tests.support.text_engine import TextEngine
from tests.support.tiny import FAMILIES, VOCABULARY, write_model

Prompts: TypeAlias = Sequence[tuple[int, ...]]
Generate: TypeAlias = Callable[[Any, "Case", Prompts], int]
"""Makes all of a case's tokens and returns how many."""

_ROW_COUNTS = (1, 8, 32)
_PROMPT_TOKENS = 32
_PREFILL_CHUNK = 512


class Case(msgspec.Struct, frozen=True):
    """Requests of one kind, so many at a time."""

    kind: SamplingKind
    rows: int
    max_tokens: int

    def make_samplings(self) -> list[Sampling]:
        fields = [choose_sampling(self.kind, row) for row in range(self.rows)]
        return msgspec.convert(fields, list[Sampling])


class Rates(msgspec.Struct, frozen=True):
    """Tokens per second of one case, one for each pair."""

    case: Case
    ours: list[float]
    batch: list[float]
    """The same of `BatchGenerator`; empty where it cannot do the same."""
    single: list[float]
    """The same of `generate_step`."""


def generate_ours(model: Any, case: Case, prompts: Prompts) -> int:
    batch = TextEngine(
        model,
        max_rows=case.rows,
        pace=Pace(_PREFILL_CHUNK, max_gap=1.0),
        cache_bytes=0,
        seconds=None,
    )
    for number, (prompt, sampling) in enumerate(zip(prompts, case.make_samplings(), strict=True)):
        batch.submit(Job(number, "", prompt, case.max_tokens, frozenset(), sampling))
    tokens = 0
    while not batch.idle:
        tokens += sum(isinstance(event, Token) for event in batch.decode())
        batch.prefill()
    return tokens


def generate_batched(model: Any, case: Case, prompts: Prompts) -> int:
    samplers = [_make_sampler(sampling) for sampling in case.make_samplings()]
    figures = generate_batch(
        model, prompts, rows=case.rows, max_tokens=case.max_tokens, samplers=samplers
    )
    return figures.tokens


def generate_singly(model: Any, case: Case, prompts: Prompts) -> int:
    tokens = 0
    for prompt, sampling in zip(prompts, case.make_samplings(), strict=True):
        mx.random.seed(sampling.seed)
        steps = generate_step(
            mx.array(prompt), model, max_tokens=case.max_tokens, sampler=_make_sampler(sampling)
        )
        tokens += sum(1 for _ in steps)
    return tokens


def measure(model: Any, case: Case, pairs: int) -> Rates:
    """All ways by turns; what runs first in one pair is last in the next."""
    ways: list[Generate] = [generate_ours, generate_singly]
    if case.kind != "seeded":
        ways.append(generate_batched)
    rates: dict[Generate, list[float]] = {way: [] for way in ways}
    prompts = write_prompts(case)
    for way in ways:  # warm-up
        way(model, msgspec.structs.replace(case, max_tokens=4), prompts)
    for pair in range(pairs):
        for way in ways if pair % 2 == 0 else ways[::-1]:
            started = time.perf_counter()
            tokens = way(model, case, prompts)
            rates[way].append(tokens / (time.perf_counter() - started))
    return Rates(
        case, rates[generate_ours], rates.get(generate_batched, []), rates[generate_singly]
    )


def format_rates(measured: Sequence[Rates]) -> str:
    rows = [["sampling", "rows", "ours", "BatchGenerator", "ratio", "generate_step", "ratio"]]
    for rates in measured:
        against = (
            cell for peer in (rates.batch, rates.single) for cell in _compare(rates.ours, peer)
        )
        rows.append([rates.case.kind, str(rates.case.rows), f"{median(rates.ours):.0f}", *against])
    return format_table(rows)


def _compare(ours: Sequence[float], theirs: Sequence[float]) -> tuple[str, str]:
    if not theirs:
        return "-", "-"
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{median(theirs):.0f}", f"{median(ratios):.2f}"


def _make_sampler(sampling: Sampling) -> SampleTokens:
    made: SampleTokens = make_sampler(temp=sampling.temperature, top_p=sampling.top_p)
    return made


def write_prompts(case: Case) -> list[tuple[int, ...]]:
    dice = random.Random(case.rows)
    return [tuple(dice.choices(range(VOCABULARY), k=_PROMPT_TOKENS)) for _ in range(case.rows)]


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="mlxsrv-bench-") as folder:
        path = write_model(Path(folder), arguments.family, plain=True)
        model, _ = load_model(path)
        measured = [
            measure(model, Case(kind, rows, arguments.max_tokens), arguments.pairs)
            for kind in get_args(SamplingKind)
            for rows in _ROW_COUNTS
        ]
    print(format_machine(describe_machine()))
    print(f"tokens/s in process, random {arguments.family}, medians of {arguments.pairs} pairs\n")
    print(format_rates(measured))
    if arguments.json:
        write_json(arguments.json, measured)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step", description="Measure the decode step without a server."
    )
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rates here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
