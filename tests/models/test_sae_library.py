"""The library of SAEs: what is found, what may be registered, and what a hub on loopback gives."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from huggingface_hub import constants

from mlxsrv.errors import InvalidRequest, SAEExists, SAENotFound, ShuttingDown
from mlxsrv.formats.sae_files import read_sae
from mlxsrv.models import sae_library as module
from mlxsrv.models.catalogue import download, hub_cache
from mlxsrv.models.catalogue.hub_cache import Repository
from mlxsrv.models.sae_library import SAEEntry, SAELibrary
from mlxsrv.models.sae_place import SAEPlace
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings
from tests.models.catalogue.test_hub import use
from tests.support.hub import Hub
from tests.support.saes import write_sae
from tests.support.serving import PATIENCE
from tests.support.tiny import write_model

pytestmark = pytest.mark.served  # a hub is served here

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


# What is found.


def test_saes_below_a_folder_are_found_by_their_paths(root: Path) -> None:
    write_sae(root / "a")
    write_sae(root, layout="gemma_scope", architecture="jumprelu")
    write_sae(root / "with blanks" / "ü")
    saes = listed(library(root))
    assert list(saes) == ["a", GEMMA.replace("/", "--"), "with-blanks---"]
    found = saes[GEMMA.replace("/", "--")]
    assert (found.state, found.origin, found.path) == ("ready", GEMMA, root / GEMMA)
    assert found.file == read_sae(root / GEMMA)
    assert found.file.layer == 1


def test_a_folder_may_be_one_itself(root: Path) -> None:
    write_sae(root)
    assert [(known.id, known.origin) for known in listed(library(root)).values()] == [
        ("saes", "saes")
    ]


def test_ids_that_collide_are_numbered_and_stay(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for folder in (root / "b c", root / "b.c", other / "b.c", root / "steering", root / "demo"):
        write_sae(folder)
    saes = library(root, other)
    first = {known.path: id for id, known in listed(saes).items()}
    assert first == {
        root / "b c": "b-c",
        root / "b.c": "b.c",
        other / "b.c": "b.c-2",
        root / "demo": "demo",
        root / "steering": "steering-2",  # /api/saes/steering is not one SAE's
    }
    shutil.rmtree(root / "b c")
    write_sae(root / "b!c")  # not under the other's id, which a profile may name
    second = {known.path: id for id, known in listed(saes).items()}
    assert second.pop(root / "b!c") == "b-c-2"
    assert second == {path: id for path, id in first.items() if path != root / "b c"}


def test_a_long_path_keeps_its_end(root: Path) -> None:
    for name in ("x", "y"):
        write_sae(root / (name + "a" * 120) / "end")
    assert set(listed(library(root))) == {"a" * 95 + "--end", "a" * 93 + "--end-2"}


def test_the_same_folder_is_found_once(root: Path) -> None:
    write_sae(root / "a" / "b")
    assert list(listed(library(root, root / "a", root))) == ["a--b"]


def test_the_demo_has_one(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sae(root / "demo")
    monkeypatch.setattr(module, "_DEMO_FOLDER", write_sae(tmp_path / "demo" / "sae"))
    saes = listed(library(root))
    assert [(id, saes[id].origin, saes[id].path) for id in saes] == [
        ("demo", "demo", tmp_path / "demo" / "sae"),
        ("demo-2", "demo", root / "demo"),
    ]


def test_what_cannot_be_used_is_told_and_logged_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_sae(root / "bad", architecture="gated", reshape_activations="hook_z")
    write_sae(root / "good")
    saes = library(root)
    bad = listed(saes)["bad"]
    assert (bad.state, bad.path, bad.file) == ("failed", None, None)
    assert bad.problem is not None
    assert "hook_z" in bad.problem
    listed(saes)
    assert [record.message for record in caplog.records] == ["SAE left out"]


def test_files_are_read_again_when_they_have_changed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sae(root / "a")
    saes = library(root)
    read: list[Path] = []

    def counted(path: Path) -> Any:
        read.append(path)
        return read_sae(path)

    monkeypatch.setattr(module, "read_sae", counted)
    for _ in range(3):
        assert listed(saes)["a"].state == "ready"
    assert read == [root / "a"]
    (root / "a" / "sae_weights.safetensors").write_bytes(b"")
    write_sae(root / "b")
    assert [known.state for known in listed(saes).values()] == ["failed", "ready"]
    shutil.rmtree(root / "a")
    assert list(listed(saes)) == ["b"]


def test_an_id_that_is_not_there_gets_near_ones(root: Path) -> None:
    write_sae(root / "pirates")
    saes = library(root)
    assert listed(saes)["pirates"] == saes.get("pirates")
    with pytest.raises(SAENotFound, match="did you mean 'pirates'"):
        saes.get("pirate")
    with pytest.raises(SAENotFound, match="there are: 'pirates'"):
        saes.get("xyz")
    with pytest.raises(SAENotFound) as caught:
        saes.get("p" * 10_000)
    assert len(caught.value.message) < 500


def test_a_folder_that_is_not_there_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="sae_dir: there is no folder"):
        library(tmp_path / "nowhere")


# Registering a folder.


def test_a_folder_is_registered_under_an_id(root: Path) -> None:
    deep = root.joinpath(*"abcdefghij") / "k"  # deeper than is looked
    write_sae(deep)
    saes = library(root)
    assert not listed(saes)
    auto = "a--b--c--d--e--f--g--h--i--j--k"
    for asked, id in (
        ({"path": str(deep)}, auto),
        ({"path": "a/b/c/d/e/f/g/h/i/j/k", "id": "mine"}, "mine"),
        ({"path": str(deep / "sae_weights.safetensors"), "id": "Mine._-"}, "Mine._-"),
    ):
        known = register(saes, **asked)
        assert (known.id, known.state, known.file) == (id, "ready", read_sae(deep))
        assert saes.get(id) == known
    assert list(listed(saes)) == ["Mine._-", auto, "mine"]
    with pytest.raises(SAEExists, match=auto):
        register(saes, path=str(deep))
    with pytest.raises(SAEExists, match="'mine'"):
        register(saes, path=str(deep), id="mine")


def test_what_is_found_keeps_its_id_when_it_is_registered(root: Path) -> None:
    for name in "ab":
        write_sae(root / name)
    saes = library(root)
    before = listed(saes)
    assert register(saes, path="a") == before["a"]
    assert listed(saes) == before
    with pytest.raises(SAEExists, match="there is an SAE 'a'"):
        register(saes, path="b", id="a")
    assert listed(saes) == before


def test_a_folder_of_the_second_root(root: Path, tmp_path: Path) -> None:
    write_sae(tmp_path / "other" / "x")
    assert register(library(root, tmp_path / "other"), path="x").id == "x"


def test_nothing_outside_is_reached_or_told(root: Path, tmp_path: Path) -> None:
    outside = write_sae(tmp_path / "saes-outside" / "x")  # a sibling whose name begins the same
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    saes = library(root)
    there = [str(outside), "../saes-outside/x", "link", str(root / ".." / "saes-outside" / "x")]
    missing = [str(outside.with_name("y")), "../saes-outside/y", "/etc/none", "link/../none"]
    odd = ["a\0b", "/" * 5000, str(outside / "sae_weights.safetensors")]
    for path in (*there, *missing, *odd):
        message = refused(partial(register, saes, path=path), "path")
        assert message == f"{path!r:.200} is not below a --sae-dir"
    assert "--sae-dir" in refused(lambda: register(library(), path=str(outside)), "path")
    for path in ("none", "x" * 5000, ".", ""):
        assert "cannot be used" in refused(partial(register, saes, path=path), "path")


def test_a_folder_that_is_no_sae_is_refused_with_the_reason(root: Path) -> None:
    write_sae(root / "bad", normalize_activations="expected_average_only_in")
    saes = library(root)
    assert "scales hidden states" in refused(lambda: register(saes, path="bad"), "path")
    listed(saes)
    write_sae(root / "bad")
    assert register(saes, path="bad").id == "bad"
    assert listed(saes)["bad"].state == "ready"


def test_what_makes_no_sense_is_refused(root: Path) -> None:
    saes = library(root, allow_download=True)
    for asked, param in (
        ({}, "repository_id"),
        ({"path": "a", "repository": "org/saes"}, "repository_id"),
        ({"path": "a", "revision": "v1"}, "revision"),
        ({"path": "a", "file_path": "b"}, "file_path"),
        ({"repository": "saes"}, "repository_id"),
        ({"repository": "org/../saes"}, "repository_id"),
        ({"repository": "org/saes@../x"}, "repository_id"),
        ({"repository": "org/saes", "revision": "../x"}, "revision"),
        ({"repository": "org/saes", "revision": ""}, "revision"),
        ({"repository": "org/saes@v1", "revision": "v1"}, "revision"),
        *(
            ({"repository": "org/saes", "file_path": path}, "file_path")
            for path in ("", "/", "/a", "a//b", "../a", "a/../b", "./a", "a\\b", "a\0", "a" * 500)
        ),
        *(
            ({"repository": "org/saes", "id": id}, "id")
            for id in ("", "a/b", "ä", "a b", "a\n", "x" * 101, ".", "..", "steering", "attachment")
        ),
    ):
        refused(partial(register, saes, **asked), param)
    assert not listed(saes)


def test_a_server_that_may_not_download_says_how_it_may(
    remote: Hub, repository: Path, root: Path
) -> None:
    remote.add("org/saes", repository)
    saes = library(root)
    text = refused(lambda: register(saes, repository="org/saes", file_path=HOOK), "repository_id")
    assert "--allow-download" in text
    assert not remote.asked
    assert not listed(saes)


def test_what_is_forgotten_comes_back_only_when_it_is_registered(root: Path) -> None:
    folder = write_sae(root / "a")
    saes = library(root)
    before = listed(saes)
    saes.forget("a")
    assert not list(saes)
    assert not listed(saes)
    assert folder.is_dir()
    with pytest.raises(SAENotFound):
        saes.forget("a")
    register(saes, path="a")
    assert listed(saes) == before
    saes.forget("a")
    register(saes, path="a", id="other")
    assert list(listed(saes)) == ["other"]
    saes.forget("other")
    assert not listed(saes)


def test_another_id_is_forgotten_alone(root: Path) -> None:
    write_sae(root / "a")
    saes = library(root)
    before = listed(saes)
    register(saes, path="a", id="other")
    assert list(listed(saes)) == ["a", "other"]
    saes.forget("other")
    assert listed(saes) == before


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
            await saes.close()

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
        await saes.close()
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
    remote.drip(f"{HOOK}/sae_weights.safetensors", 0.05)
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
        await saes.close()
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
        remote.drip(path, 0.1)
    remote.add("org/saes", repository)
    saes = library(allow_download=True)

    async def work() -> None:
        for path in (*(os.path.dirname(path) for path in weights), "layers.2", GEMMA):
            await saes.register(repository="org/saes", file_path=path)
        await until(lambda: set(weights) <= set(sent(remote)))
        assert not [path for path in sent(remote) if not path.startswith("blocks.")]
        saes.forget("org--saes--layers.2")
        await asyncio.gather(*(settled(saes, known.id) for known in list(saes)))
        await saes.close()

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
