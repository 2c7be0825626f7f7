"""The document of the API: it is sound, and it says of a body what the decoder does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from itertools import product
from typing import Any

import jsonschema
import pytest

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.outputs import Answer, Ended, Identity, TokenScore, ToolUse, Usage
from mlxsrv.generation.status import Health, ModelDetails, ModelObject
from mlxsrv.wire import openapi
from mlxsrv.wire.anthropic import errors as anthropic
from mlxsrv.wire.openai import answers as openai
from mlxsrv.wire.openai import builders, tokens
from mlxsrv.wire.openapi import document
from tests.support.bodies import KINDS, Kind
from tests.support.operations import every_operation
from tests.support.schemas import Body, as_sent, read_chunks

OPENAI = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/{id}"),
    ("DELETE", "/v1/responses/{id}"),
    ("GET", "/v1/responses/{id}/input_items"),
    ("POST", "/infill"),
    ("POST", "/completion"),
    ("POST", "/v1/fim/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{id:path}"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/v2/rerank"),
    ("POST", "/v1/score"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("POST", "/apply-template"),
    ("GET", "/health"),
    ("GET", "/health/live"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
]
OLLAMA = [
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/embed"),
    ("POST", "/api/embeddings"),
    ("GET", "/api/tags"),
    ("GET", "/api/version"),
    ("POST", "/api/show"),
    ("GET", "/api/ps"),
    ("POST", "/api/pull"),
    ("DELETE", "/api/delete"),
    ("POST", "/api/copy"),
    ("POST", "/api/create"),
    ("POST", "/api/push"),
    ("GET", "/"),
]
OPERATIONS = every_operation()
MANAGED = [(each.method, each.path) for each in OPERATIONS if each.enveloped]
BODILESS = ("/activate", "{id}/deactivate")
"""Ends of paths that are posted to, and say all."""
ROUTES = OPENAI + OLLAMA + MANAGED


@cache
def read_document() -> Body:
    """The document of all routes, as a client reads it."""
    return dict(json.loads(json.dumps(document(OPERATIONS))))


def objects(value: Any) -> Iterator[Body]:
    """Every object within `value`, itself included."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from objects(part)


def resolve(reference: str) -> Any:
    """Return the object that a `$ref` points to. Raises KeyError if there is none."""
    assert reference.startswith("#/")
    found: Any = read_document()
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return found


def validator(schema: Body) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema | {"components": read_document()["components"]})


def operation(method: str, path: str) -> Body:
    return dict(read_document()["paths"][path.replace(":path", "")][method.lower()])


def answers(method: str, path: str, status: int, media: str = "application/json") -> Any:
    """The schema of what an endpoint answers."""
    content = operation(method, path)["responses"][str(status)]["content"]
    return validator(content[media]["schema"])


# The document.


