"""Rows that join and leave: `python -m benchmarks.churn`.

The KV caches of rows that decode together, without a model: what a row that joins or leaves costs,
in mlx-lm's merged caches and in slots, side by side in one process. A join and a leave copy bytes;
these are counted from what the arrays are: MLX writes to a buffer of its own, or in place.

- A step writes one token of each row. In slots it is in place, for nothing else is under way.
- The last table has what the classes of lengths waste: columns for each token that rows have, over
  the lives of rows whose lengths are drawn as the simulator draws them; and how often a row moves
  into the next class.
- The peak is that of rows that join one by one, over what there is at the end. Growth is that of
  the server: slots and columns grow in steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.models.cache import KVCache

from benchmarks.report import (
    describe_machine,
    format_machine,
    format_number,
    format_table,
    write_json,
)
from benchmarks.simulate import Traffic
from mlxsrv.engine.cache.row_cache import RowCache
from mlxsrv.engine.cache.row_caches import RowCaches
from mlxsrv.engine.events import KVCost
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.scheduling.groups import NEXT, STEP, Groups, round_up
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.generation.parameters import Sampling

_LAYERS, _HEADS, _SIZE = 4, 2, 64
_ROW_BYTES = _LAYERS * 2 * _HEADS * _SIZE * 4  # of a token
_JOINING = 128  # tokens
_STEPS = 5
_FACTS = TextFacts(
    batched=True,
    cuts=True,
    pads=True,
    padding=1 << 60,
    vocabulary=2,
    prompt_cache_bytes=0,
    kv_costs=(KVCost(_ROW_BYTES),),
)
_SHAPES = ((4, 512), (8, 1024), (16, 2048), (32, 2048))
_PEAK = (16, 2048)


_MIXES = ((100, 300), (400, 200), (2_000, 300), (8_000, 300), (30_000, 400))
_CLASSES = {"a step apart": 1 << 20, "as used": 8, "4 an octave": 4, "2": 2, "1": 1}


class Figures(msgspec.Struct, frozen=True):
    """The cost of one way to join and leave: milliseconds and bytes."""

    rows: int
    tokens: int
    way: str
    join: float
    leave: float
    step: float
    join_bytes: int
    leave_bytes: int


def make_row(tokens: int) -> RowCache:
    """The KV cache of a row that was read."""
    layers = [KVCache() for _ in range(_LAYERS)]
    for layer in layers:
        layer.update_and_fetch(*_make_tokens(1, tokens))
    row = RowCache(layers, tokens)
    mx.eval(row.state)
    return row


def _make_tokens(rows: int, tokens: int) -> tuple[mx.array, mx.array]:
    shape = (rows, _HEADS, tokens, _SIZE)
    return mx.random.normal(shape), mx.random.normal(shape)


class Merged:
    """mlx-lm's merged caches."""

    name = "merged"

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.lengths: list[int] = []

    def join(self, row: RowCache) -> None:
        joining = [KVCache.merge([layer]) for layer in row.layers]
        if self.layers:
            for layer, other in zip(self.layers, joining, strict=True):
                layer.extend(other)
        else:
            self.layers = joining
        self.lengths.append(row.tokens)
        self._wait()

    def leave(self, place: int) -> None:
        del self.lengths[place]
        left = mx.array([row for row in range(len(self.lengths) + 1) if row != place])
        for layer in self.layers:
            layer.filter(left)
        self._wait()

    def step(self) -> None:
        for layer in self.layers:
            layer.update_and_fetch(*_make_tokens(len(self.lengths), 1))
        self._wait()

    def _wait(self) -> None:
        mx.eval([(layer.keys, layer.values) for layer in self.layers])


class InSlots:
    """Slots, with the room that the scheduler gives them."""

    name = "slots"

    def __init__(self) -> None:
        self._caches = RowCaches([KVCache() for _ in range(_LAYERS)])
        self._groups = Groups(_FACTS, 32)
        self._rows: list[int] = []  # ids
        self._numbers = count()

    @property
    def layers(self) -> list[Any]:
        return self._caches.layers

    def join(self, row: RowCache) -> None:
        number = next(self._numbers)
        prompt = np.zeros(row.tokens + 1, np.uint32)
        self._groups.join([Row(Job(number, "", (0,), 99, frozenset(), Sampling()), prompt)])
        self._arrange({number: row})

    def leave(self, place: int) -> None:
        gone = next(row for row in self._groups.rows if row.id == self._rows[place])
        self._groups.remove(gone)
        self._caches.drop_rows([place])
        del self._rows[place]
        self._arrange({})

    def step(self) -> None:
        for layer in self._caches.layers:
            layer.update_and_fetch(*_make_tokens(len(self._rows), 1))
        self._caches.advance(1)
        mx.eval([(layer.keys, layer.values) for layer in self._caches.layers])

    def _arrange(self, joining: dict[int, RowCache]) -> None:
        groups = self._groups.take_changed()
        assert groups is not None
        [group] = groups
        known = {row: place for place, row in enumerate(self._rows)}
        sources = [known[row] if row in known else joining[row] for row in group.rows]
        self._caches.arrange(sources, group.slots, group.columns)
        self._rows = list(group.rows)


