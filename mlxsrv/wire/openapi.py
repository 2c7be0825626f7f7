"""The OpenAPI 3.1 document for `/openapi.json`, made from the operations and their types.

Rules that the types of a Struct cannot express (which fields go together, the forms of a prompt)
are added here, so that the server understands each body that the schemas allow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct

from mlxsrv.generation.status import Health
from mlxsrv.version import __version__
from mlxsrv.wire.anthropic.blocks import BLOCKS
from mlxsrv.wire.management import Problem
from mlxsrv.wire.ollama.requests import OllamaPullRequest, OllamaShowRequest
from mlxsrv.wire.openai import (
    embeddings,
    forms,
    generation_request,
    infill,
    requests,
    tokens,
)
from mlxsrv.wire.operation import Operation
from mlxsrv.wire.responses import description
from mlxsrv.wire.responses.requests import ResponsesRequest

Schema = dict[str, Any]


_STATUS = {
    400: "The request is wrong; `param` says where.",
    401: "The key is missing or wrong.",
    403: "Web pages of other origins, and hosts of other names, are not answered.",
    404: "There is no such model, no such thing, or no such path.",
    405: "The path does not answer this method.",
    408: "The body did not arrive in time.",
    409: "What is there stands against it.",
    413: "The body is too large.",
    429: "More requests than the server allows one client.",
    431: "The headers are too large.",
    500: "A bug; the log says more under the request id.",
    503: "The server is busy, cannot load the model, or is shutting down.",
    504: "The request's time was over before there was any text.",
    507: "The model does not fit, even if all others that may be unloaded are.",
    529: "The server is busy or is shutting down.",
}


def document(operations: Sequence[Operation], *, prefix: str = "") -> dict[str, Any]:
    """The OpenAPI document of an app.

    Args:
        operations: what the app serves.
        prefix: the path where the app is mounted, as ASGI has it: not quoted.
    """
    paths: dict[str, Schema] = {}
    for each in operations:
        paths.setdefault(each.described_path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlxsrv",
            "version": __version__,
            "description": "A server for MLX language models, with the APIs of OpenAI, Anthropic "
            "and Ollama. What is under /v1 is served without it, too.",
        },
        "servers": [{"url": quote(prefix) or "/"}],
        "paths": paths,
        "components": {
            "schemas": _schemas(operations),
            "headers": _HEADERS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


# Operations.

_HEADERS = {
    "X-Request-ID": {
        "description": "The client's own id of the request, or a new one; the log has it, too.",
        "schema": {"type": "string"},
    },
    "X-Ignored-Params": {
        "description": "Fields of the request that mean nothing here.",
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds after which to try again.",
        "schema": {"type": "integer"},
    },
}


def _operation(operation: Operation) -> Schema:
    described: Schema = {"operationId": operation.id, "summary": operation.summary}
    if operation.description:
        described["description"] = operation.description
    parameters = [*_path_parameters(operation.described_path), *_query_parameters(operation.query)]
    if parameters:
        described["parameters"] = parameters
    if not operation.open:  # {}: a server without keys needs none
        described["security"] = [{}, {"bearer": []}, {"key": []}]
    if operation.asks is not None:
        described["requestBody"] = {
            "required": _needs_body(operation.asks),
            "content": {"application/json": {"schema": _schema(operation.asks)}},
        }
    described["responses"] = {str(operation.status): _answer(operation)} | {
        str(status): _error(status, operation)
        for status in sorted({*operation.errors, *_guarding(operation)})
    }
    if operation.answer is Health:  # a server that is not well answers in the same form
        described["responses"]["503"] = _answer(operation, "No; the status tells why.")
    return described


def _needs_body(kind: type[Struct]) -> bool:
    """Whether an empty object is refused. Some kinds need one of several fields."""
    required = any(field.required for field in msgspec.structs.fields(kind))
    one_of = (
        *(tokens.TokenizeRequest, embeddings.ScoreRequest, ResponsesRequest),
        *(OllamaShowRequest, OllamaPullRequest),
    )
    return required or kind in one_of


def _guarding(operation: Operation) -> list[int]:
    """The statuses with which the guard in front of all endpoints may answer."""
    refusals = [400, 403, 431] if operation.open else [400, 401, 403, 429, 431]
    return refusals if operation.asks is None else [*refusals, 408]


def _path_parameters(path: str) -> list[Schema]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query_parameters(query: type[Struct] | None) -> list[Schema]:
    if query is None:
        return []
    described = msgspec.json.schema(query)["$defs"][query.__name__]["properties"]
    return [
        {"name": name, "in": "query", "schema": _without_null(schema)}
        for name, schema in described.items()
    ]


def _without_null(schema: Schema) -> Schema:
    """The schema without null, which a query cannot have."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind != {"type": "null"}]
    return {name: value for name, value in kinds[0].items() if value is not None}


