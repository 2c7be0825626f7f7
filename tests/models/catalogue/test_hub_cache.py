"""Names of repositories, and what a catalogue reads of the Hugging Face cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.utils import validate_repo_id

from mlxsrv.models.catalogue.download import fetch
from mlxsrv.models.catalogue.hub_cache import (
    CachedModel,
    Repository,
    cache_state,
    cached,
    cached_models,
)
from tests.support.hub import Hub
from tests.support.hub_caches import TINY, WEIGHTS, cache, failure, hub, model, server

__all__ = ["cache", "hub", "model", "server"]

pytestmark = pytest.mark.served  # a hub is served here

# Names.


@pytest.mark.parametrize(
    ("text", "id", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/name@main", "org/name", None),
        ("mlx-community/Qwen3-0.6B-4bit@v1.0", "mlx-community/Qwen3-0.6B-4bit", "v1.0"),
        ("o/n@refs/pr/1", "o/n", "refs/pr/1"),
        ("_o_/0.n@" + "0" * 40, "_o_/0.n", "0" * 40),
    ],
)
def test_a_repository_is_read(text: str, id: str, revision: str | None) -> None:
    repository = Repository.parse(text)
    assert repository == Repository(id, revision)
    assert Repository.parse(str(repository)) == repository


IDS = [
    *("org/name", "o/n", "a.b/c-d_e", "a/" + "n" * 96, "-a/b", "a/b-", ".a/b", "a/.b", "a/b."),
    *("../b", "a/..", "a/b..c", "a--b/c", "a/b.git", "a/", "/a", "a/b/c", "a b/c", "a/é", "a/b\n"),
    *("a/" + "n" * 97, "a/b\0", "a/b?c", "a\\b/c", "~/b", ""),
]


@pytest.mark.parametrize("id", IDS)
def test_names_are_those_of_the_hub(id: str) -> None:
    try:
        validate_repo_id(id)
    except ValueError:
        with pytest.raises(ValueError, match="is not"):
            Repository.parse(id)
    else:
        assert Repository.parse(id).id == id


@pytest.mark.parametrize(
    "revision",
    ["", "..", "a/../b", "../main", "/a", "a/", "a//b", "a b", "-x", ".x", "a/.b", "a.lock", "é"],
)
def test_a_revision_stays_in_its_folder(revision: str) -> None:
    with pytest.raises(ValueError, match="branch, a tag or a commit"):
        Repository.parse(f"org/name@{revision}")


def test_one_name_is_no_repository() -> None:
    with pytest.raises(ValueError, match="ORG/NAME"):
        Repository.parse("gpt2")


# What the cache holds.


def test_no_cache_is_an_empty_one(cache: Path) -> None:
    assert cached_models() == []
    assert cached(TINY) is None
    assert cache_state() == ()


def test_entries_that_cannot_be_read_are_left_out(hub: Hub, cache: Path, model: Path) -> None:
    hub.add(TINY.id, model)
    folder = fetch(TINY)
    (cache / "models--a--file").write_text("")
    (cache / "models--no--snapshots" / "blobs").mkdir(parents=True)
    (cache / "datasets--org--data" / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (cache / "models--org--tiny" / "refs" / "broken").write_bytes(b"\xff\xfe")
    (cache / "models--org--tiny" / "refs" / "outside").write_text("../../outside")
    shutil.copytree(model, cache / "outside")
    (cache / "models--org--tiny" / "refs" / "missing").write_text("0" * 40)
    assert cached_models() == [CachedModel("org/tiny", folder, incomplete=False)]
    for ref in ("broken", "outside", "missing"):
        assert cached(Repository(TINY.id, ref)) is None


def test_a_download_that_was_cut_short_is_seen(hub: Hub, cache: Path, model: Path) -> None:
    hub.add(TINY.id, model)
    folder = Path(snapshot_download(TINY.id, allow_patterns=["*.json"]))
    assert cached_models() == [CachedModel("org/tiny", folder, incomplete=True)]
    assert cached(TINY) is None

    fetch(TINY)
    assert not cached_models()[0].incomplete
    (folder / WEIGHTS).resolve().unlink()
    assert cached_models()[0].incomplete
    assert cached(TINY) is None

    fetch(TINY)
    shutil.rmtree(cache / "models--org--tiny" / "trees")  # as older versions leave it
    assert not cached_models()[0].incomplete
    (cache / "models--org--tiny" / "blobs" / "0.incomplete").touch()
    assert cached_models()[0].incomplete


def test_a_tokenizer_alone_is_no_model(hub: Hub, cache: Path, model: Path) -> None:
    hub.add(TINY.id, model)
    folder = fetch(TINY)
    shutil.rmtree(cache / "models--org--tiny" / "trees")
    (folder / WEIGHTS).unlink()
    assert cached(TINY) is None


def test_the_state_changes_when_the_cache_does(hub: Hub, cache: Path, model: Path) -> None:
    hub.add(TINY.id, model)
    root = cache / "models--org--tiny"
    states = [cache_state()]

    def changed() -> bool:
        states.append(cache_state())
        assert states[-1] == cache_state()
        return states[-1] != states[-2]

    hub.drop(WEIGHTS, after=100_000)
    failure()
    assert changed()
    hub.mend()
    folder = fetch(TINY)
    assert changed()
    fetch(TINY)
    assert not changed()
    (root / "refs" / "v1").write_text(folder.name)
    assert changed()
    (root / "refs" / "v1").write_text("0" * 40)
    assert changed()
    (folder / "deep").mkdir()
    assert changed()
    (folder / "deep" / "link").symlink_to(folder / WEIGHTS)
    assert changed()
    (folder / WEIGHTS).resolve().unlink()
    assert changed()
    shutil.rmtree(root)
    assert changed()
