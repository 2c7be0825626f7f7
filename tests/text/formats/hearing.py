"""Answers in all formats, and what is heard of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from mlxsrv.text.call_formats.calls import Tools
from mlxsrv.text.formats import CALLS, THOUGHTS
from mlxsrv.text.frames import CONTENT
from mlxsrv.text.marks import SPELLED, Marks
from mlxsrv.text.reader import AnswerReader, OfferedCalls, OutputPart, ToolArguments, ToolOpened
from tests.support.effort import EFFORT

VECTORS = Path(__file__).parent / "vectors.jsonl"
APART = "\ue000"
"""A character inside a marker that is spelled by other tokens. It is not part of the text."""


class Call(msgspec.Struct, frozen=True):
    """A call; arguments that are None are not compared."""

    name: str
    arguments: dict[str, Any] | None = None


class Expected(msgspec.Struct, frozen=True):
    """An answer, without whitespace around content and reasoning."""

    content: str
    reasoning: str
    calls: list[Call]


class Vector(msgspec.Struct, frozen=True):
    """An answer as a model writes it.

    Attributes:
        calls: the format of its calls.
        thoughts: the format of its thoughts.
        prompt: the end of the prompt, if it opens a thought.
        tools: "all" or "none".
        text: with the names of tokens.
        cut: a limit ended the answer.
        only: "tokens" or "spelled" if it is clear only where markers are.
    """

    id: str
    calls: str
    thoughts: str
    prompt: str
    tools: str
    text: str
    expect: Expected
    why: str = ""
    cut: bool = False
    only: str = ""


class Heard(msgspec.Struct):
    """An answer put together.

    Attributes:
        calls: names, and arguments as they were given.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = []

    def add(self, parts: Sequence[OutputPart]) -> Heard:
        for part in parts:
            match part:
                case ToolOpened(name=name, index=index):
                    assert index == len(self.calls)
                    self.calls.append((name, ""))
                case ToolArguments(text=text, index=index):
                    assert text
                    assert index == len(self.calls) - 1
                    name, arguments = self.calls[-1]
                    self.calls[-1] = (name, arguments + text)
                case (channel, text):
                    assert text
                    if channel == CONTENT:
                        self.content += text
                    else:
                        self.reasoning += text
        return self

    def begins(self, whole: Heard) -> bool:
        """Whether this is a part of the whole, and nothing of it was taken back."""
        texts = zip(self.calls, whole.calls, strict=False)
        return (
            whole.content.startswith(self.content)
            and whole.reasoning.startswith(self.reasoning)
            and len(self.calls) <= len(whole.calls)
            and all(one[0] == other[0] and other[1].startswith(one[1]) for one, other in texts)
        )

    def meets(self, expected: Expected) -> bool:
        return (
            self.content.strip() == expected.content.strip()
            and self.reasoning.strip() == expected.reasoning.strip()
            and len(self.calls) == len(expected.calls)
            and all(
                name == call.name and (call.arguments is None or _same(arguments, call.arguments))
                for (name, arguments), call in zip(self.calls, expected.calls, strict=True)
            )
        )


def _same(arguments: str, expected: Mapping[str, Any]) -> bool:
    """Whether a text is JSON of this value. 5 is 5.0, but True is not 1."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return False
    return bool(found == expected) and _words(found) == _words(expected)


def _words(value: Any) -> Any:
    match value:
        case dict():
            return [_words(value[key]) for key in sorted(value)]
        case list():
            return [_words(item) for item in value]
    return isinstance(value, bool)


@cache
def offered() -> Tools:
    """The tools of all vectors."""
    tools = json.loads(VECTORS.read_text().splitlines()[0])["tools"]
    return Tools({each["function"]["name"]: each["function"]["parameters"] for each in tools})


@cache
def vectors() -> Sequence[Vector]:
    """All vectors."""
    lines = VECTORS.read_text().splitlines()[1:]
    return [msgspec.json.decode(line, type=Vector) for line in lines]


def by_format() -> dict[str, list[Vector]]:
    found: dict[str, list[Vector]] = {}
    for each in vectors():
        found.setdefault(each.calls, []).append(each)
    return found


def names(calls: str, thoughts: str) -> Sequence[str]:
    """The markers of two formats."""
    return [*dict.fromkeys([*CALLS[calls].marks, *THOUGHTS[thoughts].marks])]


def tokens(calls: str, thoughts: str) -> Marks:
    """Marks of two formats that are all tokens."""
    found = names(calls, thoughts)
    return Marks(found, {name: number for number, name in enumerate(found)})


def all_marks(vector: Vector) -> Iterator[Marks]:
    """The ways in which a vector's markers may be written."""
    if vector.only != "spelled":
        yield tokens(vector.calls, vector.thoughts)
    if vector.only != "tokens":
        yield SPELLED


def shown(vector: Vector, marks: Marks) -> str:
    return marks.show(vector.text).replace(APART, "")


def places(vector: Vector, size: int) -> range:
    """Places in an answer of this size; all of them in long runs, some in others."""
    step = 1 if EFFORT == "long" else 11
    return range(1 + len(vector.id + vector.why) % step, size, step)


def reader(vector: Vector, marks: Marks, *, parallel: bool = True) -> AnswerReader:
    format = THOUGHTS[vector.thoughts]
    thinking = format.leaves_open(vector.prompt)
    frame = format.frame(marks, thinking=thinking, prompt=vector.prompt)
    calls = OfferedCalls(CALLS[vector.calls], offered(), parallel)
    return AnswerReader(frame, marks, calls if vector.tools == "all" else None, thinking=thinking)


def hear(vector: Vector, feeds: Sequence[str], marks: Marks, *, cut: bool | None = None) -> Heard:
    """Return what is heard of an answer in pieces, and check that nothing is taken back."""
    stage = reader(vector, marks)
    heard = Heard()
    for text in feeds:
        heard.add(stage.feed(text))
    return heard.add(stage.flush(cut=vector.cut if cut is None else cut))
