"""`--allow-download` over HTTP, from a hub on loopback."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.support.client import CHAT, Body, answer, ask, chat, refused
from tests.support.hub import Hub
from tests.support.ollama import check_type, read_lines
from tests.support.serving import Server, serving, wait_for
from tests.support.tiny import write_model

WEIGHTS = "model.safetensors"
HELD = 100_000
"""A byte of the weights behind which the hub waits."""


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
    place.hub.hold(WEIGHTS, at=HELD)
    body = small("org/slow", stream=True)
    with client.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200
        parts = response.iter_text()
        assert next(parts).startswith(": keep-alive\n\n")
        place.hub.hurry(WEIGHTS)
        text = "".join(parts)
    assert '"finish_reason":"length"' in text
    assert text.endswith("data: [DONE]\n\n")


def test_other_models_are_served_meanwhile(place: Place, client: httpx.Client) -> None:
    place.hub.add("org/slower", place.model)
    place.hub.hold(WEIGHTS, at=HELD)
    with client.stream("POST", CHAT, json=small("org/slower", stream=True)) as response:
        with place.server.client() as other:
            assert ask(other, small("demo"))["model"] == "demo"
            assert other.get("/health").json() == {"status": "ok"}
        place.hub.hurry(WEIGHTS)
        assert "[DONE]" in response.read().decode()


def test_a_client_that_leaves_does_not_stop_a_download(place: Place, client: httpx.Client) -> None:
    place.hub.add("org/left", place.model)
    place.hub.hold(WEIGHTS, at=HELD)
    body, headers = small("org/left", stream=True), {"X-Request-ID": "it leaves"}
    with client.stream("POST", CHAT, json=body, headers=headers) as response:
        next(response.iter_raw())
    place.server.logged("request", request="it leaves")
    place.hub.hurry(WEIGHTS)
    assert ask(client, small("org/left"))["model"] == "org/left"
    size = (place.model / WEIGHTS).stat().st_size
    assert [sent.count for sent in place.hub.sent if sent.path == WEIGHTS] == [size]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_not_on_the_hub_is_a_404(
    client: httpx.Client, place: Place, streaming: bool
) -> None:
    # Not after the first keep-alive. The hub answers sooner, if not at the first time: what talks
    # with it is imported then.
    headers = {"Accept": "application/json"}

    def ask_once() -> httpx.Response | None:
        body = small("org/none", stream=streaming)
        response = client.post(CHAT, json=body, headers=headers)
        return None if response.status_code == 200 else response

    response = wait_for(ask_once, why="it is refused before the first keep-alive")
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
        assert error["message"].endswith("To get it: mlxsrv pull org/else")
        assert not place.hub.asked


def test_a_shutdown_does_not_wait_for_a_download(place: Place, tmp_path: Path) -> None:
    place.hub.empty()
    place.hub.add("org/endless", place.model)
    place.hub.hold(WEIGHTS, at=HELD)
    variables = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": place.hub.url}
    arguments = ("--allow-download", "--keepalive", "0.3", "--shutdown-grace", "0.2")
    with serving(tmp_path, *arguments, variables=variables) as server, server.client() as client:
        with client.stream("POST", CHAT, json=small("org/endless", stream=True)) as response:
            chunks = response.iter_text()
            assert next(chunks).startswith(": keep-alive")
            server.process.terminate()
            assert "shutting_down" in "".join(chunks)
        assert server.exit_status() == 0


# Ollama's way to ask for a download.

PULL = "/api/pull"


def pulled(response: httpx.Response) -> list[Body]:
    """The lines of a pull's progress."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = read_lines(response.content)
    for line in lines:
        check_type(line, "ProgressResponse")
    return lines


