"""Readers of answers whose markers are spelled: no vocabulary has them as tokens."""

from collections.abc import Iterable, Sequence

from mlxsrv.text.calls import CallFormat, Tools
from mlxsrv.text.frames import CONTENT, MarkedThoughts, NoThoughts, Piece
from mlxsrv.text.marks import SPELLED
from mlxsrv.text.reader import AnswerReader, OfferedCalls, OutputPart, ToolArguments, ToolOpened


def thoughts(
    start: str | None, end: str | None, *, thinking: bool = False, bound: bool = False
) -> AnswerReader:
    """A reader that tells thoughts between two markers from content."""
    format = NoThoughts() if start is None or end is None else MarkedThoughts("", start, end)
    frame = format.frame(SPELLED, thinking=thinking)
    return AnswerReader(frame, SPELLED, thinking=thinking, bound=bound)


def caller(
    format: CallFormat,
    tools: Tools,
    *,
    parallel: bool = True,
    bound: bool = False,
    markers: tuple[str, str] | None = None,
) -> AnswerReader:
    """A reader that tells calls from content, and from thoughts between two markers."""
    thinking = MarkedThoughts("", *markers) if markers else NoThoughts()
    offered = OfferedCalls(format, tools, parallel)
    return AnswerReader(thinking.frame(SPELLED, thinking=False), SPELLED, offered, bound=bound)


def pieces(parts: Iterable[OutputPart]) -> list[Piece]:
    """The pieces of text; there is nothing else."""
    found: list[Piece] = []
    for part in parts:
        assert not isinstance(part, ToolOpened | ToolArguments)
        found.append(part)
    return found


def merge(parts: Sequence[OutputPart]) -> list[str | tuple[str, str]]:
    """Content and calls in order, each as one text or (name, arguments)."""
    merged: list[str | tuple[str, str]] = []
    opened = 0
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, ToolOpened):
            assert part.index == opened
            opened += 1
            merged.append((part.name, ""))
        elif isinstance(part, ToolArguments):
            assert part.text
            assert part.index == opened - 1
            assert isinstance(last, tuple)
            merged[-1] = (last[0], last[1] + part.text)
        else:
            channel, text = part
            assert channel == CONTENT
            assert text
            if isinstance(last, str):
                merged[-1] = last + text
            else:
                merged.append(text)
    return merged
