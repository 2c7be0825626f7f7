"""Measure the cost of steering for a decode step: `python -m benchmarks.steer`.

Decode steps per second of the engine, steered and watched in several ways, over those
of a batch that has nothing attached, in one process and by turns. All rows are greedy, so that
nothing else is in the step. The SAE is random, at the middle layer, with 16 features for each
number of the hidden state; the control vector changes every layer. `nothing` is a second batch
without any of it: how far the machine's own noise takes the ratio from 1. The same ratio by
processor time, which other processes change less, says the same where MLX computes on the CPU; on a
GPU it is what the host has to do.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.utils import load_model

from benchmarks.report import describe_machine, format_machine, format_table, write_json
from mlxsrv.engine.events import Token
from mlxsrv.engine.execution.facts import weights
from mlxsrv.engine.loading.weights import lay_out_weights
from mlxsrv.engine.orders import Attach, Job, Watch
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.steering.steerer import Steerer, fit_vectors
from mlxsrv.generation.parameters import Sampling, Steering
from tests.support.ggufs import write_gguf
from tests.support.saes import write_sae
from tests.support.text_engine import TextEngine
from tests.support.tiny import FAMILIES, VOCABULARY, write_model

MakeSteering: TypeAlias = Callable[[random.Random, int], Steering]
"""A maker of one row's steering, by an SAE with so many features."""

_MODEL = "bench"
_NUMBER = 1  # of the attachment
_VECTOR = "vector"
_FEATURES_PER_NUMBER = 16
_PROMPT_TOKENS = 4  # little is read, for it is not what is measured
_MAX_TOKENS = 4000
_WARM_UP = 4  # steps
_STEPS = {"qwen3": 20, "qwen3-46m": 1}
"""In one turn: few, so that what else the machine does strikes both sides of a pair alike."""


class Way(msgspec.Struct, frozen=True):
    """A way to decode, and the least that is to be left of the speed."""

    name: str
    steer: MakeSteering | None = None
    attached: bool = True
    watch: Watch | None = None
    must: float | None = None


class Turn(msgspec.Struct, frozen=True):
    """Steps a second, and steps a second of processor time."""

    speed: float
    lean: float


class Ratios(msgspec.Struct, frozen=True):
    """Figures of a way over those with nothing attached, one for each pair."""

    family: str
    way: str
    steps_per_second: float
    speed: list[float]
    lean: list[float]
    must: float | None


class Subject(msgspec.Struct, frozen=True):
    """A model and what it is steered with."""

    family: str
    model: Any
    features: int
    attach: Attach
    vectors: dict[str, dict[int, mx.array]]


def _steer(dice: random.Random, features: int) -> Steering:
    chosen = sorted(dice.sample(range(features), 4))
    return Steering(_NUMBER, "additive", tuple((i, dice.uniform(-2, 2)) for i in chosen))


def _clamp(dice: random.Random, features: int) -> Steering:
    return msgspec.structs.replace(_steer(dice, features), mode="clamp")


def _add_vector(dice: random.Random, features: int) -> Steering:
    return Steering(vectors=((_VECTOR, dice.uniform(-1, 1)),))


WAYS = (
    Way("nothing", attached=False),
    Way("attached", must=0.99),
    Way("additive", _steer, must=0.90),
    Way("clamp", _clamp),
    Way("control vector", _add_vector, attached=False),
    Way("8 features watched", watch=Watch(_MODEL, tuple(range(8)))),
    Way("8 and top 10 watched", watch=Watch(_MODEL, tuple(range(8)), 10)),
)


def prepare(folder: Path, family: str) -> Subject:
    model, _ = load_model(write_model(folder / family, family, plain=True))
    lay_out_weights(model)
    mx.eval(weights(model))
    config = FAMILIES[family].config
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    features = _FEATURES_PER_NUMBER * width
    dice = np.random.default_rng(0)
    directions = [
        (f"direction.{layer}", dice.standard_normal(width, np.float32)) for layer in range(layers)
    ]
    vector = write_gguf(folder / f"{family}.gguf", directions)
    vectors, notes = fit_vectors(model, [(_VECTOR, str(vector))])
    assert not notes, notes
    layer = layers // 2
    sae = write_sae(folder / f"{family}-sae", d_in=width, d_sae=features, layer=layer)
    return Subject(family, model, features, Attach(_MODEL, _NUMBER, str(sae), layer), vectors)


