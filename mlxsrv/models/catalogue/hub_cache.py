"""Repositories of the Hugging Face hub, and what its cache on this disk holds of them.

huggingface-hub defines the layout, since other programs read and write the cache too:

    models--ORG--NAME/refs/REF                the last known commit of a branch or tag
    models--ORG--NAME/snapshots/COMMIT/PATH   a link to the file's blob
    models--ORG--NAME/blobs/CHECKSUM          a file; CHECKSUM.incomplete while it is downloaded
    models--ORG--NAME/trees/COMMIT.json       all paths on the hub

Nothing here uses the network; downloads are in `download.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

# Only the constants: importing the rest of huggingface-hub takes 0.1 s.
from huggingface_hub import constants

_ESSENTIAL = (
    "config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
"""Files that every program downloads with a whole model: if one is missing, the download was cut
short."""

SAE_WEIGHTS = (
    *("sae_weights.safetensors", "sae.safetensors"),
    *("params.npz", "params.safetensors"),
)
"""Names of files that hold a sparse autoencoder."""

_PART = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")
_REVISION = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.+/-]{0,198}[A-Za-z0-9_+-])?")
_NO_REVISION = re.compile(r"\.\.|//|/\.|\.lock(/|$)")  # git and the cache give it other meanings
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Repository(msgspec.Struct, frozen=True):
    """A repository of the hub, at one revision."""

    id: str
    revision: str | None = None
    """A branch, tag or commit; None is `main`."""

    @classmethod
    def parse(cls, text: str) -> Repository:
        """Read `ORG/NAME` or `ORG/NAME@REVISION`.

        Raises:
            ValueError: it is neither, or unsafe: name and revision become parts of paths.
        """
        id, at, revision = text.partition("@")
        parts = id.split("/")
        if len(parts) != 2:
            raise ValueError(f"{text!r:.200} is not ORG/NAME or ORG/NAME@REVISION")
        plain = all(_PART.fullmatch(part) for part in parts)
        if not plain or "--" in id or ".." in id or id.endswith(".git"):
            raise ValueError(
                f"{id!r:.200} is not the name of a repository: letters, digits, '-', '_' and '.', "
                "without '--', '..' and a '.git' at its end"
            )
        if at and (not _REVISION.fullmatch(revision) or _NO_REVISION.search(revision)):
            raise ValueError(f"{revision!r:.200} is not the name of a branch, a tag or a commit")
        return cls(id, revision if revision not in ("", constants.DEFAULT_REVISION) else None)

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"

    @property
    def ref(self) -> str:
        return self.revision or constants.DEFAULT_REVISION

    @property
    def root(self) -> Path:
        """Its folder in the cache, which need not exist."""
        return Path(constants.HF_HUB_CACHE) / f"models--{self.id.replace('/', '--')}"


class CachedModel(msgspec.Struct, frozen=True):
    """A model in the cache. Its folder may still hold nothing that can be served."""

    name: str
    """`ORG/NAME` for `main`, or for the newest snapshot if `main` is not in the cache; other
    revisions as `ORG/NAME@REF`."""
    folder: Path
    incomplete: bool
    """Its download has not finished."""


def cached_models() -> list[CachedModel]:
    """All models in the cache, sorted by name; entries that cannot be read are left out."""
    # Not with `huggingface_hub.scan_cache_dir`, which hides a repository with one broken link,
    # fails on a file that it may not read, and visits every file of every dataset.
    found = [model for root in _roots() for model in _cached_in(root)]
    return sorted(found, key=lambda model: model.name)


def _cached_in(root: Path) -> Iterator[CachedModel]:
    id = root.name.removeprefix("models--").replace("--", "/")
    snapshots = _snapshots(root)
    if not snapshots:
        return
    refs = {ref: commit for ref, commit in _refs(root).items() if commit in snapshots}
    newest = max(snapshots, key=lambda commit: (_mtime(snapshots[commit]), commit))
    main = refs.pop(constants.DEFAULT_REVISION, newest)
    for name, commit in [(id, main), *((f"{id}@{ref}", refs[ref]) for ref in refs)]:
        if _holds_saes(snapshots[commit]):
            continue
        yield CachedModel(name, snapshots[commit], not is_complete(root, commit))


def _holds_saes(snapshot: Path) -> bool:
    """Whether a snapshot holds sparse autoencoders and no model."""
    here = [path.relative_to(snapshot) for path in _files(snapshot)]
    saes = any(path.name in SAE_WEIGHTS for path in here)
    return saes and not any(matches(path.as_posix(), ("model*.safetensors",)) for path in here)


def cache_state() -> Hashable:
    """A value that changes when the result of `cached_models` does. Reads folders, no files."""
    return tuple(
        (root.name, _mtime(root / "blobs"), *_mtimes(root / "refs"), *_mtimes(root / "snapshots"))
        for root in _roots()
    )


def cached(repository: Repository) -> Path | None:
    """The folder of a model, if all of it is in the cache."""
    folder = snapshot(repository)
    # Other programs download only a tokenizer or a config, if they need no more.
    if folder is None or not (folder / "config.json").exists():
        return None
    if not any(folder.glob("model*.safetensors")):
        return None
    return folder if is_complete(repository.root, folder.name) else None


def snapshot(repository: Repository) -> Path | None:
    """The folder of what the cache holds of the revision. It may be incomplete, or not there."""
    root, ref = repository.root, repository.ref
    commit = ref if _COMMIT.fullmatch(ref) else read_ref(root / "refs" / ref)
    return None if commit is None else root / "snapshots" / commit


def read_ref(file: Path) -> str | None:
    """The commit that a file below `refs` names."""
    try:
        commit = file.read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def is_complete(root: Path, commit: str) -> bool:
    """Whether all files of a snapshot are there, as far as the cache shows."""
    snapshot = root / "snapshots" / commit
    paths = _files(snapshot)
    if not all(path.exists() for path in paths):
        return False
    wanted = _listed(root, commit)
    if wanted is None:  # then any unfinished download may belong to this snapshot
        return not any(path.suffix == ".incomplete" for path in _entries(root / "blobs"))
    here = {path.relative_to(snapshot).as_posix() for path in paths}
    return all(path in here for path in wanted if matches(path, _ESSENTIAL))


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _listed(root: Path, commit: str) -> list[str] | None:
    """The paths of a commit's files on the hub, if the cache knows them."""
    if not (root / "trees" / f"{commit}.json").exists():
        return None
    try:
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError
    except ImportError:  # another program's huggingface-hub is newer, and wrote the file
        return None
    id = root.name.removeprefix("models--").replace("--", "/")
    try:
        found = get_cached_repo_tree(id, revision=commit, cache_dir=root.parent)
    except (CachedRepoTreeNotFoundError, ValueError):
        return None
    return [file.path for file in found]


