"""A library of SAEs, and a hub on loopback with a repository of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from huggingface_hub import constants

from mlxsrv.errors import InvalidRequest
from mlxsrv.models import sae_library as module
from mlxsrv.models.catalogue import download
from mlxsrv.models.sae_library import SAEEntry, SAELibrary
from mlxsrv.settings import Settings
from tests.support.hub import Hub
from tests.support.hub_caches import use
from tests.support.saes import write_sae
from tests.support.serving import PATIENCE

T = TypeVar("T")

GEMMA = "layer_1/width_128/average_l0_8"
HOOK = "blocks.1.hook_resid_post"
SAE_ID = "org--saes--" + HOOK


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "saes"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def no_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DEMO_FOLDER", tmp_path / "no demo")


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with Hub() as server:
        yield server


@pytest.fixture
def remote(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub of this process, and an empty cache. Nobody waits before trying again."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "_WAITS", (0.0, 0.0))
    use(server.url, monkeypatch)
    yield server
    server.empty()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The repository `org/saes`: SAEs of three kinds, and other files that nobody asks for."""
    folder = tmp_path / "repository"
    for layer in (0, 1):
        write_sae(folder / f"blocks.{layer}.hook_resid_post", layer=layer, seed=layer)
    write_sae(folder, layout="gemma_scope", architecture="jumprelu")
    write_sae(folder, layout="sparsify", architecture="topk", layer=2)
    (folder / "config.json").write_text('{"model": "org/base"}')
    (folder / HOOK / "sparsity.safetensors").write_bytes(b"not asked for")
    (folder / "README.md").write_text("# SAEs")
    return folder


def library(*roots: Path, **options: Any) -> SAELibrary:
    settings = {"sae_dir": [str(root) for root in roots], **options}
    return SAELibrary(msgspec.convert(settings, Settings))


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


def listed(saes: SAELibrary) -> dict[str, SAEEntry]:
    run(saes.refresh())
    return {known.id: known for known in saes}


def register(saes: SAELibrary, **asked: str) -> SAEEntry:
    return run(saes.register(**asked))


def refused(call: Callable[[], object], param: str | None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        call()
    assert type(caught.value) is InvalidRequest
    assert caught.value.param == param
    return caught.value.message
