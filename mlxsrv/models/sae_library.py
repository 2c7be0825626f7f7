"""The sparse autoencoders (SAEs) that may be attached to a model, by their ids.

Three sources: the one of the demo model, what lies below each `--sae-dir`, and what was registered
since the start: a folder below an `--sae-dir`, or files of a repository, which are downloaded. An
id stays with what it was given to; nothing that a request says leads out of those folders, and
nothing is loaded here.

Used on the event loop. The disk is read in worker threads, and so are downloads received; those
have a few threads of their own, so that slow ones keep nobody waiting but each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
import os
import posixpath
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import msgspec

from mlxsrv.errors import InvalidRequest, SAEExists, SAENotFound, ServeError, ShuttingDown
from mlxsrv.formats.files import signature
from mlxsrv.formats.sae_files import SAEFile, find_saes, read_sae
from mlxsrv.logs import log
from mlxsrv.models.catalogue import hub_cache
from mlxsrv.settings import Settings, SettingsError

_log = logging.getLogger("mlxsrv.models")

DEMO = "demo"
_DEMO_FOLDER = Path(__file__).parent / "demo" / "sae"

_AT_ONCE = 2  # downloads; the others wait
_LONGEST_ID = 100
_LONGEST_PATH = 400  # characters of a `file_path`
_MOST_NAMES = 20  # that a message lists

_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{_LONGEST_ID}}}", re.ASCII)
_NO_ID = frozenset({".", "..", "attachment", "steering"})
"""What `/api/saes/` has under these names is something else."""

_COMPANIONS = {
    "sae_weights.safetensors": ("cfg.json",),
    "sae.safetensors": ("cfg.json",),
    "params.safetensors": ("config.json",),
}
"""Without which a file of weights is no SAE."""
_BESIDE = {"sae.safetensors": ("../config.json",)}
"""What may say more about it."""


class SAEEntry(msgspec.Struct, frozen=True):
    """One SAE under its id.

    `origin` is what it was found or registered as: "demo", the path below its `--sae-dir`, or
    `ORG/NAME[@REVISION][:FILE_PATH]`. There are a path and what the files say if it is ready.
    """

    id: str
    state: Literal["downloading", "ready", "failed"]
    origin: str
    path: Path | None = None
    file: SAEFile | None = None
    problem: str | None = None


class _Item(msgspec.Struct, frozen=True):
    """What has an id; `place` tells whether two are the same: a folder, or an origin."""

    known: SAEEntry
    place: Hashable


class _Download:
    """A running one. Its thread may outlive its task, and looks at `stopped`."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.task: asyncio.Task[None] | None = None

    def check(self) -> None:
        if self.stopped.is_set():
            raise _Stopped

    def stop(self) -> None:
        self.stopped.set()
        if self.task is not None:
            self.task.cancel()


class _Stopped(Exception):
    """Nobody wants the download any more."""


