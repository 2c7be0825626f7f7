"""Calls in thoughts, markers that are tokens, and text that only looks like a call."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mlxsrv.text.call_formats.calls import Tools
from mlxsrv.text.call_formats.json_calls import HERMES
from mlxsrv.text.call_formats.literal_calls import PYTHONIC
from mlxsrv.text.frames import MarkedThoughts
from mlxsrv.text.marks import Marks
from mlxsrv.text.reader import AnswerReader, OfferedCalls, ToolArguments, ToolOpened
from tests.support.reading import caller

THINK = MarkedThoughts("think", "<think>", "</think>")
NAMES = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MARKS = Marks(NAMES, {name: number for number, name in enumerate(NAMES)})
TOOLS = Tools({"f": {}, "g": {}})
F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
UNKNOWN = F.replace('"f"', '"h"')


def reader(*, thinking: bool = False, parallel: bool = True, bound: bool = False) -> AnswerReader:
    calls = OfferedCalls(HERMES, TOOLS, parallel)
    frame = THINK.frame(MARKS, thinking=thinking)
    return AnswerReader(frame, MARKS, calls, thinking=thinking, bound=bound)


def said(parts: Iterable[object]) -> tuple[str, str, list[list[str]]]:
    """The thoughts, the content, and the calls."""
    texts = {"reasoning": "", "content": ""}
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, ToolOpened):
            calls.append([part.name, ""])
        elif isinstance(part, ToolArguments):
            calls[-1][1] += part.text
        else:
            assert isinstance(part, tuple)
            texts[part[0]] += part[1]
    return texts["reasoning"], texts["content"], calls


def read(text: str, *, thinking: bool = False) -> tuple[str, str, list[list[str]]]:
    """The outcome of a text whose markers are tokens; however it is cut it is the same."""
    shown = MARKS.show(text)
    whole = reader(thinking=thinking)
    expected = said([*whole.feed(shown), *whole.flush()])
    for size in (1, 2, 7):
        stage = reader(thinking=thinking)
        feeds = [shown[at : at + size] for at in range(0, len(shown), size)]
        parts = [part for feed in feeds for part in stage.feed(feed)]
        assert said([*parts, *stage.flush()]) == expected
    return expected


CALL = ["f", '{"a": 1}']


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(f"Hm.\n\n{F}", ("Hm.", "", [CALL]), id="the thought is not closed"),
        pytest.param(f"Hm. {F}\n</think>\n\nSo.", ("Hm.", "So.", [CALL]), id="closed behind it"),
        pytest.param(f"Hm. {F}{F}", ("Hm.", "", [CALL, CALL]), id="two"),
        pytest.param(
            f"I may call {UNKNOWN}.</think>So.",
            (f"I may call {UNKNOWN}.", "So.", []),
            id="no tool of the request",
        ),
        pytest.param(
            "I write <tool_call> first.</think>So.",
            ("I write <tool_call> first.", "So.", []),
            id="prose",
        ),
        pytest.param(
            f"I write <tool_call> first. Then {F}",
            ("I write <tool_call> first. Then", "", [CALL]),
            id="prose, then a call",
        ),
        pytest.param(
            '<tool_call>\n{"name": "f", "arguments": {"a": ',
            ('<tool_call>\n{"name": "f", "arguments": {"a":', "", []),
            id="a call that is not whole",
        ),
        pytest.param(
            '<tool_call>{"name": "f", "arguments": {"a": yes}}</tool_call></think>So.',
            ('<tool_call>{"name": "f", "arguments": {"a": yes}}</tool_call>', "So.", []),
            id="arguments that are no JSON",
        ),
    ],
)
def test_a_call_in_a_thought_is_one_if_it_is_whole_and_known(
    text: str, expected: tuple[str, str, list[list[str]]]
) -> None:
    thoughts, content, calls = read(text, thinking=True)
    assert (thoughts.rstrip(), content, calls) == expected


def test_markers_in_an_argument_are_its_text() -> None:
    text = "a </tool_call> b <think> c </think> d"
    call = f'<tool_call>{{"name": "f", "arguments": {{"a": "{text}"}}}}</tool_call>'
    assert read(f"{call}\nSo.") == ("", "So.", [["f", f'{{"a": "{text}"}}']])


def test_prose_about_calls_is_content() -> None:
    text = "Between <tool_call> and </tool_call> stands JSON."
    assert read(text) == ("", text, [])
    assert read(f"{text}\n{F}") == ("", text, [CALL])


def test_a_long_text_that_is_no_call_is_read_once_more_at_most() -> None:
    unclosed = '<tool_call>{"x": "' * 2000
    assert read(unclosed) == ("", unclosed, [])
    assert read(f"{unclosed}</think>", thinking=True)[0] == unclosed


def test_a_fragment_begins_with_the_call_that_was_cut() -> None:
    first, second = '{"name": "f"}', ', {"name": "g", "arguments": {"a": "x'
    for calls, fragment in ((second[2:], f"<tool_call>[{second[2:]}"), (first + second, second)):
        stage = reader()
        stage.feed(MARKS.show(f"<tool_call>[{calls}"))
        stage.flush(cut=True)
        assert stage.fragment == fragment


def test_of_two_markers_that_begin_alike_the_longer_one_is_shown() -> None:
    marks = Marks(("<call", "<call>"), {"<call": 0, "<call>": 1})
    assert marks.show("<call>") == marks.tokens[1]


def test_a_spelled_marker_counts_outside_of_calls() -> None:
    stage = reader()
    parts = [*stage.feed(f"<think>Hm.</think>\n{F}"), *stage.flush()]
    assert said(parts) == ("Hm.", "", [CALL])


def test_reasoning_goes_on_while_a_call_in_it_is_not_certain() -> None:
    stage = reader(thinking=True)
    seen = []
    for text in (
        "Hm. ",
        MARKS.show("<tool_call>"),
        '{"name": "f"',
        "}",
        MARKS.show("</tool_call>"),
    ):
        parts = stage.feed(text)
        seen.append((bool(parts), stage.reasoning, stage.holding))
    assert seen == [
        (True, True, False),
        (False, False, True),
        (False, False, True),
        (True, False, False),
        (False, False, False),
    ]


def test_an_answer_that_follows_a_grammar_may_spell_any_marker() -> None:
    text = '{"a": "<think> <tool_call> </think>"}'
    stage = reader(bound=True)
    assert said([*stage.feed(text), *stage.flush()]) == ("", text, [])
    stage = reader(bound=True)
    assert said([*(part for sign in text for part in stage.feed(sign)), *stage.flush()])[1] == text


def test_more_than_one_call_is_not_read_where_one_may_be_made() -> None:
    stage = reader(parallel=False)
    both = MARKS.show('<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call> So.')
    assert said([*stage.feed(both), *stage.flush()]) == ("", "", [["f", "{}"]])
    assert stage.done


@pytest.mark.parametrize("feeds", [["\n [f(a='x"], ["\n", " ", "[f(a='x"]])
def test_whitespace_before_a_call_without_a_marker_is_no_part_of_it(feeds: list[str]) -> None:
    marks = Marks((), {})
    frame = MarkedThoughts("think", "<think>", "</think>").frame(marks, thinking=False)
    stage = AnswerReader(frame, marks, OfferedCalls(PYTHONIC, Tools({"f": {}})))
    parts = [part for text in feeds for part in stage.feed(text)]
    assert said([*parts, *stage.flush(cut=True)]) == ("", "", [["f", '{"a": "x']])
    assert stage.fragment == "[f(a='x"


def test_a_call_without_a_marker_begins_no_thought() -> None:
    stage = caller(PYTHONIC, TOOLS, markers=("<think>", "</think>"))
    parts = [*stage.feed("<think>[f()]</think>[g()]"), *stage.flush()]
    assert said(parts) == ("[f()]", "", [["g", "{}"]])
