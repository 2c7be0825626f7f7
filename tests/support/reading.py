"""Readers of answers and what is heard of them, with markers that are text or tokens."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from mlxsrv.text.call_formats.calls import CallFormat, Tools, ToolSchema, WrittenCall
from mlxsrv.text.call_formats.lark import Lark
from mlxsrv.text.frames import CONTENT, FrameFormat, MarkedThoughts, NoThoughts, Piece
from mlxsrv.text.marks import SPELLED, Marks
from mlxsrv.text.reader import AnswerReader, OfferedCalls, OutputPart, ToolArguments, ToolOpened

Read = list[str | tuple[str, str]]
"""Content and calls in order, each as one text or (name, arguments)."""

_BYTES = LLTokenizer("byte")


def named(format: CallFormat) -> str:
    return format.name


def schemas(*names: str) -> Tools:
    """Tools that take anything."""
    return Tools({name: {} for name in names})


def tokens(*formats: CallFormat | FrameFormat) -> Marks:
    """Markers of formats that are all tokens."""
    names = [name for format in formats for name in format.marks]
    return Marks(names, {name: number for number, name in enumerate(names)})


# Readers.


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
    marks: Marks = SPELLED,
    *,
    parallel: bool = True,
    bound: bool = False,
    markers: tuple[str, str] | None = None,
) -> AnswerReader:
    """A reader that tells calls from content, and from thoughts between two markers."""
    thinking = MarkedThoughts("", *markers) if markers else NoThoughts()
    offered = OfferedCalls(format, tools, parallel)
    return AnswerReader(thinking.frame(marks, thinking=False), marks, offered, bound=bound)


# What is heard.


def pieces(parts: Iterable[OutputPart]) -> list[Piece]:
    """The pieces of text; there is nothing else."""
    found: list[Piece] = []
    for part in parts:
        assert not isinstance(part, ToolOpened | ToolArguments)
        found.append(part)
    return found


def merge(parts: Sequence[OutputPart]) -> Read:
    """Content and calls in order, each as one text or (name, arguments)."""
    merged: Read = []
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


def heard(*calls: WrittenCall) -> list[tuple[str, str]]:
    """The words of a reader of calls whose arguments are JSON, in the model's order."""
    return [(call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in calls]


def splits(text: str) -> Iterator[Sequence[str]]:
    """A text whole, by character, and cut at every place."""
    yield [text]
    yield text
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]


def read(
    format: CallFormat,
    feeds: Iterable[str],
    tools: Tools,
    *,
    marks: Marks = SPELLED,
    cut: bool = False,
) -> Read:
    """Return what is heard of an answer in pieces."""
    stage = caller(format, tools, marks)
    return merge([part for text in feeds for part in stage.feed(text)] + stage.flush(cut=cut))


def read_each_way(format: CallFormat, text: str, tools: Tools, *, cut: bool = False) -> Read:
    """Return what is heard of an answer, the same however it is split and markers are shown."""
    found = [read(format, feeds, tools, cut=cut) for feeds in splits(text)]
    # A marker that is a token is one character, so cuts inside of it are not there to try.
    marks = tokens(format)
    shown = marks.show(text)
    found += [read(format, feeds, tools, marks=marks, cut=cut) for feeds in ([shown], shown)]
    assert all(each == found[0] for each in found), [each for each in found if each != found[0]]
    return found[0]


def check_cuts(format: CallFormat, calls: Sequence[WrittenCall], tools: Tools) -> None:
    """Fails unless calls that a limit cuts off anywhere are the beginning of the whole ones."""
    spelled = format.spell(calls)
    for marks in (SPELLED, tokens(format)):
        text = marks.show(spelled)
        heard = read(format, [text], tools, marks=marks)
        whole = [each for each in heard if not isinstance(each, str)]
        assert len(whole) == len(heard) == len(calls)
        for place in range(len(text)):
            parts = read(format, [text[:place]], tools, marks=marks, cut=True)
            assert len(parts) <= len(whole)
            for part, (name, arguments) in zip(parts, whole, strict=False):
                if not isinstance(part, str):
                    assert part[0] == name
                    assert arguments.startswith(part[1])


# Grammars.


class CallGrammar:
    """The grammar of a format's calls of some tools, whose schemas hold as they are."""

    def __init__(self, format: CallFormat, tools: Sequence[tuple[str, ToolSchema]]) -> None:
        self._format = format
        self._lark = Lark(SPELLED, json.dumps)
        self.rules = format.rules(tools, self._lark)

    def follows(self, rule: str, text: str) -> bool:
        """Whether a text is all of what a rule asks for."""
        grammar = json.dumps({"grammars": [{"lark_grammar": self._lark.grammar(rule)}]})
        matcher = LLMatcher(_BYTES, grammar)
        assert not matcher.get_error(), grammar
        taken = matcher.try_consume_tokens(_BYTES.tokenize_str(text))
        return taken == len(text.encode()) and matcher.is_accepting()

    def takes(self, *calls: WrittenCall) -> bool:
        """Whether calls may be made, as the model writes them."""
        return self.follows(self.rules.many, self._format.spell(calls))

    def check(
        self,
        written: Sequence[WrittenCall],
        refused: Sequence[tuple[str, Mapping[str, Any]]],
        *,
        single: bool = False,
    ) -> None:
        """Fails unless the rules hold what is written, one call or all, and not what is refused.

        Args:
            single: an answer makes one call, and a marker before the opener may open it.
        """
        rules, spell = self.rules, self._format.spell
        for call in written:
            assert self.follows(rules.one, spell([call])), call
            assert self.takes(call), call
        assert self.takes(*written) != single
        assert not self.follows(rules.one, spell(written))
        for name, arguments in refused:
            call = WrittenCall(name, arguments)
            assert not self.follows(rules.one, spell([call])), call
            assert not self.takes(call), call
        one = spell(written[:1])
        for opener, rule in rules.behind.items():
            assert not self.follows(rule, "")
            if one.startswith(opener) or single:
                assert self.follows(rule, one.partition(opener)[2])
