"""Random grammars lead to an end: those that were once stuck, and a few of all that there are.

`GRAMMARS` says how many (40): ten thousand take half an hour.
"""

from __future__ import annotations

import json
import os

import pytest

from mlxsrv.errors import InvalidRequest
from mlxsrv.prompts.grammars.specs import GrammarSpec
from tests.fuzz.grammars import check, judge, writer

pytestmark = pytest.mark.usefixtures("near_sandbox")

COUNT = int(os.environ.get("GRAMMARS", "40"))


@pytest.mark.slow
def test_random_grammars_lead_to_texts_of_theirs() -> None:
    found = [check(seed) for seed in range(COUNT)]
    assert sum(each.startswith("accepted") for each in found) > COUNT / 2


@pytest.mark.parametrize(
    "schema",
    [
        # One option forbids what the other lists, once both are closed.
        {"oneOf": [{"type": "object", "required": ["x"]}, {"type": "object", "properties": {}}]},
        # The patterns are not disjoint, so the options cannot be compared as they were.
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"": {"patternProperties": {"^[ab]?$": {}, "^a{1,2}$": {}}}},
                    "required": [],
                },
                {"type": "object", "required": ["ab"]},
            ],
            "$defs": {"names": {"required": ["a", "b", "aa", ""]}},
        },
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "ab": {"type": "string"}},
            "patternProperties": {"^(a|ab)$": {"maxLength": 2}},
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"a": {"type": "null"}},
            "patternProperties": {"": False},
        },
    ],
)
def test_what_was_once_wrong_is_refused_or_right(schema: dict[str, object]) -> None:
    spec = GrammarSpec("json_schema", json.dumps(schema))
    for seed in range(20):
        try:
            text, failure = writer().write(spec, seed)
        except InvalidRequest:
            return
        assert (failure, judge(spec, text or "")) == ("", None)
