"""The view of the server: what it shows while requests run, and what its buttons do."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.page.conftest import Serve, hide
from tests.support import faulty
from tests.support.hub import Hub
from tests.support.serving import serving_faulty
from tests.support.tiny import write_model

FOR_EVER = 500_000
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers last longer than a test."""
    folder = tmp_path_factory.mktemp("models") / "endless"
    return write_model(folder, "qwen3", plain=True, max_position_embeddings=10**6)


@pytest.fixture(scope="module")
def url(serve: Serve, endless: Path) -> Iterator[str]:
    with serve("--model", f"t={endless}", "--max-concurrency", "1") as found:
        yield found


@pytest.fixture
def view(page: Any, url: str) -> Any:
    return open_view(page, url)


def open_view(page: Any, url: str) -> Any:
    page.goto(f"{url}/#server")
    found = page.get_by_role("region", name="Server", exact=True)
    expect(found.get_by_role("status")).to_have_text("Ready")
    return found


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Tell me of the sea."}], **fields}


def long_body() -> dict[str, Any]:
    """A request whose prompt is worth keeping."""
    message = {"role": "user", "content": "Tell me of the sea. " * 30}
    return {"messages": [message], "max_tokens": 1}


def plot(view: Any, title: str) -> Any:
    """Return the picture with this title."""
    return view.get_by_role("img", name=re.compile(f"^{title}: "))


@contextmanager
def running(url: str) -> Iterator[None]:
    """An answer that is being generated."""
    request = body(max_tokens=FOR_EVER, stream=True)
    with httpx.stream("POST", url + CHAT, json=request, timeout=60) as response:
        lines = response.iter_lines()  # without it, httpx would hang up
        next(lines)
        yield


@contextmanager
def waiting(url: str) -> Iterator[None]:
    """A request that waits for a row, and goes away at the end."""
    connection = HTTPConnection(url.removeprefix("http://"))
    with closing(connection):
        fields = {"Content-Type": "application/json"}
        connection.request("POST", CHAT, json.dumps(body(max_tokens=1)), fields)
        yield


# What is seen.


def test_the_plots_follow_a_stream(view: Any, url: str) -> None:
    expect(plot(view, "Running")).to_have_accessible_name(re.compile("^Running: 0 now"))
    with running(url):
        expect(plot(view, "Running")).to_have_accessible_name(re.compile("^Running: 1 now"))
        expect(view.get_by_role("row", name=re.compile("^t "))).to_contain_text("1 of 1")
        speed = re.compile("^Tokens per second: [1-9][0-9,]* now; from .* in the last 2 minutes$")
        expect(plot(view, "Tokens per second")).to_have_accessible_name(speed)
        with waiting(url):
            expect(plot(view, "Queued")).to_have_accessible_name(re.compile("^Queued: 1 now"))
        expect(plot(view, "Queued")).to_have_accessible_name(re.compile("^Queued: 0 now"))
    expect(plot(view, "Running")).to_have_accessible_name(
        "Running: 0 now; from 0 to 1 in the last 2 minutes"
    )
    expect(view).to_contain_text(re.compile("95 % of first tokens within [0-9.]+ m?s"))


def test_the_cache_is_seen(view: Any, url: str) -> None:
    for _ in range(2):
        httpx.post(url + CHAT, json=long_body()).raise_for_status()
    hits = re.compile("^Prompt cache hits: [1-9][0-9]? % now")
    expect(plot(view, "Prompt cache hits")).to_have_accessible_name(hits)
    first = re.compile("^Time to first token: [0-9.]+ m?s now")
    expect(plot(view, "Time to first token")).to_have_accessible_name(first)


def test_the_bar_shows_what_memory_is_used_for(view: Any, url: str) -> None:
    httpx.post(url + CHAT, json=long_body()).raise_for_status()
    bar = view.get_by_role("img", name=re.compile("^Memory, of [0-9.]+ [GT]B: Weights "))
    name = re.compile(
        r"Weights [1-9.]\S* kB, Running .*, Prompt cache [1-9]\S* [kM]B, Free \S+ [GT]B$"
    )
    expect(bar).to_have_accessible_name(name)
    boxes = [each.bounding_box() for each in bar.locator("span").all()]
    weights, _, reading, kept, free = boxes
    assert reading is None, "nothing is read at the moment"
    assert free["width"] > 100 * weights["width"] > 0
    assert kept["width"] > 0


