"""Traces: what a collector gets of each request, and what it never gets."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from signal import SIGTERM
from typing import Any

import httpx
import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.support.client import (
    CHAT,
    COMPLETIONS,
    FIRST_CONTENT,
    RawClient,
    ask,
    chat,
    completion,
    refused,
    stream,
)
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, Server, environment, serving, wait_for

FOR_EVER = 500_000
SECRET = "xyzzy"
"""A word of a prompt."""

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"

# The collector.


class Span(msgspec.Struct, kw_only=True):
    name: str
    trace: str
    parent: str
    state: str
    kind: int
    begun: float
    ended: float
    error: bool
    status: str
    attributes: dict[str, Any]
    events: dict[str, float]
    resource: dict[str, Any]


class Collector(ThreadingHTTPServer):
    """Takes spans as an OpenTelemetry collector does: OTLP over HTTP, protobuf."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []
        self.spans: list[Span] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def span(self, request: str) -> Span:
        """The span of the request of this id, waited for."""
        return wait_for(lambda: self._found(request), why=f"the span of {request} comes")

    def _found(self, request: str) -> Span | None:
        mine = [span for span in self.spans if span.attributes["mlxsrv.request.id"] == request]
        assert len(mine) <= 1, "one span for each request"
        return mine[0] if mine else None


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        assert self.headers["Content-Type"] == "application/x-protobuf"
        export = ExportTraceServiceRequest.FromString(body)
        self.server.bodies.append(body)
        self.server.spans += read_spans(export)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def read_spans(export: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in export.resource_spans:
        for scope in resource.scope_spans:
            assert scope.scope.name == "mlxsrv"
            for span in scope.spans:
                yield Span(
                    name=span.name,
                    trace=span.trace_id.hex(),
                    parent=span.parent_span_id.hex(),
                    state=span.trace_state,
                    kind=span.kind,
                    begun=span.start_time_unix_nano / 1e9,
                    ended=span.end_time_unix_nano / 1e9,
                    error=span.status.code == span.status.STATUS_CODE_ERROR,
                    status=span.status.message,
                    attributes={each.key: value_of(each.value) for each in span.attributes},
                    events={each.name: each.time_unix_nano / 1e9 for each in span.events},
                    resource={e.key: value_of(e.value) for e in resource.resource.attributes},
                )


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(
    folders: Folders, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "50",  # ms
    }
    options = ["--model", f"t={folders.endless}", "--otel", "--metrics"]
    folder = tmp_path_factory.mktemp("traced")
    with serving(folder, *options, variables=variables) as server:
        yield server


@pytest.fixture
def client(traced: Server) -> Iterator[httpx.Client]:
    with traced.client() as client:
        yield client


def check(attributes: dict[str, Any], **expected: Any) -> None:
    """Fails unless these are among the attributes; names with _ for a dot."""
    told = {name.replace(".", "_"): value for name, value in attributes.items()}
    assert {name: told.get(name) for name in expected} == expected


# Spans of a server.


def test_a_span_says_what_was_asked_and_what_came(
    client: httpx.Client, collector: Collector
) -> None:
    sampling = {"top_p": 0.5, "top_k": 7, "seed": 3, "frequency_penalty": 0.5, "n": 2}
    body = chat(SECRET, **sampling, max_tokens=12, stop=[SECRET])
    headers = {"X-Request-ID": "whole", "traceparent": TRACEPARENT, "tracestate": "a=b"}
    before = time.time()
    answer = ask(client, body, **headers)
    span = collector.span("whole")
    assert (span.name, span.kind) == ("chat t", 2)  # SERVER
    assert (span.trace, span.parent, span.state) == (TRACE, PARENT, "a=b")
    assert before <= span.begun <= span.events["first token"] <= span.ended <= time.time()
    assert not span.error
    assert span.resource["service.name"] == "mlxsrv"
    check(
        span.attributes,
        gen_ai_operation_name="chat",
        gen_ai_provider_name="mlxsrv",
        gen_ai_request_model="t",
        gen_ai_request_temperature=0.0,
        gen_ai_request_top_p=0.5,
        gen_ai_request_top_k=7,
        gen_ai_request_seed=3,
        gen_ai_request_frequency_penalty=0.5,
        gen_ai_request_max_tokens=12,
        gen_ai_request_choice_count=2,
        gen_ai_response_id=answer["id"],
        gen_ai_response_model="t",
        gen_ai_response_finish_reasons=["length", "length"],
        gen_ai_usage_input_tokens=answer["usage"]["prompt_tokens"],
        gen_ai_usage_output_tokens=24,
        http_route=CHAT,
        http_request_method="POST",
        http_response_status_code=200,
        error_type=None,
        gen_ai_request_stream=None,
    )


def test_a_span_of_a_stream_ends_with_it(client: httpx.Client, collector: Collector) -> None:
    usage = stream(client, chat(SECRET, max_tokens=40), **{"X-Request-ID": "stream"}).usage
    span = collector.span("stream")
    assert (span.name, span.parent) == ("chat t", "")
    first = span.attributes["gen_ai.response.time_to_first_chunk"]
    assert span.begun + first == pytest.approx(span.events["first token"], abs=0.1)
    assert span.ended > span.events["first token"] > span.events["engine has the request"]
    check(
        span.attributes,
        gen_ai_request_stream=True,
        gen_ai_usage_input_tokens=usage["prompt_tokens"],
        gen_ai_usage_output_tokens=40,
        gen_ai_response_finish_reasons=["length"],
    )


def test_other_operations_have_their_names(client: httpx.Client, collector: Collector) -> None:
    ask(client, completion(SECRET), COMPLETIONS, **{"X-Request-ID": "text"})
    assert collector.span("text").name == "text_completion t"
    body = {"input": [SECRET, "other"], "model": "default", "encoding_format": "base64"}
    response = client.post("/v1/embeddings", json=body, headers={"X-Request-ID": "embed"})
    span = collector.span("embed")
    assert (span.name, span.error) == ("embeddings t", False)
    check(
        span.attributes,
        gen_ai_operation_name="embeddings",
        gen_ai_request_model="default",
        gen_ai_request_encoding_formats=["base64"],
        gen_ai_usage_input_tokens=response.json()["usage"]["prompt_tokens"],
    )


def test_what_a_client_does_wrong_is_no_error_of_the_server(
    client: httpx.Client, collector: Collector
) -> None:
    for request, body, status, code in (
        ("unknown", chat(model="no" * 1000), 404, "model_not_found"),
        ("invalid", chat(temperature=9), 400, "invalid_value"),
        ("late", chat(logit_bias={"999999": 1}), 400, "invalid_value"),
        ("unknown stream", chat(model="nobody", stream=True), 404, "model_not_found"),
    ):
        response = client.post(CHAT, json=body, headers={"X-Request-ID": request})
        assert response.status_code == status
        span = collector.span(request)
        assert span.name == ("chat t" if request == "late" else "chat")
        assert not span.error
        check(span.attributes, error_type=code, http_response_status_code=status)
        assert len(span.attributes.get("gen_ai.request.model", "")) <= 200
    refused(client.get("/v1/nowhere"), 404, "not_found")


def test_a_client_that_leaves_is_told(traced: Server, collector: Collector) -> None:
    for streaming in (True, False):
        body = chat(SECRET, stream=streaming, max_tokens=FOR_EVER)
        with RawClient(traced, body) as leaver:
            if streaming:
                leaver.until(FIRST_CONTENT)
            else:
                traced.logged("stream start", request=leaver.request)
            leaver.hang_up()
        span = collector.span(leaver.request)
        assert not span.error
        check(
            span.attributes,
            error_type="disconnected",
            gen_ai_response_finish_reasons=None,
            http_response_status_code=200 if streaming else None,
        )
        assert span.attributes["gen_ai.usage.input_tokens"] > 0


def test_what_asks_no_model_has_no_span(client: httpx.Client, collector: Collector) -> None:
    for path in ("/health", "/v1/models", "/metrics"):
        assert client.get(path, headers={"X-Request-ID": path}).status_code == 200
    client.post("/tokenize", json={"content": SECRET}, headers={"X-Request-ID": "tokenize"})
    ask(client, chat(), **{"X-Request-ID": "the last"})
    collector.span("the last")
    told = {span.attributes["mlxsrv.request.id"] for span in collector.spans}
    assert not told & {"/health", "/v1/models", "/metrics", "tokenize"}


def test_nothing_of_a_prompt_is_told(client: httpx.Client, collector: Collector) -> None:
    ask(client, chat(SECRET), **{"X-Request-ID": "secret"})
    collector.span("secret")
    assert not [body for body in collector.bodies if SECRET.encode() in body]


# The end of a server.


def test_what_fails_in_its_stream_is_an_error_and_is_sent_before_the_end(
    folders: Folders, tmp_path: Path
) -> None:
    variables = {"OTEL_SERVICE_NAME": "mine", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"}
    options = ["--model", f"t={folders.endless}", "--otel", "--shutdown-grace", "0"]
    with collecting() as collector:
        variables["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = f"{collector.url}/v1/traces"
        with (
            serving(tmp_path, *options, variables=variables) as server,
            RawClient(server, chat(stream=True, max_tokens=FOR_EVER)) as running,
        ):
            running.until(FIRST_CONTENT)
            server.signal(SIGTERM)
            running.until(rb"\[DONE\]")
            assert server.exit_status() == 0
        # No waiting: the process is gone.
        [span] = collector.spans
    assert (span.error, span.status) == (True, "shutting_down")
    assert span.resource["service.name"] == "mine"
    check(span.attributes, error_type="shutting_down", http_response_status_code=200)
    assert span.attributes["gen_ai.usage.output_tokens"] > 0


def test_a_collector_that_is_not_there_holds_up_nobody(folders: Folders, tmp_path: Path) -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        "OTEL_BSP_SCHEDULE_DELAY": "10",
    }
    options = ["--model", f"t={folders.plain}", "--otel"]
    with serving(tmp_path, *options, variables=variables) as server, server.client() as client:
        for _ in range(3):
            ask(client, chat())
        server.signal(SIGTERM)
        assert server.exit_status() == 0
        lines = server.log_text().splitlines()
    for line in lines:
        assert {"time", "level", "event"} <= json.loads(line).keys()


# Mounted in an app that traces.

PARENT_APP = """
import json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
import mlxsrv

app = mlxsrv.create_app(mlxsrv.Settings(model=("t=" + sys.argv[1],), hf_cache=False, otel=True))
exporter = InMemorySpanExporter()
provider = TracerProvider()  # only now: the order does not matter
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)


class Traced:
    async def __call__(self, scope, receive, send):
        with trace.get_tracer("parent").start_as_current_span("parent"):
            await app(scope, receive, send)


body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
client = TestClient(Starlette(routes=[Mount("/llm", Traced()), Mount("/plain", app)]))
for prefix in ("/llm", "/plain"):
    headers = {"traceparent": sys.argv[2]}
    response = client.post(prefix + "/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
spans = [json.loads(span.to_json()) for span in exporter.get_finished_spans()]
print(json.dumps(spans))
"""


def test_an_app_around_it_has_the_spans(folders: Folders) -> None:
    """Its provider is used, whoever came first; its span is the parent, if it has one."""
    result = subprocess.run(
        [sys.executable, "-c", PARENT_APP, str(folders.plain), TRACEPARENT],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    spans = json.loads(result.stdout)
    assert [span["name"] for span in spans] == ["chat t", "parent", "chat t"]
    inner, parent, plain = spans
    assert inner["parent_id"] == parent["context"]["span_id"]
    assert inner["attributes"]["http.route"] == CHAT
    assert plain["parent_id"] == f"0x{PARENT}"
    assert plain["context"]["trace_id"] == f"0x{TRACE}"
