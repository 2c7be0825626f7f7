"""Answers in messages, some of them for a tool: harmony's, with all that models get wrong."""

from __future__ import annotations

import json
from itertools import islice

from mlxsrv.text.call_formats.calls import Tools
from mlxsrv.text.formats import CALLS, THOUGHTS
from mlxsrv.text.marks import SPELLED
from mlxsrv.text.reader import AnswerReader, OfferedCalls, ToolArguments, ToolOpened
from tests.support.reading import schemas, splits, tokens

TOOLS = schemas("get_weather", "search", "now")
CITY = '{"city": "Paris"}'
CALL = f"<|message|>{CITY}"
PARIS = [("get_weather", CITY)]
NEXT = "<|end|><|start|>assistant"
AGAIN = "<|call|><|start|>assistant"
ANALYSIS = f"<|channel|>analysis<|message|>Hm.{NEXT}"
TO = "to=functions.get_weather"
FINAL = "<|channel|>final<|message|>"

Heard = tuple[str, str, list[tuple[str, str]]]
"""The reasoning, the content, and the calls with their arguments."""


def read(text: str, *, tools: Tools = TOOLS, offered: bool = True, cut: bool = False) -> Heard:
    """Return what is heard of an answer, the same whole and by character, however markers are
    shown."""
    heard = []
    frames, calls = THOUGHTS["harmony"], CALLS["harmony"]
    for marks in (SPELLED, tokens(frames, calls)):
        for feeds in islice(splits(marks.show(text)), 2):
            stage = AnswerReader(
                frames.frame(marks, thinking=False),
                marks,
                OfferedCalls(calls, tools) if offered else None,
            )
            said: dict[str, str] = {"reasoning": "", "content": ""}
            called: list[tuple[str, str]] = []
            for part in [*(part for feed in feeds for part in stage.feed(feed)),
                         *stage.flush(cut=cut)]:  # fmt: skip
                match part:
                    case ToolOpened():
                        called.append((part.name, ""))
                    case ToolArguments():
                        called[-1] = (called[-1][0], called[-1][1] + part.text)
                    case (channel, piece):
                        said[channel] += piece
            heard.append((said["reasoning"], said["content"], called))
    assert all(each == heard[0] for each in heard), [each for each in heard if each != heard[0]]
    return heard[0]


def test_calls_have_their_name_in_the_header() -> None:
    for header in (
        f"<|channel|>commentary {TO} <|constrain|>json",
        f"<|channel|>commentary {TO}<|constrain|>json",
        f"<|channel|>commentary {TO} json",
        f"<|channel|>commentary {TO}",
        f"<|channel|>analysis {TO} code",
        f" {TO}<|channel|>commentary <|constrain|>json",
        f" {TO}<|channel|>commentary json",
        f" {TO}",
        f"<|start|>assistant {TO}<|channel|>commentary",
    ):
        for end in ("", "<|call|>", "<|end|>"):
            assert read(header + CALL + end) == ("", "", PARIS), header
            assert read(ANALYSIS + header + CALL + end) == ("Hm.", "", PARIS), header


def test_headers_with_noise_are_read_as_far_as_they_can_be() -> None:
    for header in (
        f"<|channel|>commentary {TO}<|channel|>commentary",
        f"<|channel|>commentary {TO}<|channel|>commentary <|constrain|>json",
        f"<|channel|>analysis<|channel|>commentary {TO} <|constrain|>json",
        f"<|channel|>commentary {TO} <|constrain|>get_weather: the city",
        f" to=assistant<|channel|>commentary {TO}",
        f"<|channel|>commentary to=assistant {TO}",
        f"<|channel|>commentary{TO}",
        "<|channel|>commentary to=get_weather json",
        f"<|constrain|>json {TO}",
    ):
        assert read(header + CALL) == ("", "", PARIS), header
        assert read(f"{ANALYSIS}{header}{CALL}<|call|>") == ("Hm.", "", PARIS), header


def test_a_header_without_a_name_is_no_call() -> None:
    for header in (
        "<|channel|>commentary to=<|constrain|>json",
        "<|channel|>commentary to=functions. <|constrain|>json",
        "<|channel|>commentary to=assistant json",
    ):
        assert read(header + CALL) == ("", CITY, []), header


