"""Arguments as text become JSON by the tool's schema."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsrv.text.call_formats.values import Argument, ArgumentTypes, escape
from tests.support.effort import examples

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
OBJECT, LIST, FLAG = {"type": "object"}, {"type": "array"}, {"type": "boolean"}
MAYBE = {"anyOf": [STRING, {"type": "null"}]}
EITHER = {"type": ["integer", "string"]}
ANY: dict[str, Any] = {}


def argument(schema: Any, **definitions: Any) -> Argument:
    return ArgumentTypes({"properties": {"a": schema}, "$defs": definitions}).argument("a")


def test_values_by_their_schemas() -> None:
    for schema, text, value in [
        (STRING, "007", "007"),
        (STRING, " null\n", " null\n"),
        (STRING, '{"a": "\x00\\"}', '{"a": "\x00\\"}'),
        ({"enum": ["a", "b"]}, "a", "a"),
        ({"const": "5"}, "5", "5"),
        (INTEGER, "5", 5),
        (INTEGER, "\n5 ", 5),
        (INTEGER, "five", "five"),
        (INTEGER, "007", "007"),
        (INTEGER, "", ""),
        (INTEGER, '"5"', "5"),
        (NUMBER, "-1.5e3", -1500.0),
        (NUMBER, "+2", 2),
        (NUMBER, "NaN", "NaN"),
        (NUMBER, "1e999", "1e999"),
        (FLAG, "True", True),
        (FLAG, "false", False),
        (FLAG, "yes", "yes"),
        ({"type": "null"}, "None", None),
        (OBJECT, '{"a": {"b": [1, "2"]}}', {"a": {"b": [1, "2"]}}),
        (OBJECT, "{'a': True, \"n\": None, 1: (2, -3.5)}", {"a": True, "n": None, "1": [2, -3.5]}),
        (OBJECT, "{'a': true, 'b': [null]}", {"a": True, "b": [None]}),
        (OBJECT, '{"a": "x\ny"}', {"a": "x\ny"}),
        (OBJECT, "{a: 1}", "{a: 1}"),
        (OBJECT, "dict(a=1)", "dict(a=1)"),
        (OBJECT, "{**{}}", "{**{}}"),
        (OBJECT, '{"a": 1', '{"a": 1'),
        (LIST, "[" * 5000, "[" * 5000),
        (LIST, "['x', 1e999]", "['x', 1e999]"),
        (LIST, r'["\ud800"]', r'["\ud800"]'),
        (LIST, r"['C:\dir\n']", ["C:\\dir\n"]),
        (LIST, "b'x'", "b'x'"),
        (LIST, "-'x'", "-'x'"),
        (MAYBE, "null", None),
        (MAYBE, "None", None),
        (MAYBE, "5", "5"),
        (MAYBE, '"x"', '"x"'),
        (MAYBE, " x ", " x "),
        (EITHER, "5", 5),
        (EITHER, "5.0", 5.0),
        (EITHER, "5.5", "5.5"),
        (EITHER, "true", "true"),
        (EITHER, "[" * 5000, "[" * 5000),
        ({"enum": ["auto", 1, None]}, "1", 1),
        ({"enum": ["auto", 1, None]}, "auto", "auto"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"oneOf": [LIST, STRING]}, '["x"]', ["x"]),
        ({"oneOf": [LIST, STRING]}, '{"x": 1}', '{"x": 1}'),
        (ANY, "5", "5"),
        (ANY, "true", "true"),
        (ANY, '{"a": 1}', {"a": 1}),
        (ANY, "[1]", [1]),
        (ANY, "[1", "[1"),
        (True, '"x"', '"x"'),
        ({"description": "anything"}, "null", "null"),
    ]:
        assert json.loads(argument(schema).json(text)) == value, (schema, text)


def test_kinds_of_schemas() -> None:
    text = {"type": "string", "description": "a name"}
    for schema, kind in [
        (STRING, "text"),
        ({"type": ["string"]}, "text"),
        ({"enum": ["a"]}, "text"),
        ({"enum": []}, "mixed"),
        ({"type": "string", "enum": ["a", None]}, "text"),
        ({"type": "string", "enum": [1]}, "text"),
        ({"pattern": "a+"}, "text"),
        ({"maximum": 5}, "other"),
        ({"properties": {"a": {}}}, "other"),
        ({"items": STRING}, "other"),
        ({"additionalProperties": False}, "mixed"),
        ({"$ref": "#/$defs/text"}, "text"),
        ({"$ref": "#/$defs/maybe"}, "mixed"),
        ({"$ref": "#/$defs/again"}, "text"),
        ({"$ref": "#/$defs/number", "description": "so many"}, "other"),
        ({"$ref": "#/$defs/loop"}, "mixed"),
        ({"$ref": "#/$defs/none"}, "mixed"),
        ({"$ref": "https://example.com/schema"}, "mixed"),
        ({"$ref": "#/$defs/maybe/anyOf/0"}, "text"),
        ({"$ref": "#/$defs/maybe/anyOf/9"}, "mixed"),
        ({"allOf": [text]}, "text"),
        ({"allOf": [EITHER, STRING]}, "text"),
        ({"allOf": [EITHER, INTEGER]}, "other"),
        ({"allOf": [NUMBER, INTEGER]}, "other"),
        ({"allOf": [STRING, INTEGER]}, "mixed"),
        ({"type": "string", "anyOf": [{"enum": ["a"]}, {"pattern": "b"}]}, "text"),
        ({"type": "string", "anyOf": [{"maxLength": 5}, {"format": "date"}]}, "text"),
        ({"anyOf": [INTEGER, FLAG]}, "other"),
        ({"anyOf": [INTEGER, {}]}, "mixed"),
        ({"type": "text"}, "mixed"),
        ({"type": 5, "enum": "a", "anyOf": {}, "properties": []}, "mixed"),
    ]:
        found = argument(
            schema,
            text=text,
            number=NUMBER,
            maybe=MAYBE,
            again={"$ref": "#/$defs/text"},
            loop={"anyOf": [{"$ref": "#/$defs/loop"}, INTEGER]},
        )
        assert found.kind == kind, schema


def test_arguments_are_found_in_all_that_a_tool_combines() -> None:
    tool = {
        "type": "object",
        "properties": {"a": STRING},
        "allOf": [{"$ref": "#/definitions/more"}],
        "anyOf": [{"properties": {"c": STRING}}, {"properties": {"c": INTEGER, "d": INTEGER}}],
        "additionalProperties": FLAG,
        "definitions": {"more": {"properties": {"a": {"maxLength": 5}, "b": INTEGER}}},
    }
    types = ArgumentTypes(tool)
    for key, text, value in [("a", "5", "5"), ("b", "5", 5), ("c", "5", 5), ("c", "x", "x")]:
        assert json.loads(types.argument(key).json(text)) == value, key
    assert [types.argument(key).kind for key in "abcde"] == [
        *("text", "other", "mixed", "other", "other")
    ]
    assert types.argument("a") is types.argument("a")
    needs = [{"required": ["a"]}, {"required": ["a", "b"]}]
    assert ArgumentTypes({"allOf": needs}).whole.required == {"a", "b"}
    assert ArgumentTypes({"anyOf": needs}).whole.required == {"a"}
    assert ArgumentTypes({}).argument("a").kind == "mixed"
    assert ArgumentTypes({"$ref": "#"}).argument("a").kind == "mixed"


def test_values_in_values() -> None:
    tree: dict[str, Any] = {"$ref": "#/$defs/tree"}
    node = {
        "type": "object",
        "properties": {"name": STRING, "children": {"type": "array", "items": tree}},
        "additionalProperties": INTEGER,
    }
    found = argument(tree, tree=node)
    for _ in range(3):
        assert found.types == {"object"}
        assert [found.member(key).kind for key in ("name", "x")] == ["text", "other"]
        assert found.member("children").types == {"array"}
        found = found.member("children").item()
    pair = argument({"type": "array", "prefixItems": [STRING, INTEGER]})
    assert pair.item().types == {"string", "integer"}
    assert argument(LIST).item().kind == argument(OBJECT).member("b").kind == "mixed"


SCHEMAS = st.recursive(
    st.sampled_from([STRING, INTEGER, NUMBER, FLAG, OBJECT, LIST, ANY, MAYBE, EITHER])
    | st.sampled_from([{"$ref": "#"}, {"$ref": "#/properties/a"}, {"enum": ["a", 1]}])
    | st.booleans(),
    lambda inner: st.builds(
        lambda how, parts: {how: parts},
        st.sampled_from(["anyOf", "oneOf", "allOf"]),
        st.lists(inner, max_size=3),
    ),
    max_leaves=8,
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(SCHEMAS, st.text() | JSON.map(json.dumps) | JSON.map(repr))
@settings(max_examples=examples(300))
def test_any_text_becomes_json(schema: Any, text: str) -> None:
    found = argument(schema)
    value = msgspec.json.decode(found.json(text))
    if found.kind == "text":
        assert value == text


@given(JSON)
@settings(max_examples=examples(300))
def test_values_come_back(value: Any) -> None:
    for schema in (OBJECT, LIST, NUMBER, FLAG, {"type": "null"}):
        for written in (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value)):
            assert json.loads(argument(schema).json(written)) == value


@given(st.lists(st.text()))
def test_escapes_of_parts_are_joined(parts: list[str]) -> None:
    assert json.loads('"' + "".join(map(escape, parts)) + '"') == "".join(parts)


@pytest.mark.parametrize("depth", [30])
def test_references_in_references_are_looked_up_once_each(depth: int) -> None:
    definitions: dict[str, Any] = {"d0": STRING}
    for number in range(depth):
        reference = {"$ref": f"#/$defs/d{number}"}
        definitions[f"d{number + 1}"] = {"anyOf": [reference, reference]}
    assert argument({"$ref": f"#/$defs/d{depth}"}, **definitions).kind == "text"
