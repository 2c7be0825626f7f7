"""`--allow-download` over HTTP, from a hub on loopback."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.support.client import CHAT, Body, answer, ask, chat, refused
from tests.support.hub import Hub
from tests.support.serving import Server, serving
from tests.support.tiny import write_model

WEIGHTS = "model.safetensors"


class Place(msgspec.Struct, frozen=True):
    """A server that may download, and the hub it downloads from."""

    hub: Hub
    server: Server
    model: Path
    cache: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("downloads")
    model = write_model(root / "model", "qwen3", plain=True)
    variables = {"HF_HUB_CACHE": str(root / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    with Hub() as hub:
        arguments = ("--allow-download", "--keepalive", "0.3", "--log-level", "debug")
        variables |= {"HF_ENDPOINT": hub.url}
        with serving(root, *arguments, variables=variables) as server:
            yield Place(hub, server, model, root / "cache")


@pytest.fixture
def client(place: Place) -> Iterator[httpx.Client]:
    place.hub.empty()
    with place.server.client() as client:
        yield client


def small(name: str, **options: object) -> Body:
    return chat(model=name, max_tokens=5, **options)


def test_an_unknown_repository_is_fetched_and_served_from_then_on(
    place: Place, client: httpx.Client
) -> None:
    place.hub.add("org/new", place.model)
    assert "org/new" not in listed(client)
    first = ask(client, small("org/new"))
    assert first["model"] == "org/new"
    assert "org/new" in listed(client)
    place.hub.empty()
    assert answer(ask(client, small("org/new"))) == answer(first)


def listed(client: httpx.Client) -> dict[str, Body]:
    return {model["id"]: model for model in client.get("/v1/models").json()["data"]}


def test_a_stream_waits_for_its_download_with_keep_alives(
    place: Place, client: httpx.Client
) -> None:
    place.hub.add("org/slow", place.model)
    place.hub.drip(WEIGHTS, 0.03)
    body = small("org/slow", stream=True)
    with client.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200
        text = response.read().decode()
    assert text.startswith(": keep-alive\n\n")
    assert '"finish_reason":"length"' in text
    assert text.endswith("data: [DONE]\n\n")


def test_other_models_are_served_meanwhile(place: Place, client: httpx.Client) -> None:
    place.hub.add("org/slower", place.model)
    place.hub.drip(WEIGHTS, 0.03)
    with client.stream("POST", CHAT, json=small("org/slower", stream=True)) as response:
        with place.server.client() as other:
            assert ask(other, small("demo"))["model"] == "demo"
            assert other.get("/health").json() == {"status": "ok"}
        assert "[DONE]" in response.read().decode()


def test_a_client_that_leaves_does_not_stop_a_download(place: Place, client: httpx.Client) -> None:
    place.hub.add("org/left", place.model)
    place.hub.drip(WEIGHTS, 0.02)
    with client.stream("POST", CHAT, json=small("org/left", stream=True)) as response:
        next(response.iter_raw())
    assert ask(client, small("org/left"))["model"] == "org/left"


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_not_on_the_hub_is_a_404(
    client: httpx.Client, place: Place, streaming: bool
) -> None:
    # Not before the first keep-alive, but here the hub answers at once.
    headers = {"Accept": "application/json"}
    response = client.post(CHAT, json=small("org/none", stream=streaming), headers=headers)
    error = refused(response, 404, "model_not_found", param="model")
    assert "org/none" in error["message"]


def test_a_repository_that_is_no_model_is_a_404_with_the_reason(
    place: Place, client: httpx.Client, tmp_path: Path
) -> None:
    other = shutil.copytree(place.model, tmp_path / "other")
    (other / WEIGHTS).rename(other / "pytorch_model.bin")
    place.hub.add("org/torch", other)
    error = refused(
        client.post(CHAT, json=small("org/torch")), 404, "model_not_found", param="model"
    )
    assert "safetensors" in error["message"]
    assert not any(sent.path.endswith(".bin") for sent in place.hub.sent)


def test_damaged_weights_are_refused_and_fetched_again(place: Place, client: httpx.Client) -> None:
    place.hub.add("org/damaged", place.model)
    place.hub.corrupt(WEIGHTS)
    error = refused(client.post(CHAT, json=small("org/damaged")), 503, "model_not_loaded")
    assert WEIGHTS in error["message"]
    place.hub.mend()
    assert ask(client, small("org/damaged"))["model"] == "org/damaged"


@pytest.mark.parametrize("name", ["../x", "org/..", "org/name/more", "/etc/passwd", "org\\x", "o/"])
def test_a_name_that_is_no_repository_asks_nobody(
    place: Place, client: httpx.Client, name: str
) -> None:
    place.hub.mend()
    refused(client.post(CHAT, json=small(name)), 404, "model_not_found", param="model")
    assert not place.hub.asked


def test_a_server_that_may_not_download_names_the_command(place: Place, tmp_path: Path) -> None:
    place.hub.empty()
    place.hub.add("org/else", place.model)
    variables = {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": place.hub.url}
    with serving(tmp_path, variables=variables) as server, server.client() as client:
        error = refused(
            client.post(CHAT, json=small("org/else")), 404, "model_not_found", param="model"
        )
        assert error["message"].endswith("To get it: python -m mlxsrv pull org/else")
        assert not place.hub.asked


def test_a_shutdown_does_not_wait_for_a_download(place: Place, tmp_path: Path) -> None:
    place.hub.empty()
    place.hub.add("org/endless", place.model)
    place.hub.drip(WEIGHTS, 5)
    variables = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": place.hub.url}
    arguments = ("--allow-download", "--keepalive", "0.3", "--shutdown-grace", "0.2")
    with serving(tmp_path, *arguments, variables=variables) as server, server.client() as client:
        with client.stream("POST", CHAT, json=small("org/endless", stream=True)) as response:
            chunks = response.iter_text()
            assert next(chunks).startswith(": keep-alive")
            started = time.monotonic()
            server.process.terminate()
            assert "shutting_down" in "".join(chunks)
        assert server.exit_status() == 0
        assert time.monotonic() - started < 15