Way: TypeAlias = Merged | InSlots


def measure(way: Way, rows: int, tokens: int, times: int) -> Figures:
    """Rows of so many tokens; by turns one of them leaves, a short one joins, and all step."""
    for _ in range(rows):
        way.join(make_row(tokens))
    own = _ROW_BYTES * tokens
    spent: dict[str, list[float]] = {"join": [], "leave": [], "step": []}
    copied = {"join": 0, "leave": 0}
    for _ in range(times):
        joining = make_row(_JOINING)
        before = _find_buffers(way)
        spent["leave"].append(_time(lambda: way.leave(2)))
        between = _find_buffers(way)
        spent["join"].append(_time(partial(way.join, joining)))
        # The last row is copied. On a GPU it is twice: out of its slot, and into the other one.
        times_copied = 1 if mx.default_device() == mx.cpu else 2
        copied["leave"] = _count_copied(before, between, times_copied * own)
        copied["join"] = _count_copied(between, _find_buffers(way), _ROW_BYTES * _JOINING)
        spent["step"] += [_time(way.step) for _ in range(_STEPS)]
        way.leave(rows - 1)
        way.join(make_row(tokens))
    return Figures(
        rows,
        tokens,
        way.name,
        join=median(spent["join"]),
        leave=median(spent["leave"]),
        step=median(spent["step"]),
        join_bytes=copied["join"],
        leave_bytes=copied["leave"],
    )


def measure_peak(way: Way, rows: int, tokens: int) -> float:
    """The most memory while rows join one by one, over that at the end."""
    mx.clear_cache()
    begin = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(rows):
        way.join(make_row(tokens))
    return (mx.get_peak_memory() - begin) / (mx.get_active_memory() - begin)


def measure_waste(prompt: int, answer: int, classes: int) -> tuple[float, float]:
    """The columns for each token of rows, and the moves of a row, if there are so many classes for
    lengths from one power of two to the next. `prompt` and `answer` are medians."""
    held = columns = moves = 0
    requests = Traffic(400, 1.0, prompt, answer).draw(0)
    for request in requests:
        lengths = range(request.prompt, request.prompt + request.answer)
        found = [_round_up(length + NEXT, classes) for length in lengths]
        held, columns = held + sum(lengths), columns + sum(found)
        moves += len({*found}) - 1
    return columns / held, moves / len(requests)


def _round_up(tokens: int, classes: int) -> int:
    step = max(STEP, (1 << (tokens - 1).bit_length() - 1) // classes)
    columns = -(-tokens // step) * step
    assert classes != _CLASSES["as used"] or columns == round_up(tokens)
    return columns


def _time(work: Callable[[], None]) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begin)


def _find_buffers(way: Way) -> list[tuple[int, int]]:
    """The place in memory of each array, and its bytes."""
    arrays = [array for layer in way.layers for array in (layer.keys, layer.values)]
    return [(np.asarray(memoryview(array)).ctypes.data, array.nbytes) for array in arrays]


def _count_copied(
    before: Sequence[tuple[int, int]], now: Sequence[tuple[int, int]], own: int
) -> int:
    """The bytes of arrays that were made anew; if all were written in place, those of the row."""
    anew = [size for (place, size), (was, _) in zip(now, before, strict=True) if place != was]
    return sum(anew) or own


def main() -> None:
    arguments = _parse()
    figures = [
        measure(make(), rows, tokens, arguments.times)
        for rows, tokens in _SHAPES
        for make in (Merged, InSlots)
    ]
    peaks = {make.name: measure_peak(make(), *_PEAK) for make in (Merged, InSlots)}
    print(format_machine(describe_machine()))
    print(
        f"{_LAYERS} layers, {_HEADS} KV heads of {_SIZE}, float32; medians of {arguments.times}\n"
    )
    head = ["rows x tokens", "", "join, ms", "leave, ms", "step, ms", "join, MB", "leave, MB"]
    lines = [
        [
            f"{each.rows} x {each.tokens}",
            each.way,
            *(format_number(value) for value in (each.join, each.leave, each.step)),
            *(format_number(value / 1e6) for value in (each.join_bytes, each.leave_bytes)),
        ]
        for each in figures
    ]
    print(format_table([head, *lines]))
    told = ", ".join(f"{name} {ratio:.2f}" for name, ratio in peaks.items())
    print(f"\npeak while {_PEAK[0]} rows of {_PEAK[1]} join, over the end's: {told}")
    wastes = [
        [f"{prompt:,} + {answer:,}"]
        + [
            f"{waste:.2f}, {moves:.1f} moves"
            for waste, moves in (measure_waste(prompt, answer, n) for n in _CLASSES.values())
        ]
        for prompt, answer in _MIXES
    ]
    print("\ncolumns for each token\n" + format_table([["prompt + answer", *_CLASSES], *wastes]))
    if arguments.json:
        write_json(arguments.json, {"figures": figures, "peaks": peaks})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.churn", description="Measure rows that join and leave."
    )
    parser.add_argument("--times", type=int, default=9, help="joins and leaves of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
