"""JSON files: objects that are read from them, and the values that several readers ask for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from mlxsrv.formats.files import LONGEST_TEXT, UnusableFile, check_content

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
