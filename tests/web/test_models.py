"""Many models on one server, as its clients see them: swaps, loads, failures, the catalogue."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import mlxsrv
from mlxsrv.formats.model_folder import describe_model
from tests.support.client import (
    CHAT,
    FIRST_CONTENT,
    Body,
    RawClient,
    answer,
    ask,
    chat,
    check_schema,
    read_stream,
    refused,
)
from tests.support.crowds import Crowd, states
from tests.support.effort import examples, often
from tests.support.serving import PATIENCE, Server, hosted, serving, wait_for
from tests.support.tiny import write_model

FOR_EVER = 500_000

STORM = examples(250)
"""Requests that come at random."""

KEEPALIVE = rb": keep-alive\n\n"
JSON = {"Accept": "application/json"}


class Places(msgspec.Struct, frozen=True):
    """Models on disk, and where the server looks for more.

    - `x`, `y`: say whole characters for ever, each its own; only `x` has no end.
    - `broken`: what is missing of it only its load finds out.
    - `large`: eight times the layers.
    - `root`: a folder of models, one of them not healthy.
    - `cache`: of the Hugging Face hub, with one model.
    """

    x: Path
    y: Path
    broken: Path
    large: Path
    root: Path
    cache: Path


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    root = tmp_path_factory.mktemp("places")
    places = Places(*(root / name for name in Places.__struct_fields__))
    write_model(places.x, "qwen3", plain=True, max_position_embeddings=10**6)
    write_model(places.y, "qwen3", plain=True, seed=1)
    write_model(places.large, "qwen3", num_hidden_layers=16)
    config = write_model(places.broken, "qwen3") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))
    shutil.copytree(places.y, places.root / "org" / "named")
    shutil.copytree(places.y, places.root / "sick")
    (places.root / "sick" / "config.json").write_text("{}")
    snapshots = places.cache / "models--hub--cached" / "snapshots"
    shutil.copytree(places.y, snapshots / ("a" * 40))
    return places


@pytest.fixture(scope="module")
def one(places: Places, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Room for one model, four requests for each, and an impatient keep-alive."""
    models = [f"--model={name}={getattr(places, name)}" for name in ("x", "y", "broken")]
    options = ["--max-models=1", "--keepalive=0.2", "--max-concurrency=3", "--max-queue=1"]
    with serving(tmp_path_factory.mktemp("one"), *models, *options) as server:
        yield server


