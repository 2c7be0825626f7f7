"""The library of SAEs: what is found below folders, and what may be registered and forgotten."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.errors import SAEExists, SAENotFound
from mlxsrv.formats.sae_files import read_sae
from mlxsrv.models import sae_library as module
from mlxsrv.options import SettingsError
from tests.support.hub import Hub
from tests.support.sae_libraries import (
    GEMMA,
    HOOK,
    library,
    listed,
    no_demo,
    refused,
    register,
    remote,
    repository,
    root,
    server,
)
from tests.support.saes import write_sae

__all__ = ["no_demo", "remote", "repository", "root", "server"]

pytestmark = pytest.mark.served  # a hub is served here


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
