"""The sparse autoencoders (SAEs) that may be attached to a model, by their ids.

There are three sources: the demo model's SAE, the folders below each `--sae-dir`, and what has been
registered since the start: a folder below an `--sae-dir`, or files of a repository, which are
downloaded. An SAE keeps its id. No text of a request leads out of these folders, and nothing is
loaded here.

Used on the event loop. Worker threads read the disk and receive downloads. Downloads have a few
threads of their own, so a slow one delays only other downloads.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
import posixpath
import re
import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import msgspec

from mlxsrv.errors import InvalidRequest, SAEExists, SAENotFound, ServeError, ShuttingDown
from mlxsrv.formats.files import signature
from mlxsrv.formats.sae_files import SAEFile, find_saes, read_sae
from mlxsrv.logs import log
from mlxsrv.models.catalogue.hub_cache import SAE_WEIGHTS
from mlxsrv.models.sae_place import SAEPlace
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings

_log = logging.getLogger("mlxsrv.models")

DEMO = "demo"
_DEMO_FOLDER = Path(__file__).parent / "demo" / "sae"

_MOST_DOWNLOADS = 2  # at once; the others wait
_LONGEST_ID = 100
_MOST_NAMES = 20  # names that a message lists

_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{_LONGEST_ID}}}", re.ASCII)
_NO_ID = frozenset({".", "..", "attachment", "steering"})
"""Names below `/api/saes/` that mean something else."""


class SAEEntry(msgspec.Struct, frozen=True):
    """One SAE under its id."""

    id: str
    state: Literal["downloading", "ready", "failed"]
    origin: str
    """"demo", the path below its `--sae-dir`, or `ORG/NAME[@REVISION][:FILE_PATH]`."""
    path: Path | None = None
    """Its folder or file, once it is ready."""
    file: SAEFile | None = None
    """The description of its files, once it is ready."""
    problem: str | None = None
    """Why it has failed."""


class _Item(msgspec.Struct, frozen=True):
    """An SAE with its place, a folder or an origin: two with the same place are the same SAE."""

    entry: SAEEntry
    place: Hashable


class _Download:
    """A running download. Its thread may outlive its task, so it checks `stopped` itself."""

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
    """All SAEs of one app. Those on the disk are known after the first `refresh`.

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
        self._ids: dict[Hashable, str] = {}  # by place; made here, and never changed
        self._forgotten: set[Hashable] = set()
        self._seen: dict[Path, tuple[Hashable, SAEFile | str]] = {}
        self._reported: set[tuple[str, str]] = set()
        self._refreshing = anyio.Lock()
        self._receiving = anyio.CapacityLimiter(_MOST_DOWNLOADS)
        self._downloads: dict[str, _Download] = {}
        self._closed = False

    def __iter__(self) -> Iterator[SAEEntry]:
        """In the order of their ids."""
        items = self._items()
        return iter([items[id].entry for id in sorted(items)])

    def get(self, id: str) -> SAEEntry:
        """The SAE of this id. Raises SAENotFound; the message has similar ids."""
        item = self._items().get(id)
        if item is None:
            raise SAENotFound(f"there is no SAE {id!r:.200}; {self._hint(id[:_LONGEST_ID])}")
        return item.entry

    async def refresh(self) -> None:
        """Scan the folders. Files that have not changed are not read again."""
        async with self._refreshing:
            found = await anyio.to_thread.run_sync(lambda: list(self._scan()))
        self._found = {}
        for place, entry in found:
            if place not in self._forgotten:
                id = self._name(place, entry.id)
                self._found[id] = _Item(msgspec.structs.replace(entry, id=id), place)
        for item in self._found.values():
            self._report(item.entry)

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
            InvalidRequest: the arguments make no sense, are not allowed, or name no SAE.
            SAEExists: the id is taken, or the SAE is here already.
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
        """Remove an SAE until it is registered again. Its files stay; its download stops.

        Raises SAENotFound.
        """
        self.get(id)
        if download := self._downloads.pop(id, None):
            download.stop()
        self._registered.pop(id, None)
        if found := self._found.pop(id, None):
            self._forgotten.add(found.place)

    async def stop_downloads(self) -> None:
        """Stop all downloads. Each continues where it stopped when it is registered again."""
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
        """The id of an SAE that nobody has named: always the same one."""
        items = self._items()
        id = self._ids.get(place)
        if id is None or (id in items and items[id].place != place):
            id = self._ids[place] = _free(wanted, {*items, *self._ids.values(), *_NO_ID})
        return id

    def _claim(self, id: str | None, place: Hashable, wanted: str) -> str:
        """The id for an SAE that is being registered. It may replace one that has failed."""
        for item in self._registered.values():
            if item.place == place and id in (None, item.entry.id):
                if item.entry.state != "failed":
                    raise SAEExists(f"it is here already, as {item.entry.id!r}", param="id")
                return item.entry.id
        if id is None:
            return self._name(place, wanted)
        taken = self._items().get(id)
        if taken is not None and taken.place != place and taken.entry.state != "failed":
            raise SAEExists(f"there is an SAE {id!r}", param="id")
        return id

    def _hint(self, id: str) -> str:
        ids = [entry.id for entry in self if entry.state == "ready"]
        near = difflib.get_close_matches(id, ids, n=3, cutoff=0.5)
        if near:
            return "did you mean " + " or ".join(map(repr, near)) + "?"
        return "there are: " + (", ".join(map(repr, ids[:_MOST_NAMES])) or "none")

    # Folders.

    def _scan(self) -> Iterator[tuple[Path, SAEEntry]]:
        """All SAEs on the disk, each folder once."""
        places: set[Path] = set()
        for folder, origin in self._folders():
            try:
                place = folder.resolve()
            except (OSError, RuntimeError):  # it is gone, or its links make a circle
                continue
            if place in places:
                continue
            places.add(place)
            yield place, _make_entry(_plain(origin), origin, folder, self._look(folder))

    def _folders(self) -> Iterator[tuple[Path, str]]:
        if _DEMO_FOLDER.is_dir():
            yield _DEMO_FOLDER, DEMO
        for root in self._roots:
            for folder in find_saes(root):
                yield folder, _origin(folder, root)

    def _look(self, folder: Path) -> SAEFile | str:
        """The description of a folder's files, or the reason why they are unusable."""
        stamp = signature(folder)
        seen = self._seen.get(folder)
        if seen is None or seen[0] != stamp:
            seen = self._seen[folder] = (stamp, _read(folder))
        return seen[1]

    def _report(self, entry: SAEEntry) -> None:
        """Log a problem, once."""
        if entry.problem is None or (entry.id, entry.problem) in self._reported:
            return
        self._reported.add((entry.id, entry.problem))
        log(_log, logging.WARNING, "SAE left out", sae=entry.id, reason=entry.problem)

    async def _register_folder(self, path: str, id: str | None) -> SAEEntry:
        place, folder, origin, found = await anyio.to_thread.run_sync(self._locate, path)
        if isinstance(found, str):
            raise InvalidRequest(f"{path!r:.200} cannot be used: {found}", param="path")
        id = self._claim(id, place, _plain(origin))
        entry = _make_entry(id, origin, folder, found)
        self._registered[id] = _Item(entry, place)
        return entry

    def _locate(self, path: str) -> tuple[Path, Path, str, SAEFile | str]:
        """The resolved folder, the folder, its origin, and what its files say.

        A folder outside is refused in the same way whether it exists or not.
        """
        below: list[tuple[Path, Path, str]] = []
        for root in self._roots:
            given = root / path  # an absolute path stays as it is
            folder = given.parent if given.name in SAE_WEIGHTS else given
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
        place = SAEPlace.parse(name, revision, file_path)
        origin = str(place)
        id = self._claim(id, origin, _plain(posixpath.join(str(place.repository), place.folder)))
        entry = SAEEntry(id, "downloading", origin)
        self._registered[id] = _Item(entry, origin)
        self._downloads[id] = download = _Download()
        download.task = asyncio.create_task(
            self._receive(entry, lambda: place.fetch(download.check))
        )
        return entry

    async def _receive(self, entry: SAEEntry, fetch: Callable[[], tuple[Path, SAEFile]]) -> None:
        """Download a registered SAE. Cancelled by `forget` and `stop_downloads`."""
        log(_log, logging.INFO, "SAE download", sae=entry.id, origin=entry.origin)
        begun = asyncio.get_running_loop().time()
        try:
            # Abandoned on cancel: the thread checks itself whether it is still wanted.
            path, file = await anyio.to_thread.run_sync(
                fetch, abandon_on_cancel=True, limiter=self._receiving
            )
            entry = msgspec.structs.replace(entry, state="ready", path=path, file=file)
        except Exception as error:
            problem = error.message if isinstance(error, ServeError) else str(error)
            if not isinstance(error, ServeError | ValueError):
                problem = f"an error of the server ({type(error).__name__})"
                _log.exception("SAE download")
            entry = msgspec.structs.replace(entry, state="failed", problem=problem)
        del self._downloads[entry.id]
        self._registered[entry.id] = _Item(entry, entry.origin)
        self._report(entry)
        if entry.state == "ready":
            seconds = asyncio.get_running_loop().time() - begun
            log(_log, logging.INFO, "SAE ready", sae=entry.id, seconds=seconds)


def _make_entry(id: str, origin: str, folder: Path, found: SAEFile | str) -> SAEEntry:
    """The entry of a folder, from what its files say or the reason why they are unusable."""
    if isinstance(found, str):
        return SAEEntry(id, "failed", origin, problem=found)
    return SAEEntry(id, "ready", origin, path=folder, file=found)


def _plain(text: str) -> str:
    """A valid id that resembles the text. Of a long text, the end: there texts differ."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text.replace("/", "--"))[-_LONGEST_ID:]


def _free(wanted: str, taken: set[str]) -> str:
    """An id that is not taken: the wanted one, or the wanted one with a number."""
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
