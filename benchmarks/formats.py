"""Measure the cost of a token of a call in each format: `python -m benchmarks.formats`.

The reader of an answer, fed as a model writes: markers one by one, all else four characters at a
time. The same calls in every format: one writes a file, the other has many values. The costs are
those of a token, over the cost of a token of JSON between `<tool_call>` marks, which is taken by
turns with it: the median of several rounds, in processor time, for a machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.report import describe_machine, format_machine, format_table, write_json
from mlxsrv.text.call_formats.calls import CallFormat, Tools, WrittenCall
from mlxsrv.text.formats import CALLS, THOUGHTS
from mlxsrv.text.marks import Marks
from mlxsrv.text.reader import AnswerReader, OfferedCalls, ToolArguments

BASE = "hermes"
LINES = 400
VALUES = 60
CHARACTERS = 4  # of a token

TOOLS = Tools(
    {
        "write": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        },
        "run": {
            "type": "object",
            "properties": {
                **{f"text_{number}": {"type": "string"} for number in range(VALUES)},
                **{f"count_{number}": {"type": "integer"} for number in range(VALUES)},
                "options": {"type": "object"},
            },
        },
    }
)


class Cost(msgspec.Struct, frozen=True):
    """The cost of one kind of call in one format.

    Attributes:
        tokens: how many the call has.
        nanoseconds: per token, at best.
        ratios: to the cost of a token of JSON, one for each round.
    """

    format: str
    kind: str
    tokens: int
    nanoseconds: float
    ratios: list[float]


def make_calls() -> dict[str, WrittenCall]:
    """Return the calls that are written in every format, by kind."""
    line = '    print(f"line {number}: {\'<b>\' + text}", end="\\n")  # it\'s [a] {b}\n'
    texts = {f"text_{number}": f"the value of {number}" for number in range(VALUES)}
    counts = {f"count_{number}": number for number in range(VALUES)}
    options = {"options": {"list": list(range(VALUES)), "deep": {"a": [True, None, "x"]}}}
    return {
        "a file": WrittenCall("write", {"path": "a.py", "text": line * LINES}, "functions.write:0"),
        "values": WrittenCall("run", {**texts, **counts, **options}, "functions.run:0"),
    }


def split(text: str, marks: Marks) -> list[str]:
    """Return a text as tokens."""
    return re.findall(rf"[\ufdd0-\ufdef]|[^\ufdd0-\ufdef]{{1,{CHARACTERS}}}", marks.show(text))


def make_reader(format: CallFormat, marks: Marks) -> AnswerReader:
    thoughts = THOUGHTS.get(format.name, THOUGHTS["none"])
    frame = thoughts.frame(marks, thinking=False)
    return AnswerReader(frame, marks, OfferedCalls(format, TOOLS))


def make_marks(format: CallFormat) -> Marks:
    """Return the format's markers, all of them tokens."""
    names = [*format.marks, *THOUGHTS.get(format.name, THOUGHTS["none"]).marks]
    return Marks(names, {name: number for number, name in enumerate(dict.fromkeys(names))})


def read(format: CallFormat, marks: Marks, pieces: Sequence[str]) -> str:
    """Read an answer; return the arguments of its calls."""
    reader = make_reader(format, marks)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.flush()
    return "".join(part.text for part in parts if isinstance(part, ToolArguments))


def prepare(format: CallFormat, call: WrittenCall) -> tuple[Callable[[], Any], int]:
    """Return the reading of a call in a format, and its number of tokens.

    Raises:
        ValueError: the call is not read as it was written.
    """
    marks = make_marks(format)
    pieces = split(format.spell([call]), marks)
    heard = json.loads(read(format, marks, pieces) or "null")
    if heard != call.arguments:
        raise ValueError("another call is read")
    return lambda: read(format, marks, pieces), len(pieces)


def measure(kind: str, call: WrittenCall, names: Sequence[str], rounds: int) -> list[Cost]:
    """Return what each format costs. One that does not read the call is told, and left out."""
    base, base_tokens = prepare(CALLS[BASE], call)
    costs = []
    for name in names:
        try:
            ours, tokens = prepare(CALLS[name], call)
        except ValueError as error:
            print(f"{name}, {kind}: left out: {error}", flush=True)
            continue
        pairs = [(_time(base) / base_tokens, _time(ours) / tokens) for _ in range(rounds)]
        ratios = [mine / json_cost for json_cost, mine in pairs]
        costs.append(Cost(name, kind, tokens, min(mine for _, mine in pairs), ratios))
    return costs


def _time(action: Callable[[], Any]) -> int:
    started = time.thread_time_ns()
    action()
    return time.thread_time_ns() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.formats", description="Measure the formats of calls, per token."
    )
    parser.add_argument("--rounds", type=int, default=9, help="for each format (default: 9)")
    parser.add_argument("--only", nargs="+", choices=sorted(CALLS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    arguments = parser.parse_args()
    names = arguments.only or [BASE, *sorted(set(CALLS) - {BASE})]
    print(format_machine(describe_machine()) + "\n")
    costs = [
        cost
        for kind, call in make_calls().items()
        for cost in measure(kind, call, names, arguments.rounds)
    ]
    rows = [
        [cost.format, cost.kind, str(cost.tokens), f"{cost.nanoseconds:.0f}", _spread(cost.ratios)]
        for cost in costs
    ]
    print(format_table([["format", "call", "tokens", "ns/token", "over JSON"], *rows]))
    if arguments.json:
        write_json(arguments.json, costs)


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
