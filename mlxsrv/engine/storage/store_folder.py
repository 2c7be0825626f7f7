"""The folder of stored nodes: files by name, their bound, and which of them go.

    DIR/kv-<fingerprint>/<digest>-<tokens>.safetensors

Several processes may use one folder, and each may end at any moment:

- A file is written under another name and renamed, so it is there whole or not at all. Whoever
  writes holds a lock on the unfinished file, which ends with the process: an unfinished file
  without a lock is removed by the next scan. Nothing waits for a lock.
- A file that has vanished is a miss. Each process looks what files there are before it writes a
  prompt; so the bound holds for all of them together, but for the prompt that each is writing. (A
  folder's time of change does not tell: a change of one's own would hide another's. To look takes
  20 ms where there are 16,000 files, which is too long for each of a prompt's hundreds.)
- Files are not forced to the disk. What a loss of power leaves half written has a wrong checksum.

Folders of other names or other users, links, and files of other names are never touched.

Used on the storage thread only, but for `StoredFiles.files`, which the device thread reads: it is
changed an entry at a time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
from collections.abc import Generator, Iterable
from contextlib import suppress
from io import BufferedReader
from itertools import count
from operator import itemgetter
from pathlib import Path

from mlxsrv.engine.storage.node_file import SUFFIX, NodeName
from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.engine")

_FOLDER = re.compile(r"kv-[0-9a-f]{32}")
_FILE = re.compile(rf"[0-9a-f]{{32}}-([0-9]{{1,9}}){re.escape(SUFFIX)}")
_UNFINISHED = f"{SUFFIX}-unfinished"
_OLD = "kv-*/*.mlxkv"  # files of older versions
_SPARE = 50  # of the bound, one part goes beside what has to, so that not every write removes files


class StoredFiles:
    """The files of one fingerprint.

    Attributes:
        path: their folder.
        files: the sizes of files, by their names.
        bytes: of all files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, int] = {}
        self.bytes = 0

    def put(self, name: str, size: int) -> None:
        """Note that a file is there."""
        self.take(name)
        self.files[name] = size
        self.bytes += size

    def take(self, name: str) -> None:
        """Note that a file is gone."""
        self.bytes -= self.files.pop(name, 0)

    def holds(self, name: NodeName) -> bool:
        return name.file in self.files

    def list_ends(self, most: int) -> list[int]:
        """The places of texts, `most` at the highest, at which nodes end."""
        ends = {int(found[1]) for name in [*self.files] if (found := _FILE.fullmatch(name))}
        return sorted(end for end in ends if end <= most)


