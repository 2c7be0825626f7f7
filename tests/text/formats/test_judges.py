"""Calls as our formats write them are read alike by mlx-lm's parsers, where these are right."""

import importlib
import json
import pkgutil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import tool_parsers

from mlxsrv.text.call_formats.calls import Tools, WrittenCall
from mlxsrv.text.formats import CALLS
from mlxsrv.text.marks import SPELLED
from tests.support.effort import examples
from tests.text.formats.test_round_trips import read

FORMATS = {
    "function_gemma": "functiongemma",
    "gemma4": "gemma4",
    "glm47": "glm",
    "json_tools": "hermes",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "laguna": "glm",
    "longcat": "longcat",
    "minicpm5": "minicpm5",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral_args",
    "muse_spark": "muse",
    "pythonic": "lfm2",
    "qwen3_coder": "qwen_xml",
}
"""Our format for each of mlx-lm's parsers."""

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "n": {"type": "integer"},
        "flag": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
# Words only: the parsers strip values, end them at the first closer, or read digits as numbers.
WORDS = st.lists(st.sampled_from(["Paris", "é", "a-b", "x1"]), min_size=1).map(" ".join)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": WORDS,
        "n": st.integers(-99, 99),
        "flag": st.booleans(),
        "tags": st.lists(WORDS, min_size=1, max_size=3),
    },
)


def test_every_parser_of_mlx_lm_is_a_judge() -> None:
    assert {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)} == set(FORMATS)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@given(ARGUMENTS)
@settings(max_examples=examples(100, 20))
def test_a_parser_of_mlx_lm_reads_the_same(name: str, arguments: dict[str, Any]) -> None:
    if name == "function_gemma":  # it has no lists of strings
        arguments = {key: value for key, value in arguments.items() if key != "tags"}
    if name == "longcat" and not arguments:  # it reads no call without arguments
        return
    parser: Any = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    format = FORMATS[name]
    text = CALLS[format].spell([WrittenCall("f", arguments, "functions.f:0")])
    _, start, rest = text.partition(parser.tool_call_start)
    assert start
    body = rest.partition(parser.tool_call_end)[0] if parser.tool_call_end else rest
    if name == "minicpm5":  # its markers are part of the call
        body = start + body + parser.tool_call_end
    judged = parser.parse_tool_call(body, TOOLS)
    if isinstance(judged, list):
        [judged] = judged
    found = judged["arguments"]
    assert judged["name"] == "f"
    assert (json.loads(found) if isinstance(found, str) else found) == arguments
    [call] = read(format, [text], Tools({"f": SCHEMA}), SPELLED).calls
    assert (call[0], json.loads(call[1])) == ("f", arguments)
