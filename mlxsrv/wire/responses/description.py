"""Rules of requests that the types of their Structs cannot say, for `/openapi.json`."""

from __future__ import annotations

from typing import Any

from mlxsrv.wire.responses.items import ITEM_KINDS
from mlxsrv.wire.responses.requests import NEUTRAL
from mlxsrv.wire.responses.tools import CustomTool, FunctionTool, NamespaceTool

Schemas = dict[str, dict[str, Any]]

DESCRIBED = (*ITEM_KINDS, FunctionTool, CustomTool, NamespaceTool)
"""Types of items and tools, which are decoded apart from their request."""

_GIVEN = {"not": {"type": "null"}}


def describe_requests(schemas: Schemas) -> None:
    """Add the forms of items and tools, and the rules that fields follow together."""
    request = schemas["ResponsesRequest"]
    fields = request["properties"]
    fields["input"] = {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": _any(*ITEM_KINDS), "maxItems": 10_000},
            {"type": "null"},
        ],
        "description": "Items of other types are left out.",
    }
    for tools, kinds in (
        (fields["tools"], (FunctionTool, CustomTool, NamespaceTool)),
        (schemas["NamespaceTool"]["properties"]["tools"], (FunctionTool, CustomTool)),
    ):
        tools["description"] = "Tools of other types are left out."
        [array] = [each for each in tools.get("anyOf", [tools]) if each.get("type") == "array"]
        array["items"] = _any(*kinds)
    for name, values in NEUTRAL.items():
        fields[name] = {"enum": list(values), "description": "No other is supported."}
    fields["max_output_tokens"]["description"] = "-1: none is given."
    fields["steering"]["propertyNames"] = {"pattern": "^(0|[1-9][0-9]{0,8})$"}
    fields["steering"]["description"] = "Not with `profile`."
    fields["steering_mode"]["description"] = "Only with `steering`."
    request["anyOf"] = [
        {"properties": {name: _GIVEN}, "required": [name]}
        for name in ("input", "previous_response_id")
    ]
    part = schemas["ItemPart"]
    part["properties"] |= {
        "type": {"enum": ["input_text", "output_text", "summary_text", "reasoning_text"]},
        "text": {"type": "string"},
    }
    part["required"] = ["type", "text"]


def _any(*kinds: type[Any]) -> dict[str, Any]:
    return {"anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]}
