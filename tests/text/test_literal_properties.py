"""Random calls whose arguments are literals, and random texts that are almost calls."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tool_parsers import gemma4, pythonic

from mlxsrv.text.call_formats.calls import CallFormat, Tools, WrittenCall
from mlxsrv.text.call_formats.literal_calls import GEMMA4, LFM2, LITERAL_FORMATS
from mlxsrv.text.marks import SPELLED
from tests.support.cuts import cut
from tests.support.effort import examples
from tests.support.reading import CallGrammar, named, read, tokens
from tests.text.test_literal_calls import TOOLS

TEXTS = st.one_of(
    st.text(max_size=12),
    st.lists(
        st.sampled_from([*"\n '\"\\{}[]()<>=,:x", "é", "null", "007", "a=", ", b='", "')]"]),
        max_size=8,
    ).map("".join),
)
KEYS = st.sampled_from(["a", "b1", "c_d", "path", "Text", "class"])
SCALARS = st.one_of(
    TEXTS,
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(-1e6, 1e6, allow_subnormal=False),
)
VALUES = st.recursive(
    SCALARS | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
ANYTHING = Tools({"f": {}, "g": {}})


def only_call(format: CallFormat, text: str) -> Any:
    heard = read(format, [text], ANYTHING)
    assert len(heard) == 1
    return heard[0][0], json.loads(heard[0][1])


@given(st.dictionaries(KEYS, VALUES, max_size=4))
@settings(max_examples=examples(150))
def test_python_is_read_as_python_reads_it(arguments: dict[str, Any]) -> None:
    body = ", ".join(f"{key}={value!r}" for key, value in arguments.items() if key != "class")
    text = f"<|tool_call_start|>[f({body})]<|tool_call_end|>"
    parsed = pythonic.parse_tool_call(f"[f({body})]")
    assert only_call(LFM2, text) == (parsed["name"], parsed["arguments"])


@given(st.dictionaries(KEYS, SCALARS | st.lists(SCALARS, max_size=3), min_size=1, max_size=4))
@settings(max_examples=examples(150))
def test_gemma_is_read_as_mlx_lm_reads_it(arguments: dict[str, Any]) -> None:
    if "<" in json.dumps(arguments) or "\x00" in str(arguments):
        return
    text = GEMMA4.spell([WrittenCall("f", arguments)])
    parsed: Any = gemma4.parse_tool_call(text.removeprefix("<|tool_call>"))
    assert only_call(GEMMA4, text) == (parsed["name"], parsed["arguments"])


@st.composite
def typed(draw: st.DrawFn, depth: int = 2) -> tuple[Any, st.SearchStrategy[Any]]:
    """A schema, and a strategy for its values."""
    kinds: list[tuple[Any, st.SearchStrategy[Any]]] = [
        ({"type": "string"}, st.sampled_from(["", "x", "a b\nc", 'it\'s "x"'])),
        ({"enum": ["a", "b c", 3, None]}, st.sampled_from(["a", "b c", 3, None])),
        ({"type": "integer", "minimum": 0}, st.integers(0, 99)),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, st.sampled_from([True, None])),
        ({"$ref": "#/$defs/n"}, st.sampled_from(["x", 1.5])),
        ({}, st.sampled_from(["x", 5, None, False])),
    ]
    kind = draw(st.integers(0, len(kinds) + (1 if depth else -1)))
    if kind < len(kinds):
        return kinds[kind]
    schema, values = draw(typed(depth=depth - 1))
    if kind == len(kinds):
        return {"type": "array", "items": schema, "maxItems": 2}, st.lists(values, max_size=2)
    return {"type": "object", "properties": {"k": schema}}, st.fixed_dictionaries({"k": values})


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema of arguments, and such arguments in an order of their own."""
    members = draw(st.dictionaries(KEYS, typed(), max_size=4))
    required = draw(st.sets(st.sampled_from(sorted(members)))) if members else set()
    given_keys = [key for key in members if key in required or draw(st.booleans())]
    schema = {
        "type": "object",
        "properties": {key: schema for key, (schema, _) in members.items()},
        "required": sorted(required),
        "$defs": {"n": {"type": ["string", "number"]}},
        "additionalProperties": False,
    }
    return schema, {key: draw(members[key][1]) for key in draw(st.permutations(given_keys))}


@pytest.mark.slow
@pytest.mark.parametrize("format", LITERAL_FORMATS, ids=named)
@given(calls())
@settings(max_examples=examples(60))
def test_a_grammar_holds_all_calls_of_a_schema(
    format: CallFormat, call: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    schema, arguments = call
    call_of = WrittenCall("f", arguments)
    grammar = CallGrammar(format, [("f", schema)])
    assert grammar.follows(grammar.rules.one, format.spell([call_of])), call_of


NOISE = ["call:", "weather", "now", "run", "f", "(", ")", "[", "]", "{", "}", ":", "=", ",", " "]
NOISE += ["\n", "'", '"', "'''", "\\", "\\u00", "\\ud83d", "e9", "3", "-1.5", "07", "True", "null"]
NOISE += ["city", "days", "opts", "city:", "city=", '"city":', "days=", "x y", "é", "/", ";"]


@pytest.mark.slow
@pytest.mark.parametrize("format", LITERAL_FORMATS, ids=named)
@given(st.data())
@settings(max_examples=examples(300))
def test_reading_does_not_depend_on_how_a_text_is_split(
    format: CallFormat, data: st.DataObject
) -> None:
    marks = data.draw(st.sampled_from([SPELLED, tokens(format)]))
    noise = [*NOISE, *format.marks, *format.marks, *format.openers]
    begun = data.draw(st.sampled_from(["", *(f"{each}call:weather{{" for each in format.openers)]))
    begun = data.draw(st.sampled_from([begun, *(f"{each}[run(" for each in format.openers), "["]))
    pieces: Sequence[str] = data.draw(st.lists(st.sampled_from(noise), max_size=14))
    text = marks.show(begun + "".join(pieces))
    for cut_off in (False, True):
        whole = read(format, [text], TOOLS, marks=marks, cut=cut_off)
        assert read(format, text, TOOLS, marks=marks, cut=cut_off) == whole
        assert read(format, [*cut(data, text)], TOOLS, marks=marks, cut=cut_off) == whole
