"""`GET /metrics`: metrics for Prometheus. Where vLLM has the same metric, its name is used, so
dashboards for vLLM can be adapted.

What has a state (rows, queues, memory, caches) is read at each scrape. What happens between two
scrapes is counted in a registry of the app's own, because several apps may share a process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

import anyio.to_thread
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.errors import RouteNotFound
from mlxsrv.generation.status import Health
from mlxsrv.service.observing import Generated, Observer, RequestEnded, TokenCallback
from mlxsrv.service.service import Service
from mlxsrv.version import __version__
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.paths import Endpoint, OperationRoute

# Not OpenMetrics: prometheus-client replaces colons in names by underscores there.
_TEXT = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's bounds in seconds; two lists begin lower, for small models on fast machines.
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAP = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Gaps:
    """A histogram of the seconds between the tokens of one model's answers.

    `note` is called for each token. prometheus-client's own Histogram is too slow for that: it
    takes two locks and searches its buckets one by one. The event loop writes, and a thread reads
    at a scrape; it copies the counts, which may be one token ahead of the sum.
    """

    __slots__ = ("_counts", "_firsts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(_GAP) + 1)
        self._sum = 0.0
        self._firsts = 0

    def note(self, seconds: float | None) -> None:
        """Count a token; None: it is the first of its choice, so there is no gap before it."""
        if seconds is None:
            self._firsts += 1
        else:
            self._counts[bisect_left(_GAP, seconds)] += 1
            self._sum += seconds

    @property
    def count(self) -> int:
        """All tokens, first ones included."""
        return self._firsts + sum(self._counts)

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Each bound in seconds, and how many gaps are not above it."""
        bounds = [*map(floatToGoString, _GAP), "+Inf"]
        return list(zip(bounds, accumulate(list(self._counts)), strict=True))

    @property
    def sum(self) -> float:
        return self._sum


