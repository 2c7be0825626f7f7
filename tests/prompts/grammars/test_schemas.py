"""A client's JSON schema, prepared for the compiler."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlxsrv.prompts.grammars.schemas import SchemaError, prepare
from mlxsrv.prompts.grammars.specs import GrammarRefused, GrammarSpec, tool_grammar
from mlxsrv.prompts.grammars.translation import translate

pytestmark = pytest.mark.usefixtures("near_sandbox")

Schema = dict[str, Any]
BYTES = LLTokenizer("byte")

A: Schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: Schema = {"type": "object", "properties": {"b": {"type": "integer"}}}


def accepted(spec: GrammarSpec, *texts: str) -> list[bool]:
    """Return those of the texts that the grammar describes."""
    matcher = LLMatcher(BYTES, translate(spec, {}), log_level=0)
    assert not matcher.get_error()
    fits = []
    for text in texts:
        tokens = list(text.encode())
        walker = matcher.deep_copy()
        fits.append(walker.try_consume_tokens(tokens) == len(tokens) and walker.is_accepting())
    return fits


def fits(schema: Schema, *values: Any) -> list[bool]:
    spec = GrammarSpec("json_schema", json.dumps(schema), compact=True)
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return accepted(spec, *(text.replace(", ", ",").replace(": ", ":") for text in texts))


def defines(schema: Schema) -> Schema:
    return {"$defs": {"I": schema}}


# Objects that list properties are closed.


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, True),
        (A | {"additionalProperties": True}, False),
        (A | {"additionalProperties": {"type": "integer"}}, False),
        (A | {"patternProperties": {"^m": {"type": "integer"}}}, False),
        (A | {"patternProperties": {"^n": {"type": "integer"}}}, True),
        ({"type": "object"}, False),
        ({"type": "object", "required": ["a"]}, False),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, True),
        ({"anyOf": [A, B]}, True),
        ({"anyOf": [A, B | {"additionalProperties": True}]}, False),
        ({"allOf": [A, B]}, True),
        ({"allOf": [A, B | {"additionalProperties": True}]}, False),
        ({"allOf": [A], "additionalProperties": True}, False),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, True),
    ],
)
def test_an_object_that_lists_its_properties_is_closed(schema: Schema, closed: bool) -> None:
    assert fits(schema, {"a": 1}, {"a": 1, "more": 2}) == [True, not closed]


@pytest.mark.parametrize(
    ("wrap", "around"),
    [
        (lambda inner: {"properties": {"x": inner}}, {"x": "?"}),
        (lambda inner: {"items": inner}, ["?"]),
        (lambda inner: {"prefixItems": [inner]}, ["?"]),
        (lambda inner: {"additionalProperties": inner}, {"k": "?"}),
        (lambda inner: {"patternProperties": {"^k$": inner}}, {"k": "?"}),
        (
            lambda inner: {"properties": {"x": {"$ref": "#/$defs/I"}}, "$defs": {"I": inner}},
            {"x": "?"},
        ),
        (lambda inner: {"properties": {"x": {"$ref": "#/properties/y"}, "y": inner}}, {"x": "?"}),
    ],
)
def test_objects_are_closed_wherever_they_are(wrap: Any, around: Any) -> None:
    kind = "array" if isinstance(around, list) else "object"
    texts = [json.dumps(around).replace('"?"', inner) for inner in ('{"a":1}', '{"a":1,"b":2}')]
    assert fits(wrap(A) | {"type": kind}, *texts) == [True, False]


@pytest.mark.slow
def test_what_is_combined_may_have_the_properties_of_all() -> None:
    both, more = {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}
    beside: Schema = {"properties": {"c": {"type": "integer"}}}
    for schema in (
        {"allOf": [A, B]},
        A | {"allOf": [B]},
        {"$ref": "#/$defs/A", "properties": B["properties"], "$defs": {"A": A}},
        {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": A, "B": B}},
    ):
        assert fits(schema, both, more) == [True, False]
    schema = {"type": "object", "allOf": [{"anyOf": [A, B]}, beside]}
    # Whoever is listed first comes first.
    assert fits(schema, {"a": 1, "c": 3}, {"b": 1, "c": 3}, both, more) == [
        True,
        True,
        False,
        False,
    ]


def test_a_definition_is_closed_where_it_stands_alone_though_combined_elsewhere() -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/A"}, "y": {"allOf": [{"$ref": "#/$defs/A"}, B]}},
        "$defs": {"A": A},
    }
    assert fits(schema, {"x": {"a": 1}, "y": {"a": 1, "b": 2}}) == [True]
    assert fits(schema, {"x": {"a": 1, "b": 2}}) == [False]


def test_an_empty_list_is_a_list() -> None:
    assert fits({"type": "object", "properties": {}}, {}, {"a": 1}) == [True, False]


def test_an_object_that_must_have_more_than_is_listed_is_open() -> None:
    schema = A | {"required": ["a"], "minProperties": 2}
    assert fits(schema, {"a": 1}, {"a": 1, "more": 2}) == [False, True]
    schema = A | {"required": ["a"], "minProperties": 1}  # which is listed
    assert fits(schema, {"a": 1}, {"a": 1, "more": 2}) == [True, False]


def test_a_closed_object_may_have_what_it_requires() -> None:
    assert fits(A | {"required": ["a", "z"]}, {"a": 1, "z": 0}, {"a": 1}) == [True, False]


def test_a_pattern_beside_leaves_its_keys_open() -> None:
    schema = {"allOf": [A, {"patternProperties": {"^x": {"type": "null"}}}]}
    assert fits(schema, {"a": 1, "x1": None}, {"a": 1, "x1": 2}, {"a": 1, "y": 2}) == [
        *(True, False, False)
    ]


def test_the_order_of_keywords_does_not_matter() -> None:
    """It does to llguidance, which applies an allOf where it stands."""
    pattern: Schema = {"patternProperties": {"^x": {"type": "null"}}}
    both: Schema = {"allOf": [{}]}
    for schema in ({**pattern, **both, **A}, {**A, **both, **pattern}, {**both, **A, **pattern}):
        assert fits(schema, {"x1": None}, {"a": 1}, {"y": 2}) == [True, True, False]


def test_the_parameters_of_tools_are_closed() -> None:
    spec = tool_grammar([("f", {"properties": A["properties"]})], "hermes", many=False)
    calls = [
        '<tool_call>\n{"name": "f", "arguments": ' + arguments + "}\n</tool_call>"
        for arguments in ('{"a":1}', "{}", '{"a":1,"b":2}')
    ]
    assert accepted(spec, *calls) == [True, True, False]


def test_each_of_many_tools_is_prepared() -> None:
    patterned: Schema = {"patternProperties": {"^a$": {"const": 1}}, "additionalProperties": False}
    tools = [("f", A), ("g", patterned), ("f", B), ("h", patterned)]
    spec = tool_grammar(tools, "hermes", many=False)
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in [
            ("g", '{"a":1}'),
            ("h", '{"a":1}'),
            ("f", '{"b":2}'),
            ("f", '{"c":2}'),
        ]
    ]
    assert accepted(spec, *calls) == [True, True, True, False]
    with pytest.raises(GrammarRefused, match="h: oneOf constraints are not supported"):
        translate(tool_grammar([*tools, ("h", {"oneOf": [A, B]})], "hermes", many=False), {})


@pytest.mark.slow
def test_one_of_is_as_disjoint_as_before_it_was_closed() -> None:
    one = {"oneOf": [A, B]}
    with pytest.raises(GrammarRefused, match="oneOf constraints are not supported"):
        fits(one, {})
    kinds = [
        {"type": "object", "properties": {"k": {"const": k}, k: True}, "required": ["k"]}
        for k in "xy"
    ]
    values = [{"k": "x", "x": 1}, {"k": "y", "x": 1}]
    assert fits({"oneOf": kinds}, *values) == [True, False]
    assert fits({"oneOf": [{"const": 10**30}, {"type": "null"}]}, None) == [True]


@pytest.mark.slow
def test_there_is_an_end_to_what_may_be_combined() -> None:
    parts: list[Schema] = [{"properties": {f"p{i}": {}}} for i in range(2000)]
    with pytest.raises(SchemaError, match="too much"):
        prepare({"allOf": parts})


# Numbers are exact or refused.


@pytest.mark.parametrize(
    "number", [2**53, -(2**53), 2**53 + 2, 2**60, -(2**60), 10**17, 2**63 - 1, 10**19, 10**22, 1e20]
)
@pytest.mark.slow
def test_a_constant_that_is_kept_is_exact(number: float) -> None:
    whole = int(number)
    values = [whole, whole + 1, whole - 1]
    assert fits({"const": number}, *values) == [True, False, False]
    assert fits({"enum": [1, number]}, *values) == [True, False, False]
    assert fits({"const": {"a": [number]}}, *({"a": [value]} for value in values))[:2] == [
        *(True, False)
    ]


@pytest.mark.parametrize(
    "schema",
    [
        *({"const": number} for number in (2**53 + 1, -(2**53) - 1, 2**63 + 1, 10**30 + 1, 1e23)),
        {"enum": [1, [2**53 + 1]]},
        {"const": {"a": {"b": 2**53 + 1}}},
        {"properties": {"a": {"type": "integer", "minimum": 2**53 + 1}}},
        {"type": "integer", "maximum": 2**53 + 1},
        {"type": "integer", "maximum": 1e20},
        {"type": "integer", "minimum": -(2**63)},
        {"type": "integer", "exclusiveMinimum": 2**53 + 2},
        {"type": "number", "maximum": 2**60},
        {"maximum": 2**53 + 1},
    ],
)
def test_a_number_that_would_be_rounded_is_refused(schema: Schema) -> None:
    with pytest.raises(SchemaError, match="cannot be kept exactly"):
        prepare(schema)


def test_a_format_without_a_grammar_is_an_annotation() -> None:
    for name in ("regex", "int32", "iri", "uri-reference", "json-pointer", "password", "cron", ""):
        assert fits({"type": "string", "format": name}, '"any text"') == [True], name
    of_parts = {"type": ["string", "null"], "minLength": 3, "format": "phone"}
    assert fits(of_parts, '"123"', '"12"', None) == [True, False, True]


def test_a_format_with_a_grammar_is_followed() -> None:
    """Also by a llguidance that knows fewer of them: then this fails."""
    examples = {
        "date-time": "2026-11-28T01:02:03Z",
        "time": "01:02:03Z",
        "date": "2026-11-28",
        "duration": "P3D",
        "email": "a@example.com",
        "hostname": "example.com",
        "ipv4": "127.0.0.1",
        "ipv6": "::1",
        "uuid": "123e4567-e89b-12d3-a456-426614174000",
        "uri": "https://example.com/",
    }
    for name, text in examples.items():
        schema = {"type": "string", "format": name}
        assert fits(schema, f'"{text}"', '"not this"') == [True, False], name


@pytest.mark.parametrize("bound", [2**53, 2**53 + 2, 10**17])
def test_a_bound_that_is_kept_is_exact(bound: int) -> None:
    around = [bound - 1, bound, bound + 1]
    assert fits({"type": "integer", "minimum": bound}, *around) == [False, True, True]
    assert fits({"type": "integer", "maximum": bound}, *around) == [True, True, False]
    assert fits({"type": "integer", "minimum": -bound}, *(-n for n in around)) == [
        True,
        True,
        False,
    ]


def test_an_int64_is_exact() -> None:
    schema = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
    assert fits(schema, 0, 2**63 - 1, 2**63) == [True, True, False]


def test_numbers_in_annotations_do_not_matter() -> None:
    notes = {"default": 2**53 + 1, "examples": [2**70], "title": "t", "$comment": "c"}
    schema = A | {"properties": {"a": {"type": "integer"} | notes, "default": {}}} | notes
    assert fits(schema, {"a": 1, "default": 5}) == [True]


# Classes of characters are ASCII.


@pytest.mark.parametrize(
    ("regex", "texts", "others"),
    [
        (r"\d", "09", "٣a"),
        (r"\D", "a٣", "5"),
        (r"\w", "aZ_9", "éß-"),
        (r"\W", "é- ", "a_"),
        (r"\s", " \t\n\r\f\v", "\u00a0\u2028\ufeffa"),
        (r"\S", "aé", " \t\u00a0\u2028\ufeff\x1c"),
        (r"[\d\-x]", "5-x", "٣w"),
        (r"[^\w\s]", "é-", "a \n"),
        (r"[\D]", "é", "5"),
        (r"\\|\^", "\\^", "d"),
    ],
)
@pytest.mark.slow
def test_classes_are_ascii_in_regexes_and_in_patterns(regex: str, texts: str, others: str) -> None:
    expected = [True] * len(texts) + [False] * len(others)
    assert accepted(GrammarSpec("regex", regex), *texts, *others) == expected
    for schema, quoted in (
        ({"type": "string", "pattern": f"^(?:{regex})$"}, "{}"),
        (
            {
                "type": "object",
                "patternProperties": {f"^(?:{regex})$": {"const": 1}},
                "additionalProperties": False,
            },
            "{{{}:1}}",
        ),
    ):
        texts_in = [quoted.format(json.dumps(char, ensure_ascii=False)) for char in texts + others]
        spec = GrammarSpec("json_schema", json.dumps(schema), compact=True)
        assert accepted(spec, *texts_in) == expected


def test_a_word_boundary_is_refused() -> None:
    with pytest.raises(GrammarRefused, match="lookarounds not supported"):
        translate(GrammarSpec("regex", r"\bfoo"), {})


# Nothing that is accepted gets stuck.


@pytest.mark.parametrize("pattern", ["^ab$", "^(ab|cd)$", "^.*$", "^a"])
@pytest.mark.parametrize(
    ("listed", "required", "additional"),
    [
        ({"ab": {"type": "string"}}, [], {"additionalProperties": False}),
        ({"ab": {"type": "string"}}, ["ab"], {"additionalProperties": False}),
        ({}, ["ab"], {"additionalProperties": False}),
        ({"ab": {"type": "string"}}, [], {}),
    ],
)
@pytest.mark.slow
def test_after_a_comma_there_is_always_a_key(
    listed: Schema, required: list[str], additional: Schema, pattern: str
) -> None:
    schema = {
        "type": "object",
        "properties": listed,
        "required": required,
        "patternProperties": {pattern: {"type": "string"}},
    } | additional
    spec = GrammarSpec("json_schema", json.dumps(schema), compact=True)
    matcher = LLMatcher(BYTES, translate(spec, {}), log_level=0)
    text = list(b'{"ab":"x"')
    assert matcher.try_consume_tokens(text) == len(text)
    if matcher.try_consume_tokens([ord(",")]):
        assert matcher.validate_tokens([ord('"')]) == 1


def test_where_there_may_be_no_key_after_a_comma_the_schema_is_refused() -> None:
    names: Schema = {"properties": {"ab": {}}, "patternProperties": {"^a[b]$": {}}}
    with pytest.raises(GrammarRefused, match="nothing may follow"):
        fits({"type": "object", "additionalProperties": False} | names, {})


def test_patterns_of_what_is_listed_elsewhere_are_its_schema() -> None:
    pattern = {"patternProperties": {"^a$": {"maximum": 5}}, "additionalProperties": False}
    schema = {"allOf": [A, pattern | {"type": "object"}]}
    assert fits(schema, {"a": 5}, {"a": 6}, {"a": 5, "b": 1}) == [True, False, False]


ENDLESS: Schema = {
    "type": "object",
    "properties": {"again": {"$ref": "#/$defs/endless"}},
    "required": ["again"],
}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/endless"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/endless"}]},
        {"allOf": [A, {"$ref": "#/$defs/endless"}]},
    ],
)
def test_what_nothing_finite_satisfies_is_refused(schema: Schema) -> None:
    with pytest.raises(SchemaError, match="nothing can satisfy it"):
        prepare(schema | {"$defs": {"endless": ENDLESS}})


def test_an_array_may_have_no_more_items_than_it_must_have() -> None:
    schema = {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1}
    assert fits(schema, [1], [1, 2], []) == [True, False, False]


def test_what_nothing_finite_satisfies_is_never_begun() -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/endless"}, "y": {"type": "null"}},
        "$defs": {"endless": ENDLESS},
    }
    assert fits(schema, {"y": None}, '{"x":') == [True, False]
    matcher = LLMatcher(
        BYTES, translate(GrammarSpec("json_schema", json.dumps(schema), compact=True), {})
    )
    assert matcher.try_consume_tokens(list(b'{"x')) == 2


def test_a_dead_end_that_random_texts_meet_is_refused() -> None:
    lark = 'start: "a" B\nB: /b/ & /c/'
    with pytest.raises(GrammarRefused):
        translate(GrammarSpec("lark", lark), {})
