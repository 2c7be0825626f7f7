"""Traces: one OpenTelemetry span for each request to a model, with the attributes of the GenAI
semantic conventions. No text of a prompt or an answer is in it.

A span is made when its request is over, with the times of the request. By then everything is known
that a sampler may need, and making it has cost nothing while tokens were generated.

If the process has a tracer provider, it is used: the parent app of a mounted app may have
configured one, or logfire. Otherwise the app has its own provider, which exports by OTLP over HTTP;
the standard OTEL_* variables say where to.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress

import anyio
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
)
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.util.types import AttributeValue

from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.generation.texts import EmbeddingSpec
from mlxsrv.service.observing import Generated, Observer, RequestEnded
from mlxsrv.version import __version__

Attributes = Iterator[tuple[str, AttributeValue | None]]

_CLOSE_SECONDS = 3.0
_LONGEST_NAME = 200  # characters of a model's name, which a client may choose freely


class Tracing(Observer):
    """Makes the spans of one app."""

    def __init__(self) -> None:
        self._own: TracerProvider | None = None

    def ended(self, request: RequestEnded) -> None:
        if request.operation is None:
            return
        tracer = self._provider().get_tracer("mlxsrv", __version__)
        span = tracer.start_span(
            f"{request.operation} {request.model}".rstrip(),
            context=_parent(request.headers),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in _attributes(request) if value is not None},
            start_time=request.time,
        )
        if span.is_recording() and request.generated is not None:
            _add_moments(span, request, request.generated)
        _set_status(span, request)
        span.end(_wall(request, request.ended))

    def _provider(self) -> trace.TracerProvider:
        """The process's provider, if it has one by now; else this app's own."""
        shared = trace.get_tracer_provider()
        if not isinstance(shared, trace.ProxyTracerProvider):
            return shared
        if self._own is None:
            self._own = _make_provider()
        return self._own

    async def close(self) -> None:
        """Send the spans that are not sent yet, for at most `_CLOSE_SECONDS`."""
        own, self._own = self._own, None
        if own is None:
            return
        # A daemon thread does not keep the process alive: a collector that is gone may block it.
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            own.shutdown()
            with suppress(RuntimeError):  # the loop has stopped waiting, and is closed
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=shut_down, name="mlxsrv-otel", daemon=True).start()
        with anyio.move_on_after(_CLOSE_SECONDS):
            await sent.wait()


def _make_provider() -> TracerProvider:
    usual = Resource({SERVICE_NAME: "mlxsrv", SERVICE_VERSION: __version__})
    # The variables override what we know of the service.
    resource = Resource.create().merge(usual).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    exporter = _make_exporter()
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _make_exporter() -> SpanExporter | None:
    kind = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if kind == "console":
        return ConsoleSpanExporter()
    return None if kind == "none" else OTLPSpanExporter()


def _parent(headers: Mapping[str, str]) -> Context | None:
    """The parent of the span: None for the current span, which the app around this one has opened;
    else the one that the client has sent."""
    if trace.get_current_span().get_span_context().is_valid:
        return None
    return propagate.extract(headers)


def _wall(request: RequestEnded, moment: float) -> int:
    """A moment of the request in nanoseconds since 1970."""
    return request.time + round((moment - request.begun) * 1e9)


def _add_moments(span: Span, request: RequestEnded, one: Generated) -> None:
    moments = (("engine has the request", one.started), ("first token", one.first_token))
    for name, moment in moments:
        if moment is not None:
            span.add_event(name, timestamp=_wall(request, moment))


def _set_status(span: Span, request: RequestEnded) -> None:
    """Set the status to error if the server failed. By the conventions, a client's mistake is no
    error of the server's span; `error.type` names it."""
    failed_midway = request.error is not None and request.status < 400
    if request.status >= 500 or failed_midway:
        span.set_status(StatusCode.ERROR, request.error)


def _attributes(request: RequestEnded) -> Attributes:
    yield "gen_ai.operation.name", request.operation
    yield "gen_ai.provider.name", "mlxsrv"
    yield "http.request.method", request.method
    yield "http.route", request.route
    yield "http.response.status_code", request.status or None
    yield "mlxsrv.request.id", request.id
    yield "error.type", request.error or ("disconnected" if _left(request) else None)
    asked = request.asked
    named = (asked is not None and asked.model) or request.model
    yield "gen_ai.request.model", named[:_LONGEST_NAME] or None
    if isinstance(asked, GenerationSpec):
        yield from _asked_attributes(asked)
    elif isinstance(asked, EmbeddingSpec):
        yield "gen_ai.request.encoding_formats", [asked.encoding]
        yield "gen_ai.embeddings.dimension.count", asked.dimensions
    yield "gen_ai.usage.input_tokens", request.tokens
    if request.generated is not None:
        yield from _generated_attributes(request.generated)


def _left(request: RequestEnded) -> bool:
    """Whether the client went away before the end."""
    return request.status == 0 or (request.generated is not None and request.generated.disconnected)


def _asked_attributes(asked: GenerationSpec) -> Attributes:
    yield "gen_ai.request.max_tokens", asked.limit
    yield "gen_ai.request.temperature", asked.sampling.temperature
    yield "gen_ai.request.top_p", asked.sampling.top_p
    yield "gen_ai.request.top_k", asked.sampling.top_k
    yield "gen_ai.request.frequency_penalty", asked.sampling.frequency_penalty
    yield "gen_ai.request.presence_penalty", asked.sampling.presence_penalty
    yield "gen_ai.request.seed", asked.sampling.seed
    yield "gen_ai.request.choice.count", asked.choices if asked.choices != 1 else None
    yield "gen_ai.request.stream", asked.streamed or None


def _generated_attributes(one: Generated) -> Attributes:
    yield "gen_ai.response.id", one.id
    yield "gen_ai.response.model", one.model
    yield "gen_ai.response.finish_reasons", one.reasons or None
    if one.first_token is not None:
        yield "gen_ai.response.time_to_first_chunk", one.first_token - one.begun
    yield "gen_ai.usage.input_tokens", one.usage.prompt_tokens
    yield "gen_ai.usage.output_tokens", one.usage.completion_tokens
    yield "gen_ai.usage.cache_read.input_tokens", one.usage.cached_tokens
    yield "gen_ai.usage.reasoning.output_tokens", one.usage.reasoning_tokens
