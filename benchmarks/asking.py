"""Measure the cost of asking for more than tokens: `python -m benchmarks.asking`.

Tokens per second of the engine where one row, or each, asks for log-probabilities, has
penalties or follows a grammar, over those of the same batch where nobody does, by turns in one
process. A row that asks for nothing pays for its neighbours' asking, so the ratio is of all rows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import msgspec
from mlx_lm.utils import load_model, load_tokenizer

from benchmarks.report import describe_machine, format_machine, format_table, write_json
from benchmarks.step import Case, write_prompts
from mlxsrv.engine.events import Token
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.generation.parameters import Constraint, Sampling
from mlxsrv.prompts.grammars.calls import CallConstraint
from mlxsrv.prompts.grammars.grammar import CompiledGrammar, GrammarCompiler
from mlxsrv.prompts.grammars.specs import GrammarSpec, each_call
from mlxsrv.prompts.tokenizer import Tokenizer
from tests.support.text_engine import TextEngine
from tests.support.tiny import FAMILIES, VOCABULARY, write_model

Ask: TypeAlias = Callable[[Job], tuple[Job, Constraint | None]]

_ROW_COUNTS = (8, 32)
_SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 1000}


class Rates(msgspec.Struct, frozen=True):
    """Tokens per second, one for each pair: of rows that ask, and of the same that do not."""

    asked: str
    asking: int
    rows: int
    with_it: list[float]
    without: list[float]


def ask_nothing(job: Job) -> tuple[Job, Constraint | None]:
    return job, None


def ask_scores(job: Job) -> tuple[Job, Constraint | None]:
    return msgspec.structs.replace(job, logprobs=5), None


def ask_penalties(job: Job) -> tuple[Job, Constraint | None]:
    sampling = msgspec.structs.replace(job.sampling, frequency_penalty=0.5, repetition_penalty=1.1)
    return msgspec.structs.replace(job, sampling=sampling), None


def ask_grammar(template: CompiledGrammar) -> Ask:
    """JSON that does not end before the benchmark does."""
    return lambda job: (job, template.constraint())


def ask_calls(tokenizer: Tokenizer) -> Ask:
    """Calls held to a schema, in text that makes none: `--tool-grammar` while nothing is called."""
    spec = each_call([("f", _SCHEMA)], "hermes")
    grammar = tokenizer.grammars.compile_call(spec, param="x")
    assert grammar is not None
    content = tokenizer.content_pipeline
    return lambda job: (job, CallConstraint(grammar, content(thinking=False)))


def measure(
    model: Any, name: str, ask: Ask, asking: int, rows: int, arguments: argparse.Namespace
) -> Rates:
    """With and without by turns; what runs first in one pair is last in the next."""
    ways = (ask, ask_nothing)
    rates: dict[Ask, list[float]] = {way: [] for way in ways}
    for way in ways:  # warm-up
        _generate(model, way, asking, rows, 4)
    for pair in range(arguments.pairs):
        for way in ways if pair % 2 == 0 else ways[::-1]:
            rates[way].append(_generate(model, way, asking, rows, arguments.max_tokens))
    return Rates(name, asking, rows, rates[ask], rates[ask_nothing])


def _generate(model: Any, ask: Ask, asking: int, rows: int, max_tokens: int) -> float:
    pace = Pace(512, max_gap=1.0)
    batch = TextEngine(model, max_rows=rows, pace=pace, cache_bytes=0, seconds=None)
    for number, prompt in enumerate(write_prompts(Case("greedy", rows, max_tokens))):
        job = Job(number, "", prompt, max_tokens, frozenset(), Sampling(temperature=0))
        batch.submit(*(ask(job) if number < asking else ask_nothing(job)))
    tokens = 0
    started = time.perf_counter()
    while not batch.idle:
        tokens += sum(isinstance(event, Token) for event in batch.decode())
        batch.prefill()
    return tokens / (time.perf_counter() - started)


def format_rates(measured: Sequence[Rates]) -> str:
    table = [["asked for", "rows asking", "of", "tokens/s", "if nobody did", "ratio"]]
    for rates in measured:
        ratios = [a / b for a, b in zip(rates.with_it, rates.without, strict=True)]
        table.append(
            [
                rates.asked,
                str(rates.asking),
                str(rates.rows),
                f"{median(rates.with_it):.0f}",
                f"{median(rates.without):.0f}",
                f"{median(ratios):.2f}",
            ]
        )
    return format_table(table)


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="mlxsrv-bench-") as folder:
        path = write_model(Path(folder), arguments.family, plain=True)
        model, _ = load_model(path)
        grammars = GrammarCompiler(
            load_tokenizer(path)._tokenizer, vocabulary=VOCABULARY, end_tokens=[0]
        )
        template = grammars.compile(GrammarSpec("json_schema", json.dumps(_SCHEMA)), param="x")
        asks = {
            "log-probabilities": ask_scores,
            "penalties": ask_penalties,
            "a grammar": ask_grammar(template),
            "calls in a grammar": ask_calls(Tokenizer(path)),
        }
        measured = [
            measure(model, name, ask, asking, rows, arguments)
            for name, ask in asks.items()
            if arguments.only in ("", name)
            for rows in _ROW_COUNTS
            for asking in (1, rows)
        ]
    print(format_machine(describe_machine()))
    print(f"in process, random {arguments.family}, medians of {arguments.pairs} pairs\n")
    print(format_rates(measured))
    if arguments.json:
        write_json(arguments.json, measured)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.asking", description="Measure what asking for more costs."
    )
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--only", default="", metavar="NAME", help="measure this row of the table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rates here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
