"""Calls that are JSON objects, in every format that has them."""

import json
from typing import Any

import pytest

from mlxsrv.text.calls import WrittenCall
from mlxsrv.text.json_calls import ERNIE45, EXAONE4, HERMES, JsonCalls
from tests.support.reading import read_each_way, schemas

FORMATS = (HERMES, EXAONE4, ERNIE45)
TOOLS = schemas("f", "g")


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_calls_as_the_model_writes_them(format: JsonCalls) -> None:
    written = [
        WrittenCall("f", {"a": 'x\n"y" {}]é'}, "id0"),
        WrittenCall("g", {}, "id1"),
        WrittenCall("f", {"b": [1, {"c": None}]}, "id2"),
    ]
    for count in range(1, 4):
        heard = read_each_way(format, format.spell(written[:count]), TOOLS)
        expected = [(call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in written]
        assert heard == expected[:count]


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ('<tool_call>\n[{"name": "f"}, {"name": "g"}]\n</tool_call>', [("f", "{}"), ("g", "{}")]),
        ('<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>b', [("f", "{}"), ("g", "{}"), "b"]),
        ('<tool_call>[{"name": "f"}, 5]</tool_call>', [("f", "{}"), ", 5]"]),
        ('a<tool_call>[{"name": "f"}', ["a", ("f", "{}")]),
        ('<tool_call>{"f": {}}', ['<tool_call>{"f": {}}']),
    ],
)
def test_several_objects_between_one_pair_of_markers(text: str, heard: Any) -> None:
    assert read_each_way(HERMES, text, TOOLS) == heard
