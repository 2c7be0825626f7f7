"""The document of the API: it describes what is served, and the server keeps to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias
from urllib.parse import quote

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from litestar import Litestar, asgi
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import mlxsrv
from mlxsrv.options import SettingsError
from mlxsrv.web.paths import OperationRoute
from tests.support.client import CHAT, COMPLETIONS, Body, read_stream
from tests.support.effort import examples, often
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, Server, hosted, serving

DOCUMENT = "/openapi.json"
MAX_CHOICES = 4
EXAMPLES = examples(80, usual=4)
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
"""All but the search for a smaller example, which with bodies like these takes minutes."""

AnyCase: TypeAlias = Case[Any]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def described(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that soon has enough of a request."""
    options = ["--max-choices", f"{MAX_CHOICES}"]
    folder = tmp_path_factory.mktemp("described")
    with serving(folder, "--model", f"t={folders.plain}", *options) as server:
        yield server


@pytest.fixture(scope="module")
def document(described: Server) -> Body:
    with described.client() as client:
        return dict(client.get(DOCUMENT).json())


# The document.


def read_document(app: Any, prefix: str = "") -> Body:
    response = TestClient(app).get(prefix + DOCUMENT)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    return dict(response.json())


def test_what_is_routed_is_what_is_described() -> None:
    app = mlxsrv.create_app(mlxsrv.Settings())
    routes = [route for route in app.routes if isinstance(route, OperationRoute)]
    others = [getattr(route, "path", "") for route in app.routes if route not in routes]
    assert others == ["/", "/page/{name}"], "the page is not part of the API"
    own = [route for route in routes if not route.unversioned]
    routed = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in own
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert len(own) == len(routed)
    paths = read_document(app)["paths"]
    assert {(verb.upper(), path) for path, item in paths.items() for verb in item} == routed


@pytest.fixture(scope="module")
def alone() -> Body:
    """The document of an app that nobody mounts."""
    return read_document(mlxsrv.create_app(mlxsrv.Settings()))


@pytest.mark.parametrize(
    "prefix", often(["/llm", "/a/b", "/with%20space"], ["/a/b", "/with%20space"])
)
def test_a_mounted_app_says_where_it_is(alone: Body, prefix: str) -> None:
    app = mlxsrv.create_app(mlxsrv.Settings())
    assert alone["servers"] == [{"url": "/"}]
    parent = Starlette(routes=[Mount(httpx.URL(prefix).path, app=app)])
    assert read_document(parent, prefix) == alone | {"servers": [{"url": prefix}]}


def in_litestar(app: Any) -> Any:
    return Litestar(route_handlers=[asgi("/llm", is_mount=True, copy_scope=True)(app)])


def in_starlette(app: Any) -> Any:
    return Starlette(routes=[Mount("/llm", app=app)])


@pytest.mark.parametrize(
    ("parent", "proxy", "said"),
    [
        (in_starlette, "/v1", "by the parent's server"),
        (in_litestar, "/a/b", "by us"),
        pytest.param(in_starlette, "", "by us", marks=pytest.mark.long),
        pytest.param(in_litestar, "/v1", "by us", marks=pytest.mark.long),
        pytest.param(in_litestar, "/a/b", "by the parent's server", marks=pytest.mark.long),
        pytest.param(in_starlette, "/v1", "by us", marks=pytest.mark.long),
        pytest.param(in_starlette, "/a/b", "by us", marks=pytest.mark.long),
        pytest.param(in_starlette, "/a/b", "by the parent's server", marks=pytest.mark.long),
        pytest.param(in_litestar, "", "by us", marks=pytest.mark.long),
        pytest.param(in_litestar, "/v1", "by the parent's server", marks=pytest.mark.long),
    ],
)
def test_a_server_behind_a_proxy_says_where_it_is(parent: Any, proxy: str, said: str) -> None:
    """The proxy has taken its prefix off; either the server of the parent knows it, or we do."""
    ours, theirs = (proxy, "") if said == "by us" else ("", proxy)
    app = parent(mlxsrv.create_app(mlxsrv.Settings(root_path=ours)))
    with (
        hosted(app, root_path=theirs) as url,
        httpx.Client(base_url=f"{url}/llm", timeout=PATIENCE) as client,
    ):
        document = client.get(DOCUMENT).json()
        assert document["servers"] == [{"url": f"{proxy}/llm"}]
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/models/demo/").json()["id"] == "demo"
        lost = client.get("/v1/nowhere")
        assert f"{proxy}/llm/v1/nowhere" in lost.json()["error"]["message"]