def _answer(operation: Operation, description: str = "The answer.") -> Schema:
    schema = {"type": "object"} if operation.answer is None else _schema(operation.answer)
    if operation.other_answer is not None:
        schema = {"anyOf": [schema, _schema(operation.other_answer)]}
    if operation.enveloped:
        schema = _envelope(success=True, data=schema, error={"type": "null"})
    headers = ["X-Request-ID"] + (["X-Ignored-Params"] if operation.asks is not None else [])
    described = _response(description, schema, headers, operation.media)
    if operation.chunk is not None:
        described["content"][operation.stream_media] = {"schema": _schema(operation.chunk)}
    return described


def _error(status: int, operation: Operation) -> Schema:
    schema = _schema(operation.refuses.kind)
    if operation.enveloped:
        schema = _envelope(success=False, data={"type": "null"}, error=_schema(Problem))
    headers = ["X-Request-ID"] + (["Retry-After"] if status in (429, 503, 529) else [])
    return _response(_STATUS[status], schema, headers)


def _envelope(*, success: bool, data: Schema, error: Schema) -> Schema:
    properties = {"success": {"const": success}, "data": data, "error": error}
    return {"type": "object", "properties": properties, "required": [*properties]}


def _response(
    description: str, schema: Schema, headers: list[str], media: str = "application/json"
) -> Schema:
    return {
        "description": description,
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in headers},
        "content": {media: {"schema": schema}},
    }


def _schema(kind: Any) -> Schema:
    """The schema of a type; for a Struct, a reference."""
    [schema], _ = msgspec.json.schema_components([kind], ref_template=_TEMPLATE)
    return schema


_TEMPLATE = "#/components/schemas/{name}"


# Schemas.


def _schemas(operations: Sequence[Operation]) -> dict[str, Schema]:
    apart = (*description.DESCRIBED, *BLOCKS.kinds)  # decoded apart from their requests
    asked = _components([*(operation.asks for operation in operations), *apart])
    answered = [each for one in operations for each in (one.answer, one.other_answer)]
    chunks = [operation.chunk for operation in operations]
    refusals = [operation.refuses.kind for operation in operations if not operation.enveloped]
    told = _components([*answered, *chunks, *refusals, Problem])
    assert not asked.keys() & told.keys()  # each name has one schema
    _tighten(asked)
    for schema in told.values():
        _require_all(schema)
    return dict(sorted((asked | told).items()))


def _components(kinds: Iterable[Any]) -> dict[str, Schema]:
    _, components = msgspec.json.schema_components(
        [kind for kind in kinds if kind is not None], ref_template=_TEMPLATE
    )
    return components


def _require_all(schema: Schema) -> None:
    """Require all fields with a default: they are sent too, and only UNSET ones are left out."""
    properties = schema["properties"]
    always = [name for name, field in properties.items() if "default" in field]
    schema["required"] = sorted({*schema["required"], *always})
    for name in always:
        del properties[name]["default"]


