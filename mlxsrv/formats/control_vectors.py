"""Files of control vectors: one direction for each layer that the vector changes.

repeng and llama.cpp write them as GGUF, others as safetensors. In both a tensor `direction.N` is
added to the output of layer N, counted from 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from mlxsrv.formats.arrays import StoredArray, list_arrays, read_array, reading_file
from mlxsrv.formats.files import UnusableFile, check_content
from mlxsrv.formats.gguf import is_gguf, list_gguf

Direction: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]

_LONGEST_HINT = 100  # characters
_NAME = re.compile(r"direction\.(0|[1-9][0-9]{0,3})")


class VectorFile(msgspec.Struct, frozen=True):
    """A control vector by its header.

    Attributes:
        layers: the layers that it changes, in order.
        width: the model's hidden size.
        model_hint: the kind of model it was made for, such as "qwen3", if the file says it.
    """

    path: Path
    layers: tuple[int, ...]
    width: int
    model_hint: str | None = None


def read_vector(path: Path) -> VectorFile:
    """Read the header of a GGUF or safetensors file.

    Raises:
        UnusableFile: it cannot be read, is cut short, or holds no control vector; the message has
            the file's name without its folder.
    """
    with reading_file(path):
        return _look_into(path)[0]


def read_directions(file: VectorFile) -> dict[int, Direction]:
    """Read the direction of each layer, `(width,)` each.

    Raises:
        UnusableFile: as `read_vector`; also if a number is not finite, or the file has changed.
    """
    with reading_file(file.path):
        found, directions = _look_into(file.path)
        if found != file:
            raise UnusableFile("it has changed since the server looked at it")
        return {
            layer: np.concatenate([piece.ravel() for piece in read_array(file.path, stored)])
            for layer, stored in directions.items()
        }


def _look_into(path: Path) -> tuple[VectorFile, Mapping[int, StoredArray]]:
    check_content(path)
    arrays, fields = list_gguf(path) if is_gguf(path) else (list_arrays(path), {})
    directions = _find_directions(arrays)
    width, *others = {math.prod(stored.shape) for stored in directions.values()}
    if others:
        raise UnusableFile("its directions are not all of the same width")
    hint = fields.get("controlvector.model_hint")
    said = isinstance(hint, str) and 0 < len(hint) <= _LONGEST_HINT and hint.isprintable()
    return VectorFile(path, tuple(directions), width, hint if said else None), directions


def _find_directions(arrays: Mapping[str, StoredArray]) -> dict[int, StoredArray]:
    """Return the directions by layer, in order. The file may hold other arrays too."""
    found: dict[int, StoredArray] = {}
    for name, stored in arrays.items():
        if not name.startswith("direction."):
            continue
        match = _NAME.fullmatch(name)
        if match is None:
            raise UnusableFile(f"{name[:40]!r} is the direction of no layer")
        if not stored.shape or not 0 < max(stored.shape) == math.prod(stored.shape):
            raise UnusableFile(f"{name} is not a vector")
        found[int(match[1])] = stored
    if not found:
        raise UnusableFile("it has no array of floating-point numbers that is called direction.N")
    return dict(sorted(found.items()))