class StoreFolder:
    """All files below one directory.

    Args:
        path: the directory. It is made when it is opened.
        most_bytes: that all files may take, those of other fingerprints included.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path = path
        self.most_bytes = most_bytes
        self._stored: dict[str, StoredFiles] = {}
        self._numbers = count(1)

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are known."""
        return sum(held.bytes for held in self._stored.values())

    def open(self, fingerprint: str) -> StoredFiles:
        """The files of a fingerprint. What is there beyond the bound goes.

        Raises:
            OSError: the folder cannot be made or read, or belongs to somebody else.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._stored and (old := len([*self.path.glob(_OLD)])):
            what = "prompts that an older version has stored are not used; delete *.mlxkv"
            log(_log, logging.WARNING, what, folder=str(self.path), files=old)
        held = self._find_files(f"kv-{fingerprint}")
        self._make(held)
        self.refresh()
        self._make_room(0)
        return held

    def _find_files(self, name: str) -> StoredFiles:
        if name not in self._stored:
            self._stored[name] = StoredFiles(self.path / name)
        return self._stored[name]

    def _make(self, held: StoredFiles) -> None:
        """Make the folder of a fingerprint, for this user alone: a KV cache reveals the text. The
        directory is made as well if somebody has removed it, but none above it: that may be a disk.
        """
        self.path.mkdir(mode=0o700, exist_ok=True)
        held.path.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(held.path)
        if not _is_own(found):
            raise OSError(f"{held.path} belongs to somebody else")
        if stat.S_IMODE(found.st_mode) != 0o700:
            os.chmod(held.path, 0o700)

    def refresh(self) -> None:
        """Look what files there are now: others write and remove them, too.

        Raises OSError if the directory cannot be read.
        """
        names: set[str] = set()
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                # What a link points to may be of somebody else.
                with suppress(OSError):
                    if _FOLDER.fullmatch(entry.name) and _is_own(entry.stat(follow_symlinks=False)):
                        names.add(entry.name)
        for name in names | self._stored.keys():
            held = self._find_files(name)
            there = _list(held.path) if name in names else {}
            for gone in held.files.keys() - there.keys():
                held.take(gone)
            for new in there.keys() - held.files.keys():
                with suppress(FileNotFoundError):
                    held.put(new, there[new].stat(follow_symlinks=False).st_size)

    # One file.

    def open_file(self, held: StoredFiles, name: NodeName) -> BufferedReader | None:
        """Open a file; None if it is gone.

        Raises OSError.
        """
        path = held.path / name.file
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            held.take(name.file)
            return None
        return os.fdopen(descriptor, "rb")

    def touch(self, held: StoredFiles, name: NodeName, at: int) -> None:
        """Note for all processes when a file was of use, in nanoseconds: as its time of change."""
        with suppress(OSError):
            os.utime(held.path / name.file, ns=(at, at))

    def remove(self, held: StoredFiles, name: str) -> None:
        """Remove a file. One that cannot be removed is not ours to use, nor to count."""
        held.take(name)
        with suppress(OSError):
            os.unlink(held.path / name)

    def write(
        self,
        held: StoredFiles,
        name: NodeName,
        room: int,
        pieces: Iterable[bytes | memoryview],
    ) -> Generator[None, None, bool]:
        """Write a file, yielding between pieces.

        Args:
            held: the files of the fingerprint.
            name: its name.
            room: bytes that it takes, at most.
            pieces: its bytes.

        Returns:
            Whether it was written: not if it could never fit.

        Raises:
            FileNotFoundError: another process has removed the folder or the unfinished file.
            FileExistsError: another process is writing it under the same name.
            OSError: it could not be written. Nothing of it is left.
        """
        if room > self.most_bytes:
            return False
        self._make_room(room)
        self._make(held)
        path = held.path / f"{os.getpid()}-{next(self._numbers)}-{name.digest.hex()}{_UNFINISHED}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor, size = os.open(path, flags, 0o600), 0
        try:
            # A scan of another process that came in between has removed the file. Then the rename
            # fails, and the prompt is not stored this time.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for piece in pieces:
                size += _write(descriptor, piece)
                yield
            os.rename(path, held.path / name.file)
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        held.put(name.file, size)
        return True

    # The bound.

    def _make_room(self, size: int) -> None:
        """Remove what was not used for longest until there is room for so many bytes more."""
        wanted = self.most_bytes - size
        if self.nbytes <= wanted:
            return
        wanted -= self.most_bytes // _SPARE
        found: list[tuple[int, str, StoredFiles]] = []
        for held in self._stored.values():
            for name in [*held.files]:
                try:
                    found.append((os.lstat(held.path / name).st_mtime_ns, name, held))
                except OSError:
                    held.take(name)
        for _, name, held in sorted(found, key=itemgetter(0)):
            if self.nbytes <= wanted:
                return
            self.remove(held, name)
            if not held.files:
                with suppress(OSError):
                    os.rmdir(held.path)


def _write(descriptor: int, piece: bytes | memoryview) -> int:
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    return len(piece)


def _is_own(status: os.stat_result) -> bool:
    """Whether it is a folder of this user."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _list(path: Path) -> dict[str, os.DirEntry[str]]:
    """The whole files of a folder, by name. What an ended process left unfinished is removed."""
    there: dict[str, os.DirEntry[str]] = {}
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(_UNFINISHED):
                _remove_abandoned(path / entry.name)
            elif _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                there[entry.name] = entry
    return there


def _remove_abandoned(path: Path) -> None:
    """Remove an unfinished file whose writer is gone: nobody holds its lock."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(descriptor)
