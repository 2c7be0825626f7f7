"""The OpenAPI 3.1 document for `/openapi.json`, made from the operations and their types.

What a Struct's types cannot say is in its `schema_rules`, so that the server understands each body
that the schemas allow. Beside this file, `descriptions.json` tells what a field means, by its name
or as `Struct.name`, and `examples.json` has a request and its answer for each operation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.inspect import StructType, multi_type_info

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.status import Health
from mlxsrv.version import __version__
from mlxsrv.wire.decoding import RequestDecoder
from mlxsrv.wire.management import Problem
from mlxsrv.wire.operation import Operation
from mlxsrv.wire.schema_rules import Schema, add_rules, unsupported

_STATUS = {
    400: "The request is wrong; `param` says where.",
    401: "The key is missing or wrong.",
    403: "The web page's origin, or the host name, is not allowed.",
    404: "There is no such model, no such object, or no such route.",
    405: "The route does not answer this method.",
    408: "The body did not arrive in time.",
    409: "It conflicts with what exists.",
    413: "The body is too large.",
    429: "The client sends too many requests.",
    431: "The headers are too large.",
    500: "A bug; the log says more under the request id.",
    503: "The server is busy, cannot load the model, or is shutting down.",
    504: "A time limit passed before there was any text.",
    507: "The model, or the prompt, does not fit into memory.",
    529: "The server is busy or is shutting down.",
}

_TAGS = {
    "Chat and text": (
        "OpenAI's, Mistral's and llama.cpp's ways to ask for text.",
        "/.*complet|/infill",
    ),
    "Responses": ("OpenAI's API for agents.", "/v1/responses"),
    "Messages": ("Anthropic's API.", "/v1/messages"),
    "Embeddings": ("Vectors, ranks and scores of texts.", "/v[12]/(embeddings|rerank|score)"),
    "Models": ("The models of this server.", "/v1/models"),
    "Tokens": ("Tokens and templates, without generating.", "/(de)?token|/apply-template"),
    "Steering": ("Sparse autoencoders, and the default steering.", "/api/saes"),
    "Profiles": ("Stored steerings.", "/api/profiles"),
    "Monitoring": ("Activations of features.", "/api/monitoring"),
    "Ollama": ("Ollama's API.", "/api/|/$"),
    "Operation": ("Health, metrics and this document.", "/"),
}
"""Groups of operations, each with its description and the beginnings of its paths; the first that
matches counts."""


def document(operations: Sequence[Operation], *, prefix: str = "") -> dict[str, Any]:
    """The OpenAPI document of an app.

    Args:
        operations: what the app serves.
        prefix: the path where the app is mounted, as ASGI has it: not quoted.
    """
    paths: dict[str, Schema] = {}
    examples = {each["operation"]: each for each in _read("examples.json")}
    for each in operations:
        described = _operation(each)
        _add_example(described, examples[each.id], each)
        paths.setdefault(each.described_path, {})[each.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlxsrv",
            "version": __version__,
            "description": "A server for MLX language models, with the APIs of OpenAI, Anthropic "
            "and Ollama. What is under /v1 is served without it, too.",
        },
        "servers": [{"url": quote(prefix) or "/"}],
        "tags": [{"name": tag, "description": text} for tag, (text, _) in _TAGS.items()],
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


@cache
def _read(name: str) -> Any:
    return msgspec.json.decode((files(__package__) / name).read_bytes())


# Operations.

_HEADERS = {
    "X-Request-ID": {
        "description": "The client's own id of the request, or a new one; the log has it, too.",
        "schema": {"type": "string"},
    },
    "X-Ignored-Params": {
        "description": "Fields of the request that were ignored.",
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds after which to try again.",
        "schema": {"type": "integer"},
    },
}


def _operation(operation: Operation) -> Schema:
    described: Schema = {
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [next(tag for tag, (_, path) in _TAGS.items() if re.match(path, operation.path))],
    }
    if operation.description:
        described["description"] = operation.description
    parameters = [*_path_parameters(operation.described_path), *_query_parameters(operation.query)]
    if parameters:
        described["parameters"] = parameters
    if not operation.open:  # {}: a server without keys needs none
        described["security"] = [{}, {"bearer": []}, {"key": []}]
    if operation.body is not None:
        described["requestBody"] = {
            "required": _needs_body(operation.body),
            "content": {"application/json": {"schema": _schema(operation.body.kind)}},
        }
    described["responses"] = {str(operation.status): _answer(operation)} | {
        str(status): _error(status, operation)
        for status in sorted({*operation.errors, *_guarding(operation)})
    }
    if operation.answer is Health:  # a server that is not well answers in the same form
        described["responses"]["503"] = _answer(operation, "Not ready; the status tells why.")
    return described


def _add_example(described: Schema, example: Mapping[str, Any], operation: Operation) -> None:
    """Put a request and its answer into a described operation."""
    given = example.get("path", {}) | example.get("query", {})
    for parameter in described.get("parameters", []):
        if parameter["name"] in given:
            parameter["example"] = given[parameter["name"]]
    if "body" in example:
        described["requestBody"]["content"]["application/json"]["example"] = example["body"]
    if "answer" in example:
        answer = described["responses"][str(operation.status)]
        answer["content"][operation.media]["example"] = example["answer"]


def _needs_body(decoder: RequestDecoder[Any]) -> bool:
    """Whether an empty object is refused."""
    try:
        decoder.decode(b"{}")
    except InvalidRequest:
        return True
    return False


def _guarding(operation: Operation) -> list[int]:
    """The statuses with which the guard in front of all endpoints may answer."""
    refusals = [400, 403, 431] if operation.open else [400, 401, 403, 429, 431]
    return refusals if operation.asks is None else [*refusals, 408]


def _path_parameters(path: str) -> list[Schema]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": _read("descriptions.json")[name],
            "schema": {"type": "string"},
        }
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query_parameters(query: type[Struct] | None) -> list[Schema]:
    if query is None:
        return []
    described = msgspec.json.schema(query)["$defs"][query.__name__]["properties"]
    texts = _read("descriptions.json")
    return [
        {
            "name": name,
            "in": "query",
            "description": texts[name],
            "schema": _without_null(schema),
        }
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
    bodies = [each.body for each in operations if each.body is not None]
    read = [kind for body in bodies for kind in (body.kind, *body.parts)]
    refusals = [Problem if each.enveloped else each.refuses.kind for each in operations]
    sent = [*refusals]
    for each in operations:
        sent += [each.answer, each.other_answer, each.chunk]
    asked, answered = _components(read), _components(sent)
    assert not asked.keys() & answered.keys()  # each name has one schema
    for kind in _structs(read):
        add_rules(kind, asked[kind.__name__])
    for body in bodies:
        properties = asked[body.kind.__name__]["properties"]
        for name, schema in unsupported(body.neutral):
            properties.setdefault(name, schema)
    for schema in answered.values():
        _require_all(schema)
    schemas = dict(sorted((asked | answered).items()))
    _describe_fields(schemas)
    return schemas


def _describe_fields(schemas: Mapping[str, Schema]) -> None:
    """Add the texts of `descriptions.json` to fields; what a rule says of one stands behind its
    own."""
    texts: dict[str, str] = _read("descriptions.json")
    for struct, schema in schemas.items():
        for name, field in schema["properties"].items():
            text = texts.get(f"{struct}.{name}", texts.get(name))
            if text is not None:
                told = [text, field["description"]] if "description" in field else [text]
                schema["properties"][name] = field | {"description": " ".join(told)}


def _components(kinds: Iterable[Any]) -> dict[str, Schema]:
    _, components = msgspec.json.schema_components(
        [kind for kind in kinds if kind is not None], ref_template=_TEMPLATE
    )
    return components


def _structs(kinds: Iterable[type[Struct]]) -> Iterable[type[Struct]]:
    """Return each Struct that is in these, at any depth."""
    found: dict[type[Struct], None] = {}

    def search(node: Any) -> None:
        if isinstance(node, StructType):
            if node.cls in found:
                return
            found[node.cls] = None
        if isinstance(node, Struct):
            node = msgspec.structs.astuple(node)
        if isinstance(node, tuple):
            for each in node:
                search(each)

    search(multi_type_info(kinds))
    return found


def _require_all(schema: Schema) -> None:
    """Require all fields with a default: they are sent too, and only UNSET ones are left out."""
    properties = schema["properties"]
    always = [name for name, field in properties.items() if "default" in field]
    schema["required"] = sorted({*schema["required"], *always})
    for name in always:
        del properties[name]["default"]
