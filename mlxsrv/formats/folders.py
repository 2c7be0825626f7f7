"""The files of a folder: what the file system refuses, when they change, where a text begins.

What is in them is read as all files are that come from anywhere: `mlxsrv.formats.headers`.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxsrv.formats.headers import Unhealthy


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Around all work on the files of a folder: what the file system refuses is a reason too."""
    try:
        if not folder.is_dir():
            raise Unhealthy("there is no such folder")
        yield
    except OSError as error:
        name = os.path.basename(str(error.filename or folder))
        raise Unhealthy(f"{name!r} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a path that no file can have
        raise Unhealthy(f"a name of a file is no path: {error}") from None


def read_start(path: Path, files: Iterable[str], limit: int) -> str:
    """The first `limit` bytes of a text; empty if it is not among `files`."""
    if path.name not in files or not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(limit).decode(errors="replace")


def signature(folder: Path) -> Hashable:
    """Changes when a file in the folder does, through links too."""
    try:
        with os.scandir(folder) as files:
            return tuple(sorted((file.name, *_stamp(file)) for file in files))
    except OSError:
        return ()


def _stamp(file: os.DirEntry[str]) -> tuple[int, int]:
    try:
        stat = file.stat()
    except OSError:  # a link to nothing
        return 0, 0
    return stat.st_size, stat.st_mtime_ns
