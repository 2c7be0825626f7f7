"""SAEs that the library fetches from a hub on loopback."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.errors import SAEExists, ShuttingDown
from mlxsrv.models import sae_library as module
from mlxsrv.models.catalogue import download, hub_cache
from mlxsrv.models.catalogue.hub_cache import Repository
from mlxsrv.models.sae_library import SAEEntry, SAELibrary
from mlxsrv.models.sae_place import SAEPlace
from tests.support.hub import Hub
from tests.support.sae_libraries import (
    GEMMA,
    HOOK,
    SAE_ID,
    library,
    no_demo,
    remote,
    repository,
    run,
    server,
)
from tests.support.saes import write_sae
from tests.support.tiny import write_model

__all__ = ["no_demo", "remote", "repository", "server"]

pytestmark = pytest.mark.served  # a hub is served here

# Registering a repository.


async def settled(saes: SAELibrary, id: str) -> SAEEntry:
    """The entry once its download has ended."""
    await until(lambda: saes.get(id).state != "downloading")
    return saes.get(id)


async def until(condition: Callable[[], object]) -> None:
    """Wait for it; `run` limits the time."""
    while not condition():  # noqa: ASYNC110 threads change it
        await asyncio.sleep(0.01)


def fetched(saes: SAELibrary, **asked: str) -> SAEEntry:
    async def work() -> SAEEntry:
        known = await saes.register(**asked)
        assert (known.state, known.path, known.file) == ("downloading", None, None)
        assert saes.get(known.id) == known
        try:
            return await settled(saes, known.id)
        finally:
            await saes.stop_downloads()

    return run(work())


def sent(remote: Hub) -> list[str]:
    return sorted(answer.path for answer in remote.sent)


@pytest.mark.parametrize(
    ("file_path", "files", "id", "layer"),
    [
        (HOOK, [f"{HOOK}/cfg.json", f"{HOOK}/sae_weights.safetensors"], SAE_ID, 1),
        (f"{HOOK}/cfg.json", [f"{HOOK}/cfg.json", f"{HOOK}/sae_weights.safetensors"], SAE_ID, 1),
        (f"{GEMMA}/params.npz", [f"{GEMMA}/params.npz"], f"org--saes--{GEMMA}", 1),
        (f"{GEMMA}/", [f"{GEMMA}/params.npz"], f"org--saes--{GEMMA}", 1),
        (
            "layers.2",
            ["config.json", "layers.2/cfg.json", "layers.2/sae.safetensors"],
            "org--saes--layers.2",
            2,
        ),
    ],
)
def test_only_what_is_named_comes(
    remote: Hub, repository: Path, file_path: str, files: list[str], id: str, layer: int
) -> None:
    commit = remote.add("org/saes", repository)
    saes = library(allow_download=True)
    known = fetched(saes, repository="org/saes", file_path=file_path)
    assert (known.problem, known.state, known.id) == (None, "ready", id.replace("/", "--"))
    assert known.origin == f"org/saes:{file_path.removesuffix('/').removesuffix('/cfg.json')}"
    assert known.file is not None
    assert known.file.layer == layer
    assert known.path is not None
    assert known.path.is_relative_to(Repository("org/saes").root / "snapshots" / commit)
    assert sent(remote) == files
    assert not hub_cache.cached_models()  # it is no model


def test_without_a_path_the_repository_is_the_sae(remote: Hub, tmp_path: Path) -> None:
    remote.add("org/one", write_sae(tmp_path / "one"), "v1")
    known = fetched(library(allow_download=True), repository="org/one", revision="v1", id="one")
    assert (known.state, known.id, known.origin) == ("ready", "one", "org/one@v1")
    assert sent(remote) == ["cfg.json", "sae_weights.safetensors"]


def test_what_the_cache_has_is_not_asked_for(remote: Hub, repository: Path) -> None:
    remote.add("org/saes", repository)
    asked = {"repository": "org/saes", "file_path": HOOK}
    first = fetched(library(allow_download=True), **asked)
    remote.empty()
    assert fetched(library(allow_download=True), **asked) == first
    assert not remote.asked


@pytest.mark.parametrize(
    ("repository_id", "file_path", "reason"),
    [
        ("org/saes", "blocks.7.hook_resid_post", "did_you_mean"),
        ("org/saes", f"{HOOK}/params.npz", "has no SAE at"),
        ("org/saes", "README.md", "has no SAE at"),
        ("org/saes", None, "has no SAE at its top; there are 'blocks.0.hook_resid_post'"),
        ("org/model", None, "it has none of sae_weights.safetensors"),
        ("org/none", None, "no repository 'org/none'"),
        ("org/saes@v9", HOOK, "no revision 'v9'"),
    ],
)
def test_what_is_not_there_is_told(
    remote: Hub,
    repository: Path,
    tmp_path: Path,
    repository_id: str,
    file_path: str | None,
    reason: str,
) -> None:
    remote.add("org/saes", repository)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    remote.add("org/model", tmp_path / "model")
    asked = {"repository": repository_id} | ({"file_path": file_path} if file_path else {})
    known = fetched(library(allow_download=True), **asked)
    assert (known.state, known.path, known.file) == ("failed", None, None)
    assert known.problem is not None
    if reason == "did_you_mean":
        assert "'blocks.1.hook_resid_post'" in known.problem
        assert "and 2 more; 'file_path' names one" in known.problem
    else:
        assert reason in known.problem
    assert not remote.sent


def test_an_sae_that_cannot_be_used_is_told(remote: Hub, tmp_path: Path) -> None:
    remote.add("org/bad", write_sae(tmp_path / "bad", reshape_activations="hook_z"))
    known = fetched(library(allow_download=True), repository="org/bad")
    assert known.state == "failed"
    assert known.problem is not None
    assert "hook_z" in known.problem


def test_what_failed_can_be_tried_again_and_goes_on(remote: Hub, repository: Path) -> None:
    weights = f"{HOOK}/sae_weights.safetensors"
    size = (repository / weights).stat().st_size
    remote.add("org/saes", repository)
    remote.drop(weights, after=size // 2)
    saes = library(allow_download=True)

    async def work() -> list[SAEEntry]:
        ended = []
        for _ in range(2):
            known = await saes.register(repository="org/saes", file_path=HOOK)
            ended.append(await settled(saes, known.id))
            remote.mend()
        with pytest.raises(SAEExists, match=SAE_ID):
            await saes.register(repository="org/saes", file_path=HOOK)
        with pytest.raises(SAEExists, match=SAE_ID):
            await saes.register(repository="org/other", id=SAE_ID)
        await saes.stop_downloads()
        return ended

    failed, ready = run(work())
    assert failed.problem is not None
    assert "connection to the hub failed" in failed.problem
    assert (failed.state, ready.state, failed.id) == ("failed", "ready", ready.id)
    assert [known.id for known in saes] == [SAE_ID]
    blob = (ready.file.weights if ready.file else Path()).resolve()
    assert blob.read_bytes() == (repository / weights).read_bytes()


def test_an_error_tells_no_secrets(remote: Hub, repository: Path) -> None:
    remote.add("org/saes", repository)
    remote.fail(f"{HOOK}/sae_weights.safetensors", 500)
    known = fetched(library(allow_download=True), repository="org/saes", file_path=HOOK)
    assert known.problem is not None
    assert "status 500" in known.problem
    assert "Signature" not in known.problem


@pytest.mark.parametrize("how", ["forget", "close"])
def test_a_download_stops(
    remote: Hub, repository: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    remote.add("org/saes", repository)
    remote.hold(f"{HOOK}/sae_weights.safetensors", at=1)
    saes = library(allow_download=True)
    ended: list[object] = []
    fetch = SAEPlace.fetch

    def watched(*arguments: Any) -> Any:
        try:
            return fetch(*arguments)
        except BaseException as error:
            ended.append(type(error))
            raise

    monkeypatch.setattr(SAEPlace, "fetch", watched)

    async def work() -> None:
        known = await saes.register(repository="org/saes", file_path=HOOK)
        await until(lambda: f"{HOOK}/sae_weights.safetensors" in sent(remote))
        if how == "forget":
            saes.forget(known.id)
            assert not list(saes)
        await saes.stop_downloads()
        await until(lambda: ended)
        with pytest.raises(ShuttingDown):
            await saes.register(repository="org/saes", file_path=HOOK)

    run(work())
    assert ended == [module._Stopped]
    assert len(remote.sent) <= 2  # the config, and some of the weights
    assert all(known.state == "downloading" for known in saes)


@pytest.mark.slow
def test_a_few_downloads_run_at_once_and_a_waiting_one_can_be_forgotten(
    remote: Hub, repository: Path
) -> None:
    weights = [f"blocks.{layer}.hook_resid_post/sae_weights.safetensors" for layer in (0, 1)]
    for path in weights:
        remote.hold(path, at=1)
    remote.add("org/saes", repository)
    saes = library(allow_download=True)

    async def work() -> None:
        for path in (*(os.path.dirname(path) for path in weights), "layers.2", GEMMA):
            await saes.register(repository="org/saes", file_path=path)
        await until(lambda: set(weights) <= set(sent(remote)))
        assert not [path for path in sent(remote) if not path.startswith("blocks.")]
        saes.forget("org--saes--layers.2")
        for path in weights:
            remote.hurry(path)
        await asyncio.gather(*(settled(saes, known.id) for known in list(saes)))
        await saes.stop_downloads()

    run(work())
    assert [known.state for known in saes] == ["ready"] * 3
    assert not [path for path in sent(remote) if path.startswith("layers.2")]


def test_a_model_in_the_same_repository_is_served_as_before(remote: Hub, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3")
    remote.add("org/both", model)
    both = Repository("org/both")
    served = download.fetch(both)
    write_sae(model / "sae")
    remote.add("org/both", model)
    known = fetched(library(allow_download=True), repository="org/both", file_path="sae")
    assert known.state == "ready"
    assert hub_cache.cached(both) == served
    assert [found.folder for found in hub_cache.cached_models()] == [served]
