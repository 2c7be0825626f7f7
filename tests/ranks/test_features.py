"""Steering and embeddings on ranks: each works as on one process, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import msgspec
import numpy as np
import pytest

from tests.support import encoder_folders
from tests.support.client import Body, answer, ask, chat
from tests.support.ranks import PATIENCE, Ranks, launch, ranks, write_divisible
from tests.support.saes import write_sae
from tests.support.serving import serving

pytestmark = [pytest.mark.served, pytest.mark.slow, pytest.mark.ranks]

WIDTH = 96
STEERING = {"5": 3.0, "9": -3.0}
SILENCE = dict.fromkeys(map(str, range(128)), 0)
"""For a clamp: no feature is active."""
TEXTS = ["the quick brown fox", "a", "jumps over the lazy dog " * 60]


class Files(msgspec.Struct, frozen=True):
    """A model, an SAE below `saes`, a control vector, an encoder, and a folder for data."""

    model: Path
    saes: Path
    vector: Path
    encoder: Path
    data: Path

    @property
    def options(self) -> tuple[str, ...]:
        models = ("--model", f"m={self.model}", "--model", f"encoder={self.encoder}")
        folders = ("--sae-dir", str(self.saes), "--data-dir", str(self.data))
        return (*models, *folders, "--prefill-chunk", "64")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("files")
    write_sae(root / "saes" / "one", d_in=WIDTH)
    vector = root / "calm.safetensors"
    direction = mx.random.normal((WIDTH,), key=mx.random.key(5)) / 4
    mx.save_safetensors(str(vector), {"direction.0": direction})
    encoder = encoder_folders.write(root / "encoder", "bert")
    return Files(write_divisible(root / "model"), root / "saes", vector, encoder, root / "data")


def say(client: httpx.Client, **fields: Any) -> str:
    return answer(ask(client, chat(max_tokens=16, **fields)))


def manage(client: httpx.Client, method: str, path: str, body: Body | None = None) -> Any:
    told = client.request(method, f"/api{path}", json=body).json()
    assert told["success"], told
    return told["data"]


class Steered(msgspec.Struct, frozen=True):
    """Texts by their steering, and the activations of watched features, newest first."""

    texts: dict[str, str]
    activations: list[tuple[float, ...]]

    def close_to(self, other: Steered) -> bool:
        """Whether they are the same but for rounding."""
        return self.texts == other.texts and bool(
            np.allclose(self.activations, other.activations, atol=1e-3)
        )


def steer(client: httpx.Client) -> Steered:
    """Ask for all kinds of steering, beside each other's kept prompts."""
    texts = {"vector by default": say(client), "none": say(client, control_vector={})}
    texts["more"] = say(client, control_vector={"calm": 2})
    manage(client, "POST", "/saes/one/attach", {})
    off: Body = {"control_vector": {}}
    texts["add"] = say(client, steering=STEERING, **off)
    texts["clamp"] = say(client, steering=SILENCE, steering_mode="clamp", **off)
    texts["both"] = say(client, steering=STEERING)
    watched = {"enabled": True, "features": [3, 5, 7], "history_size": 100}
    manage(client, "POST", "/monitoring/configure", watched)
    texts["watched"] = say(client, **off)
    history = manage(client, "GET", "/monitoring/history?limit=100")
    manage(client, "POST", "/monitoring/configure", {"enabled": False})
    manage(client, "POST", "/saes/one/detach", {})
    texts["detached"] = say(client, **off)
    return Steered(texts, [tuple(entry["activations"].values()) for entry in history])


def embed(client: httpx.Client) -> np.ndarray[Any, Any]:
    """The vectors of short texts, read together, and of one that is read in several slices."""
    found = client.post("/v1/embeddings", json={"input": TEXTS})
    assert found.status_code == 200, found.text
    return np.array([each["embedding"] for each in found.json()["data"]])


def open_client(running: Ranks) -> httpx.Client:
    return httpx.Client(base_url=running.server.url, timeout=PATIENCE)


class Right(msgspec.Struct, frozen=True):
    """The answers of one process."""

    steered: Steered
    vectors: np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def right(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Right:
    options = (*files.options, "--control-vector", str(files.vector))
    with (
        serving(tmp_path_factory.mktemp("alone"), *options) as server,
        server.client() as client,
    ):
        return Right(steer(client), embed(client))


@pytest.fixture(scope="module")
def tensor(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    options = (*files.options, "--control-vector", str(files.vector), "--parallel", "tensor")
    folder = tmp_path_factory.mktemp("ranks")
    with ranks(2, folder, *options) as running, open_client(running) as client:
        yield client


@pytest.fixture(scope="module")
def pipeline(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    options = (*files.options, "--parallel", "pipeline")
    folder = tmp_path_factory.mktemp("ranks")
    with ranks(2, folder, *options) as running, open_client(running) as client:
        yield client


def test_steering_works_where_each_rank_has_a_part_of_every_layer(
    tensor: httpx.Client, right: Right
) -> None:
    steered = steer(tensor)
    assert steered.close_to(right.steered), (steered, right.steered)
    unsteered = ("none", "watched", "detached")
    assert len({steered.texts[name] for name in unsteered}) == 1
    assert len({*steered.texts.values()}) == len(steered.texts) - len(unsteered) + 1
    assert len(steered.activations) > 16


def test_an_sae_is_refused_where_a_rank_has_some_of_the_layers_only(
    pipeline: httpx.Client,
) -> None:
    before = say(pipeline)
    told = pipeline.post("/api/saes/one/attach", json={}).json()
    assert not told["success"]
    assert "--parallel pipeline" in told["error"]["message"]
    assert say(pipeline) == before


def test_a_control_vector_is_refused_where_a_rank_has_some_of_the_layers_only(
    files: Files, tmp_path: Path
) -> None:
    options = ("--control-vector", str(files.vector), "--parallel", "pipeline")
    started = launch(["--port", "0", *files.options, *options], 2, tmp_path)
    assert started.exit_statuses() == [2, 2]
    assert "--control-vector cannot be used with --parallel pipeline" in started.read_log(0)


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_texts_are_embedded_as_by_one_process(
    split: str, right: Right, request: pytest.FixtureRequest
) -> None:
    vectors = embed(request.getfixturevalue(split))
    assert np.allclose(vectors, right.vectors, atol=1e-5)


def test_an_encoder_is_refused_and_ranks_go_on(tensor: httpx.Client) -> None:
    body = {"model": "encoder", "input": "sea"}
    refused = tensor.post("/v1/embeddings", json=body)
    assert refused.status_code == 503
    assert "an encoder cannot be divided among ranks" in refused.json()["error"]["message"]
    assert say(tensor)
