"""Stored responses of several replicas: each has its own in memory, and in files for the others.

A response is a file with its id as its name, in the folder of the replica that has made it. Beside
it are links to it, with the ids of its output. A replica looks there for what it does not have. So
a response is found wherever a request goes, and after the end of its replica, however that came.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from mlxsrv.errors import StoreFailed
from mlxsrv.options import SettingsError
from mlxsrv.service.response_store import (
    ResponseStore,
    StoredItem,
    StoredReference,
    StoredResponse,
)
from mlxsrv.settings import Settings

_NAME = re.compile(r"[a-z]+_[0-9a-f]{1,100}")  # ids that this server makes; no other is a path
_NEW = ".new"

_ALIVE_SECONDS = 300.0  # since the last sign of life; Serve looks every 10 s
_KEEP_SECONDS = 24 * 3600.0  # for which files outlive their replica
_MOST_GONE = 100  # replicas that are gone, and whose files are kept

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredResponse).decode


def responses_folder(settings: Settings, deployment: str) -> Path:
    """Return the folder for all replicas of a deployment. Raises SettingsError if there is no home
    for it."""
    try:
        return Path(settings.data_dir).expanduser() / f"responses-{deployment}"
    except RuntimeError:
        raise SettingsError("--data-dir: this user has no home directory; choose another") from None


class ResponseFiles(ResponseStore):
    """The responses of this replica, and what others have stored.

    The bounds hold for what this replica makes. Calls are made on the event loop. None waits for
    the disk, only for the file system: a response of 4 KB takes half a
    millisecond.

    Args:
        folder: of all replicas.
        replica: the id of this one.

    Raises:
        SettingsError: the folder cannot be used.
        StoreFailed: by any method, if that is so later.
    """

    def __init__(self, most: int, most_bytes: int, folder: Path, replica: str) -> None:
        super().__init__(most, most_bytes)
        self._folder = folder
        self._own = folder / replica
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)  # texts are for this user only
            self._own.mkdir(mode=0o700, exist_ok=True)
            _remove_old(folder)
        except OSError as error:
            raise SettingsError(f"--data-dir: {folder} cannot be used: {error}") from None

    def note_alive(self) -> None:
        """Files are removed some time after the last call of this."""
        with self._explained():
            self._own.mkdir(mode=0o700, exist_ok=True)  # others remove it after a long sleep
            os.utime(self._own)

    def put(self, response: StoredResponse) -> None:
        super().put(response)
        if response.id not in self._responses:  # it did not fit
            return
        try:
            with self._explained():
                self._make(response.id, lambda new: new.write_bytes(_encode(response)))
                for item in response.output:
                    self._make(item.id, lambda new: new.symlink_to(response.id))
        except StoreFailed:
            self._forget(response.id)
            raise

    def _make(self, name: str, make: Callable[[Path], object]) -> None:
        """Make a file under another name first, so that nobody reads half of it."""
        new = self._own / _NEW
        new.unlink(missing_ok=True)
        make(new)
        new.replace(self._own / name)

    def _find(self, id: str) -> StoredResponse | None:
        found = super()._find(id)
        if found is None:
            found = self._read(id)
            return found if found is not None and found.id == id else None  # not of an item's link
        if (self._own / id).exists():
            return found
        self._forget(id)  # a client has had another replica delete it
        return None

    def _newest(self, owner: str, id: str) -> StoredItem | None:
        own = super()._newest(owner, id)
        if own is not None and self._find(own.response) is not None:
            return own
        found = self._read(id)
        return None if found is None or found.owner != owner else _item(found, id)

    def _follow(self, reference: StoredReference) -> StoredItem | None:
        found = self._find(reference.response)
        return None if found is None else _item(found, reference.id)

    def _read(self, name: str) -> StoredResponse | None:
        """Read another replica's response by its id, or by that of an item of its output."""
        with self._explained():
            for path in self._places(name):
                # It may be removed now, or be half of a file if the machine has crashed.
                with suppress(FileNotFoundError, msgspec.DecodeError):
                    return _decode(path.read_bytes())
        return None

    def _places(self, name: str) -> Iterator[Path]:
        """Find the files with a name in the folders of all replicas."""
        if _NAME.fullmatch(name):
            for folder in os.listdir(self._folder):
                path = f"{self._folder}/{folder}/{name}"
                if os.path.exists(path):  # much faster than to try and fail
                    yield Path(path)

    def _touch(self, ids: Iterable[str]) -> None:
        super()._touch(id for id in ids if id in self._responses)

    def _forget(self, id: str) -> None:
        own = self._responses.get(id)
        with self._explained():
            if own is None:
                # The links to it go with their folder. They lead nowhere.
                for path in self._places(id):
                    path.unlink(missing_ok=True)
                return
            super()._forget(id)
            for name in (id, *(item.id for item in own.output)):
                (self._own / name).unlink(missing_ok=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise StoreFailed for an OSError."""
        try:
            yield
        except OSError as error:
            raise StoreFailed(
                f"the stored responses below {self._folder} cannot be used: {error.strerror}; "
                "see that the disk has room and that the folder may be written"
            ) from error


def _item(response: StoredResponse, id: str) -> StoredItem | None:
    return next((item for item in response.own_items if item.id == id), None)


def _remove_old(folder: Path) -> None:
    """Remove the folders of replicas that are gone for long, or of which there are too many."""
    now = time.time()
    known: list[tuple[float, Path]] = []
    for each in folder.iterdir():
        with suppress(FileNotFoundError):  # another replica may be at it as well
            known.append((now - each.stat().st_mtime, each))
    gone = sorted((ago, each) for ago, each in known if ago > _ALIVE_SECONDS)
    for place, (ago, each) in enumerate(gone):
        if place >= _MOST_GONE or ago > _KEEP_SECONDS:
            shutil.rmtree(each, ignore_errors=True)
