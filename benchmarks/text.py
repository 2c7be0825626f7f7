"""Measure the cost of a token from its id to the text that is sent: `python -m benchmarks.text`.

The stages that a request asks for, one id at a time as they come from the engine, and mlx-lm's
detokenizer beside them, which is the first stage alone. Hot loop, no socket; the best of several
rounds, since anything slower was the machine doing something else.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from mlx_lm.utils import load_tokenizer

from benchmarks.report import describe_machine, format_machine, format_table, write_json
from mlxsrv.text.detokenize import Detokenizer, TokenBytes, token_bytes
from mlxsrv.text.frames import MarkedThoughts
from mlxsrv.text.marks import Marks
from mlxsrv.text.pipeline import TextPipeline
from mlxsrv.text.reader import AnswerReader
from mlxsrv.text.stops import StopStrings
from tests.support.tiny import MARKER_TOKENS, SPECIAL_TOKENS, write_model

Read: TypeAlias = Callable[[Sequence[int]], None]
"""Reads one answer, id by id."""

TOKENS = 5_000
ROUNDS = 7
STOPS = ("\n\nUser:", "</answer>", "<|never|>")
"""They begin as some of the text does, and never match."""


def list_ways(wrapper: Any) -> dict[str, Read]:
    table = token_bytes(wrapper, "byte_level", keep=MARKER_TOKENS)
    return {
        "plain": _pipe(table),
        "stop strings": _pipe(table, stops=STOPS),
        "channels, content": _pipe(table, thinking=False),
        "channels, reasoning": _pipe(table, thinking=True),
        "channels and stop strings": _pipe(table, stops=STOPS, thinking=False),
        "mlx-lm's detokenizer": lambda ids: _detokenize(wrapper, ids),
    }


def _pipe(
    table: TokenBytes, *, stops: Sequence[str] | None = None, thinking: bool | None = None
) -> Read:
    """A way that makes a pipeline for each answer, as the server does."""

    def read(ids: Sequence[int]) -> None:
        pipeline = TextPipeline(
            Detokenizer(table),
            None if thinking is None else _reader(thinking),
            None if stops is None else StopStrings(stops),
        )
        for token_id in ids:
            pipeline.feed((token_id,))
        pipeline.flush()
        assert not pipeline.stopped

    return read


def _reader(thinking: bool) -> AnswerReader:
    marks = Marks((), {})
    frame = MarkedThoughts("think", "<think>", "</think>").frame(marks, thinking=thinking)
    return AnswerReader(frame, marks, thinking=thinking)


def _detokenize(wrapper: Any, ids: Sequence[int]) -> None:
    detokenizer = wrapper.detokenizer
    detokenizer.reset()
    for token_id in ids:
        detokenizer.add_token(token_id)
        _ = detokenizer.last_segment
    detokenizer.finalize()


def measure(read: Read, ids: Sequence[int]) -> float:
    """Nanoseconds per token."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter_ns()
        read(ids)
        rounds.append(time.perf_counter_ns() - started)
    return min(rounds) / len(ids)


def _draw_ids(wrapper: Any) -> list[int]:
    """Ids of ordinary tokens: text in many scripts, some of it in parts of characters."""
    added = {*SPECIAL_TOKENS, *MARKER_TOKENS}
    ordinary = sorted(number for token, number in wrapper.get_vocab().items() if token not in added)
    return random.Random(0).choices(ordinary, k=TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.text", description="Measure the text pipeline, per token."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxsrv-bench-") as folder:
        wrapper = load_tokenizer(write_model(Path(folder), "qwen3"))
    ids = _draw_ids(wrapper)
    figures = {name: measure(read, ids) for name, read in list_ways(wrapper).items()}
    print(format_machine(describe_machine()) + "\n")
    rows = [[name, f"{nanoseconds:.0f}"] for name, nanoseconds in figures.items()]
    print(format_table([["stages", "ns/token"], *rows]))
    if arguments.json:
        write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
