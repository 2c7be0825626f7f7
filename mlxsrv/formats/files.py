"""Untrusted files and folders: why one cannot be used, when it changes, how a text file begins.

Files come from anywhere, so each is bounded in size. Whatever a file holds, it is read or refused
with `UnusableFile`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST_TEXT = 100_000_000
"""Bytes that are read of a text file or a header. This is safetensors' own limit."""

_LFS_POINTER = b"version https://git-lfs"


class UnusableFile(ValueError):
    """A file or folder cannot be used; the message is the reason, one line."""


def check_content(path: Path) -> int:
    """Return the size in bytes of a file that is not empty.

    Raises:
        UnusableFile: there is no such file, or it is empty or a Git-LFS pointer.
    """
    size = _find(path).st_size
    if size == 0:
        raise UnusableFile(f"{path.name!r} is empty")
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise UnusableFile(f"{path.name!r} is a Git-LFS pointer; run git lfs pull")
    return size


def _find(path: Path) -> os.stat_result:
    try:
        found = path.stat()
    except FileNotFoundError:
        raise UnusableFile(f"{path.name!r} is not there") from None
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
        raise UnusableFile(f"{path.name!r} is not a file")
    return found


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into UnusableFile, around all work on a folder."""
    try:
        if not folder.is_dir():
            raise UnusableFile("there is no such folder")
        yield
    except UnusableFile:
        raise
    except OSError as error:
        name = os.path.basename(str(error.filename or folder))
        raise UnusableFile(f"{name!r} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a path that no file can have
        raise UnusableFile(f"a file name in it is not valid: {error}") from None


def read_start(path: Path, files: Iterable[str], limit: int) -> str:
    """Return the first `limit` bytes of a text file, or nothing if it is not among `files`."""
    if path.name not in files or not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(limit).decode(errors="replace")


def signature(folder: Path) -> Hashable:
    """Return a value that changes when a file in the folder does, through links too."""
    try:
        with os.scandir(folder) as files:
            return tuple(sorted((file.name, *_stamp(file)) for file in files))
    except OSError:
        return ()


def _stamp(file: os.DirEntry[str]) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:  # a link to nothing
        return 0, 0
    return found.st_size, found.st_mtime_ns
