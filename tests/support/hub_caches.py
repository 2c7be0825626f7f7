"""The Hugging Face cache of this process, and a hub on loopback that fills it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlxsrv.errors import ModelNotFound, ModelNotLoaded
from mlxsrv.models.catalogue import download
from mlxsrv.models.catalogue.download import fetch
from mlxsrv.models.catalogue.hub_cache import Repository
from tests.support.hub import Hub
from tests.support.tiny import write_model

TINY = Repository("org/tiny")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of this process, with nothing in it."""
    cache = tmp_path / "home" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


@pytest.fixture
def hub(server: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub of this process, with nothing in it. Nobody waits before trying again."""
    use(server.url, monkeypatch)
    monkeypatch.setattr(download, "_WAITS", (0.0, 0.0))
    yield server
    server.empty()


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the hub's address: huggingface-hub reads the environment only when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def copy(tmp_path: Path, model: Path) -> Path:
    """The model's folder, to be changed."""
    return Path(shutil.copytree(model, tmp_path / "copy"))


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def ranges(hub: Hub, path: str) -> list[tuple[int, int]]:
    """The ranges of bytes that were sent of a file: start and end."""
    return [(sent.start, sent.start + sent.count) for sent in hub.sent if sent.path == path]


def refusal(repository: Repository = TINY) -> str:
    with pytest.raises(ModelNotFound) as caught:
        fetch(repository)
    assert caught.value.param == "model"
    return caught.value.message


def failure(repository: Repository = TINY) -> str:
    with pytest.raises(ModelNotLoaded) as caught:
        fetch(repository)
    return caught.value.message


def partials(cache: Path) -> list[Path]:
    return list(cache.glob("*/blobs/*.incomplete"))