def make_batch(subject: Subject, way: Way, rows: int) -> TextEngine:
    """A batch of rows that are all being decoded."""
    steerer = Steerer(subject.model, subject.vectors)
    if way.attached:
        for _ in steerer.attach(subject.attach):
            pass
    if way.watch is not None:
        steerer.watch(way.watch)
    batch = TextEngine(
        subject.model,
        max_rows=rows,
        pace=Pace(512, max_gap=1.0),
        cache_bytes=0,
        steerer=steerer,
        seconds=None,
    )
    dice = random.Random(0)
    for row in range(rows):
        prompt = tuple(dice.choices(range(VOCABULARY), k=_PROMPT_TOKENS))
        steering = way.steer(random.Random(row), subject.features) if way.steer else None
        sampling = Sampling(temperature=0)
        batch.submit(
            Job(row, _MODEL, prompt, _MAX_TOKENS, frozenset(), sampling, steering=steering)
        )
    while batch.statistics()["rows"] < rows:
        batch.prefill()
    return batch


def take_turn(batch: TextEngine, steps: int) -> Turn:
    """Waits for the step under way at the end, or the other batch would pay for it."""
    started, used = time.perf_counter(), time.process_time()
    drawn = sum(isinstance(event, Token) for _ in range(steps) for event in batch.decode())
    mx.synchronize()
    seconds, processor = time.perf_counter() - started, time.process_time() - used
    assert drawn == steps * batch.statistics()["rows"]
    return Turn(steps / seconds, steps / processor)


def measure(subject: Subject, way: Way, rows: int, rounds: int) -> Ratios:
    """Both by turns; what runs first in one pair is last in the next."""
    plain, other = make_batch(subject, WAYS[0], rows), make_batch(subject, way, rows)
    for batch in (plain, other):
        batch.decode()  # its tokens are those of the step before, of which there is none
        take_turn(batch, _WARM_UP)
    pairs: list[tuple[Turn, Turn]] = []
    for turn in range(rounds):
        order = (plain, other) if turn % 2 == 0 else (other, plain)
        took = {id(batch): take_turn(batch, _STEPS[subject.family]) for batch in order}
        pairs.append((took[id(other)], took[id(plain)]))
    return Ratios(
        subject.family,
        way.name,
        median(own.speed for own, _ in pairs),
        [own.speed / base.speed for own, base in pairs],
        [own.lean / base.lean for own, base in pairs],
        way.must,
    )


def format_ratios(measured: Sequence[Ratios]) -> str:
    rows = [["model", "way", "steps/s", "speed", "least", "most", "by processor", "must"]]
    for each in measured:
        speed = each.speed
        figures = (median(speed), min(speed), max(speed), median(each.lean))
        cells = [each.family, each.way, f"{each.steps_per_second:.1f}"]
        rows.append([*cells, *(f"{figure:.3f}" for figure in figures), _judge(each)])
    return format_table(rows)


def _judge(each: Ratios) -> str:
    if each.must is None:
        return "-"
    return f"{each.must:.2f} {'kept' if median(each.speed) >= each.must else 'MISSED'}"


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="mlxsrv-bench-") as folder:
        subjects = [prepare(Path(folder), family) for family in arguments.families]
        measured = [
            measure(subject, way, arguments.rows, arguments.rounds)
            for subject in subjects
            for way in WAYS
        ]
    print(format_machine(describe_machine()))
    print(f"{arguments.rows} rows; ratios to a batch with nothing, {arguments.rounds} pairs\n")
    print(format_ratios(measured))
    if arguments.json:
        write_json(arguments.json, measured)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steer",
        description="Measure what steering costs a decode step, without a server.",
    )
    parser.add_argument("--families", nargs="+", choices=_STEPS, default=list(_STEPS))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all ratios here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
