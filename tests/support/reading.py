"""Answers read by a format of calls, with markers that are text or tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxsrv.text.calls import CallFormat, Tools
from mlxsrv.text.frames import FrameFormat, NoThoughts
from mlxsrv.text.marks import Marks
from mlxsrv.text.reader import AnswerReader, OfferedCalls, ToolArguments, ToolOpened

Read = list[str | tuple[str, str]]
"""Content and calls in order, each as one text or (name, arguments)."""


def schemas(*names: str) -> Tools:
    """Tools that take anything."""
    return Tools({name: {} for name in names})


def tokens(format: CallFormat) -> Marks:
    """Markers that are all tokens."""
    return Marks(format.marks, {name: number for number, name in enumerate(format.marks)})


def reader(
    format: CallFormat,
    tools: Tools,
    marks: Marks,
    frame: FrameFormat | None = None,
) -> AnswerReader:
    frames = frame or NoThoughts()
    return AnswerReader(frames.frame(marks, thinking=False), marks, OfferedCalls(format, tools))


def pieces(text: str) -> Iterator[Sequence[str]]:
    """A text whole, by character, and cut at every place."""
    yield [text]
    yield text
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]


def read(
    format: CallFormat,
    feeds: Sequence[str],
    tools: Tools,
    *,
    marks: Marks | None = None,
    cut: bool = False,
) -> Read:
    """Return what is heard of an answer in pieces."""
    stage = reader(format, tools, marks or Marks((), {}))
    parts = [part for text in feeds for part in stage.feed(text)] + stage.flush(cut=cut)
    heard: Read = []
    for part in parts:
        last = heard[-1] if heard else None
        match part:
            case ToolOpened(name=name):
                heard.append((name, ""))
            case ToolArguments(text=text):
                assert isinstance(last, tuple)
                heard[-1] = (last[0], last[1] + text)
            case (_, text):
                if isinstance(last, str):
                    heard[-1] = last + text
                else:
                    heard.append(text)
    return heard


def read_each_way(format: CallFormat, text: str, tools: Tools, *, cut: bool = False) -> Read:
    """Return what is heard of an answer, the same however it is split and markers are shown."""
    heard = [
        read(format, feeds, tools, marks=marks, cut=cut)
        for marks in (Marks((), {}), tokens(format))
        for feeds in pieces(marks.show(text))
    ]
    assert all(each == heard[0] for each in heard), [each for each in heard if each != heard[0]]
    return heard[0]


def schema(**properties: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}