def test_a_model_tells_what_it_needs(view: Any, url: str) -> None:
    [model] = httpx.get(f"{url}/health?verbose=1").json()["models"]
    per_token = sum(cost["bytes_per_token"] for cost in model["kv_cache"])
    assert per_token < 1000
    row = view.get_by_role("row", name=re.compile("^t "))
    expect(row).to_contain_text(f"{per_token} B per token")
    expect(row).to_contain_text("1,000,000")
    expect(row).to_contain_text("loaded")


def test_a_refused_request_is_among_the_last_errors(view: Any, url: str) -> None:
    headers = {"X-Request-ID": "refused-1"}
    wrong = body(model="nobody-has-this")
    assert httpx.post(url + CHAT, json=wrong, headers=headers).status_code == 404
    row = view.get_by_role("row", name=re.compile("refused-1"))
    for text in (f"POST {CHAT}", "404", "model_not_found"):
        expect(row).to_contain_text(text)
    expect(view).not_to_contain_text("nobody-has-this")
    expect(view).to_contain_text(re.compile("Since the start [0-9]+ requests, [1-9][0-9]* failed"))


# What one does.


def test_a_model_is_unloaded_and_loaded(page: Any, view: Any, url: str) -> None:
    httpx.post(url + CHAT, json=body(max_tokens=1)).raise_for_status()
    row = view.get_by_role("row", name=re.compile("^t "))
    row.get_by_role("button", name="Unload t").press("Enter")
    expect(row).to_contain_text("not loaded")
    assert httpx.get(f"{url}/health?verbose=1").json()["models"] == []
    expect(page.get_by_role("status").filter(has_text="t is unloaded")).to_be_visible()
    load = row.get_by_role("button", name="Load t")
    expect(load).to_be_focused()
    load.press("Enter")
    expect(row.get_by_role("button", name="Unload t")).to_be_focused()
    [model] = httpx.get(f"{url}/health?verbose=1").json()["models"]
    assert model["state"] == "loaded"


def test_a_model_in_use_stays_until_it_is_not(page: Any, view: Any, url: str) -> None:
    row = view.get_by_role("row", name=re.compile("^t "))
    with running(url):
        row.get_by_role("button", name="Unload t").click()
        note = page.get_by_role("status").filter(has_text="t goes when nothing needs it any more")
        expect(note).to_be_visible()
        expect(row).to_contain_text("1 of 1")
    expect(row).to_contain_text("not loaded")


def test_a_model_that_stays_loaded_says_why(page: Any, url: str) -> None:
    httpx.post(url + CHAT, json=body(max_tokens=1)).raise_for_status()

    def pin(route: Any) -> None:
        told = route.fetch().json()
        told["models"][0]["pinned"] = True
        route.fulfill(json=told)

    page.route("**/health?verbose=1", pin)
    unload = open_view(page, url).get_by_role("button", name="Unload t")
    expect(unload).to_have_attribute("aria-disabled", "true")
    expect(unload).to_have_attribute("title", re.compile("^It stays loaded: --pin"))


def test_a_pull_that_is_refused_is_told(view: Any) -> None:
    view.get_by_label("Download a model").fill("org/name")
    view.get_by_role("button", name="Pull").click()
    alert = view.get_by_role("alert").filter(has_text="--allow-download")
    expect(alert).to_contain_text("This server does not download models")
    expect(view.get_by_role("button", name="Pull")).to_be_enabled()


