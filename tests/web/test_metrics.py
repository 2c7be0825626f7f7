"""`GET /metrics`: what is counted, under which names, and that looking costs nobody anything."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import mlxsrv
from mlxsrv.options import SettingsError
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
from tests.support.serving import Server, serving, wait_for

FOR_EVER = 500_000
OBSERVABILITY = Path(__file__).parent.parent.parent / "benchmarks" / "observability"

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


class Scrape:
    """The samples of one scrape of /metrics."""

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self.names = {sample.name for family in families for sample in family.samples}
        self.types = {family.name: family.type for family in families}
        self.samples: Samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }
        assert len(self.samples) == sum(len(family.samples) for family in families)

    def __getitem__(self, name: str) -> Reading:
        return Reading(self.samples, name)


class Reading:
    """The samples of one name; called with labels, the sum of those that have them."""

    def __init__(self, samples: Samples, name: str) -> None:
        self._samples = samples
        self._name = f"mlxsrv:{name}"

    def __call__(self, **labels: str) -> float:
        return sum(
            value
            for (name, labelled), value in self._samples.items()
            if name == self._name and labels.items() <= labelled
        )


def scrape(client: httpx.Client) -> Scrape:
    response = client.get("/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain; version=")
    return Scrape(response.text)


REQUESTS = "http_requests_total"


def counted(client: httpx.Client, before: Scrape, requests: int) -> Scrape:
    """A scrape when so many more requests are counted, scrapes aside: a client may have all of its
    answer before that."""

    def count(each: Scrape) -> float:
        return each[REQUESTS]() - each[REQUESTS](route="/metrics")

    return wait_for(
        lambda: now if count(now := scrape(client)) >= count(before) + requests else None,
        why=f"{requests} more requests are counted",
    )


@pytest.fixture(scope="module")
def metered(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two rows and room for one model of its four."""
    root = tmp_path_factory.mktemp("metered")
    shutil.copytree(folders.plain, root / "broken")
    weights = root / "broken" / "model.safetensors"
    weights.write_bytes(b"\0" * weights.stat().st_size)
    models = {"t": folders.endless, "u": folders.other, "broken": root / "broken"}
    arguments = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
    options = ["--metrics", "--max-models", "1", "--max-concurrency", "2"]
    with serving(root, *arguments, *options) as server:
        yield server


@pytest.fixture
def client(metered: Server) -> Iterator[httpx.Client]:
    with metered.client() as client:
        before = scrape(client)
        ask(client, chat(max_tokens=1))  # t is loaded
        counted(client, before, 1)
        yield client


def test_a_request_for_text_is_counted(client: httpx.Client) -> None:
    before = scrape(client)
    usages = [
        ask(client, chat(max_tokens=20))["usage"],
        stream(client, chat(max_tokens=30)).usage,
        ask(client, completion(max_tokens=5), COMPLETIONS)["usage"],
    ]
    after = counted(client, before, 3)

    def more(name: str, **labels: str) -> float:
        return after[name](**labels) - before[name](**labels)

    mine = {"model_name": "t"}
    assert more("http_requests_total", route=CHAT, status="200", **mine) == 2
    assert more("http_requests_total", route=COMPLETIONS, status="200", **mine) == 1
    assert more("request_success_total", finished_reason="length", **mine) == 3
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert more("prompt_tokens_total", **mine) == prompts
    assert more("prefix_cache_queries_total", **mine) == prompts
    assert more("generation_tokens_total", **mine) == 55
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert more(f"{name}_count", **mine) == 3, name
        assert more(f"{name}_bucket", le="+Inf", **mine) == 3, name
        assert more(f"{name}_sum", **mine) > 0, name
    assert more("inter_token_latency_seconds_count", **mine) == 55 - 3

    def seconds(name: str) -> float:
        return more(f"{name}_seconds_sum", **mine)

    # The parts make the whole.
    waited = seconds("request_queue_time") + seconds("request_prefill_time")
    assert seconds("time_to_first_token") == pytest.approx(waited)
    assert seconds("inter_token_latency") == pytest.approx(seconds("request_decode_time"))
    worked = seconds("request_prefill_time") + seconds("request_decode_time")
    assert seconds("request_inference_time") == pytest.approx(worked)
    assert seconds("e2e_request_latency") >= seconds("time_to_first_token")


def test_each_choice_has_gaps_of_its_own(client: httpx.Client) -> None:
    before = scrape(client)
    ask(client, chat(n=2, max_tokens=10))
    after = counted(client, before, 1)
    for name, told in (
        ("generation_tokens_total", 20),
        ("inter_token_latency_seconds_count", 18),
        ("request_success_total", 1),
        ("request_decode_time_seconds_count", 1),
    ):
        assert after[name](model_name="t") - before[name](model_name="t") == told, name