class _Registry(CollectorRegistry):
    """A registry that leaves out when each series was made: that would double the series."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class _Live(Collector):
    """Metrics that are made anew at each scrape."""

    def __init__(self) -> None:
        self.gaps: dict[str, Gaps] = {}
        self.gauges: list[Metric] = []

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        gaps = HistogramMetricFamily(
            _name("inter_token_latency_seconds"),
            "Seconds between two tokens of an answer.",
            labels=["model_name"],
        )
        tokens = CounterMetricFamily(
            _name("generation_tokens"), "Tokens generated.", labels=["model_name"]
        )
        for model, counted in list(self.gaps.items()):
            gaps.add_metric([model], counted.buckets, counted.sum)
            tokens.add_metric([model], counted.count)
        yield gaps
        yield tokens
        yield from self.gauges


class Metrics(Observer):
    """The metrics of one app."""

    def __init__(self) -> None:
        registry = self._registry = _Registry()
        self._live = _Live()
        registry.register(self._live)
        ProcessCollector(registry=registry)
        self._requests = self._counter(
            "http_requests",
            "Requests by what they asked for and how they were answered.",
            ("route", "model_name", "status"),
        )
        self._finished = self._counter(
            "request_success",
            "Requests for text that the engine got, by how they ended: also abort, their client "
            "left, and error.",
            ("model_name", "finished_reason"),
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts read.")
        self._cache_queries = self._counter(
            "prefix_cache_queries", "Tokens of prompts looked for in the prompt cache."
        )
        self._cache_hits = self._counter(
            "prefix_cache_hits", "Tokens of prompts found in the prompt cache."
        )
        self._loads = self._counter("model_loads", "Models loaded.")
        self._load_failures = self._counter("model_load_failures", "Loads that have failed.")
        self._evictions = self._counter(
            "model_evictions", "Models unloaded: room, or idle.", ("model_name", "reason")
        )
        self._load_seconds = self._histogram(
            "model_load_seconds", "Seconds that loads took.", _LATENCY
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Seconds from a request to its first token.", _TTFT
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Seconds from a request to its end.", _LATENCY
        )
        self._queue = self._histogram(
            "request_queue_time_seconds",
            "Seconds that a request waited for its model and for a row.",
            _LATENCY,
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "Seconds that a request had a row.", _LATENCY
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds",
            "Seconds from when a request got its row to its first token.",
            _LATENCY,
        )
        self._decode = self._histogram(
            "request_decode_time_seconds",
            "Seconds from a request's first token to its last.",
            _LATENCY,
        )
        self._request_prompt = self._histogram(
            "request_prompt_tokens", "Tokens of a request's prompts.", _TOKENS
        )
        self._request_tokens = self._histogram(
            "request_generation_tokens", "Tokens of a request's answers.", _TOKENS
        )

    def _counter(self, name: str, help: str, labels: Sequence[str] = ("model_name",)) -> Counter:
        return Counter(_name(name), help, labels, registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            _name(name), help, ["model_name"], buckets=buckets, registry=self._registry
        )

    # Events.

    def tokens(self, model: str) -> TokenCallback:
        gaps = self._live.gaps.get(model)
        if gaps is None:
            gaps = self._live.gaps[model] = Gaps()
        return gaps.note

    def ended(self, request: RequestEnded) -> None:
        model = request.model
        self._requests.labels(request.route, model, str(request.status)).inc()
        if request.generated is not None and request.generated.started is not None:
            self._generated(request, request.generated)
        elif request.tokens is not None:
            self._prompt_tokens.labels(model).inc(request.tokens)
            self._request_prompt.labels(model).observe(request.tokens)
            self._latency.labels(model).observe(request.ended - request.begun)

    def _generated(self, request: RequestEnded, one: Generated) -> None:
        model = request.model
        self._finished.labels(model, _outcome(request, one)).inc()
        self._latency.labels(model).observe(request.ended - one.begun)
        assert one.started is not None
        self._queue.labels(model).observe(one.started - one.begun)
        if one.first_token is None or one.last_token is None:
            return
        self._ttft.labels(model).observe(one.first_token - one.begun)
        self._prefill.labels(model).observe(one.first_token - one.started)
        self._decode.labels(model).observe(one.last_token - one.first_token)
        self._inference.labels(model).observe(one.last_token - one.started)
        self._prompt_tokens.labels(model).inc(one.usage.prompt_tokens)
        self._cache_queries.labels(model).inc(one.usage.prompt_tokens)
        self._cache_hits.labels(model).inc(one.usage.cached_tokens)
        self._request_prompt.labels(model).observe(one.usage.prompt_tokens)
        self._request_tokens.labels(model).observe(one.usage.completion_tokens)

    def model_loaded(self, model: str, seconds: float, bytes: int) -> None:
        self._loads.labels(model).inc()
        self._load_seconds.labels(model).observe(seconds)

    def model_failed(self, model: str, reason: str) -> None:
        self._load_failures.labels(model).inc()

    def model_evicted(self, model: str, reason: str) -> None:
        self._evictions.labels(model, reason).inc()

    # A scrape.

    @property
    def route(self) -> OperationRoute:
        declared = Endpoint(
            "GET",
            "/metrics",
            "getMetrics",
            "Get metrics for Prometheus",
            "In its text format; with `--metrics` only.",
            answer=str,
            media="text/plain",
        )
        return declared(self.scrape)

    async def scrape(self, request: Request) -> Response:
        record_of(request.scope).quiet = True
        if request.app.membership is not None:
            raise RouteNotFound(
                "the metrics of replicas are among Ray's own, at the metrics port of each of Ray's "
                "nodes, with the prefix ray_mlxsrv_"
            )
        registry = await self.collect(request.app.service)
        # It takes some milliseconds for many models, which streams need not wait for.
        text = await anyio.to_thread.run_sync(generate_latest, registry)
        return Response(text, headers={"Content-Type": _TEXT})

    async def collect(self, service: Service) -> CollectorRegistry:
        """Return the registry, with what is read of a state at each scrape as it is now."""
        health = await service.full_health()
        self._live.gauges = [*_service_gauges(service, health), *_engine_gauges(health)]
        return self._registry


def _name(name: str) -> str:
    return f"mlxsrv:{name}"


def _outcome(request: RequestEnded, one: Generated) -> str:
    if request.error is not None:
        return "error"
    return one.reasons[0] if one.reasons else "abort"


def _gauge(name: str, help: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(_name(name), help, labels=list(labels))


def _service_gauges(service: Service, health: Health) -> list[Metric]:
    """Metrics that need no answer of the engine, and are there also while the engine is stalled."""
    info = _gauge("info", "1; its version is a label.", "version")
    info.add_metric([__version__], 1)
    ready = _gauge("ready", "Whether requests would be served.")
    ready.add_metric([], health.status == "ok")
    running = _gauge("num_requests_running", "Answers that have a row.", "model_name")
    waiting = _gauge(
        "num_requests_waiting", "Requests that wait for their model or for a row.", "model_name"
    )
    clients = _gauge("num_clients_waiting", "Clients whose requests wait for a row.", "model_name")
    most = _gauge("max_rows", "Rows that are decoded together at most.", "model_name")
    size = _gauge("model_bytes", "Bytes of a loaded model's weights.", "model_name")
    queued: dict[str, int] = {}
    for model in service.pool:
        known = service.pool.catalogue.label(model.name) if model.loaded is None else model.name
        queues = model.waiting_for_load + len(model.queued)
        queued[known] = queued.get(known, 0) + queues
        if model.loaded is not None:
            running.add_metric([model.name], len(model.running))
            most.add_metric([model.name], model.max_rows)
            clients.add_metric([model.name], model.waiting_clients)
            size.add_metric([model.name], model.loaded.bytes)
    for name, number in queued.items():
        waiting.add_metric([name], number)
    return [info, ready, running, waiting, clients, most, size]


def _engine_gauges(health: Health) -> list[Metric]:
    rows = _gauge("rows", "Rows of the batch by what they do.", "model_name", "state")
    cache_bytes = _gauge("prompt_cache_bytes", "Bytes of prompts read before.", "model_name")
    entries = _gauge("prompt_cache_entries", "Prompts in the prompt cache.", "model_name")
    for model in health.models or ():
        engine = model.engine
        for name, state in (("rows", "decoding"), ("reading", "reading"), ("waiting", "waiting")):
            if name in engine:
                rows.add_metric([model.id, state], engine[name])
        if "prompt_cache_bytes" in engine:
            cache_bytes.add_metric([model.id], engine["prompt_cache_bytes"])
            entries.add_metric([model.id], engine["prompt_cache_entries"])
    return [rows, cache_bytes, entries, *_disk_metrics(health), *_memory_gauges(health)]


def _disk_metrics(health: Health) -> list[Metric]:
    """Prompts on disk, of the models that have some."""
    metrics: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
        "bytes": _gauge("prompt_cache_disk_bytes", "Bytes of a model's files.", "model_name"),
        "files": _gauge("prompt_cache_disk_files", "Files of a model's.", "model_name"),
        "hits": _count("prompt_cache_disk_hits", "Prompts that began with what was on disk."),
        "hit_tokens": _count("prompt_cache_disk_hit_tokens", "Tokens that were read from disk."),
        "writes": _count("prompt_cache_disk_writes", "Files that were written."),
    }
    for model in health.models or ():
        for name, metric in metrics.items():
            if (number := model.engine.get(f"prompt_cache_disk_{name}")) is not None:
                metric.add_metric([model.id], number)
    return list(metrics.values())


def _count(name: str, help: str) -> CounterMetricFamily:
    return CounterMetricFamily(_name(name), help, labels=["model_name"])


def _memory_gauges(health: Health) -> list[Metric]:
    memory = _gauge(
        "memory_bytes",
        "Bytes of the device: active, cached (free, kept for reuse), peak; the limit, weights of "
        "all models, the budget that they leave for KV caches, and what of it rows, reading "
        "(prompts that are being read) and kept (prompts, and what drafts have read) take.",
        "kind",
    )
    usage = _gauge(
        "kv_cache_usage_perc", "KV caches of rows and of prompts being read; 1: all of the budget."
    )
    if health.memory:
        kinds = ("limit", "weights", "budget", "rows", "reading", "kept")
        for kind in (*kinds, "active", "cached", "peak"):
            memory.add_metric([kind], getattr(health.memory, kind))
        taken = health.memory.rows + health.memory.reading
        usage.add_metric([], taken / health.memory.budget if health.memory.budget else 1)
    per_token = _gauge(
        "kv_cache_bytes_per_token",
        "Bytes of a row's KV cache for each token, while no window is full.",
        "model_name",
    )
    preemptions = _count(
        "num_preemptions", "Rows that gave their memory to older ones, and were read again."
    )
    for model in health.models or ():
        if model.kv_cache is not None:
            own = [cost for cost in model.kv_cache if cost.kind != "draft"]
            bytes = sum(cost.bytes_per_token for cost in own)
            per_token.add_metric([model.id], bytes)
        if "preemptions" in model.engine:
            preemptions.add_metric([model.id], model.engine["preemptions"])
    return [memory, usage, per_token, preemptions]
