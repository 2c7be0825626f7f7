"""Measure the time to draw a token: `python -m benchmarks.sampler`.

The table has milliseconds from the logits of a step to its tokens, for the engine's `Step` and for
mlx-lm's `BatchGenerator`. The latter calls logits processors and samplers row by row, because
`mlx_lm.server` gives each request its own, and always computes all log-probabilities. Both take
turns in one process with the same random logits (standard deviation 4, as in the tests' models).
The model's own time is not included, so these are not ratios of whole steps: see the measures with
the large vocabulary in `benchmarks.ratios`.

- `mask` applies the masks of a grammar: nearly all tokens, as in a string, and a few, by turns. The
  grammar's own time is not included. mlx-lm has no counterpart.
- `repetition` and `frequency` have rows with a prompt of 500 tokens and 200 drawn tokens. mlx-lm
  looks back at 20.
- `logprobs` asks for the 20 likeliest tokens.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from benchmarks.report import describe_machine, format_machine, format_table, write_json
from mlxsrv.engine.execution.decode import Step
from mlxsrv.engine.live_row import LiveRow
from mlxsrv.engine.orders import Job
from mlxsrv.generation.parameters import Constraint, Mask, Sampling

Draw: TypeAlias = Callable[[mx.array], None]
"""Takes the logits `(rows, vocabulary)` of a step, and returns when its tokens are computed."""

_ROW_COUNTS = (1, 8, 32)
_VOCABULARIES = (512, 32_768, 151_936, 262_144)
_PROMPT_TOKENS, _DRAWN_TOKENS = 500, 200
_ALTERNATIVES = 20
_DEVIATION = 4.0
_TURNS, _QUICK_TURNS = 7, 3


class Kind(msgspec.Struct, frozen=True):
    """A kind of request."""

    sampling: Sampling
    processors: dict[str, Any] = {}
    """The same for mlx-lm's `make_logits_processors`."""
    logprobs: int | None = None
    masked: bool = False


_GREEDY = Sampling(temperature=0.0)
_BIAS = {7 * i: 1.0 - i / 10 for i in range(20)}
KINDS = {
    "greedy": Kind(_GREEDY),
    "temperature": Kind(Sampling(0.6)),
    "top_k 20": Kind(Sampling(0.6, top_k=20)),
    "Qwen's own": Kind(Sampling(0.6, 0.95, 20)),
    "top_k 1024": Kind(Sampling(0.6, 0.95, 1024)),
    "top_p": Kind(Sampling(0.6, 0.95)),
    "min_p": Kind(Sampling(0.6, min_p=0.05)),
    "logit_bias": Kind(
        msgspec.structs.replace(_GREEDY, logit_bias=tuple(_BIAS.items())), {"logit_bias": _BIAS}
    ),
    "repetition": Kind(
        msgspec.structs.replace(_GREEDY, repetition_penalty=1.1), {"repetition_penalty": 1.1}
    ),
    "frequency": Kind(
        msgspec.structs.replace(_GREEDY, frequency_penalty=0.5), {"frequency_penalty": 0.5}
    ),
    "mask": Kind(_GREEDY, masked=True),
    "logprobs": Kind(_GREEDY, logprobs=_ALTERNATIVES),
}


class Case(msgspec.Struct, frozen=True):
    kind: str
    rows: int
    vocabulary: int


class Times(msgspec.Struct, frozen=True):
    """The milliseconds of a case in each turn."""

    case: Case
    ours: list[float]
    theirs: list[float]
    """Empty if mlx-lm has no counterpart."""