def test_a_preamble_is_content() -> None:
    text = f"{ANALYSIS}<|channel|>commentary<|message|>I look.{NEXT}<|channel|>commentary {TO}"
    assert read(f"{text}{CALL}<|call|>") == ("Hm.", "I look.", PARIS)


def test_several_calls_are_messages_each() -> None:
    text = f"<|channel|>commentary {TO} json{CALL}{AGAIN}"
    two = f"{text}<|channel|>commentary to=functions.now json<|message|>{{}}<|call|>"
    assert read(two) == ("", "", [*PARIS, ("now", "{}")])
    # The first was not ended, or the next has no start.
    ended = two.replace("<|call|>", "<|end|>", 1)
    assert read(ended) == ("", "", [*PARIS, ("now", "{}")])
    assert read(two.replace(AGAIN, "<|call|>")) == ("", "", [*PARIS, ("now", "{}")])
    assert read(two.replace(AGAIN, "<|start|>assistant")) == ("", "", [*PARIS, ("now", "{}")])


def test_what_follows_a_call_is_read_on() -> None:
    text = f"<|channel|>commentary {TO} json{CALL}{AGAIN}"
    assert read(f"{text}{ANALYSIS}{FINAL}So.") == ("Hm.", "So.", PARIS)
    result = "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>20"
    invented = f"<|channel|>commentary {TO} json{CALL}<|call|>{result}{NEXT}{FINAL}So."
    assert read(invented) == ("20", "So.", PARIS)


def test_values_may_spell_markers() -> None:
    value = json.dumps({"city": "<|end|> <|call|> to=functions.now<|message|>{}"})
    marks = tokens(THOUGHTS["harmony"])
    frame = THOUGHTS["harmony"].frame(marks, thinking=False)
    stage = AnswerReader(frame, marks, OfferedCalls(CALLS["harmony"], TOOLS))
    text = marks.show(f"<|channel|>commentary {TO} json<|message|>") + value
    parts = [*stage.feed(text), *stage.flush()]
    assert "".join(part.text for part in parts if isinstance(part, ToolArguments)) == value


def test_unknown_tools_and_those_that_models_know_unasked() -> None:
    header = "<|channel|>commentary to=functions.other <|constrain|>json<|message|>"
    assert read(f"{header}{CITY}<|call|>") == ("", "", [("other", CITY)])
    for name in ("python", "browser.search", "container.exec"):
        for text in ("print(1)", '{"query": "x"}'):
            unasked = f"<|channel|>analysis to={name} code<|message|>{text}<|call|>"
            assert read(unasked) == (text, "", []), name
            assert read(unasked, offered=False) == (text, "", []), name
    asked = f"<|channel|>analysis to=python code<|message|>{CITY}<|call|>"
    assert read(asked, tools=schemas("python")) == ("", "", [("python", CITY)])


def test_without_tools_a_call_is_content() -> None:
    text = f"{ANALYSIS}<|channel|>commentary {TO} json{CALL}<|call|>"
    assert read(text, offered=False) == ("Hm.", CITY, [])


def test_a_call_that_is_cut() -> None:
    whole = f"{ANALYSIS}<|channel|>commentary {TO} <|constrain|>json{CALL}"
    begun = len(ANALYSIS) + len("<|channel|>commentary to=functions.get_weather <|constrain|>json")
    for end in range(len(ANALYSIS), len(whole)):
        reasoning, content, calls = read(whole[:end], cut=True)
        assert (reasoning, content) == ("Hm.", "")
        if calls:
            [(name, arguments)] = calls
            assert name == "get_weather"
            assert CITY.startswith(arguments)
        else:
            assert end < begun + len("<|message|>") + 1


def test_prose_about_calls_is_prose() -> None:
    text = "Write to=functions.get_weather in the header, then json."
    assert read(f"{ANALYSIS}{FINAL}{text}") == ("Hm.", text, [])
    assert read(text) == ("", text, [])


def test_a_text_of_words_of_headers_is_no_header() -> None:
    text = "to=" + 300 * "x" + 3000 * " final"
    assert read(text)[1] == text
    frame = THOUGHTS["harmony"].frame(SPELLED, thinking=False)
    assert frame.place(text[:300])