class SAELibrary:
    """All SAEs. Those on the disk are known after the first `refresh`.

    Raises:
        SettingsError: a folder that is not there.
    """

    def __init__(self, settings: Settings) -> None:
        for folder in settings.sae_dir:
            if not os.path.isdir(Path(folder).expanduser()):
                raise SettingsError(f"sae_dir: there is no folder {folder!r}")
        self._roots = tuple(Path(folder).expanduser() for folder in settings.sae_dir)
        self._allow_download = settings.allow_download
        self._found: dict[str, _Item] = {}
        self._registered: dict[str, _Item] = {}
        self._ids: dict[Hashable, str] = {}  # of those that nobody has named, for good
        self._forgotten: set[Hashable] = set()
        self._seen: dict[Path, tuple[Hashable, SAEFile | str]] = {}
        self._reported: set[tuple[str, str]] = set()
        self._refreshing = anyio.Lock()
        self._receiving = anyio.CapacityLimiter(_AT_ONCE)
        self._downloads: dict[str, _Download] = {}
        self._closed = False

    def __iter__(self) -> Iterator[SAEEntry]:
        """In the order of their ids."""
        items = self._items()
        return iter([items[id].known for id in sorted(items)])

    def get(self, id: str) -> SAEEntry:
        """Raises SAENotFound, with near names."""
        item = self._items().get(id)
        if item is None:
            raise SAENotFound(f"there is no SAE {id!r:.200}; {self._hint(id[:_LONGEST_ID])}")
        return item.known

    async def refresh(self) -> None:
        """Look through the folders. Files that have not changed are not read again."""
        async with self._refreshing:
            found = await anyio.to_thread.run_sync(lambda: list(self._scan()))
        self._found = {}
        for place, known in found:
            if place not in self._forgotten:
                id = self._name(place, known.id)
                self._found[id] = _Item(msgspec.structs.replace(known, id=id), place)
        for item in self._found.values():
            self._report(item.known)

    async def register(
        self,
        *,
        repository: str | None = None,
        path: str | None = None,
        revision: str | None = None,
        file_path: str | None = None,
        id: str | None = None,
    ) -> SAEEntry:
        """Add the SAE of a folder, which then is ready, or of a repository, which is downloaded.

        Raises:
            InvalidRequest: what is asked for makes no sense, is not allowed or is no SAE.
            SAEExists: the id is taken, or the same is there without one.
        """
        if self._closed:
            raise ShuttingDown("the server is shutting down")
        if id is not None and (not _ID.fullmatch(id) or id in _NO_ID):
            raise InvalidRequest(
                f"{id!r:.200} is no id: 1 to {_LONGEST_ID} letters, digits, '.', '_' and '-', "
                f"and none of {', '.join(sorted(_NO_ID))}",
                param="id",
            )
        if path is not None:
            for name, value in (
                ("repository_id", repository),
                ("revision", revision),
                ("file_path", file_path),
            ):
                if value is not None:
                    raise InvalidRequest(f"{name!r} does not go with 'path'", param=name)
            return await self._register_folder(path, id)
        if repository is None:
            raise InvalidRequest("'repository_id' or 'path' is needed", param="repository_id")
        return self._register_repository(repository, revision, file_path, id)

    def forget(self, id: str) -> None:
        """Have it here no more, unless it is registered again. Its files stay; a download stops.

        Raises SAENotFound.
        """
        self.get(id)
        if download := self._downloads.pop(id, None):
            download.stop()
        self._registered.pop(id, None)
        if found := self._found.pop(id, None):
            self._forgotten.add(found.place)

    async def close(self) -> None:
        """Stop all downloads; each goes on where it was when it is asked for again."""
        self._closed = True
        downloads = list(self._downloads.values())
        for download in downloads:
            download.stop()
        tasks = [download.task for download in downloads if download.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _items(self) -> dict[str, _Item]:
        return self._found | self._registered

    # Ids.

    def _name(self, place: Hashable, wanted: str) -> str:
        """The id of what nobody has named: the same whenever it is asked for."""
        items = self._items()
        id = self._ids.get(place)
        if id is None or (id in items and items[id].place != place):
            id = self._ids[place] = _free(wanted, {*items, *self._ids.values(), *_NO_ID})
        return id

    def _claim(self, id: str | None, place: Hashable, wanted: str) -> str:
        """The id for what is being registered. What has failed gives way."""
        for item in self._registered.values():
            if item.place == place and id in (None, item.known.id):
                if item.known.state != "failed":
                    raise SAEExists(f"it is here already, as {item.known.id!r}", param="id")
                return item.known.id
        if id is None:
            return self._name(place, wanted)
        taken = self._items().get(id)
        if taken is not None and taken.place != place and taken.known.state != "failed":
            raise SAEExists(f"there is an SAE {id!r}", param="id")
        return id

    def _hint(self, id: str) -> str:
        ids = [known.id for known in self if known.state == "ready"]
        near = difflib.get_close_matches(id, ids, n=3, cutoff=0.5)
        if near:
            return "did you mean " + " or ".join(map(repr, near)) + "?"
        return "there are: " + (", ".join(map(repr, ids[:_MOST_NAMES])) or "none")

    # Folders.

    def _scan(self) -> Iterator[tuple[Path, SAEEntry]]:
        """All that are on the disk; of those in the same folder the first."""
        places: set[Path] = set()
        for folder, origin in self._folders():
            try:
                place = folder.resolve()
            except (OSError, RuntimeError):  # it has gone, or its links lead in a circle
                continue
            if place in places:
                continue
            places.add(place)
            said = self._look(folder)
            known = _known(_plain(origin), origin, folder, said)
            yield place, known

    def _folders(self) -> Iterator[tuple[Path, str]]:
        if _DEMO_FOLDER.is_dir():
            yield _DEMO_FOLDER, DEMO
        for root in self._roots:
            for folder in find_saes(root):
                yield folder, _origin(folder, root)

    def _look(self, folder: Path) -> SAEFile | str:
        """What its files say, or what is wrong with them."""
        stamp = signature(folder)
        seen = self._seen.get(folder)
        if seen is None or seen[0] != stamp:
            seen = self._seen[folder] = (stamp, _read(folder))
        return seen[1]

    def _report(self, known: SAEEntry) -> None:
        """Log a problem, once."""
        if known.problem is None or (known.id, known.problem) in self._reported:
            return
        self._reported.add((known.id, known.problem))
        log(_log, logging.WARNING, "SAE left out", sae=known.id, reason=known.problem)

    async def _register_folder(self, path: str, id: str | None) -> SAEEntry:
        place, folder, origin, said = await anyio.to_thread.run_sync(self._locate, path)
        if isinstance(said, str):
            raise InvalidRequest(f"{path!r:.200} cannot be used: {said}", param="path")
        id = self._claim(id, place, _plain(origin))
        known = _known(id, origin, folder, said)
        self._registered[id] = _Item(known, place)
        return known

    def _locate(self, path: str) -> tuple[Path, Path, str, SAEFile | str]:
        """Where the links of a folder lead to, the folder, its origin, and what its files say.

        What is outside is refused in the same way whether it is there or not.
        """
        below: list[tuple[Path, Path, str]] = []
        for root in self._roots:
            given = root / path  # an absolute one stays as it is
            folder = given.parent if given.name in hub_cache.SAE_WEIGHTS else given
            try:
                place, top = folder.resolve(), root.resolve()
            except (OSError, RuntimeError, ValueError):
                continue
            if place.is_relative_to(top):
                below.append((place, folder, _origin(place, top)))
        if not below:
            hint = "" if self._roots else "; there is none, and 'repository_id' needs no folder"
            raise InvalidRequest(f"{path!r:.200} is not below a --sae-dir{hint}", param="path")
        place, folder, origin = next((b for b in below if os.path.isdir(b[0])), below[0])
        return place, folder, origin, _read(folder)

    # Repositories.

    def _register_repository(
        self, name: str, revision: str | None, file_path: str | None, id: str | None
    ) -> SAEEntry:
        if not self._allow_download:
            raise InvalidRequest(
                "this server does not download; start it with --allow-download",
                param="repository_id",
            )
        repository = _repository(name, revision)
        folder, weights = _split(file_path)
        inside = _join(folder, weights)
        origin = f"{repository}:{inside}" if inside else str(repository)
        id = self._claim(id, origin, _plain(posixpath.join(str(repository), folder)))
        known = SAEEntry(id, "downloading", origin)
        self._registered[id] = _Item(known, origin)
        self._downloads[id] = download = _Download()
        download.task = asyncio.create_task(
            self._receive(known, lambda: _fetch(repository, folder, weights, download.check))
        )
        return known

    async def _receive(self, known: SAEEntry, fetch: Callable[[], tuple[Path, SAEFile]]) -> None:
        """Bring a registered SAE to its end. Cancelled by `forget` and `close`."""
        log(_log, logging.INFO, "SAE download", sae=known.id, origin=known.origin)
        begun = asyncio.get_running_loop().time()
        try:
            # Abandoned when nobody wants it any more: the thread looks at that itself.
            path, file = await anyio.to_thread.run_sync(
                fetch, abandon_on_cancel=True, limiter=self._receiving
            )
            known = msgspec.structs.replace(known, state="ready", path=path, file=file)
        except Exception as error:
            problem = error.message if isinstance(error, ServeError) else str(error)
            if not isinstance(error, ServeError | ValueError):
                problem = f"an error of the server ({type(error).__name__})"
                _log.exception("SAE download")
            known = msgspec.structs.replace(known, state="failed", problem=problem)
        del self._downloads[known.id]
        self._registered[known.id] = _Item(known, known.origin)
        self._report(known)
        if known.state == "ready":
            seconds = asyncio.get_running_loop().time() - begun
            log(_log, logging.INFO, "SAE ready", sae=known.id, seconds=seconds)


def _known(id: str, origin: str, folder: Path, said: SAEFile | str) -> SAEEntry:
    if isinstance(said, str):
        return SAEEntry(id, "failed", origin, problem=said)
    return SAEEntry(id, "ready", origin, path=folder, file=said)


def _plain(text: str) -> str:
    """What is like it and may be an id; of a long one the end, which tells one from another."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text.replace("/", "--"))[-_LONGEST_ID:]


def _free(wanted: str, taken: set[str]) -> str:
    """An id that is not taken: the wanted one, or that with a number."""
    id, number = wanted, 1
    while id in taken:
        number += 1
        id = f"{wanted}-{number}"[-_LONGEST_ID:]
    return id


def _origin(folder: Path, root: Path) -> str:
    return (root.resolve().name or "sae") if folder == root else folder.relative_to(root).as_posix()


def _read(folder: Path) -> SAEFile | str:
    try:
        return read_sae(folder)
    except (ValueError, OSError) as error:
        return str(error)


# What a repository is to give. These are called in the thread of a download.


def _fetch(
    repository: hub_cache.Repository, folder: str, weights: str | None, check: Callable[[], None]
) -> tuple[Path, SAEFile]:
    """The folder of the SAE, and what its files say; what the cache has is not asked for.

    Raises ServeError; or ValueError, if it is there and cannot be used.
    """

    def choose(paths: Sequence[str]) -> list[str]:
        return _choose(paths, repository, folder, weights)

    here = hub_cache.snapshot(repository)
    if here is not None:
        with contextlib.suppress(ValueError):
            return _open(here, folder, weights)
    # Imported on first use: this takes 0.1 s, and most servers never download.
    from mlxsrv.models.catalogue.download import fetch_files

    return _open(fetch_files(repository, choose, check=check), folder, weights)


def _open(snapshot: Path, folder: str, weights: str | None) -> tuple[Path, SAEFile]:
    path = snapshot / folder
    return path, read_sae(path / weights if weights else path)


def _choose(
    paths: Sequence[str], repository: hub_cache.Repository, folder: str, weights: str | None
) -> list[str]:
    """The files of one SAE, of all that the repository has. Raises SAENotFound."""
    there = set(paths)
    for name in hub_cache.SAE_WEIGHTS if weights is None else (weights,):
        needed = [posixpath.join(folder, n) for n in (name, *_COMPANIONS.get(name, ()))]
        if there.issuperset(needed):
            more = {posixpath.normpath(posixpath.join(folder, n)) for n in _BESIDE.get(name, ())}
            return needed + sorted(more & there)
    raise SAENotFound(
        f"{str(repository)!r} has no SAE {_where(folder, weights)}; {_elsewhere(there, folder)}"
    )


def _join(folder: str, weights: str | None) -> str:
    return folder if weights is None else posixpath.join(folder, weights)


def _where(folder: str, weights: str | None) -> str:
    inside = _join(folder, weights)
    return f"at {inside!r}" if inside else "at its top"


def _elsewhere(paths: Iterable[str], folder: str) -> str:
    """Where in the repository there are SAEs."""
    folders = sorted(
        {posixpath.dirname(p) for p in paths if posixpath.basename(p) in hub_cache.SAE_WEIGHTS}
    )
    if not folders:
        return "it has none of " + ", ".join(hub_cache.SAE_WEIGHTS)
    near = difflib.get_close_matches(folder, folders, n=3, cutoff=0.3) or folders[:3]
    others = len(folders) - len(near)
    text = "there are " + ", ".join(repr(name or ".") for name in near)
    return f"{text} and {others} more; 'file_path' names one" if others else text


def _repository(name: str, revision: str | None) -> hub_cache.Repository:
    """Raises InvalidRequest."""
    try:
        repository = hub_cache.Repository.parse(name)
    except ValueError as error:
        raise InvalidRequest(str(error), param="repository_id") from None
    if revision is None:
        return repository
    if "@" in name:
        raise InvalidRequest("'repository_id' names a revision already", param="revision")
    try:
        return hub_cache.Repository.parse(f"{name}@{revision}")
    except ValueError as error:
        raise InvalidRequest(str(error), param="revision") from None


def _split(file_path: str | None) -> tuple[str, str | None]:
    """The folder of an SAE in its repository and, if that is what is named, its file of weights.

    Raises InvalidRequest.
    """
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
    if last in hub_cache.SAE_WEIGHTS:
        return folder, last
    return (folder, None) if last in ("cfg.json", "config.json") else ("/".join(parts), None)
