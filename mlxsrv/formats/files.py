"""Untrusted files and folders: why one cannot be used, when it changes, and the JSON in one.

Files come from anywhere, so each is bounded in size. Whatever a file holds, it is read or refused
with `UnusableFile`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

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


JSONObject: TypeAlias = dict[str, Any]

_LARGEST = 10**9  # of a number in a config; a tokenizer without a limit says 10**30


def read_object(path: Path, *, limit: int = LONGEST_TEXT) -> JSONObject:
    """Return the object in a JSON file of at most `limit` bytes.

    Raises:
        UnusableFile: the file is not there or too large, or holds no object, or an empty one.
    """
    value = read_json(path, limit=limit)
    if not isinstance(value, dict) or not value:
        raise UnusableFile(f"{path.name!r} is not a JSON object with something in it")
    return value


def read_optional_object(path: Path, *, limit: int = LONGEST_TEXT) -> JSONObject:
    """Return the object in a JSON file, or an empty one if the file is not there.

    Raises:
        UnusableFile: the file is too large, or holds no object.
    """
    if not os.path.lexists(path):
        return {}
    value = read_json(path, limit=limit)
    if not isinstance(value, dict):
        raise UnusableFile(f"{path.name!r} is not a JSON object")
    return value


def read_json(path: Path, *, limit: int = LONGEST_TEXT) -> Any:
    """Return the value in a JSON file of at most `limit` bytes.

    Raises:
        UnusableFile: the file is not there, too large, not valid JSON, or cannot be read.
    """
    try:
        if check_content(path) > limit:
            raise UnusableFile(f"{path.name!r} is too large")
        text = path.read_bytes()
    except OSError as error:
        raise UnusableFile(f"{path.name!r} cannot be read: {error.strerror or error}") from None
    try:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            # Python's writer, and so transformers', writes NaN and Infinity, which are not JSON;
            # its reader, which mlx-lm uses, takes them.
            return json.loads(text.decode())
    except (ValueError, RecursionError):
        raise UnusableFile(f"{path.name!r} is not valid JSON") from None


def positive_int(config: JSONObject, *keys: str) -> int | None:
    """Return the value of the first key whose value is a positive integer of usual size."""
    for key in keys:
        value = config.get(key)
        if type(value) is int and 0 < value < _LARGEST:
            return value
    return None


def text_config(config: JSONObject) -> JSONObject:
    """Return the config of the text model where that is part of another, else an empty one."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def merged_config(config: JSONObject) -> JSONObject:
    """Return the config with the text model's own values in the place of the outer ones."""
    return {**config, **text_config(config)}


def architecture_names(config: Mapping[str, Any]) -> list[str]:
    """Return the names of classes that a model's config has under `architectures`."""
    listed = config.get("architectures")
    listed = listed if isinstance(listed, list) else [listed]
    return [name for name in listed if isinstance(name, str)]