def test_a_pull_shows_how_far_it_is(
    page: Any, serve: Serve, tmp_path: Path, endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub() as hub:
        for name, value in hub.environment(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        hub.add("org/new", endless)
        hub.drip("model.safetensors", 0.05)
        with serve("--model", f"t={endless}", "--allow-download", "--keepalive", "0.2") as url:
            view = open_view(page, url)
            view.get_by_label("Download a model").fill("org/new")
            view.get_by_role("button", name="Pull").click()
            bar = view.get_by_role("progressbar", name="Download")
            expect(bar).to_have_js_property("hidden", value=False)
            expect(view).to_contain_text(re.compile("[1-9][0-9.]* [kM]?B of [0-9.]+ [kM]B"))
            name = view.get_by_label("Download a model")
            name.press("ControlOrMeta+a")
            name.press("Delete")
            expect(name).to_have_value("org/new")  # without a name, Stop would be refused
            view.get_by_role("button", name="Stop").click()
            expect(bar).to_be_hidden()
            hub.mend()
            view.get_by_role("button", name="Pull").click()
            row = view.get_by_role("row", name=re.compile("^org.new "))
            expect(row).to_contain_text("not loaded")
            row.get_by_role("button", name="Load org/new").click()
            expect(row.get_by_role("button", name="Unload org/new")).to_be_visible()


# When it asks.


def test_it_asks_only_while_it_is_seen(page: Any, url: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.install()
    view = open_view(page, url)

    def count() -> int:
        return sum("/health" in each for each in asked)

    def looks(seconds: int) -> int:
        before = count()
        for _ in range(seconds):
            page.clock.run_for(1000)
            page.evaluate("fetch('/health/live').then(() => null)")  # what was asked before is told
        return count() - before - seconds

    assert looks(5) > 0
    page.get_by_role("link", name="Chat").click()
    expect(view).to_be_hidden()
    assert looks(5) == 0
    page.get_by_role("link", name="Server").click()
    assert looks(5) > 0
    hide(page, True)
    assert looks(5) == 0
    hide(page, False)
    assert looks(5) > 0
    refusal = {"status": 429, "headers": {"Retry-After": "60"}, "json": {"error": {"message": "x"}}}
    page.route("**/health?verbose=1", lambda route: route.fulfill(**refusal))
    assert looks(20) <= 2  # one may have been on its way


def test_a_server_may_go_away_and_come_back(page: Any, serve: Serve, endless: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serve("--model", f"t={endless}", "--port", f"{port}") as url:
        view = open_view(page, url)
        httpx.post(url + CHAT, json={})
        expect(view).to_contain_text("missing_required_parameter")
    state = view.get_by_role("status")
    expect(state).to_have_text("The server does not answer; trying again")
    expect(plot(view, "Running")).to_have_accessible_name(re.compile("^Running: no value; from 0"))
    with serve("--model", f"t={endless}", "--port", f"{port}"):
        expect(state).to_have_text("Ready")
        expect(view).to_contain_text("No request has failed since the start.")
        expect(page.get_by_text("The server cannot be reached")).to_be_hidden()


def test_a_stalled_engine_is_told(page: Any, tmp_path: Path, endless: Path) -> None:
    options = ("--model", f"t={endless}", "--step-timeout", "0.2")
    with serving_faulty(tmp_path, *options) as server:
        view = open_view(page, server.url)
        asked = Thread(target=complete, args=(server.url, [1, 2, faulty.HELD]))
        asked.start()
        told = re.compile("The engine is stalled *One step has taken [0-9.]+ m?s so far")
        expect(view).to_contain_text(told)
        server.signal(faulty.RELEASE)
        asked.join()
        expect(view.get_by_role("status")).to_have_text("Ready")


def complete(url: str, prompt: list[int]) -> None:
    httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}, timeout=60)


def test_without_a_key_it_does_not_ask_again(page: Any, serve: Serve, endless: Path) -> None:
    with serve("--model", f"t={endless}", "--api-key", "secret") as url:
        page.goto(f"{url}/#server")
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        view = page.get_by_role("region", name="Server", exact=True)
        expect(view.get_by_role("status")).to_contain_text("API key")
        view.get_by_role("button", name="Try again").click()
        page.get_by_label("The server wants an API key").fill("secret")
        page.get_by_role("button", name="Use this key").click()
        expect(view.get_by_role("status")).to_have_text("Ready")