def test_a_pull_tells_its_progress(place: Place, client: httpx.Client) -> None:
    place.hub.add("org/pulled", place.model)
    place.hub.hold(WEIGHTS, at=HELD)
    size = (place.model / WEIGHTS).stat().st_size
    body = {"model": "hf.co/org/pulled:latest"}
    with client.stream("POST", PULL, json=body) as response:
        told = response.iter_lines()
        begun = until_weights_come(told, size)
        place.hub.hurry(WEIGHTS)
        lines = [*begun, *map(json.loads, told)]
    for line in lines:
        check_type(line, "ProgressResponse")
    assert lines[0] == {"status": "pulling manifest"}
    assert [line["status"] for line in lines[-3:]] == [
        "verifying sha256 digest",
        "writing manifest",
        "success",
    ]
    [digest] = {line["digest"] for line in lines if line.get("digest", "").startswith("sha256:")}
    weights = [line for line in lines if line.get("digest") == digest]
    assert {line["total"] for line in weights} == {size}
    done = [line["completed"] for line in weights]
    assert done == sorted(done)
    assert done[-1] == size
    assert "org/pulled:latest" in tags(client)
    place.hub.mend()
    again = pulled(client.post(PULL, json={"model": "org/pulled"}))
    assert [line["status"] for line in again] == ["pulling manifest", "success"]
    assert not place.hub.asked


def tags(client: httpx.Client) -> set[str]:
    return {model["name"] for model in client.get("/api/tags").json()["models"]}


def test_a_pull_that_is_not_streamed_waits_for_the_end(place: Place, client: httpx.Client) -> None:
    place.hub.add("org/whole", place.model)
    response = client.post(PULL, json={"name": "org/whole", "stream": False})
    assert response.json() == {"status": "success"}
    assert "org/whole:latest" in tags(client)


def test_a_pull_without_news_says_the_last_again(place: Place, client: httpx.Client) -> None:
    place.hub.add("org/silent", place.model)
    place.hub.hold(WEIGHTS, at=HELD, still=True)
    with client.stream("POST", PULL, json={"model": "org/silent"}) as response:
        lines = map(json.loads, response.iter_lines())
        last, again = next(lines), next(lines)
        while again != last or "digest" not in again:
            last, again = again, next(lines)
    place.hub.mend()


def test_who_leaves_a_pull_leaves_it_to_the_others(place: Place, client: httpx.Client) -> None:
    place.hub.add("org/shared", place.model)
    place.hub.hold(WEIGHTS, at=HELD)
    body, headers = {"model": "org/shared"}, {"X-Request-ID": "leaves a pull"}
    with client.stream("POST", PULL, json=body) as stays:
        lines = stays.iter_lines()
        first = next(lines)
        with (
            place.server.client() as other,
            other.stream("POST", PULL, json=body, headers=headers) as leaves,
        ):
            next(leaves.iter_lines())
        place.server.logged("request", request="leaves a pull")
        place.hub.hurry(WEIGHTS)
        rest = [first, *lines]
    assert json.loads(rest[-1]) == {"status": "success"}
    assert len([sent for sent in place.hub.sent if sent.path == WEIGHTS]) == 1


def test_a_pull_that_nobody_waits_for_ends_and_goes_on_later(
    place: Place, client: httpx.Client
) -> None:
    place.hub.add("org/resumed", place.model)
    place.hub.hold(WEIGHTS, at=HELD)
    with client.stream("POST", PULL, json={"model": "org/resumed"}) as response:
        until_weights_come(response.iter_lines(), (place.model / WEIGHTS).stat().st_size)
    place.server.logged("pull failed", model="org/resumed")
    place.hub.mend()
    assert "org/resumed:latest" not in tags(client)
    assert pulled(client.post(PULL, json={"model": "org/resumed"}))[-1] == {"status": "success"}
    assert place.hub.sent[-1].start > 0


@pytest.mark.parametrize("streaming", [False, True])
def test_a_pull_that_fails_at_once_is_refused(
    place: Place, client: httpx.Client, streaming: bool
) -> None:
    for name in ("org/none", "nonsense", "a:b"):
        response = client.post(PULL, json={"model": name, "stream": streaming})
        assert response.status_code == 404
        assert response.json().keys() == {"error"}
    assert client.post(PULL, json={}).status_code == 400


def test_a_pull_that_fails_later_says_so_in_its_stream(place: Place, client: httpx.Client) -> None:
    place.hub.add("org/rotten", place.model)
    place.hub.corrupt(WEIGHTS)
    response = client.post(PULL, json={"model": "org/rotten"})
    *_, last = read_lines(response.content)
    assert last.keys() == {"error"}
    assert WEIGHTS in last["error"]
    response = client.post(PULL, json={"model": "org/rotten", "stream": False})
    assert response.status_code == 503