def _tighten(schemas: dict[str, Schema]) -> None:
    description.describe_requests(schemas)
    for name in ("ChatRequest", "CompletionRequest"):
        properties = schemas[name]["properties"]
        for field, values in requests.NEUTRAL.items():
            if field not in properties:
                properties[field] = {"enum": list(values), "description": "No other is supported."}
    llama = ("InfillRequest", "LlamaCompletionRequest")
    for name in ("ChatRequest", "CompletionRequest", "FIMRequest", *llama):
        schema = schemas[name]
        properties = schema["properties"]
        properties["logit_bias"]["propertyNames"] = {"pattern": "^(0|[1-9][0-9]{0,8})$"}
        # With more rules, tools that generate bodies give up.
        properties["steering"]["description"] = "Not with `profile`."
        properties["steering_mode"]["description"] = "Only with `steering`."
        properties["prompt_logprobs"]["description"] = "Not with `stream`."
        schema["oneOf"] = _at_most_one(_constraints(properties))
    chat, text = schemas["ChatRequest"], schemas["CompletionRequest"]
    chat["allOf"], text["allOf"] = _CHAT_RULES, _TEXT_RULES
    for schema in schemas.values():
        if "steering" in schema["properties"]:
            schema["properties"]["steering"]["propertyNames"] = _FEATURE
    schemas["AnthropicTool"]["allOf"] = [_OWN_TOOL]
    schemas["AnthropicToolChoice"]["allOf"] = [_NAMED_CHOICE]
    blocks = [{"$ref": _TEMPLATE.format(name=kind.__name__)} for kind in BLOCKS.kinds]
    for name in ("MessageParam", "ToolResultBlockParam", "DocumentSource"):
        content = schemas[name]["properties"]["content"]
        content["description"] = "Blocks of other types are left out."
        [array] = [each for each in content["anyOf"] if each.get("type") == "array"]
        array["items"] = {"anyOf": blocks}
    chat["properties"]["chat_template"]["description"] = "Where the operator allows it."
    for name in generation_request.SPELLINGS["max_tokens"]:
        chat["properties"][name]["description"] = "-1: none is given."
    text["properties"]["prompt"] = _PROMPT
    structured = schemas["StructuredOutputs"]
    for name in forms.REFUSED:
        structured["properties"][name] = {"type": "null", "description": "Not supported."}
    structured["oneOf"] = [_set(name) for name in forms.FORMS]
    for name in ("OllamaShowRequest", "OllamaPullRequest"):
        schemas[name]["anyOf"] = [_with(field, _TEXT) for field in ("model", "name")]
    schemas["TokenizeRequest"]["oneOf"] = [_set(name) for name in ("content", "prompt", "messages")]
    text["properties"]["suffix"]["description"] = "Not with `echo`; prompts are texts then."
    for asked in (schemas[name]["properties"] for name in llama):
        asked["n"] = {"enum": [None, 1], "description": "There is one answer."}
        for name, values in (*infill.NOT_HERE.items(), *infill.NEUTRAL.items()):
            asked[name] = {"enum": list(values), "description": "No other is supported."}
    options = schemas["StreamOptions"]["properties"]
    options["continuous_usage_stats"]["description"] = "Only with `include_usage`."
    schemas["EmbeddingRequest"]["properties"]["input"] = _INPUT
    schemas["ContentPart"]["properties"] |= {"type": {"const": "text"}, "text": _STRING}
    schemas["ContentPart"]["required"] = ["type", "text"]
    call = schemas["ToolCall"]
    call["properties"] |= {
        "type": {"const": "function"},
        "function": {"$ref": _TEMPLATE.format(name="FunctionCall")},
    }
    call["required"] = ["function"]
    schemas["FunctionCall"]["properties"]["arguments"] |= {
        "contentMediaType": "application/json",
        "contentSchema": {"type": "object"},
    }


_FEATURE: Schema = {"pattern": "^(0|[1-9][0-9]{0,8})$"}
_STRING: Schema = {"type": "string"}
_TOKENS: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "minItems": 1,
}
_TEXT: Schema = {"type": "string", "minLength": 1}
_INPUT: Schema = {
    "anyOf": [
        _TEXT,
        *(
            {"type": "array", "items": items, "minItems": 1, "maxItems": embeddings.MOST_TEXTS}
            for items in (_TEXT, _TOKENS["items"], _TOKENS)
        ),
    ]
}
_PROMPT: Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _TOKENS,
        {"type": "array", "items": _TOKENS, "minItems": 1},
    ]
}

_GIVEN: Schema = {"not": {"type": "null"}}
_SET_BY: Mapping[str, Schema] = {
    "grammar": {"type": "string", "minLength": 1},
    "json_object": {"const": True},
    "response_format": {"properties": {"type": {"enum": ["json_object", "json_schema"]}}}
    | {"type": "object"},
}
"""The values with which a field constrains the answer, if not all do."""


def _constraints(properties: Schema) -> list[Schema]:
    names = [
        name for name in (*generation_request.FORM_FIELDS, "response_format") if name in properties
    ]
    return [_set(name) for name in names]


def _set(name: str) -> Schema:
    return _with(name, _SET_BY.get(name, _GIVEN))


def _with(name: str, value: Schema) -> Schema:
    """The schema of objects whose field `name` has such a value."""
    return {"properties": {name: value}, "required": [name]}


def _at_most_one(schemas: list[Schema]) -> list[Schema]:
    return [*schemas, {"not": {"anyOf": schemas}}]


def _needs(one: Schema, other: Schema) -> Schema:
    return {"if": one, "then": other}


_CHAT_RULES = [
    _needs(
        _with("top_logprobs", {"type": "integer", "minimum": 1}),
        _with("logprobs", {"const": True}),
    ),
    _needs(
        _with("tool_choice", {"not": {"enum": [None, "none", "auto"]}}),
        _with("tools", {"type": "array", "minItems": 1}),
    ),
]
_OWN_TOOL = _needs(
    {"properties": {"type": {"enum": [None, "custom"]}}},
    {
        "properties": {"name": _STRING, "input_schema": {"type": "object"}},
        "required": ["name", "input_schema"],
    },
)
_NAMED_CHOICE = _needs(
    _with("type", {"const": "tool"}), {"properties": {"name": _STRING}, "required": ["name"]}
)
_TEXT_RULES = [_needs(_with("max_tokens", {"const": 0}), _with("echo", {"const": True}))]
