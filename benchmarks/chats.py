"""Measure the cost of a growing chat: `python -m benchmarks.chats`.

- The tokens that are read of the prompts of a chat of ten turns, for each family of models: how
  much that is beyond what is new depends on the family's KV cache.
- The bytes that MLX holds while rows go on from a kept prompt of 4,000 tokens.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model

from benchmarks.report import describe_machine, format_machine, format_table
from mlxsrv.engine.events import Token
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.generation.parameters import Sampling
from mlxsrv.prompts.tokenizer import Tokenizer
from tests.support.chats import Turn, play_chat, play_text
from tests.support.text_engine import TextEngine
from tests.support.tiny import FAMILIES, write_model

_TURNS = 10
_HEAD = 4000
_KEPT_BYTES = 1 << 30
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}  # 8 KiB a token

Play = Callable[[TextEngine, Tokenizer, int], Iterator[Turn]]


def make_engine(model: Any) -> TextEngine:
    pace = Pace(512, 10.0)
    return TextEngine(model, max_rows=8, pace=pace, cache_bytes=_KEPT_BYTES, seconds=None)


# Tokens read.


def count_reads(folder: Path, play: Play) -> list[Turn]:
    """The turns of a chat with the model in `folder`."""
    engine = make_engine(load_model(folder)[0])
    tokenizer = Tokenizer(folder)
    tokenizer.marks_checkpoints = not engine.runner.facts.cuts
    return list(play(engine, tokenizer, _TURNS))


def table_reads(folder: Path, families: list[str], play: Play) -> list[list[str]]:
    """The tokens read in turns 2 to 10, by family."""
    rows: list[list[str]] = []
    for family in families:
        turns = count_reads(write_model(folder / f"{family} {play.__name__}", family), play)[1:]
        if not rows:
            rows.append(["family", "KV caches", *map(str, range(2, _TURNS + 1))])
            rows.append(["(tokens of the prompt)", "", *(str(len(turn.prompt)) for turn in turns)])
            rows.append(["(of them new)", "", *(str(turn.new) for turn in turns)])
        kinds = ", ".join(dict.fromkeys(FAMILIES[family].caches))
        rows.append([family, kinds, *(str(turn.read) for turn in turns)])
    return rows


# Bytes.


class Beginning:
    """A kept prompt, and rows that go on from it.

    Attributes:
        bytes: of the kept prompt.
    """

    def __init__(self, model: Any) -> None:
        self._engine = make_engine(model)
        self._head = tuple(random.Random(1).choices(range(5, 300), k=_HEAD))
        mx.clear_cache()
        self._base = count_bytes()
        self._draw([self._head], 1)
        self.bytes = count_bytes() - self._base

    def measure(self, rows: int) -> tuple[float, float]:
        """The bytes that rows take which go on together, those of what is kept included: while
        they are decoded, and at most. By those of one kept prompt."""
        mx.reset_peak_memory()
        tails = [tuple(random.Random(2 + row).choices(range(5, 300), k=20)) for row in range(rows)]
        held = self._draw([self._head + tail for tail in tails], 40)
        peak = mx.get_peak_memory() - self._base
        return (held - self._base) / self.bytes, peak / self.bytes

    def _draw(self, prompts: list[tuple[int, ...]], tokens: int) -> int:
        """Have prompts answered. Returns the bytes that were held in the middle of the answers."""
        for number, prompt in enumerate(prompts):
            greedy = Sampling(temperature=0)
            self._engine.submit(Job(number, "m", prompt, tokens, frozenset(), greedy))
        drawn = held = 0
        while not self._engine.idle:
            drawn += sum(isinstance(event, Token) for event in self._engine.round())
            if not held and drawn >= len(prompts) * tokens // 2:
                held = count_bytes()
        return held


def count_bytes() -> int:
    """The bytes that MLX holds when all that was launched is done."""
    mx.synchronize()
    return mx.get_active_memory()


def table_bytes(folder: Path) -> list[list[str]]:
    """Copies of the kept prompt that are held, and at most, by the number of rows."""
    model = load_model(write_model(folder / "bytes", "qwen3", **_SIZES))[0]
    mx.eval(model.parameters())
    table = [["rows that go on from it", "copies while they run", "copies at most"]]
    for rows in (1, 8):
        held, peak = Beginning(model).measure(rows)
        table.append([str(rows), f"{held:.2f}", f"{peak:.2f}"])
    return table


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chats", description="Measure what a growing chat costs."
    )
    few = [name for name in FAMILIES if name != "qwen3-46m"]
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--quick", action="store_const", const=few, dest="families")
    options = parser.parse_args()
    print(format_machine(describe_machine()))
    with tempfile.TemporaryDirectory() as path:
        copies = format_table(table_bytes(Path(path)))
        print(f"\ncopies of a kept prompt of {_HEAD} tokens\n{copies}")
        for title, play in (
            ("tokens read; thoughts left out of the history", play_chat),
            ("tokens read; answers that come back token for token", play_text),
        ):
            table = format_table(table_reads(Path(path), options.families, play))
            print(f"\n{title}\n{table}", flush=True)


if __name__ == "__main__":
    main()