def test_every_schema_is_one() -> None:
    for schema in read_document()["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_reference_leads_somewhere() -> None:
    references = {part["$ref"] for part in objects(read_document()) if "$ref" in part}
    for reference in references:
        assert resolve(reference)
    named = {reference.rpartition("/")[2] for reference in references}
    components = read_document()["components"]
    kinds = components["schemas"].keys() | components["headers"].keys()
    assert kinds == named, "nothing is described that is not used"


def test_a_discriminator_leads_somewhere() -> None:
    found = [part["discriminator"] for part in objects(read_document()) if "discriminator" in part]
    for discriminator in found:
        for name, reference in discriminator["mapping"].items():
            assert resolve(reference)["properties"][discriminator["propertyName"]]["enum"] == [name]
    assert found


def test_the_document_has_what_openapi_requires() -> None:
    assert read_document()["openapi"] == "3.1.0"
    assert read_document()["info"].keys() >= {"title", "version"}
    assert read_document()["servers"] == [{"url": "/"}]
    assert len(read_document()["paths"]) == len({path for _, path in ROUTES})
    ids = [operation(*route)["operationId"] for route in ROUTES]
    assert len({*ids}) == len(ROUTES)
    for method, path in ROUTES:
        told = operation(method, path)
        assert told["summary"]
        sends = method in ("POST", "PATCH") and not path.endswith(BODILESS)
        assert ("requestBody" in told) == sends
        for response in told["responses"].values():
            assert response["description"]
            assert all(content["schema"] for content in response["content"].values())


def test_every_operation_has_a_group_and_every_group_an_operation() -> None:
    groups = {tag["name"] for tag in read_document()["tags"]}
    assert {group for route in ROUTES for group in operation(*route)["tags"]} == groups


PLAIN = {
    *("type", "object", "role", "name", "text", "description", "data", "error", "message"),
    *("item", "part", "function", "document"),
}
"""Fields whose names say all."""


def test_every_field_that_is_not_plain_is_told() -> None:
    texts = openapi._read("descriptions.json")
    schemas = read_document()["components"]["schemas"]
    fields = [(struct, name) for struct, schema in schemas.items() for name in schema["properties"]]
    for struct, name in fields:
        told = "description" in schemas[struct]["properties"][name]
        assert told or name in PLAIN, f"{struct}.{name}"
    parameters = [each for route in ROUTES for each in operation(*route).get("parameters", [])]
    assert all(each["description"] for each in parameters)
    names = {name for _, name in fields} | {each["name"] for each in parameters}
    assert texts.keys() <= names | {".".join(field) for field in fields}


def test_only_what_is_served_is_described() -> None:
    assert list(document(OPERATIONS[:1])["paths"]) == ["/v1/chat/completions"]
    assert {(one.method, one.path) for one in OPERATIONS} == {*ROUTES}


def test_a_mounted_app_says_where() -> None:
    assert document(OPERATIONS, prefix="/llm")["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize(("method", "path"), OPENAI)
def test_refusals_have_the_one_shape(method: str, path: str) -> None:
    errors = operation(method, path)["responses"].keys() - {"200"}
    shape = next(one.refuses for one in OPERATIONS if (one.method, one.path) == (method, path))
    if shape is anthropic.ERRORS:
        assert errors >= {"400", "401", "404", "413", "500", "504", "529"}
    elif method == "POST":
        loads = path.startswith(("/v1/", "/v2/", "/infill", "/completion")) and not path.endswith(
            "/input_tokens"
        )
        generates = {"507"} if loads else set()
        guarding = {"400", "401", "403", "408", "429", "431"}
        assert errors == guarding | {"404", "405", "413", "500", "503", "504"} | generates
    assert errors >= {"405", "500"}
    body = as_sent(shape.body(InvalidRequest("no"), "some-id"))
    for status in errors - ({"503"} if path.startswith("/health") else set()):
        answers(method, path, int(status)).validate(body)


def test_only_health_and_the_root_can_do_without_a_key() -> None:
    for method, path in ROUTES:
        told = operation(method, path.replace(":path", ""))
        needs = path != "/" and not path.startswith("/health")
        assert ("security" in told) == needs
        needs_at_times = path not in ("/", "/health/live")
        assert ("401" in told["responses"]) == needs_at_times, "verbose, it needs one, too"


# Requests: the schema and the decoder are of one mind.

PATHS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "infill": "/infill",
    "llama": "/completion",
    "fim": "/v1/fim/completions",
    "messages": "/v1/messages",
}


def asks(name: str) -> jsonschema.Draft202012Validator:
    body = operation("POST", PATHS[name])["requestBody"]
    assert body["required"]
    return validator(body["content"]["application/json"]["schema"])


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=KINDS)
def test_what_is_refused_is_not_in_the_schema(name: str, kind: Kind) -> None:
    schema = asks(name)
    for body, param in [*kind.wrong, *kind.missing, *kind.unsupported]:
        assert not schema.is_valid(body), (param, body)


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=KINDS)
def test_what_is_read_is_in_the_schema(name: str, kind: Kind) -> None:
    schema = asks(name)
    for body in kind.fine:
        schema.validate(body)
    for field in kind.struct.__struct_fields__:
        if field not in kind.base:
            schema.validate(kind.base | {field: None})
    schema.validate(kind.base | {"unknown": [1]})


