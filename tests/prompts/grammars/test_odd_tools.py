"""Tools out of the ordinary: no format crashes on one, and the others are held all the same."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mlxsrv.errors import InvalidRequest
from mlxsrv.prompts.grammars.specs import each_call, tool_grammar
from mlxsrv.text.call_formats.calls import WrittenCall
from mlxsrv.text.formats import CALLS
from tests.prompts.grammars.test_call_formats import frame_of, model

pytestmark = pytest.mark.usefixtures("near_sandbox")

TEXT = {"type": "string"}
FORMATS = ["qwen_xml", "kimi_k3", "minicpm5", "minimax_m3", "gemma4", "lfm2", "hermes"]
ITEMS = {"type": "array", "items": TEXT}


def of(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


ODD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "null where a list belongs": {"properties": {"a": TEXT}, "required": None},
    "a required key twice": {"properties": {"a": TEXT}, "required": ["a", "a"]},
    "true where a list belongs": {"properties": {"a": TEXT}, "required": True},
    "null where an object belongs": {"properties": None},
    "true": of(True),
    "a key that needs quotes": {"properties": {'a "b> <c': TEXT}},
    "a key that is empty": {"properties": {"": TEXT}},
    "a pattern that looks ahead": of({"type": "string", "pattern": "^(?!x).*$"}),
    "a pattern that is none": of({"type": "string", "pattern": "["}),
    "a text that cannot be": of({"type": "string", "minLength": 5, "maxLength": 2}),
    "bounds that are none": of({**ITEMS, "minItems": None, "maxItems": "2"}),
    "a list that cannot be": of({**ITEMS, "minItems": 3, "maxItems": 1}),
    "a reference to nowhere": of({"$ref": "#/$defs/none"}),
    "a reference to itself": of({"$ref": "#"}),
    "a type that is none": of({"type": "any"}),
}
GOOD = {"properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize("name", FORMATS)
def test_the_calls_of_other_tools_are_held(name: str, caplog: pytest.LogCaptureFixture) -> None:
    drawn, _ = model(name)
    call = CALLS[name].spell
    for odd, schema in ODD.items():
        tools = [("odd", schema), ("good", GOOD)]
        with caplog.at_level(logging.WARNING, "mlxsrv"):
            compiled = drawn.grammars.compile_call(each_call(tools, name), param="tools")
        assert compiled is not None, (odd, caplog.messages)
        assert "tool calls not enforced" not in caplog.messages, odd
        for n, follows in ((7, True), ("seven", False)):
            grammar = compiled.begin()
            text = call([WrittenCall("good", {"n": n})])
            assert grammar.skip(drawn.encode(text)[:-1]) == follows, (odd, n)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_must_come_is_held_or_refused_by_the_tools_name(name: str) -> None:
    drawn, _ = model(name)
    for odd, schema in ODD.items():
        spec = tool_grammar([("odd", schema)], name, many=False, thoughts=frame_of(name).name)
        refused = ""
        try:
            drawn.grammars.compile(spec, param="tools")
        except InvalidRequest as error:
            refused = error.message
        assert not refused or refused.startswith("tools: odd: "), odd