@pytest.fixture(scope="module")
def many(places: Places, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Room for all, of every source, and little patience with idle ones."""
    options = [
        f"--model=x={places.x}",
        f"--model=alias={places.x}",
        f"--model=y={places.y}",
        f"--model=broken={places.broken}",
        f"--models-dir={places.root}",
        "--model-alias=claude-*/[0-9]=alias",
        "--preload=y",
        "--pin=x",
        "--idle-timeout=0.5",
    ]
    variables = {"HF_HUB_CACHE": str(places.cache)}
    with serving(tmp_path_factory.mktemp("many"), *options, variables=variables) as server:
        yield server


def listed(server: Server) -> dict[str, Body]:
    with server.client() as client:
        return {model["id"]: model for model in client.get("/v1/models").json()["data"]}


def loaded(server: Server) -> set[str]:
    return {name for name, model in listed(server).items() if model["loaded"]}


def text(server: Server, model: str, max_tokens: int) -> str:
    with server.client() as client:
        return answer(ask(client, chat(model=model, max_tokens=max_tokens)))


# Swaps.


def test_a_swap_waits_for_the_stream_and_the_next_request_behind_the_swap(one: Server) -> None:
    other, undisturbed = text(one, "y", 8), text(one, "x", 200)
    assert other != undisturbed[: len(other)]
    switches = len(one.log("models switched"))
    endless = chat(model="x", max_tokens=FOR_EVER, stream=True)
    with Crowd(one) as crowd, RawClient(one, endless) as long:
        long.until(FIRST_CONTENT)
        with RawClient(one, chat(model="y", stream=True)) as swap:
            swap.until(KEEPALIVE)
            crowd.waiting("y")
            later = crowd.stream("later", "x", 8)
            crowd.asked("x", 2)
            while len(long.text) < len(undisturbed):
                assert long.read()
            long.hang_up()
            swap.until(rb"\[DONE\]")
    assert long.text.startswith(undisturbed)
    assert swap.text == other
    assert undisturbed.startswith(later.result().content)
    requests = [long.request, swap.request, "later"]
    assert crowd.order(*reversed(requests)) == requests
    there, back = one.log("models switched")[switches:]
    assert (there["model"], there["evicted"]) == ("y", "x")
    assert (back["model"], back["evicted"]) == ("x", "y")
    assert 0 < there["waited"] < there["seconds"]


def test_two_clients_that_alternate_are_both_answered(one: Server) -> None:
    right = {model: text(one, model, 5) for model in ("x", "y")}

    def alternate(models: str) -> list[tuple[str, str]]:
        return [(model, text(one, model, 5)) for model in models]

    with ThreadPoolExecutor(2) as threads:
        answers = threads.map(alternate, ["xy" * 4, "yx" * 4])
    for model, said in (pair for pairs in answers for pair in pairs):
        assert said == right[model]


def test_who_leaves_while_it_waits_takes_no_room(one: Server) -> None:
    text(one, "x", 1)
    loads = len(one.log("model loaded"))
    with RawClient(one, chat(model="x", max_tokens=FOR_EVER, stream=True)) as running:
        running.until(FIRST_CONTENT)
        with RawClient(one, chat(model="y", stream=True)) as leaver, Crowd(one) as crowd:
            leaver.until(KEEPALIVE)
            crowd.waiting("y")
            behind = crowd.stream("behind", "x", 8)
            crowd.asked("x", 2)
            assert not behind.done()
            leaver.hang_up()
            assert behind.result().finish_reason == "length"
    assert one.logged("stream end", request=leaver.request)["finish"] == "disconnected"
    assert len(one.log("model loaded")) == loads


def test_a_model_loads_beside_a_running_stream(many: Server) -> None:
    undisturbed = text(many, "x", 100)
    wait_for(lambda: loaded(many) == {"x"}, why="all others are gone")
    with RawClient(many, chat(model="x", max_tokens=FOR_EVER, stream=True)) as beside:
        beside.until(FIRST_CONTENT)
        assert text(many, "y", 8)
        assert text(many, "org/named", 8)
        assert not many.log("stream end", request=beside.request)
        while len(beside.text) < len(undisturbed):
            assert beside.read()
        assert beside.text.startswith(undisturbed)


# Loads that fail.


def test_a_failed_load_is_told_in_the_lists_until_another_is_tried(
    places: Places, tmp_path: Path
) -> None:
    """The health tells it of the default model only."""
    failing = shutil.copytree(places.broken, tmp_path / "failing")
    options = (f"--model={failing}", f"--model=broken={places.broken}")
    with serving(tmp_path, *options) as server, server.client() as client:
        reason = server.logged("load failed", model="failing")["reason"]
        wait_for(lambda: client.get("/health").json()["status"] != "loading", why="the start ends")
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert health.json()["reason"] == reason
        assert client.get("/health/live").status_code == 200
        models = listed(server)
        assert (models["failing"]["state"], models["failing"]["reason"]) == ("failed", reason)
        assert (models["broken"]["state"], models["broken"]["reason"]) == ("unused", None)
        refused(client.post(CHAT, json=chat(model="broken")), 503, "model_not_loaded")
        assert listed(server)["broken"]["state"] == "failed"
        tags = {each["model"]: each for each in client.get("/api/tags").json()["models"]}
        assert tags["failing:latest"]["reason"] == reason
        assert tags["broken:latest"]["state"] == "failed"
        shutil.copy(places.x / "config.json", failing)
        ask(client, chat(model="failing", max_tokens=1))
        assert listed(server)["failing"]["state"] == "loaded"
        assert client.get("/health").json() == {"status": "ok"}, "the other is not the default"


# What is refused, and how.


@pytest.fixture
def busy(one: Server) -> Iterator[RawClient]:
    """A stream of `x` that does not end, so that nothing else has room."""
    with RawClient(one, chat(model="x", max_tokens=FOR_EVER, stream=True)) as running:
        running.until(FIRST_CONTENT)
        yield running


def test_a_load_that_fails_after_a_comment_is_an_error_chunk(one: Server, busy: RawClient) -> None:
    with Crowd(one) as crowd:
        failing = crowd.stream("failing", "broken", 8)
        crowd.waiting("broken")
        with RawClient(one, chat(model="broken", stream=True)) as second:
            second.until(KEEPALIVE)
            busy.hang_up()
            second.until(rb"\[DONE\]")
    assert failing.result().status == 200
    assert failing.result().comments > 0
    assert failing.result().finish_reason == "error"
    error = failing.result().chunks[-1]["error"]
    assert (error["type"], error["code"]) == ("server_error", "model_not_loaded")
    assert "broken" in error["message"]
    assert "layers.2." in error["message"], "the reason"
    wait_for(lambda: loaded(one) == {"x"}, why="what went for it is back")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_load_that_fails_at_once_has_its_status(many: Server, streaming: bool) -> None:
    with many.client() as client:
        body = chat(model="broken", stream=streaming)
        error = refused(client.post(CHAT, json=body, headers=JSON), 503, "model_not_loaded")
    assert "broken" in error["message"]
    assert "layers.2." in error["message"]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_known_without_the_model_has_its_status(
    one: Server, busy: RawClient, streaming: bool
) -> None:
    """Though a keep-alive comes sooner than its model, or than its prompt is looked at."""
    del busy
    loads = len(one.log("model loaded"))
    with one.client(headers=JSON) as client:

        def post(text: str = "Hi", **fields: Any) -> httpx.Response:
            return client.post(CHAT, json=chat(text, **{"stream": streaming, **fields}))

        refused(post(model="nobody"), 404, "model_not_found", param="model")
        refused(post(model="y", temperature=9), 400, "invalid_value", param="temperature")
        long = post("ä" * 250_000, model="y")
        error = refused(long, 400, "context_length_exceeded", param="messages")
        assert "4096" in error["message"]
        waiting = [RawClient(one, chat(model="y", stream=True)) for _ in range(4)]
        for one_of_them in waiting:
            one_of_them.until(KEEPALIVE)
        refused(post(model="y"), 503, "overloaded")
        for one_of_them in waiting:
            one_of_them.hang_up()
            one.logged("stream end", request=one_of_them.request)
    assert len(one.log("model loaded")) == loads
    assert loaded(one) == {"x"}


def test_what_can_never_fit_is_refused_with_the_numbers(places: Places, tmp_path: Path) -> None:
    limit = (places.y / "model.safetensors").stat().st_size * 2
    models = [f"--model=y={places.y}", f"--model=large={places.large}"]
    with serving(tmp_path, *models, f"--memory-limit={limit}") as server, server.client() as client:
        right = text(server, "y", 8)
        for streaming in (False, True):
            body = chat(model="large", stream=streaming)
            response = client.post(CHAT, json=body, headers=JSON)
            error = refused(response, 507, "insufficient_memory")
            assert f"the limit is {limit}" in error["message"]
            assert "large needs" in error["message"]
            assert "retry-after" not in response.headers
        assert text(server, "y", 8) == right
        assert client.get("/health").json()["status"] == "ok"
        assert [line["model"] for line in server.log("model loaded")] == ["y"]


@pytest.mark.parametrize(
    "name",
    [
        "../y",
        "..",
        ".",
        "./y",
        "/",
        "y/",
        "org/../y",
        "nul\0byte",
        "x" * 10_000,
        "~",
        "hub--cached",
    ],
)
def test_a_name_is_never_a_path(many: Server, name: str) -> None:
    with many.client() as client:
        refused(client.post(CHAT, json=chat(model=name)), 404, "model_not_found", param="model")


def test_not_even_a_right_path_is(many: Server, places: Places) -> None:
    names = [places.y, places.root / "org" / "named", places.cache / "models--hub--cached"]
    with many.client() as client:
        for name in map(str, names):
            body = chat(model=name)
            refused(client.post(CHAT, json=body), 404, "model_not_found", param="model")
            refused(client.get(f"/v1/models/{name}"), 404, "model_not_found", param="model")
    assert set(states(many)) <= {"x", "y", "org/named", "hub/cached"}


# The catalogue.


def test_the_catalogue_tells_all_of_every_source(many: Server, places: Places) -> None:
    running = RawClient(many, chat(model="hub/cached", max_tokens=FOR_EVER, stream=True))
    with running, many.client() as client:
        running.until(FIRST_CONTENT)
        body = client.get("/v1/models").json()
        check_schema(body, "ListModelsResponse")
        models = {model["id"]: model for model in body["data"]}
        assert set(models) == {"x", "y", "broken", "org/named", "hub/cached", "demo"}
        order = [(not model["loaded"], model["id"]) for model in body["data"]]
        assert order == sorted(order), "loaded models first, then by id"
        for name in ("x", "alias", "org/named"):
            alone = client.get(f"/v1/models/{name}").json()
            check_schema(alone, "Model")
            assert alone["id"] == ("x" if name == "alias" else name)
    for model in models.values():
        check_schema(model, "Model")
        assert model["object"] == "model"
        assert model["type"] == "chat"
        assert {"completion", "chat"} <= {*model["capabilities"]}
        assert model["details"].keys() == {
            *("family", "parameter_size", "quantization_level", "format")
        }
    x = models["x"]
    assert x["aliases"] == ["alias"]
    assert x["context_length"] == 10**6
    assert (x["details"]["family"], x["details"]["format"]) == ("qwen3", "mlx")
    assert x["size"] >= (places.x / "model.safetensors").stat().st_size
    assert x["modified_at"].startswith("20")
    assert abs(x["created"] - places.x.stat().st_mtime) < 60
    assert "tools" in x["capabilities"]
    assert models["org/named"]["owned_by"] == "org"
    assert models["hub/cached"]["context_length"] == 4096
    assert models["hub/cached"]["loaded"] is True
    [line] = many.log("model left out", model="sick")
    assert line["level"] == "warning"
    assert line["reason"]


def test_an_alias_answers_as_its_model(many: Server) -> None:
    with many.client() as client:
        assert ask(client, chat(model="alias"))["model"] == "x"
        assert ask(client, chat())["model"] == "x", "the first is the default"


def test_a_name_that_matches_an_alias_answers_as_its_model(many: Server) -> None:
    with many.client() as client:
        assert ask(client, chat(model="claude-opus/4"))["model"] == "x"
        told = client.get("/v1/models/claude-opus/4").json()
        assert told == client.get("/v1/models/x").json()
        refused(client.get("/v1/models/claude-opus/x"), 404, "model_not_found", param="model")
        refused(client.post(CHAT, json=chat(model="claude")), 404, "model_not_found", param="model")


def test_preloaded_pinned_and_idle_models(many: Server) -> None:
    wait_for(lambda: len(many.log("model loaded")) > 1, why="both are preloaded")
    loads = [line["model"] for line in many.log("model loaded")]
    assert loads[:2] == ["x", "y"], "before any request"
    text(many, "org/named", 1)
    wait_for(lambda: loaded(many) == {"x"}, why="only the pinned model stays")
    assert many.logged("model unloaded", model="y", reason="idle")
    assert many.logged("model unloaded", model="org/named", reason="idle")
    assert not many.log("model unloaded", model="x")


# All at once.


@pytest.mark.parametrize("room", often([1, 2], [1]))
def test_requests_for_three_models_come_and_go(places: Places, tmp_path: Path, room: int) -> None:
    """At random, 16 at a time: every answer is its model's, and nothing is left over."""
    dice = random.Random(room)
    ends: Counter[str] = Counter()
    models = [f"--model={name}={getattr(places, name)}" for name in ("x", "y", "broken")]
    options = (f"--max-models={room}", "--keepalive=0.1")
    with serving(tmp_path, *models, *options) as server:
        right = {model: text(server, model, 60) for model in ("x", "y")}
        asyncio.run(_storm(server, dice, right, ends))
        assert {model: text(server, model, 60) for model in ("x", "y")} == right
        with server.client() as client:
            assert client.get("/health").json()["status"] == "ok"
        idle = {"requests": 0, "rows": 0, "state": "loaded"}
        wait_for(
            lambda: all(idle.items() <= model.items() for model in states(server).values()),
            why="all that was left behind has ended",
        )
        assert len(states(server)) <= room
        assert "Traceback" not in server.log_text()
    assert min(ends[end] for end in ("answered", "left", "failed")) >= STORM // 20


async def _storm(
    server: Server, dice: random.Random, right: dict[str, str], ends: Counter[str]
) -> None:
    places = asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:

        async def request(body: Body, patience: float | None) -> None:
            async with places:
                if patience == 0:  # it leaves at the first byte, however soon that comes
                    async with client.stream("POST", CHAT, json=body):
                        ends["left"] += 1
                    return
                try:
                    async with asyncio.timeout(patience):
                        ends[_outcome(await client.post(CHAT, json=body), body, right)] += 1
                except TimeoutError:
                    ends["left"] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(STORM):
                body = chat(
                    model=dice.choice(["x", "x", "y", "y", "broken"]),
                    max_tokens=dice.choice([1, 10, 60]),
                    stream=dice.random() < 0.5,
                )
                patience = dice.choice([0, dice.random() * 0.3]) if dice.random() < 0.3 else None
                group.create_task(request(body, patience))


def _outcome(response: httpx.Response, body: Body, right: dict[str, str]) -> str:
    """Return how a request ended; fails if a request for its model may not end so."""
    if body["model"] == "broken":
        if response.status_code == 200:
            assert read_stream(response).chunks[-1]["error"]["code"] == "model_not_loaded"
        else:
            assert response.status_code == 503, response.text
            assert '"code":"model_not_loaded"' in response.text
        return "failed"
    assert response.status_code == 200, response.text
    if body["stream"]:
        streamed = read_stream(response)
        assert streamed.finish_reason == "length"
        said, tokens = streamed.content, streamed.usage["completion_tokens"]
    else:
        said, tokens = answer(response.json()), response.json()["usage"]["completion_tokens"]
    assert said
    assert right[body["model"]].startswith(said)
    assert tokens == body["max_tokens"]
    return "answered"


def test_a_loaded_tokenizer_tells_what_no_list_of_its_tokens_does(tmp_path: Path) -> None:
    """Marks of thoughts that are ordinary entries of the vocabulary."""
    folder = write_model(tmp_path / "m", "qwen3", plain=True)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    marks = [one for one in tokenizer["added_tokens"] if "think" in one["content"]]
    tokenizer["added_tokens"] = [one for one in tokenizer["added_tokens"] if one not in marks]
    tokenizer["model"]["vocab"] |= {one["content"]: one["id"] for one in marks}
    file.write_text(json.dumps(tokenizer))
    settings = mlxsrv.Settings(model=(f"m={folder}",), hf_cache=False)
    with hosted(mlxsrv.create_app(settings)) as url, httpx.Client(base_url=url) as client:
        client.post("/v1/chat/completions", json=chat(max_tokens=1)).raise_for_status()
        model = client.get("/v1/models/m").json()
        assert model["capabilities"] == ["completion", "chat", "tools", "thinking"]
    assert "thinking" not in describe_model(folder).capabilities