def test_embeddings_are_counted(client: httpx.Client) -> None:
    before = scrape(client)
    answer = client.post("/v1/embeddings", json={"input": ["some words", "others"]}).json()
    after = counted(client, before, 1)
    labels = {"route": "/v1/embeddings", "model_name": "t", "status": "200"}
    assert after["http_requests_total"](**labels) == 1
    read = after["prompt_tokens_total"]() - before["prompt_tokens_total"]()
    assert read == answer["usage"]["prompt_tokens"]
    assert after["generation_tokens_total"]() == before["generation_tokens_total"]()


def test_what_runs_and_what_waits_is_seen(metered: Server, client: httpx.Client) -> None:
    aborted = scrape(client)["request_success_total"](finished_reason="abort")
    body = chat(stream=True, max_tokens=FOR_EVER)
    with ExitStack() as stack:
        running = [stack.enter_context(RawClient(metered, body)) for _ in range(2)]
        for one in running:
            one.until(FIRST_CONTENT)
        queued = stack.enter_context(RawClient(metered, body))
        mine = {"model_name": "t"}
        wait_for(lambda: scrape(client)["num_requests_waiting"](**mine) == 1, why="one waits")
        seen = scrape(client)
        assert seen["num_requests_running"](**mine) == 2
        assert seen["max_rows"](**mine) == 2
        assert seen["rows"](state="decoding", **mine) == 2
        tokens = seen["generation_tokens_total"](**mine)
        wait_for(
            lambda: scrape(client)["generation_tokens_total"](**mine) > tokens, why="more are made"
        )
        queued.hang_up()
        wait_for(lambda: scrape(client)["num_requests_waiting"](**mine) == 0, why="it is gone")
        for one in running:
            one.hang_up()
    wait_for(lambda: scrape(client)["num_requests_running"](**mine) == 0, why="all are gone")
    # The engine never had the one that was queued.
    wait_for(
        lambda: scrape(client)["request_success_total"](finished_reason="abort") == aborted + 2,
        why="both count as aborted",
    )


def test_the_prompt_cache_is_seen(client: httpx.Client) -> None:
    long = chat("The sea is wide, and the ships on it are small. " * 10)
    began = scrape(client)
    ask(client, long)
    before = counted(client, began, 1)
    cached = ask(client, long)["usage"]["prompt_tokens_details"]["cached_tokens"]
    after = counted(client, before, 1)
    assert cached > 64
    hits = after["prefix_cache_hits_total"]() - before["prefix_cache_hits_total"]()
    assert hits == cached
    assert after["prompt_cache_bytes"](model_name="t") > 0
    assert after["prompt_cache_entries"](model_name="t") > 0
    assert after["memory_bytes"](kind="active") > 0
    assert after["memory_bytes"](kind="kept") == after["prompt_cache_bytes"]()
    parts = (after["memory_bytes"](kind=kind) for kind in ("weights", "budget"))
    assert sum(parts) == after["memory_bytes"](kind="limit")
    assert after["kv_cache_bytes_per_token"](model_name="t") == 2 * 2 * 2 * 16 * 4
    assert after["model_bytes"](model_name="t") > 0


def test_models_that_come_and_go_are_counted(client: httpx.Client) -> None:
    before = scrape(client)
    ask(client, chat(model="u"))
    refused(client.post(CHAT, json=chat(model="broken")), 503, "model_not_loaded")
    seen = counted(client, before, 2)
    assert seen["model_loads_total"](model_name="u") == 1
    assert seen["model_load_seconds_count"](model_name="u") == 1
    assert seen["model_load_failures_total"](model_name="broken") == 1
    assert seen["model_evictions_total"](model_name="t", reason="room") == 1
    assert seen[REQUESTS](model_name="broken", status="503") == 1
    assert seen["model_bytes"](model_name="t") == 0
    ask(client, chat())
    assert scrape(client)["model_loads_total"](model_name="t") == 2


def test_what_clients_make_up_makes_no_series(client: httpx.Client) -> None:
    def make_up(name: str) -> None:
        refused(client.post(CHAT, json=chat(model=name)), 404, "model_not_found", param="model")
        client.get(f"/{name}")
        client.get(f"/v1/models/{name}/{name}")
        client.get(f"/models/{name}")  # counts as the one before
        client.delete(CHAT)
        client.post(CHAT, content=b"{" + name.encode())

    began = scrape(client)
    make_up("a")
    counted(client, began, 6)  # each look is counted, too
    before = scrape(client)
    for name in ("b", "c", "d" * 1000):
        make_up(name)
    after = counted(client, before, 18)
    assert after.samples.keys() == before.samples.keys()
    requests = after[REQUESTS]
    assert requests(route=CHAT, model_name="", status="404") == 4
    assert requests(route=CHAT, model_name="", status="405") == 4
    assert requests(route=CHAT, model_name="", status="400") == 4
    assert requests(route="/v1/models/{id:path}", status="404") == 8
    assert requests(route="", status="404") == 4


