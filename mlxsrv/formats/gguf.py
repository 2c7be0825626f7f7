"""Arrays and fields in the header of a GGUF file.

A header is little-endian: counts, fields with their values, then the arrays' names and places. No
file is trusted.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec

from mlxsrv.formats.arrays import StoredArray
from mlxsrv.formats.files import UnusableFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # they have one layout
_LONGEST_HEADER = (
    16 * 1024 * 1024
)  # bytes; the header of a whole model with its vocabulary has ten MB
_TEXT, _ARRAY = 8, 9
_LAYOUTS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"}
_LAYOUTS |= {10: "<Q", 11: "<q", 12: "<d"}
"""The layout of a field's number, by its type."""
_DTYPES = {0: "F32", 1: "F16", 28: "F64", 30: "BF16"}
_ALIGNMENTS = {1 << bits for bits in range(17)}
_MOST_DIMENSIONS = 4


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF does. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def list_gguf(path: Path) -> tuple[dict[str, StoredArray], dict[str, Any]]:
    """Return the arrays of floating-point numbers by name, and the fields by name.

    Fields that are lists are None.

    Raises:
        UnusableFile: the header is damaged or too long, or arrays are missing.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        cursor = _Cursor(file.read(_LONGEST_HEADER))
    cursor.skip(len(_MAGIC))
    if cursor.number("<I") not in _VERSIONS:
        raise UnusableFile("it is not GGUF of version 2 or 3 in little-endian order")
    array_count, field_count = cursor.count(), cursor.count()
    fields = {cursor.string(): cursor.value() for _ in range(field_count)}
    found: dict[str, StoredArray] = {}
    for _ in range(array_count):
        name, stored = _read_array(cursor)
        if name in found:
            raise UnusableFile(f"it has {name[:40]!r} twice")
        if stored is not None:
            found[name] = stored
    alignment = fields.get("general.alignment", 32)
    if alignment not in _ALIGNMENTS:
        raise UnusableFile("its alignment is not a power of two")
    data = -(-cursor.position // int(alignment)) * int(alignment)
    arrays = {
        name: msgspec.structs.replace(stored, start=data + stored.start)
        for name, stored in found.items()
    }
    _check_places(arrays, path.stat().st_size)
    return arrays, fields


def _read_array(cursor: _Cursor) -> tuple[str, StoredArray | None]:
    """Read the next array; its start counts from the beginning of the numbers."""
    name = cursor.string()
    dimensions = cursor.number("<I")
    if dimensions > _MOST_DIMENSIONS:
        raise UnusableFile("it has an array of more dimensions than there are in GGUF")
    shape = tuple(cursor.count() for _ in range(dimensions))
    dtype, start = _DTYPES.get(cursor.number("<I")), cursor.count()
    # The first of GGUF's dimensions is the one that changes fastest.
    return name, None if dtype is None else StoredArray(shape[::-1], dtype, start)


def _check_places(arrays: dict[str, StoredArray], size: int) -> None:
    """Raise UnusableFile for arrays that overlap, or lie beyond the file's end.

    Otherwise a small file could ask for any amount of memory.
    """
    if any(stored.start + stored.bytes > size for stored in arrays.values()):
        raise UnusableFile("it is cut short")
    if sum(stored.bytes for stored in arrays.values()) > size:
        raise UnusableFile("it has arrays that overlap")


class _Cursor:
    """Reads a header from its beginning on. Every method raises UnusableFile at its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def skip(self, count: int) -> int:
        """Move on, and return the position before."""
        start = self.position
        if count > len(self._data) - start:
            raise UnusableFile("its header is cut short, or too long")
        self.position += count
        return start

    def number(self, layout: str) -> Any:
        return struct.unpack_from(layout, self._data, self.skip(struct.calcsize(layout)))[0]

    def count(self) -> int:
        found: int = self.number("<Q")
        return found

    def string(self) -> str:
        length = self.count()
        start = self.skip(length)
        return self._data[start : start + length].decode(errors="replace")

    def value(self) -> Any:
        """Read a field's number or text; an array is skipped and gives None."""
        kind = self.number("<I")
        if kind != _ARRAY:
            return self._item(kind)
        kind, count = self.number("<I"), self.count()
        if kind in _LAYOUTS:
            self.skip(count * struct.calcsize(_LAYOUTS[kind]))
        else:
            for _ in range(count):
                self._item(kind)
        return None

    def _item(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.string()
        if kind not in _LAYOUTS:
            raise UnusableFile("its header has a value of an unknown type")
        return self.number(_LAYOUTS[kind])