@pytest.mark.parametrize("root_path", often(["/llm", "/llm/", "/a/b", "/v1"], ["/llm/", "/v1"]))
def test_a_root_path_is_told_and_nothing_else_changes(alone: Body, root_path: str) -> None:
    app = mlxsrv.create_app(mlxsrv.Settings(root_path=root_path))
    told = read_document(app)
    assert told == alone | {"servers": [{"url": root_path.rstrip("/")}]}
    client = TestClient(app)
    for path in ("/v1/models", "/models", "/health", "/api/profiles"):
        assert client.get(path).status_code != 404


@pytest.mark.parametrize("root_path", ["llm", "//llm", "/a b", "/a?b", "http://a/b", "/a\n"])
def test_a_root_path_is_a_path(root_path: str) -> None:
    with pytest.raises(SettingsError, match="root_path"):
        mlxsrv.Settings(root_path=root_path)


def test_nested_mounts_are_told_together() -> None:
    app = mlxsrv.create_app(mlxsrv.Settings())
    inner = Starlette(routes=[Mount("/inner", app=app)])
    outer = Starlette(routes=[Mount("/outer", app=inner)])
    assert read_document(outer, "/outer/inner")["servers"] == [{"url": "/outer/inner"}]


def test_a_proxys_prefix_is_told() -> None:
    client = TestClient(mlxsrv.create_app(mlxsrv.Settings()), root_path="/behind")
    assert client.get(DOCUMENT).json()["servers"] == [{"url": "/behind"}]


# Whatever is asked, what is answered is as described.

MESSAGES = "/v1/messages"
TEXTS = (COMPLETIONS, "/infill", "/completion", "/v1/fim/completions")
POSTS = [
    *(CHAT, *TEXTS, "/v1/embeddings", "/v1/rerank", "/v1/score"),
    *("/v2/rerank", "/tokenize", "/detokenize", "/apply-template", MESSAGES),
]
OLLAMA = ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"]
RESPONSES = "/v1/responses"
GETS = ["/tokenizer_info", "/v1/models", "/v1/models/{id}", "/health", "/health/live", DOCUMENT]
GETS += ["/api/tags", "/api/ps", "/api/version"]
MANAGED = [
    *("/api/saes", "/api/saes/attachment", "/api/saes/{id}", "/api/saes/{id}/compatibility"),
    *("/api/saes/steering", "/api/profiles", "/api/profiles/{id}", "/api/monitoring/history"),
]
"""Tests of the management hold all that it tells against its description."""

OF_THE_MODEL = re.compile(
    r"maximum context length|is not a token id of this model|a request may have at most"
    r"|there is no tool of that name|not a JSON (object|schema)|^best_of: this server returns all"
    r"|this model's vectors have|^instruction: this model's files"
    r"|^model: it (scores no pairs|makes no embeddings)|gives no token for it"
    r"|^missing required parameter: (text_|queries|documents|items|data_)|the pairs are given as"
    r"|there may be one beside any number"
    r"|^(min_tokens|chat_template|add_generation_prompt|truncate_prompt_tokens): "
    r"|which means the same; give one of them|no fill-in-the-middle tokens|^add_special_tokens: "
    r"|^prompt_logprobs: not in a stream|^suffix: |needs include_usage"
    r"|^(guided_(regex|grammar|json)|grammar|json_schema|structured_outputs|response_format)\b"
    r"|cannot be combined with tools|^prompt: must give at least one token"
    r"|^(images|messages\[\d+\].images|keep_alive|system|template|steering|format): "
    r"|this model reads text only, no images|^thread: this server keeps no conversations"
    r"|block cannot stand in a|only documents of plain text|\.source\.data$"
    r"|^(tool_choice|output_config.format|output_format): "
    r"|^(text\.format|tool_choice|tools\[\d+\]\.(tools\[\d+\]\.)?format|input)\b"
    r"|^missing required parameter: tools"
    r"|^bad_words\[\d+\]: expected a text that matches"
)
"""Why a body may be refused that the schemas allow: they do not know the model, nor the settings,
and JSON Schema can hardly say that two fields agree or that a text is JSON or a grammar. Which
characters are spaces, its regexes know otherwise than Python's."""


def attempt(
    document: Body,
    path: str,
    check: Callable[[AnyCase], None],
    *,
    mode: GenerationMode = GenerationMode.POSITIVE,
    method: str = "POST",
) -> None:
    """`check` requests that the document allows (or, in the negative mode, does not)."""
    schema = schemathesis.openapi.from_dict(document)
    # What a chat may be takes long to make up.
    count = EXAMPLES // 2 if path in (CHAT, MESSAGES) else EXAMPLES

    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=count, phases=PHASES, suppress_health_check=[*HealthCheck])
    def run(case: AnyCase) -> None:
        check(case)

    run()