@pytest.mark.parametrize("name", ["chat", "completion"])
def test_at_most_one_field_says_what_an_answer_is(name: str) -> None:
    kind, schema = KINDS[name], asks(name)
    values = {
        "guided_regex": "a",
        "guided_choice": ["a"],
        "guided_grammar": "start: x",
        "guided_json": {},
        "response_format": {"type": "json_object"},
    }
    fields = [field for field in values if field in kind.struct.__struct_fields__]
    for given in product([False, True], repeat=len(fields)):
        chosen = [field for field, wanted in zip(fields, given, strict=True) if wanted]
        body = kind.base | {field: values[field] for field in chosen}
        assert schema.is_valid(body) == (len(chosen) <= 1)


# Responses.

WHO = Identity("chatcmpl-" + "0" * 32, 1_790_000_000, "org/name", "mlxsrv-1")
USAGE = Usage(prompt_tokens=5, completion_tokens=7, reasoning_tokens=1)
SCORES = (TokenScore(b"Once", None), TokenScore(b"\xe2", -0.5, ((b"a", -0.5),)))
ANSWERS = [
    Answer("stop", "Hello", "Hm.", (ToolUse("call_1", "f", "{}"),), SCORES),
    Answer("timeout"),
]


def test_answers_are_as_described() -> None:
    chat, text = "/v1/chat/completions", "/v1/completions"
    body = as_sent(builders.ChatBuilder(WHO, "never").whole(ANSWERS, USAGE))
    answers("POST", chat, 200).validate(body)
    answers("POST", text, 200).validate(
        as_sent(builders.CompletionBuilder(WHO, "never").whole(ANSWERS, USAGE))
    )
    assert not answers("POST", text, 200).is_valid(body)
    for name in body:
        lacking = {key: value for key, value in body.items() if key != name}
        assert not answers("POST", chat, 200).is_valid(lacking), f"{name} is always there"


@pytest.mark.parametrize("usage", ["unasked", "asked", "never"])
def test_chunks_are_as_described(usage: builders.UsageMode) -> None:
    for path, kind in (
        ("/v1/chat/completions", builders.ChatBuilder),
        ("/v1/completions", builders.CompletionBuilder),
    ):
        stream = kind(WHO, usage, choices=2, scored=True)
        data = stream.opening() + stream.text(0, "content", "a", SCORES)
        data += stream.text(1, "reasoning", "a")
        if kind is builders.ChatBuilder:
            data += stream.tool(1, 0, "call_1", "f") + stream.arguments(1, 0, "{}")
        ended = data + stream.end(Ended(0, "stop")) + stream.end(Ended(1, "tool_calls", USAGE))
        failed = kind(WHO, usage).error(InvalidRequest("no"))
        schema = answers("POST", path, 200, "text/event-stream")
        for chunk in read_chunks(ended) + read_chunks(failed):
            schema.validate(chunk)
        refused = read_document()["paths"][path]["post"]["responses"]["400"]
        assert refused["content"].keys() == {"application/json"}, "a refused stream is JSON"


def test_the_rest_is_as_described() -> None:
    model = ModelObject(
        id="m",
        created=5,
        owned_by="mlxsrv",
        loaded=True,
        state="loaded",
        aliases=("n",),
        type="chat",
        details=ModelDetails("qwen3", "4.0B", "4bit", "mlx"),
        modified_at=datetime(2026, 1, 1, tzinfo=UTC),
        capabilities=("completion", "chat"),
    )
    answers("GET", "/v1/models", 200).validate(as_sent(openai.ModelList(data=[model])))
    answers("GET", "/v1/models/{id}", 200).validate(as_sent(model))
    tokenized = answers("POST", "/tokenize", 200)
    tokenized.validate(as_sent(tokens.TokenizeResponse([1], 1)))
    pieces = [tokens.TokenPiece.make(1, b"a"), tokens.TokenPiece.make(2, b"\xe2")]
    tokenized.validate(as_sent(tokens.TokenizeResponse([*pieces], 2)))
    answers("POST", "/detokenize", 200).validate(as_sent(tokens.DetokenizeResponse("a", "a")))
    answers("GET", "/health", 200).validate(as_sent(Health(status="ok")))
    for path in ("/health", "/health/live"):
        answers("GET", path, 503).validate(as_sent(Health(status="stalled")))
    answers("GET", "/openapi.json", 200).validate(read_document())
