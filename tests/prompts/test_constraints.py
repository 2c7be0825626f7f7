"""The constraints that requests ask for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mlxsrv.errors import UnsupportedParameter
from mlxsrv.generation.spec import ChatPrompt
from mlxsrv.prompts.constraints import ConstraintSpec, chat_constraint, text_constraint
from mlxsrv.text.call_formats.calls import Tools
from mlxsrv.text.call_formats.json_calls import HERMES
from mlxsrv.text.reader import OfferedCalls
from mlxsrv.wire.openai.requests import CHAT_REQUESTS, COMPLETION_REQUESTS

JSON = OfferedCalls(HERMES, Tools({}))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(calls: OfferedCalls | None = None, **fields: Any) -> ConstraintSpec | None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    request, _ = CHAT_REQUESTS.decode(msgspec.json.encode(body))
    spec = request.spec()
    assert isinstance(spec.prompt, ChatPrompt)
    return chat_constraint(spec, spec.prompt, calls)


def text(**fields: Any) -> ConstraintSpec | None:
    request, _ = COMPLETION_REQUESTS.decode(msgspec.json.encode({"prompt": "x", **fields}))
    return text_constraint(request.spec())


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def test_nothing_is_bound_unless_asked() -> None:
    assert text() is None
    assert chat() is None
    assert chat(JSON, tools=[tool("f")]) is None
    assert chat(response_format={"type": "text"}) is None


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("guided_regex", "a+", "regex"),
        ("guided_choice", ["a", "b"], "choice"),
        ("guided_grammar", 'start: "a"', "lark"),
        ("guided_json", SCHEMA, "json_schema"),
        ("guided_json", '{"type": "object"}', "json_object"),
        ("guided_grammar", 'a ::= "b"\n root::= a', "gbnf"),
        ("grammar", 'root ::= "a"', "gbnf"),
        ("grammar", 'start: "root ::= a"', "lark"),
        ("json_schema", SCHEMA, "json_schema"),
    ],
)
def test_each_guided_field_is_a_kind_of_grammar(field: str, value: Any, kind: str) -> None:
    for guide in (text(**{field: value}), chat(**{field: value})):
        assert guide is not None
        assert (guide.spec.kind, guide.param) == (kind, field)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("regex", "a+", "regex"),
        ("choice", ["a", "b"], "choice"),
        ("grammar", 'start: "a"', "lark"),
        ("grammar", 'root ::= "a"', "gbnf"),
        ("json", SCHEMA, "json_schema"),
        ("json_object", True, "json_object"),
    ],
)
def test_each_field_of_structured_outputs_is_a_kind_of_grammar(
    field: str, value: Any, kind: str
) -> None:
    for guide in (text(structured_outputs={field: value}), chat(structured_outputs={field: value})):
        assert guide is not None
        assert (guide.spec.kind, guide.param) == (kind, f"structured_outputs.{field}")


def test_json_may_be_compact() -> None:
    for field, value in (("json", {"type": "object"}), ("json_object", True)):
        guide = text(structured_outputs={field: value, "disable_any_whitespace": True})
        assert guide is not None
        assert (guide.spec.kind, guide.spec.compact) == ("json_schema", True)


def test_a_response_format_is_json() -> None:
    guide = chat(response_format={"type": "json_object"})
    assert guide is not None
    assert (guide.spec.kind, guide.param) == ("json_object", "response_format")
    guide = chat(response_format=schema_format(SCHEMA))
    assert guide is not None
    assert guide.spec.kind == "json_schema"
    assert msgspec.json.decode(guide.spec.text) == SCHEMA


def test_a_forced_call_is_one_of_the_tools_or_the_one_that_is_named() -> None:
    tools = [tool("f"), tool("g")]
    required = chat(JSON, tools=tools, tool_choice="required")
    named = chat(JSON, tools=tools, tool_choice={"type": "function", "function": {"name": "g"}})
    assert required is not None
    assert named is not None
    assert required.param == named.param == "tool_choice"
    assert required.spec.kind == named.spec.kind == "tool"
    assert '"f"' in required.spec.text
    assert '"f"' not in named.spec.text


def test_a_call_of_an_unknown_format_cannot_be_forced() -> None:
    with pytest.raises(UnsupportedParameter) as error:
        chat(None, tools=[tool("f")], tool_choice="required")
    assert error.value.param == "tool_choice"


def test_a_format_beside_tools_leaves_room_for_calls() -> None:
    guide = chat(JSON, tools=[tool("f")], response_format=schema_format(SCHEMA))
    assert guide is not None
    assert (guide.spec.kind, guide.param) == ("tool", "response_format")
    with pytest.raises(UnsupportedParameter) as error:
        chat(JSON, tools=[tool("f")], guided_regex="a")
    assert error.value.param == "guided_regex"
