"""Grammars of calls whose arguments are literals."""

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlxsrv.text.call_formats.calls import CallFormat, WrittenCall
from mlxsrv.text.call_formats.lark import Lark
from mlxsrv.text.call_formats.literal_calls import GEMMA4, LFM2, LITERAL_FORMATS, OLMO3
from mlxsrv.text.marks import SPELLED
from tests.support.reading import named


@pytest.mark.parametrize("format", [LFM2, OLMO3], ids=named)
def test_a_grammar_is_the_same_in_each_process(format: CallFormat) -> None:
    """Keys stand in the schema's order, not in that of a set: by a grammar's text the compiled one
    is found."""
    lark = Lark(SPELLED, json.dumps)
    format.rules([("f", {"properties": {key: {"type": "integer"} for key in "abcdef"}})], lark)
    for line in lark.grammar("").splitlines():
        keys = [int(key) for key in re.findall(r"\br([0-9]+) r[0-9]+", line)]
        assert keys == sorted(keys)


@pytest.mark.parametrize("format", [GEMMA4, LFM2], ids=named)
def test_a_grammar_bounds_lists(format: CallFormat) -> None:
    bounds: list[dict[str, Any]] = [
        {"maxItems": 1},
        {"minItems": 1, "maxItems": 2},
        {"minItems": None, "maxItems": 0},
    ]
    for bound in bounds:
        items = {"type": "array", "items": {"type": "integer"}}
        lark = Lark(SPELLED, json.dumps)
        schema = {"properties": {"a": {**items, **bound}}, "required": ["a"]}
        rules = format.rules([("f", schema)], lark)
        grammar = {"grammars": [{"lark_grammar": lark.grammar(rules.many)}]}
        matcher = LLMatcher(LLTokenizer("byte"), json.dumps(grammar), log_level=0)
        assert not matcher.get_error()
        for count in range(4):
            text = format.spell([WrittenCall("f", {"a": [7] * count})]).encode()
            holds = matcher.deep_copy().try_consume_tokens([*text]) == len(text)
            least = bound.get("minItems") or 0
            assert holds == (least <= count <= bound["maxItems"]), (bound, count)


@pytest.mark.parametrize("format", LITERAL_FORMATS, ids=named)
def test_a_grammar_has_each_definition_once(format: CallFormat) -> None:
    definitions: dict[str, Any] = {
        f"d{n}": {"properties": {key: {"$ref": f"#/$defs/d{n + 1}"} for key in "ab"}}
        for n in range(16)
    }
    definitions["d16"] = {"type": "integer"}
    lark = Lark(SPELLED, json.dumps)
    format.rules([("f", {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions})], lark)
    assert len(lark.grammar("")) < 60_000