def test_a_server_that_may_not_download_pulls_only_what_is_here(
    place: Place, tmp_path: Path
) -> None:
    place.hub.empty()
    variables = {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": place.hub.url}
    with serving(tmp_path, variables=variables) as server, server.client() as client:
        response = client.post(PULL, json={"model": "org/else"})
        assert response.status_code == 403
        assert "--allow-download" in response.json()["error"]
        assert pulled(client.post(PULL, json={"model": "demo"}))[-1] == {"status": "success"}
        assert not place.hub.asked


def test_a_shutdown_ends_a_pull(place: Place, tmp_path: Path) -> None:
    place.hub.empty()
    place.hub.add("org/endless", place.model)
    place.hub.hold(WEIGHTS, at=HELD)
    variables = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": place.hub.url}
    arguments = ("--allow-download", "--shutdown-grace", "0.2")
    with serving(tmp_path, *arguments, variables=variables) as server, server.client() as client:
        with client.stream("POST", PULL, json={"model": "org/endless"}) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.terminate()
            assert "shutting down" in [*lines][-1]
        assert server.exit_status() == 0


# Two servers with one cache.


@pytest.fixture
def neighbour(place: Place, tmp_path: Path) -> Iterator[Server]:
    """Another server on this machine, with the cache of `place`."""
    variables = {"HF_HUB_CACHE": str(place.cache), "HF_ENDPOINT": place.hub.url}
    with serving(tmp_path, "--allow-download", variables=variables) as server:
        yield server


def until_weights_come(lines: Iterator[str], size: int) -> list[Body]:
    """Read a pull's progress until some of the weights are here, and not all. Returns its lines."""
    read: list[Body] = []
    while not read or read[-1].get("total") != size or not read[-1].get("completed"):
        read.append(json.loads(next(lines)))
        assert "error" not in read[-1]
    assert read[-1]["completed"] < size
    return read


def test_servers_that_pull_the_same_model_download_it_once(
    place: Place, client: httpx.Client, neighbour: Server
) -> None:
    place.hub.add("org/both", place.model)
    place.hub.hold(WEIGHTS, at=HELD)
    size = (place.model / WEIGHTS).stat().st_size
    body = {"model": "org/both"}
    with neighbour.client() as other, other.stream("POST", PULL, json=body) as first:
        progress = first.iter_lines()
        until_weights_come(progress, size)
        with client.stream("POST", PULL, json=body) as waiting:
            waited = waiting.iter_lines()
            until_weights_come(waited, size)
        place.server.logged("pull failed", model="org/both")  # its only client has left
        assert not json.loads(next(progress)).get("error")
        with client.stream("POST", PULL, json=body) as waiting:
            lines = waiting.iter_lines()
            until_weights_come(lines, size)
            place.hub.hurry(WEIGHTS)
            assert json.loads([*lines][-1]) == {"status": "success"}
        assert json.loads([*progress][-1]) == {"status": "success"}
        assert [sent.count for sent in place.hub.sent if sent.path == WEIGHTS] == [size]
        assert answer(ask(client, small("org/both"))) == answer(ask(other, small("org/both")))


def test_a_server_goes_on_with_the_download_of_one_that_was_killed(
    place: Place, client: httpx.Client, neighbour: Server
) -> None:
    place.hub.add("org/orphan", place.model)
    place.hub.hold(WEIGHTS, at=HELD)
    size = (place.model / WEIGHTS).stat().st_size
    body = {"model": "org/orphan"}
    with neighbour.client() as other, other.stream("POST", PULL, json=body) as first:
        progress = first.iter_lines()  # when it is gone, the client is
        until_weights_come(progress, size)
        with client.stream("POST", PULL, json=body) as waiting:
            lines = waiting.iter_lines()
            until_weights_come(lines, size)
            neighbour.signal(signal.SIGKILL)
            place.hub.hurry(WEIGHTS)
            assert json.loads([*lines][-1]) == {"status": "success"}
    begun, continued = (sent for sent in place.hub.sent if sent.path == WEIGHTS)
    assert 0 < continued.start <= begun.count
    assert continued.start + continued.count == size
