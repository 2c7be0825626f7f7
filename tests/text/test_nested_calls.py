"""Calls whose arguments are elements that nest."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsrv.text.call_formats.calls import Tools, WrittenCall
from mlxsrv.text.call_formats.lark import Lark
from mlxsrv.text.call_formats.nested_calls import MINIMAX_M3
from mlxsrv.text.marks import SPELLED
from tests.support.effort import examples
from tests.support.reading import CallGrammar, check_cuts, read, read_each_way, tokens

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
PLACE = {"type": "object", "properties": {"city": STRING, "zip": INTEGER}, "required": ["city"]}
TOOLS = Tools(
    {
        "f": {
            "type": "object",
            "properties": {
                "a": STRING,
                "n": INTEGER,
                "place": PLACE,
                "names": {"type": "array", "items": STRING},
                "places": {"type": "array", "items": PLACE},
                "any": {"type": "object"},
                "kind": {"enum": ["x", "xy", ""]},
                "maybe": {"type": ["string", "null"]},
            },
            "required": ["a", "place"],
        },
        "g": {},
    }
)
SIGN = "]<]minimax[>["


def signed(text: str) -> str:
    """The text with a sign for each ~."""
    return text.replace("~", SIGN)


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        (
            'Hi.\n~<tool_call>\n~<invoke name="f">~<a>x\n"y"~</a>~<n>3~</n>~</invoke>\n'
            '~<invoke name="g">~</invoke>\n~</tool_call>\n',
            ["Hi.", ("f", '{"a": "x\\n\\"y\\"", "n": 3}'), ("g", "{}")],
        ),
        (
            '~<tool_call>~<invoke name="f">~<place>\n~<city>007~</city>\n~<zip>5~</zip>~</place>'
            "~<names>~<item>1~</item>~<item>~</item>~</names>"
            "~<places>~<item>~<city>c~</city>~</item>~</places>~<any>~</any>~</invoke>",
            [
                (
                    "f",
                    '{"place": {"city": "007", "zip": 5}, "any": {}, "names": ["1", ""], '
                    '"places": [{"city": "c"}]}',
                )
            ],
        ),
        # What is repeated is a list, where it may be one.
        (
            '~<invoke name="f">~<names>1~</names>~<a>x~</a>~<names>b~</names>~<a>y~</a>'
            "~<any>~<k>1~</k>~<k>[2]~</k>~</any>~</invoke>z",
            [("f", '{"a": "x", "any": {"k": ["1", [2]]}, "names": ["1", "b"]}'), "z"],
        ),
        ('~<invoke name="f">~<names>~</names>~<maybe>null~</maybe>~</invoke>', [
            ("f", '{"maybe": null, "names": []}')]),
        ('~<invoke name="f">~<names>["a"]~</names>~<any>{"a": {}}~</any>~</invoke>', [
            ("f", '{"any": {"a": {}}, "names": ["a"]}')]),
        # Tools without a schema.
        ('~<invoke name="g">~<a>5~</a>~<b>{"c": 5}~</b>~</invoke>', [
            ("g", '{"a": "5", "b": {"c": 5}}')]),
        ('~<invoke name="h">~<a>~<b>x~</b>~</a>~</invoke>', [("h", '{"a": {"b": "x"}}')]),
        # Values that do not fit.
        ('~<invoke name="f">~<n>five~</n>~<place>here~</place>~</invoke>', [
            ("f", '{"n": "five", "place": "here"}')]),
        # Tags in strings.
        ('~<invoke name="f">~<a><b>~<i>~ </i>~</i> </a>~</a>~</invoke>', [
            ("f", json.dumps({"a": signed("<b>~<i>~ </i>~</i> </a>")}))]),
        # Tags that are missing, or have no sign.
        ('~<tool_call>\n<invoke name=f>~<a>x</a>~<n>6</n>~</invoke>\n</tool_call>', [
            ("f", '{"a": "x", "n": 6}')]),
        ("~<invoke name='f'>~<a>x~<n>6~<place>~<city>c~<zip>1~</place>~</tool_call>", [
            ("f", '{"a": "x", "n": 6, "place": {"city": "c", "zip": 1}}')]),
        ('~<tool_call>~<invoke name="f">~<a>x~</a>~<invoke name="g">~</invoke>~</tool_call>', [
            ("f", '{"a": "x"}'), ("g", "{}")]),
        ('~<tool_call>~<invoke name="f">~<a>x~</a>', [("f", '{"a": "x"}')]),
        ('~<tool_call>~<invoke name="f">~<a>x</a>', [("f", '{"a": "x"}')]),
        ('~<tool_call>~<invoke name="f">~<a>x</a', [("f", '{"a": "x</a')]),
        ('~<tool_call>~<invoke name="f">~<n>5~</', [("f", '{"n": 5')]),
        ('~<tool_call>~<invoke name="f">~<places>~<item>~<city>x', [
            ("f", '{"places": [{"city": "x"}]')]),
        ('~<tool_call>~<invoke name="g">~</invoke>\n~</tool', [("g", "{}")]),
        ("a~</invoke>~</tool_call>", ["a"]),
        # No calls.
        ("~ stands before each tag, ~<tool_call> too.", [
            signed("~ stands before each tag, ~<tool_call> too.")]),
        ("~<tool_call>\n~<a>", [signed("~<tool_call>\n~<a>")]),
        ("~<tool_call>\n~<invoke", [signed("~<tool_call>\n~<invoke")]),
        ('~<tool_call>~<invoke name="f">~</invoke>text', [("f", "{}"), "text"]),
    ],
)  # fmt: skip
def test_calls(text: str, heard: Any) -> None:
    assert read_each_way(MINIMAX_M3, signed(text), TOOLS) == heard


VALUES = {
    "a": st.text(),
    "n": st.integers(-(2**53), 2**53),
    "place": st.fixed_dictionaries({"city": st.text(), "zip": st.integers(0, 9)}),
    "names": st.lists(st.text()),
    "places": st.lists(st.fixed_dictionaries({"city": st.text()})),
    "kind": st.sampled_from(["x", "xy", ""]),
    "maybe": st.sampled_from(["y", None]),
}
CALLS = st.lists(
    st.one_of(
        st.fixed_dictionaries({}, optional=VALUES).map(
            lambda arguments: WrittenCall("f", arguments)
        ),
        st.just(WrittenCall("g", {})),
    ),
    min_size=1,
    max_size=3,
)


@given(CALLS)
@settings(max_examples=examples(100))
def test_calls_as_the_model_writes_them(calls: list[WrittenCall]) -> None:
    text = MINIMAX_M3.spell(calls)
    for marks in (SPELLED, tokens(MINIMAX_M3)):
        for feeds in ([marks.show(text)], marks.show(text)):
            heard = read(MINIMAX_M3, feeds, TOOLS, marks=marks)
            assert [(each[0], json.loads(each[1])) for each in heard] == [
                (call.name, dict(call.arguments)) for call in calls
            ]


def test_a_call_that_is_cut_anywhere_gives_the_beginning_of_the_whole_one() -> None:
    call = WrittenCall("f", {"a": "x</a>\n</b>", "names": ["a"], "place": {"city": "c"}, "n": 5})
    check_cuts(MINIMAX_M3, [call], TOOLS)


def test_a_grammar_holds_what_the_model_writes() -> None:
    place = {"city": "<b>"}
    full = {"a": "", "n": 5, "place": {**place, "zip": 1}, "names": ["x", ""], "places": [place]}
    full |= {"any": {}, "kind": "xy", "maybe": None}
    grammar = CallGrammar(MINIMAX_M3, [*TOOLS.schemas.items()])
    calls = [WrittenCall("f", {"a": "x", "place": place}), WrittenCall("g", {})]
    wrong: list[dict[str, Any]] = [
        {"a": "x"},
        {"a": "x", "place": {}},
        {"a": "x", "place": place, "kind": "z"},
    ]
    grammar.check(calls, [("h", {}), *(("f", each) for each in wrong)])
    text = MINIMAX_M3.spell([WrittenCall("f", full)])
    assert grammar.follows(grammar.rules.one, text.replace(signed("<any>~"), signed("<any>{}~")))
    assert grammar.follows(grammar.rules.behind[SIGN], signed('<invoke name="g">~</invoke>\n'))


def test_elements_nest_as_deep_as_they_may_and_no_deeper() -> None:
    text = signed('~<invoke name="g">' + "~<a>" * 2000)
    [call] = read(MINIMAX_M3, [text], TOOLS)
    assert call[0] == "g"


def test_a_list_has_as_many_items_as_its_schema_says() -> None:
    names = {"type": "array", "items": STRING, "minItems": 1, "maxItems": 2}
    grammar = CallGrammar(MINIMAX_M3, [("f", {"properties": {"names": names}})])
    taken = [grammar.takes(WrittenCall("f", {"names": ["x"] * count})) for count in range(4)]
    assert taken == [False, True, True, False]


def test_a_schema_that_refers_to_itself_has_few_rules() -> None:
    again: dict[str, Any] = {"$ref": "#/$defs/node"}
    members = dict.fromkeys("abcde", again)
    deep = again
    for _ in range(6):  # values below are JSON
        deep = {"type": "object", "properties": {"x": deep}}
    whole = {"properties": {"x": deep, **members}, "$defs": {"node": {"properties": members}}}
    lark = Lark(SPELLED, json.dumps)
    MINIMAX_M3.rules([("f", whole)], lark)
    assert lark.grammar("").count("\n") < 100
    taken = WrittenCall("f", {"a": {"b": {}}, "b": {"a": {"e": {"d": {}}}}})
    assert CallGrammar(MINIMAX_M3, [("f", whole)]).takes(taken)