class Masking:
    """A constraint that allows nearly all tokens and a few by turns."""

    dormant = False
    failure: str | None = None

    def __init__(self, vocabulary: int) -> None:
        dice = np.random.default_rng(0)
        words = -(-vocabulary // 32)
        many = dice.integers(0, 2**32, (4, words), dtype=np.uint32)
        few = np.zeros(words, np.uint32)
        few[:: max(words // 20, 1)] = 2
        self._masks = [each.view(np.int32) for each in (np.bitwise_or.reduce(many), few)]
        self._turn = 0

    def fill(self, mask: Mask) -> None:
        mask[:] = self._masks[self._turn % 2]
        self._turn += 1

    def accept(self, token: int) -> None:
        pass


def prepare_ours(case: Case) -> Draw:
    kind = KINDS[case.kind]
    step = Step([_make_row(case, kind, i) for i in range(case.rows)], case.vocabulary)
    inputs = mx.zeros((case.rows,), dtype=mx.uint32)

    def draw(logits: mx.array) -> None:
        tokens, proofs, drawn = step.draw(logits, inputs)
        mx.eval(tokens, proofs[0].highest, *(part for each in drawn for part in each[1:]))

    return draw


def _make_row(case: Case, kind: Kind, number: int) -> LiveRow:
    prompt, drawn = _make_context(case, number)
    sampling = msgspec.structs.replace(kind.sampling, seed=number)
    job = Job(number, "", prompt, 10**6, frozenset(), sampling, logprobs=kind.logprobs)
    constraint: Constraint | None = Masking(case.vocabulary) if kind.masked else None
    row = LiveRow(job, constraint)
    row.fresh, row.drawn = False, drawn
    return row


def _make_context(case: Case, number: int) -> tuple[tuple[int, ...], list[int]]:
    dice = random.Random(number)
    tokens = dice.choices(range(case.vocabulary), k=_PROMPT_TOKENS + _DRAWN_TOKENS)
    return tuple(tokens[:_PROMPT_TOKENS]), tokens[_PROMPT_TOKENS:]


def prepare_theirs(case: Case) -> Draw | None:
    """Prepare the steps of `GenerationBatch._step`, as `mlx_lm.server` uses it."""
    kind = KINDS[case.kind]
    if kind.masked:
        return None
    sampling = kind.sampling
    samplers = [
        make_sampler(sampling.temperature, sampling.top_p, sampling.min_p, top_k=sampling.top_k)
        for _ in range(case.rows)
    ]
    processors = [make_logits_processors(**kind.processors) for _ in range(case.rows)]
    contexts = [mx.array([*p, *d]) for p, d in (_make_context(case, i) for i in range(case.rows))]

    def draw(logits: mx.array) -> None:
        if kind.processors:
            rows = [logits[i : i + 1] for i in range(case.rows)]
            for i, (context, each) in enumerate(zip(contexts, processors, strict=True)):
                for processor in each:
                    rows[i] = processor(context, rows[i])
            logits = mx.concatenate(rows)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if all(each is samplers[0] for each in samplers):  # greedy ones are one function
            tokens = samplers[0](logprobs)
        else:
            tokens = mx.concatenate([s(logprobs[i : i + 1]) for i, s in enumerate(samplers)])
        wanted = [tokens, *logprobs]
        if kind.logprobs:
            top = kind.logprobs
            wanted += [mx.argpartition(-row, kth=top - 1)[:top] for row in logprobs]
        mx.eval(wanted)

    return draw


def measure(case: Case, turns: int) -> Times:
    """Measure both by turns, in changing order."""
    shape = (case.rows, case.vocabulary)
    logits = [_DEVIATION * mx.random.normal(shape, key=mx.random.key(i)) for i in range(2)]
    mx.eval(logits)
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    draws = {"ours": prepare_ours(case), "theirs": prepare_theirs(case)}
    for draw in draws.values():  # warm-up
        if draw is not None:
            draw(logits[0])
    for turn in range(turns):
        for name in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
            if (chosen := draws[name]) is None:
                continue
            started = time.perf_counter()
            for each in logits:
                chosen(each)
            times[name].append(1000 * (time.perf_counter() - started) / len(logits))
    mx.clear_cache()
    return Times(case, times["ours"], times["theirs"])


def format_times(measured: Sequence[Times]) -> str:
    table = [
        ["entries", "rows", "asked for", "ours ms", "less greedy", "mlx-lm ms", "times as fast"]
    ]
    greedy = {
        (each.case.vocabulary, each.case.rows): median(each.ours)
        for each in measured
        if each.case.kind == "greedy"
    }
    for each in measured:
        case, ours = each.case, median(each.ours)
        base = greedy.get((case.vocabulary, case.rows))
        ratios = [theirs / mine for theirs, mine in zip(each.theirs, each.ours, strict=False)]
        table.append(
            [
                f"{case.vocabulary:,}",
                str(case.rows),
                case.kind,
                f"{ours:.2f}",
                "-" if base is None or case.kind == "greedy" else f"{ours - base:.2f}",
                f"{median(each.theirs):.2f}" if ratios else "-",
                f"{median(ratios):.1f}" if ratios else "-",
            ]
        )
    return format_table(table)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    vocabularies = (512, 151_936) if arguments.quick else _VOCABULARIES
    turns = _QUICK_TURNS if arguments.quick else _TURNS
    print(format_machine(describe_machine()))
    print(f"random logits, medians of {turns} turns, {mx.default_device()}\n", flush=True)
    measured = [
        measure(Case(kind, rows, vocabulary), turns)
        for vocabulary in vocabularies
        for rows in _ROW_COUNTS
        for kind in arguments.only
        if KINDS[kind].sampling.top_k < vocabulary
    ]
    print(format_times(measured))
    if arguments.json:
        write_json(arguments.json, measured)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampler", description="Measure what drawing a token costs."
    )
    parser.add_argument("--quick", action="store_true", help="two vocabularies, and fewer turns")
    parser.add_argument(
        "--only",
        type=_parse_kinds,
        default=list(KINDS),
        metavar="KIND,...",
        help=", ".join(KINDS),
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times here")
    return parser.parse_args(argv)


def _parse_kinds(text: str) -> list[str]:
    kinds = text.split(",")
    for kind in kinds:
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"no kind: {kind!r}")
    return kinds


if __name__ == "__main__":
    main()
