"""Calls that are written as the model writes them are read as the same calls."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsrv.text.call_formats.calls import Tools, WrittenCall
from mlxsrv.text.formats import CALLS, THOUGHTS
from mlxsrv.text.marks import SPELLED, Marks
from mlxsrv.text.reader import AnswerReader, OfferedCalls
from tests.support.cuts import cut
from tests.support.effort import examples
from tests.text.formats.hearing import Heard, by_format, names, tokens

FRAMES = {format: found[0].thoughts for format, found in by_format().items()}
SIGNS = "\n \"'\\{}[]()<>=,:xé"
WORDS = ["</", "null", "007", "True", "</parameter>", "<b>", "```", "&amp;", "\n\n"]
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=12),
    st.lists(st.sampled_from([*SIGNS, *WORDS]), max_size=8).map("".join),
)
KEYS = st.sampled_from(["a", "b1", "c_d", "path", "Text"])
Typed = tuple[Any, st.SearchStrategy[Any]]
SCALARS: list[Typed] = [
    ({"type": "string"}, TEXTS),
    ({"type": "string", "enum": ["a", "b c"]}, st.sampled_from(["a", "b c"])),
    ({"type": "integer"}, st.integers(-(2**53), 2**53)),
    ({"type": "number"}, st.floats(-1e6, 1e6, allow_subnormal=False)),
    ({"type": "boolean"}, st.booleans()),
    ({"type": "null"}, st.none()),
    ({"type": ["string", "null"]}, st.sampled_from([None, "x", "a b"])),
]


@st.composite
def typed(draw: st.DrawFn, depth: int = 2) -> Typed:
    """A schema, and a strategy for its values."""
    kind = draw(st.sampled_from(["scalar", "scalar", "object", "array"] if depth else ["scalar"]))
    if kind == "scalar":
        scalar: Typed = draw(st.sampled_from(SCALARS))
        return scalar
    if kind == "array":
        schema, values = draw(typed(depth=depth - 1))
        return {"type": "array", "items": schema}, st.lists(values, max_size=3)
    members = draw(st.dictionaries(KEYS, typed(depth=depth - 1), min_size=1, max_size=3))
    schema = {"type": "object", "properties": {key: each[0] for key, each in members.items()}}
    return schema, st.fixed_dictionaries({key: each[1] for key, each in members.items()})


@st.composite
def calls(draw: st.DrawFn) -> tuple[Tools, list[WrittenCall]]:
    """Tools, and calls of them."""
    schemas: dict[str, Any] = {}
    written: list[WrittenCall] = []
    for name in draw(st.lists(st.sampled_from(["f", "get_it", "Run2"]), unique=True, min_size=1)):
        members = draw(st.dictionaries(KEYS, typed(), max_size=3))
        schemas[name] = {
            "type": "object",
            "properties": {key: schema for key, (schema, _) in members.items()},
        }
        given = {key: values for key, (_, values) in members.items()}
        chosen = draw(st.fixed_dictionaries({}, optional=given))
        written.append(WrittenCall(name, chosen, f"functions.{name}:{len(written)}"))
    return Tools(schemas), written


def clear(format: str, written: list[WrittenCall]) -> bool:
    """Whether no text of the calls has a marker of the format."""
    texts = json.dumps([dict(each.arguments) for each in written], ensure_ascii=False)
    return not any(name in texts for name in names(format, FRAMES[format]))


def read(format: str, feeds: Any, tools: Tools, marks: Marks) -> Heard:
    frame = THOUGHTS[FRAMES[format]].frame(marks, thinking=False)
    stage = AnswerReader(frame, marks, OfferedCalls(CALLS[format], tools))
    heard = Heard()
    for text in feeds:
        heard.add(stage.feed(text))
    return heard.add(stage.flush())


@pytest.mark.slow
@pytest.mark.parametrize("format", CALLS)
@given(calls(), st.data())
@settings(max_examples=examples(60, 8))
def test_calls_come_back(
    format: str, case: tuple[Tools, list[WrittenCall]], data: st.DataObject
) -> None:
    tools, written = case
    if not clear(format, written):
        return
    spelled = CALLS[format].spell(written)
    for marks in (tokens(format, FRAMES[format]), SPELLED):
        text = marks.show(spelled)
        heard = read(format, [text], tools, marks)
        assert (heard.content.strip(), heard.reasoning) == ("", ""), spelled
        assert [name for name, _ in heard.calls] == [call.name for call in written], spelled
        for (_, arguments), call in zip(heard.calls, written, strict=True):
            assert json.loads(arguments) == dict(call.arguments), spelled
        assert read(format, cut(data, text), tools, marks) == heard
