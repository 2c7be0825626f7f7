"""One SAE in a repository of the Hugging Face hub: its place, and its download."""

from __future__ import annotations

import contextlib
import difflib
import posixpath
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from mlxsrv.errors import InvalidRequest, SAENotFound
from mlxsrv.formats.sae_files import SAEFile, read_sae
from mlxsrv.models.catalogue.hub_cache import SAE_WEIGHTS, Repository, snapshot

_LONGEST_PATH = 400  # characters of a `file_path`

_NEEDED = {
    "sae_weights.safetensors": ("cfg.json",),
    "sae.safetensors": ("cfg.json",),
    "params.safetensors": ("config.json",),
}
"""Files that must be beside a file of weights."""
_OPTIONAL = {"sae.safetensors": ("../config.json",)}
"""Files that may say more about it."""


class SAEPlace(msgspec.Struct, frozen=True):
    """The place of an SAE in a repository."""

    repository: Repository
    folder: str
    """Its path; "" is the top of the repository."""
    weights: str | None
    """The name of its file of weights in the folder, if the request names one."""

    @classmethod
    def parse(cls, name: str, revision: str | None, file_path: str | None) -> SAEPlace:
        """Read a request's fields. Raises InvalidRequest."""
        return cls(_repository(name, revision), *_split(file_path))

    def __str__(self) -> str:
        return f"{self.repository}:{self._inside}" if self._inside else str(self.repository)

    @property
    def _inside(self) -> str:
        """The path in the repository."""
        return self.folder if self.weights is None else posixpath.join(self.folder, self.weights)

    def fetch(self, check: Callable[[], None]) -> tuple[Path, SAEFile]:
        """Download what is not in the cache; return the folder and what its files say. Blocks.

        Args:
            check: called during the download; it stops the download by raising.

        Raises:
            ServeError: the download failed.
            ValueError: the files are there and cannot be used.
        """
        here = snapshot(self.repository)
        if here is not None:
            with contextlib.suppress(ValueError):
                return self._read(here)
        # Imported on first use: this takes 0.1 s, and most servers never download.
        from mlxsrv.models.catalogue.download import fetch_files

        return self._read(fetch_files(self.repository, self._choose, check=check))

    def _read(self, root: Path) -> tuple[Path, SAEFile]:
        path = root / self.folder
        return path, read_sae(path / self.weights if self.weights else path)

    def _choose(self, paths: Sequence[str]) -> list[str]:
        """The paths of this SAE's files, out of all in the repository. Raises SAENotFound."""
        there = set(paths)
        for name in SAE_WEIGHTS if self.weights is None else (self.weights,):
            needed = self._beside(name, *_NEEDED.get(name, ()))
            if there.issuperset(needed):
                return needed + sorted(there.intersection(self._beside(*_OPTIONAL.get(name, ()))))
        where = f"at {self._inside!r}" if self._inside else "at its top"
        raise SAENotFound(
            f"{str(self.repository)!r} has no SAE {where}; {_elsewhere(there, self.folder)}"
        )

    def _beside(self, *names: str) -> list[str]:
        return [posixpath.normpath(posixpath.join(self.folder, name)) for name in names]


def _elsewhere(paths: Iterable[str], folder: str) -> str:
    """Say where else in the repository there are SAEs."""
    folders = sorted({posixpath.dirname(p) for p in paths if posixpath.basename(p) in SAE_WEIGHTS})
    if not folders:
        return "it has none of " + ", ".join(SAE_WEIGHTS)
    near = difflib.get_close_matches(folder, folders, n=3, cutoff=0.3) or folders[:3]
    others = len(folders) - len(near)
    text = "there are " + ", ".join(repr(name or ".") for name in near)
    return f"{text} and {others} more; 'file_path' names one" if others else text


def _repository(name: str, revision: str | None) -> Repository:
    """Raises InvalidRequest."""
    try:
        repository = Repository.parse(name)
    except ValueError as error:
        raise InvalidRequest(str(error), param="repository_id") from None
    if revision is None:
        return repository
    if "@" in name:
        raise InvalidRequest("'repository_id' names a revision already", param="revision")
    try:
        return Repository.parse(f"{name}@{revision}")
    except ValueError as error:
        raise InvalidRequest(str(error), param="revision") from None


def _split(file_path: str | None) -> tuple[str, str | None]:
    """The folder and, if the path names one, the file of weights in it. Raises InvalidRequest."""
    if file_path is None:
        return "", None
    parts = file_path.removesuffix("/").split("/")
    wrong = {"", ".", ".."}.intersection(parts) or "\\" in file_path
    if wrong or not file_path.isprintable() or len(file_path) > _LONGEST_PATH:
        raise InvalidRequest(
            f"{file_path!r:.200} is not the path of a folder or a file in a repository",
            param="file_path",
        )
    folder, last = "/".join(parts[:-1]), parts[-1]
    if last in SAE_WEIGHTS:
        return folder, last
    return (folder, None) if last in ("cfg.json", "config.json") else ("/".join(parts), None)
