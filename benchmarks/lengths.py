"""Rows of very different lengths in one step: `python -m benchmarks.lengths`.

Rows whose lengths differ much are in groups with arrays of their own. A step of all of them is one
pass of the model that they share, or one pass each. Both ways take steps by turns, in one process,
and so does a third: one group, whose arrays are as long as the longest row. The rows' keys and
values are made up, and not read: 30,000 tokens would take a CPU minutes.

- The model has the weights of a large one relative to its KV cache: as many bytes as the keys and
  values of 30,000 tokens, like a model of 8 billion parameters in 4 bits.
- Times are of the processor where that computes, for others may use it too; else of the clock.
- `memory` is what a step takes beside what was there, at most.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.utils import load_model

from benchmarks.report import (
    describe_machine,
    format_machine,
    format_number,
    format_table,
    write_json,
)
from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.execution.decode import Decoder
from mlxsrv.engine.execution.facts import shares_passes, weights
from mlxsrv.engine.execution.step_results import StepResults
from mlxsrv.engine.execution.sub_batches import ReadyRow
from mlxsrv.engine.live_row import LiveRow
from mlxsrv.engine.loading.weights import lay_out_weights
from mlxsrv.engine.orders import Job
from mlxsrv.engine.plans import RowGroup
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.generation.parameters import Sampling
from tests.support.tiny import write_model

_FAMILY = "qwen3-46m"
_KV_HEADS, _HEAD_SIZE = 1, 64
_ROOM = 256  # columns for what the rows draw
_WARM_UP = 2  # steps


class Case(msgspec.Struct, frozen=True):
    """Groups of rows: how many rows, and how many tokens each has."""

    name: str
    groups: tuple[tuple[int, int], ...]

    @property
    def padded(self) -> Case:
        """All rows in one group."""
        rows, tokens = zip(*self.groups, strict=True)
        return Case(self.name, ((sum(rows), max(tokens)),))


_CASES = (
    Case("30,000 + 7 x 300", ((1, 30_000), (7, 300))),
    Case("8,000 + 7 x 300", ((1, 8_000), (7, 300))),
    Case("600 + 7 x 300", ((1, 600), (7, 300))),
    Case("2 x 4,000 + 6 x 600", ((2, 4_000), (6, 600))),
    Case("8,000 + 3 x 2,000 + 12 x 300", ((1, 8_000), (3, 2_000), (12, 300))),
    Case("8 groups: 300 to 2,400", tuple((1, 300 * n) for n in range(1, 9))),
    Case("32 groups: 100 to 3,200", tuple((1, 100 * n) for n in range(1, 33))),
    Case("32 x 300 in one group", ((32, 300),)),
)


class Way(msgspec.Struct):
    """A decoder with the rows of a case: milliseconds of its steps, and bytes of the largest."""

    decoder: Decoder
    times: list[float]
    bytes: int = 0


class Figures(msgspec.Struct, frozen=True):
    """Median milliseconds of a step, median ratios of steps by turns, and bytes beside the rest."""

    case: str
    shared: float
    apart: float
    padded: float
    to_apart: float
    to_padded: float
    shared_bytes: int
    apart_bytes: int


def make_decoder(model: Any, caches: KVCacheFactory, case: Case, *, shares: bool) -> Decoder:
    """A decoder that has the rows of a case."""
    decoder = Decoder(model, caches, steerer=Steerer(model), shares=shares)
    numbers = count()
    ready: dict[int, ReadyRow] = {}
    groups: list[RowGroup] = []
    for rows, tokens in case.groups:
        ids = tuple(next(numbers) for _ in range(rows))
        ready |= {row_id: make_row(caches, row_id, tokens) for row_id in ids}
        groups.append(RowGroup(ids, rows, tokens + _ROOM))
    decoder.arrange(groups, ready)
    return decoder


def make_row(caches: KVCacheFactory, row_id: int, tokens: int) -> ReadyRow:
    """A row of so many tokens. The keys and values are made up."""
    cache = caches.make()
    shape = (1, _KV_HEADS, tokens, _HEAD_SIZE)
    for layer in cache.layers:
        layer.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
    cache.tokens = tokens
    job = Job(row_id, "", (7,) * (tokens + 1), _ROOM, frozenset(), Sampling(temperature=0))
    return ReadyRow(LiveRow(job), cache)


def measure(model: Any, case: Case, times: int) -> Figures:
    """All ways by turns; what is first in one turn is last in the next."""
    caches = KVCacheFactory(model)
    shared, apart, padded = (
        Way(make_decoder(model, caches, each, shares=shares), [])
        for each, shares in ((case, True), (case, False), (case.padded, False))
    )
    for turn in range(-_WARM_UP, times):
        for way in (shared, apart, padded)[:: 1 if turn % 2 else -1]:
            milliseconds, taken = run_step(way.decoder)
            if turn >= 0:
                way.times.append(milliseconds)
                way.bytes = max(way.bytes, taken)
    return Figures(
        case.name,
        median(shared.times),
        median(apart.times),
        median(padded.times),
        _divide(shared, apart),
        _divide(shared, padded),
        shared.bytes,
        apart.bytes,
    )


def run_step(decoder: Decoder) -> tuple[float, int]:
    """Milliseconds of a step, and bytes that it takes beside what is there."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    clock = time.process_time if mx.default_device() == mx.cpu else time.perf_counter
    begin = clock()
    decoder.run_step(StepResults())
    decoder.wait()
    return 1000 * (clock() - begin), mx.get_peak_memory() - before


def _divide(way: Way, other: Way) -> float:
    return median(a / b for a, b in zip(way.times, other.times, strict=True))


def format_figures(measured: Sequence[Figures]) -> str:
    head = ["rows", "shared, ms", "apart, ms", "one group, ms"]
    head += ["ratio to apart", "to one group", "memory, shared", "memory, apart"]
    lines = [
        [
            each.case,
            *(format_number(value) for value in (each.shared, each.apart, each.padded)),
            *(f"{ratio:.2f}" for ratio in (each.to_apart, each.to_padded)),
            *(f"{taken / 1e6:.1f} MB" for taken in (each.shared_bytes, each.apart_bytes)),
        ]
        for each in measured
    ]
    return format_table([head, *lines])


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="mlxsrv-bench-") as folder:
        path = write_model(Path(folder), _FAMILY, plain=True, num_key_value_heads=_KV_HEADS)
        model, _ = load_model(path)
    lay_out_weights(model)
    mx.eval(weights(model))
    if not shares_passes(model, KVCacheFactory(model)):
        raise SystemExit("groups cannot share passes: is the patch `attention` switched off?")
    measured = [measure(model, case, arguments.times) for case in _CASES]
    print(format_machine(describe_machine()))
    print(f"a step in process, random {_FAMILY}, medians of {arguments.times}\n")
    print(format_figures(measured))
    if arguments.json:
        write_json(arguments.json, measured)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lengths",
        description="Measure steps of rows of very different lengths.",
    )
    parser.add_argument("--times", type=int, default=21, help="steps of each way")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
