"""Files of models and of what is put on them: JSON objects, and the headers of safetensors.

They come from anywhere, so each is bounded, and whatever is in one, it is read or `Unhealthy`.
Nothing here imports MLX, so the floors above may look before there is a model.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

Object: TypeAlias = dict[str, Any]

LONGEST_TEXT = 100_000_000
"""Bytes that are read of a file, or of a header: safetensors' own limit."""

_LFS_POINTER = b"version https://git-lfs"
_LARGEST = 10**9  # of a number in a config; a tokenizer without a limit says 10**30
_MOST_DIMENSIONS = 32

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""The size of a number by its type in safetensors."""


class Unhealthy(Exception):
    """A folder that cannot be served; the message is the reason, one line."""


def _find(path: Path) -> os.stat_result:
    try:
        found = path.stat()
    except FileNotFoundError:
        raise Unhealthy(f"{path.name!r} is not there") from None
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
        raise Unhealthy(f"{path.name!r} is not a file")
    return found


def check_content(path: Path) -> int:
    """The size in bytes of a file that holds something. Raises Unhealthy."""
    size = _find(path).st_size
    if size == 0:
        raise Unhealthy(f"{path.name!r} is empty")
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise Unhealthy(f"{path.name!r} is a Git-LFS pointer; run git lfs pull")
    return size


def read_object(
    path: Path, files: Iterable[str] | None = None, *, limit: int = LONGEST_TEXT
) -> Object:
    """What a JSON file of at most `limit` bytes holds. If `files` are given and it is not among
    them: an empty object.

    Raises:
        Unhealthy: it is not there, too large, or not an object with something in it.
    """
    if files is not None and path.name not in files:
        return {}
    if check_content(path) > limit:
        raise Unhealthy(f"{path.name!r} is too large")
    value = _decode(path.read_bytes(), path)
    if not isinstance(value, dict) or (files is None and not value):
        raise Unhealthy(f"{path.name!r} is not a JSON object with something in it")
    return value


def _decode(text: bytes, path: Path) -> Any:
    try:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            # Python's writer, and so transformers', writes NaN and Infinity, which are no JSON;
            # its reader, which mlx-lm uses, takes them.
            return json.loads(text.decode())
    except (ValueError, RecursionError):
        raise Unhealthy(f"{path.name!r} is not valid JSON") from None


def number(config: Object, *keys: str) -> int | None:
    """The first of these keys whose value is a number of something."""
    for key in keys:
        value = config.get(key)
        if type(value) is int and 0 < value < _LARGEST:
            return value
    return None


_Size = Annotated[int, Meta(ge=0)]


class Tensor(msgspec.Struct, frozen=True):
    """One entry of a safetensors header; its offsets are bytes from the header's end."""

    dtype: str
    shape: Annotated[list[_Size], Meta(max_length=_MOST_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]

    @property
    def bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]

    @property
    def numbers(self) -> int:
        """How many it holds; of a type that is not known, the bytes."""
        return self.bytes * 8 // _BITS.get(self.dtype, 8)

    @property
    def consistent(self) -> bool:
        bits = _BITS.get(self.dtype)
        return self.bytes >= 0 and (bits is None or math.prod(self.shape) * bits == self.bytes * 8)


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TENSOR = msgspec.json.Decoder(Tensor)


def read_header(path: Path, *, limit: int = LONGEST_TEXT) -> tuple[dict[str, Tensor], bool]:
    """A safetensors file's tensors by name, and whether it says that MLX has written it.

    A header of more than `limit` bytes is not read.

    Raises:
        Unhealthy: it cannot be read as one, or is cut short.
    """
    size = check_content(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(limit, size - 8):
            raise Unhealthy(f"{path.name!r} is cut short, or not safetensors")
        text = file.read(length)
    try:
        fields = _HEADER.decode(text)
        metadata = msgspec.json.decode(fields.pop("__metadata__", b"{}"))
        tensors = {name: _TENSOR.decode(field) for name, field in fields.items()}
    except (ValueError, RecursionError):
        raise Unhealthy(f"{path.name!r} has no header of safetensors") from None
    if not all(tensor.consistent for tensor in tensors.values()):
        raise Unhealthy(f"{path.name!r} has a tensor whose shape is not that of its bytes")
    whole = 8 + length + max((t.data_offsets[1] for t in tensors.values()), default=0)
    if size < whole:
        raise Unhealthy(f"{path.name!r} is cut short: {size} of {whole} bytes")
    return tensors, isinstance(metadata, dict) and metadata.get("format") == "mlx"
