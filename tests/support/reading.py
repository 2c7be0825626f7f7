"""Answers read by a format of calls, with markers that are text or tokens."""

from collections.abc import Iterator, Sequence

from mlxsrv.text.calls import CallFormat, Tools
from mlxsrv.text.frames import NoThoughts
from mlxsrv.text.marks import SPELLED, Marks
from mlxsrv.text.reader import AnswerReader, OfferedCalls
from tests.support.answers import merge

Read = list[str | tuple[str, str]]
"""Content and calls in order, each as one text or (name, arguments)."""


def schemas(*names: str) -> Tools:
    """Tools that take anything."""
    return Tools({name: {} for name in names})


def tokens(format: CallFormat) -> Marks:
    """Markers that are all tokens."""
    return Marks(format.marks, {name: number for number, name in enumerate(format.marks)})


def reader(format: CallFormat, tools: Tools, marks: Marks) -> AnswerReader:
    frame = NoThoughts().frame(marks, thinking=False)
    return AnswerReader(frame, marks, OfferedCalls(format, tools))


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
    marks: Marks = SPELLED,
    cut: bool = False,
) -> Read:
    """Return what is heard of an answer in pieces."""
    stage = reader(format, tools, marks)
    return merge([part for text in feeds for part in stage.feed(text)] + stage.flush(cut=cut))


def read_each_way(format: CallFormat, text: str, tools: Tools, *, cut: bool = False) -> Read:
    """Return what is heard of an answer, the same however it is split and markers are shown."""
    heard = [
        read(format, feeds, tools, marks=marks, cut=cut)
        for marks in (SPELLED, tokens(format))
        for feeds in pieces(marks.show(text))
    ]
    assert all(each == heard[0] for each in heard), [each for each in heard if each != heard[0]]
    return heard[0]
