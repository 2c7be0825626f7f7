"""The API described, for `/openapi.json`: OpenAPI 3.1, made from the request and response types.

What a Struct's types cannot say (which fields go together, the forms of a prompt) is added here,
so that a body which the schemas allow is one that the server understands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct

from mlxsrv.version import __version__
from mlxsrv.wire import embeddings, openai, requests

Schema = dict[str, Any]


class Operation(Struct, frozen=True, kw_only=True):
    """One endpoint. `chunk` is what it streams; `errors` are the statuses of refusals."""

    method: str
    path: str
    id: str
    summary: str
    description: str = ""
    asks: type[Struct] | None = None
    answer: type[Struct] | None = None
    chunk: type[Struct] | None = None
    errors: tuple[int, ...] = ()


_ASKED = (400, 404, 405, 413, 500, 503, 504)
_GENERATED = (*_ASKED, 507)
_READ = (405, 500)

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        id="createChatCompletion",
        summary="Answer a chat",
        description="With `stream`, as server-sent events that end with `data: [DONE]`.",
        asks=requests.ChatRequest,
        answer=openai.ChatCompletion,
        chunk=openai.ChatChunk,
        errors=_GENERATED,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        id="createCompletion",
        summary="Go on with a text",
        description="With `stream`, as server-sent events that end with `data: [DONE]`.",
        asks=requests.CompletionRequest,
        answer=openai.TextCompletion,
        chunk=openai.TextCompletion,
        errors=_GENERATED,
    ),
    Operation(
        method="GET",
        path="/v1/models",
        id="listModels",
        summary="The models that can be asked",
        answer=openai.ModelList,
        errors=_READ,
    ),
    Operation(
        method="GET",
        path="/v1/models/{id}",
        id="getModel",
        summary="One model",
        description="Slashes in the id stand as they are.",
        answer=openai.ModelObject,
        errors=(404, *_READ),
    ),
    Operation(
        method="POST",
        path="/v1/embeddings",
        id="createEmbedding",
        summary="Vectors of texts",
        asks=embeddings.EmbeddingRequest,
        answer=embeddings.EmbeddingList,
        errors=_GENERATED,
    ),
    Operation(
        method="POST",
        path="/v1/rerank",
        id="rerank",
        summary="Documents by their relevance to a query",
        asks=embeddings.RerankRequest,
        answer=embeddings.RerankResponse,
        errors=_GENERATED,
    ),
    Operation(
        method="POST",
        path="/tokenize",
        id="tokenize",
        summary="The tokens of a text",
        asks=requests.TokenizeRequest,
        answer=openai.TokenizeResponse,
        errors=_ASKED,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        id="detokenize",
        summary="The text of tokens",
        asks=requests.DetokenizeRequest,
        answer=openai.DetokenizeResponse,
        errors=_ASKED,
    ),
    Operation(
        method="GET",
        path="/health",
        id="getHealth",
        summary="Whether requests would be served",
        description="With the query `verbose=1` also what the server holds and does.",
        answer=openai.Health,
        errors=_READ,
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        id="getDescription",
        summary="This document",
        errors=_READ,
    ),
)

_STATUS = {
    400: "The request is wrong; `param` says where.",
    404: "There is no such model, or no such path.",
    405: "The path does not answer this method.",
    413: "The body is too large.",
    500: "A bug; the log says more under the request id.",
    503: "The server is busy, cannot load the model, or is shutting down.",
    504: "The request's time was over before there was any text.",
    507: "The model does not fit, and nothing idle can make room.",
}


def document(routes: Iterable[tuple[str, str]], *, prefix: str = "") -> dict[str, Any]:
    """The OpenAPI document of an app.

    Args:
        routes: (method, path) of what the app serves; a path's parameters may have converters.
        prefix: the path where the app is mounted, as ASGI has it: not quoted.

    Raises:
        ValueError: a route is none of OPERATIONS.
    """
    known = {(operation.method, operation.path): operation for operation in OPERATIONS}
    paths: dict[str, Schema] = {}
    for method, route in routes:
        path = re.sub(r":\w+}", "}", route)
        if (method, path) not in known:
            raise ValueError(f"{method} {path} is not described")
        paths.setdefault(path, {})[method.lower()] = _operation(known[method, path])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlxsrv",
            "version": __version__,
            "description": "An OpenAI-compatible server for MLX language models.",
        },
        "servers": [{"url": quote(prefix) or "/"}],
        "paths": paths,
        "components": {"schemas": _schemas(), "headers": _HEADERS},
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
    if "{id}" in operation.path:
        parameter = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [parameter]
    if operation.asks is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(operation.asks)}},
        }
    described["responses"] = {"200": _answer(operation)} | {
        str(status): _error(status, operation.chunk) for status in sorted(operation.errors)
    }
    if operation.answer is openai.Health:  # answers in its own form when it is not well, too
        described["responses"]["503"] = _answer(operation, "Requests would not be served now.")
    return described


def _answer(operation: Operation, description: str = "The answer.") -> Schema:
    schema = {"type": "object"} if operation.answer is None else _reference(operation.answer)
    headers = ["X-Request-ID"] + (["X-Ignored-Params"] if operation.asks is not None else [])
    return _response(description, schema, operation.chunk, headers)


def _error(status: int, chunk: type[Struct] | None) -> Schema:
    headers = ["X-Request-ID"] + (["Retry-After"] if status == 503 else [])
    return _response(_STATUS[status], _reference(openai.ErrorResponse), chunk, headers)


def _response(
    description: str, schema: Schema, chunk: type[Struct] | None, headers: list[str]
) -> Schema:
    content = {"application/json": {"schema": schema}}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _reference(chunk)}
    return {
        "description": description,
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in headers},
        "content": content,
    }


def _reference(kind: type[Struct]) -> Schema:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


# Schemas.


def _schemas() -> dict[str, Schema]:
    asked = _components({operation.asks for operation in OPERATIONS})
    answered = {operation.answer for operation in OPERATIONS}
    chunks = {operation.chunk for operation in OPERATIONS}
    told = _components(answered | chunks | {openai.ErrorResponse})
    assert not asked.keys() & told.keys()  # a schema has one name, and a name one schema
    _tighten(asked)
    for schema in told.values():
        _require_all(schema)
    return dict(sorted((asked | told).items()))


def _components(kinds: Iterable[type[Struct] | None]) -> dict[str, Schema]:
    _, components = msgspec.json.schema_components(
        [kind for kind in kinds if kind is not None],
        ref_template="#/components/schemas/{name}",
    )
    return components


def _require_all(schema: Schema) -> None:
    """What has a default is sent all the same; only what is UNSET is left out."""
    properties = schema["properties"]
    always = [name for name, field in properties.items() if "default" in field]
    schema["required"] = sorted({*schema["required"], *always})
    for name in always:
        del properties[name]["default"]


def _tighten(schemas: dict[str, Schema]) -> None:
    for kind in (requests.ChatRequest, requests.CompletionRequest):
        schema = schemas[kind.__name__]
        properties = schema["properties"]
        for name, values in requests.NEUTRAL.items():
            if name not in properties:
                properties[name] = {"enum": list(values), "description": "No other is supported."}
        properties["logit_bias"]["propertyNames"] = {"pattern": "^(0|[1-9][0-9]{0,8})$"}
        schema["oneOf"] = _at_most_one(_constraints(properties))
    chat, text = schemas["ChatRequest"], schemas["CompletionRequest"]
    chat["allOf"], text["allOf"] = _CHAT_RULES, _TEXT_RULES
    text["properties"]["prompt"] = _PROMPT
    schemas["EmbeddingRequest"]["properties"]["input"] = _INPUT
    schemas["ContentPart"]["properties"] |= {"type": {"const": "text"}, "text": _STRING}
    schemas["ContentPart"]["required"] = ["type", "text"]
    schemas["FunctionCall"]["properties"]["arguments"] |= {
        "contentMediaType": "application/json",
        "contentSchema": {"type": "object"},
    }


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
    "response_format": {"properties": {"type": {"enum": ["json_object", "json_schema"]}}}
    | {"type": "object"}
}
"""What a field is like when it constrains the answer, where not any value does."""


def _constraints(properties: Schema) -> list[Schema]:
    names = [name for name in (*requests.GUIDES, "response_format") if name in properties]
    return [_with(name, _SET_BY.get(name, _GIVEN)) for name in names]


def _with(name: str, value: Schema) -> Schema:
    """Objects whose `name` is there and is such a value."""
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
_TEXT_RULES = [_needs(_with("max_tokens", {"const": 0}), _with("echo", {"const": True}))]
