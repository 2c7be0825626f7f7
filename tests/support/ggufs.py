"""GGUF files, byte by byte, so that tests can also write what no library would.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
Tensors: TypeAlias = Sequence[tuple[str, Array]]

_TYPES = {"float32": 0, "float16": 1, "uint16": 30, "int32": 26}
REPENG = {
    "general.architecture": "controlvector",
    "controlvector.model_hint": "qwen3",
    "controlvector.layer_count": 2,
}
"""The values that repeng writes into each file."""


def write_gguf(
    path: Path,
    tensors: Tensors,
    fields: Mapping[str, object] = REPENG,
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write arrays; those of uint16 are the bytes of bfloat16. Fields are texts, integers, floats,
    booleans and lists of one of these."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    for key, value in fields.items():
        header += text(key) + _field(value)
    data = b""
    for name, array in tensors:
        header += text(name) + struct.pack("<I", array.ndim)
        header += struct.pack(f"<{array.ndim}Q", *array.shape[::-1])  # the fastest comes first
        header += struct.pack("<IQ", _TYPES[array.dtype.name], len(data))
        data += _pad(array.tobytes(), alignment)
    path.write_bytes(_pad(header, alignment) + data)
    return path


def text(value: str) -> bytes:
    """A text as it is in GGUF."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _field(value: object) -> bytes:
    if isinstance(value, list):
        packed = [_field(item) for item in value]
        return (
            struct.pack("<I", 9)
            + packed[0][:4]
            + struct.pack("<Q", len(packed))
            + b"".join(item[4:] for item in packed)
        )
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)


def _pad(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)