def test_scraping_under_load_disturbs_nobody(metered: Server, client: httpx.Client) -> None:
    answers: list[str] = []

    def ask_some() -> None:
        with metered.client() as mine:
            answers.extend(stream(mine, chat(max_tokens=50)).content for _ in range(2))

    before = scrape(client)
    threads = [threading.Thread(target=ask_some) for _ in range(4)]
    with RawClient(metered, chat(stream=True, max_tokens=FOR_EVER)) as running:
        running.until(FIRST_CONTENT)
        for thread in threads:
            thread.start()
        tokens = [0.0]
        while any(thread.is_alive() for thread in threads) or len({*tokens}) < 5:
            tokens.append(scrape(client)["generation_tokens_total"]())
        for thread in threads:
            thread.join()
        running.hang_up()
    assert len(answers) == 8
    assert len({*answers}) == 1
    assert tokens == sorted(tokens)
    length = {"model_name": "t", "finished_reason": "length"}
    after = counted(client, before, 9)["request_success_total"](**length)
    assert after == before["request_success_total"](**length) + 8


def test_the_names_are_the_same_for_prometheus_itself(client: httpx.Client) -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    response = client.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    types = Scrape(response.text).types
    assert types["mlxsrv:generation_tokens"] == "counter"
    assert types["mlxsrv:inter_token_latency_seconds"] == "histogram"
    assert types["mlxsrv:num_requests_running"] == "gauge"


def test_what_the_dashboard_draws_is_there(client: httpx.Client) -> None:
    dashboard = json.loads((OBSERVABILITY / "grafana.json").read_text("utf-8"))
    expressions = [target["expr"] for target in targets(dashboard)]
    assert len(expressions) > 10
    names = scrape(client).names
    drawn = {name for each in expressions for name in re.findall(r"mlxsrv:\w+", each)}
    # Counters of what has not happened yet have no series, but they have a name.
    text = client.get("/metrics").text
    named = names | {f"{name}_total" for name in re.findall(r"# TYPE (\S+?)(?:_total)? ", text)}
    assert drawn <= named, drawn - named
    for part in (
        "first_token",
        "inter_token",
        "generation_tokens",
        "waiting",
        "rows",
        "preemptions",
    ):
        assert any(part in name for name in drawn), part
    for part in ("cache_hits", "memory", "http_requests", "queue_time", "evictions", "clients"):
        assert any(part in name for name in drawn), part


def targets(part: Any) -> Iterator[dict[str, Any]]:
    """Every query of a dashboard, wherever in it."""
    if isinstance(part, dict):
        if "expr" in part:
            yield part
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from targets(each)


# In process: nothing is loaded.


def make_app(folders: Folders, **options: Any) -> mlxsrv.web.app.App:
    settings = mlxsrv.Settings(model=(f"t={folders.plain}",), hf_cache=False, **options)
    return mlxsrv.create_app(settings)


def test_without_the_option_there_is_no_such_route(folders: Folders) -> None:
    client = TestClient(make_app(folders))
    assert client.get("/metrics").json()["error"]["code"] == "not_found"
    assert "/metrics" not in client.get("/openapi.json").json()["paths"]


def test_with_it_the_route_is_described_and_wants_the_key(folders: Folders) -> None:
    client = TestClient(make_app(folders, metrics=True, api_key=("secret",)))
    assert client.get("/metrics").status_code == 401
    client.headers["Authorization"] = "Bearer secret"
    assert client.get("/metrics").status_code == 200
    described = client.get("/openapi.json").json()["paths"]["/metrics"]["get"]
    assert list(described["responses"]["200"]["content"]) == ["text/plain"]


def test_each_app_counts_for_itself_where_it_is_mounted(folders: Folders) -> None:
    one, other = make_app(folders, metrics=True), make_app(folders, metrics=True)
    client = TestClient(Starlette(routes=[Mount("/one", one), Mount("/other", other)]))
    for _ in range(3):
        assert client.get("/one/v1/models").status_code == 200
    for prefix, requests in (("/one", 3), ("/other", 0)):
        seen = Scrape(client.get(f"{prefix}/metrics").text)
        assert seen["http_requests_total"](route="/v1/models", status="200") == requests


@pytest.mark.parametrize(
    ("option", "package"), [("metrics", "prometheus_client"), ("otel", "opentelemetry")]
)
def test_without_its_extra_an_option_says_what_to_install(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, option: str, package: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "mlxsrv.web.observability.metrics", raising=False)
    monkeypatch.delitem(sys.modules, "mlxsrv.web.observability.tracing", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingsError, match=rf"--{option} .*pip install 'mlxsrv\[{option}\]'"):
        make_app(folders, **{option: True})


def test_by_default_neither_library_is_imported() -> None:
    code = (
        "import sys, mlxsrv; mlxsrv.create_app(mlxsrv.Settings(hf_cache=False));"
        "print([m for m in ('prometheus_client', 'opentelemetry.sdk') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
