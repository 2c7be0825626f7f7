"""Measure the worth of a draft model to one row: `python -m benchmarks.speculative`.

Tokens per second of the engine with a draft model over those without, in one process
and by turns on the same prompts. One draft helps: the model's own first layers, where the others
are scaled down so that they seldom change its mind. One never does: a model of the same size that
knows nothing of it. Each batch keeps what it has found out about its draft from one answer to the
next, as a server's does; `first` is its first answer, when it knows nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.utils import load_model

from benchmarks.report import describe_machine, format_machine, format_table, write_json
from mlxsrv.engine.events import Token
from mlxsrv.engine.execution.facts import weights
from mlxsrv.engine.loading.weights import lay_out_weights
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.generation.parameters import Sampling
from tests.support.text_engine import TextEngine
from tests.support.tiny import FAMILIES, VOCABULARY, write_model

_PROMPT_TOKENS = 32
_PREFILL_CHUNK = 512
_DRAFT_LAYERS = 2
_LATE_LAYERS = 0.01  # the scale of what layers behind the draft's add


class Ratios(msgspec.Struct, frozen=True):
    """Speed with a draft over speed without, one for each pair after the first."""

    draft: str
    temperature: float
    first: float
    later: list[float]
    accepted: float
    """The share of the tokens proposed that was accepted."""


def write_models(folder: Path, family: str) -> tuple[Any, dict[str, Any]]:
    """The model, and draft models by what they are."""
    path = write_model(folder / "model", family, plain=True)
    arrays = mx.load(str(path / "model.safetensors"))
    assert isinstance(arrays, dict)
    for name, array in arrays.items():
        if _layer(name) >= _DRAFT_LAYERS and name.endswith(("o_proj.weight", "down_proj.weight")):
            arrays[name] = array * _LATE_LAYERS
    mx.save_safetensors(str(path / "model.safetensors"), arrays, {"format": "mlx"})
    early = folder / "early"
    early.mkdir()
    config = json.loads((path / "config.json").read_text())
    (early / "config.json").write_text(json.dumps(config | {"num_hidden_layers": _DRAFT_LAYERS}))
    kept = {name: array for name, array in arrays.items() if _layer(name) < _DRAFT_LAYERS}
    mx.save_safetensors(str(early / "model.safetensors"), kept, {"format": "mlx"})
    stranger = write_model(folder / "stranger", family, seed=1, plain=True)
    return _load(path), {"its first layers": _load(early), "a stranger": _load(stranger)}


def _layer(name: str) -> int:
    """The number of the layer that a parameter is in; -1 for one that is in none."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def _load(path: Path) -> Any:
    model, _ = load_model(path)
    lay_out_weights(model)
    mx.eval(weights(model))
    return model


def make_batch(model: Any, draft: Any | None) -> TextEngine:
    return TextEngine(
        model,
        max_rows=8,
        pace=Pace(_PREFILL_CHUNK, max_gap=1.0),
        cache_bytes=0,
        draft=draft,
        seconds=None,
    )


def time_answer(
    batch: TextEngine, prompt: tuple[int, ...], tokens: int, temperature: float
) -> float:
    """Tokens per second of one answer, from its first step on."""
    sampling = Sampling(temperature=temperature, seed=1)
    batch.submit(Job(0, "", prompt, tokens, frozenset(), sampling))
    batch.prefill()
    started = time.perf_counter()
    drawn = 0
    while not batch.idle:
        drawn += sum(isinstance(event, Token) for event in batch.decode())
        batch.prefill()
    return drawn / (time.perf_counter() - started)


def measure(
    model: Any, name: str, draft: Any, temperature: float, pairs: int, tokens: int
) -> Ratios:
    """Both ways by turns; what runs first in one pair is last in the next."""
    plain, speculating = make_batch(model, None), make_batch(model, draft)
    dice = random.Random(0)
    time_answer(plain, (5, 6), 4, temperature)  # warm-up
    ratios = []
    for pair in range(pairs + 1):
        prompt = tuple(dice.choices(range(VOCABULARY), k=_PROMPT_TOKENS))
        speeds = {
            batch: time_answer(batch, prompt, tokens, temperature)
            for batch in ((plain, speculating) if pair % 2 == 0 else (speculating, plain))
        }
        ratios.append(speeds[speculating] / speeds[plain])
    seen = speculating.statistics()
    accepted = seen["accepted"] / max(seen["drafted"], 1)
    return Ratios(name, temperature, ratios[0], ratios[1:], accepted)


def format_ratios(measured: list[Ratios]) -> str:
    rows = [["draft", "temperature", "accepted", "first", "speed / plain", "least", "most"]]
    for each in measured:
        figures = (each.first, median(each.later), min(each.later), max(each.later))
        cells = [f"{figure:.2f}" for figure in figures]
        rows.append([each.draft, str(each.temperature), f"{each.accepted:.0%}", *cells])
    return format_table(rows)


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="mlxsrv-bench-") as folder:
        model, drafts = write_models(Path(folder), arguments.family)
    measured = [
        measure(model, name, draft, temperature, arguments.pairs, arguments.max_tokens)
        for name, draft in drafts.items()
        for temperature in arguments.temperatures
    ]
    print(format_machine(describe_machine()))
    print(
        f"one row of random {arguments.family}, answers of {arguments.max_tokens} tokens, "
        f"medians of {arguments.pairs} pairs\n"
    )
    print(format_ratios(measured))
    if arguments.json:
        write_json(arguments.json, measured)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculative",
        description="Measure what a draft model is worth, without a server.",
    )
    parser.add_argument("--family", choices=FAMILIES, default="qwen3-46m")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all ratios here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