def prepared(case: AnyCase, **fields: Any) -> AnyCase:
    """The case as a question that the default model can answer briefly. An integer is written as
    one, for a schema cannot tell 1 from 1.0."""
    body = {**_integral(case.body), "model": "t" if case.path in OLLAMA else None}
    if case.path in (CHAT, MESSAGES, "/apply-template", *TEXTS):
        # There is no SAE here, nor a profile or a control vector.
        body |= dict.fromkeys(("profile", "steering", "steering_mode", "control_vector"))
        body |= {"max_completion_tokens": None, "n_predict": None, **fields}
        if body.get("max_tokens") != 0:
            body["max_tokens"] = 2
    if case.path in OLLAMA:
        body |= dict.fromkeys(("profile", "steering", "steering_mode", "control_vector"))
        body |= {"options": {**(body.get("options") or {}), "num_predict": 2}, **fields}
    if case.path == RESPONSES:
        body |= dict.fromkeys(("profile", "steering", "steering_mode", "control_vector"))
        # Nothing is stored here that could be referred to.
        body |= {"previous_response_id": None, "input": _known(body.get("input"))}
        body |= {"max_output_tokens": 2, "chat_template_kwargs": None, **fields}
    case.body = body
    return case


def _known(given: Any) -> Any:
    """The input of a response without references."""
    if isinstance(given, list):
        given = [item for item in given if item["type"] != "item_reference"]
    return given or "Hello!"


def _integral(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _integral(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_integral(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.parametrize("path", [*POSTS, *OLLAMA, RESPONSES])
def test_what_is_allowed_is_answered_as_described(
    described: Server, document: Body, path: str
) -> None:
    def check(case: AnyCase) -> None:
        response = prepared(case, stream=False).call(base_url=described.url, timeout=PATIENCE)
        case.validate_response(response, checks=CHECKS)
        if response.status_code != 200:
            lost = "this server keeps no conversations" in response.text
            assert response.status_code == (404 if lost else 400)
            error = response.json()["error"]
            told = error if isinstance(error, str) else error["message"]
            assert OF_THE_MODEL.search(told), response.text

    attempt(document, path, check)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_allowed_is_streamed_as_described(
    described: Server, document: Body, path: str
) -> None:
    kind = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    schema = {**kind["schema"], "components": document["components"]}
    chunks = jsonschema.Draft202012Validator(schema)

    with described.client() as client:

        def check(case: AnyCase) -> None:
            response = client.post(path, json=prepared(case, stream=True).body)
            if response.status_code == 200:
                for chunk in read_stream(response).chunks:
                    chunks.validate(chunk)
            else:
                assert response.status_code == 400
                assert OF_THE_MODEL.search(response.json()["error"]["message"]), response.text

        attempt(document, path, check)


@pytest.mark.parametrize(
    "path", often(POSTS + OLLAMA, [CHAT, "/v1/embeddings", "/tokenize", MESSAGES, "/api/chat"])
)
def test_what_is_not_allowed_is_refused_as_described(
    described: Server, document: Body, path: str
) -> None:
    def check(case: AnyCase) -> None:
        response = case.call(base_url=described.url, timeout=PATIENCE)
        case.validate_response(response, checks=CHECKS)
        assert response.status_code == 400, (case.body, response.text)

    attempt(document, path, check, mode=GenerationMode.NEGATIVE)


@pytest.mark.parametrize("path", GETS + MANAGED)
def test_what_is_read_is_as_described(described: Server, document: Body, path: str) -> None:
    def check(case: AnyCase) -> None:
        response = case.call(base_url=described.url, timeout=PATIENCE)
        case.validate_response(response, checks=CHECKS)

    attempt(document, path, check, method="GET")


@pytest.mark.parametrize("id", ["t", "demo", "nobody", "no/body", "a b", "%2F", "é", "?", "#"])
def test_any_model_can_be_asked_for(described: Server, document: Body, id: str) -> None:
    case = schemathesis.openapi.from_dict(document)["/v1/models/{id}"]["GET"].Case(
        path_parameters={"id": quote(id, safe="/")}
    )
    response = case.call(base_url=described.url, timeout=PATIENCE)
    case.validate_response(response, checks=CHECKS)
    assert response.status_code == (200 if id in ("t", "demo") else 404)