def _roots() -> list[Path]:
    roots = [path for path in _entries(Path(constants.HF_HUB_CACHE)) if path.is_dir()]
    return sorted(root for root in roots if root.name.startswith("models--"))


def _snapshots(root: Path) -> dict[str, Path]:
    """The folder of each commit."""
    found = [path for path in _entries(root / "snapshots") if path.is_dir()]
    return {path.name: path for path in found if _COMMIT.fullmatch(path.name)}


def _refs(root: Path) -> dict[str, str]:
    """The commit of each branch and tag."""
    refs = root / "refs"
    read = {path.relative_to(refs).as_posix(): read_ref(path) for path in _files(refs)}
    return {ref: commit for ref, commit in read.items() if commit is not None}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _files(folder: Path) -> list[Path]:
    """All files below, links too."""
    return sorted(Path(path, name) for path, _, names in os.walk(folder) for name in names)


def _mtimes(folder: Path) -> Iterator[int]:
    """The times of all folders below; and of all refs, which older versions write in place."""
    for path, folders, names in os.walk(folder):
        folders.sort()
        yield _mtime(Path(path))
        if folder.name == "refs":
            yield from (_mtime(Path(path, name)) for name in sorted(names))


def _mtime(path: Path) -> int:
    """The time of the last change in nanoseconds; 0 if there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
