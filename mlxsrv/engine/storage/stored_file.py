"""The format of a stored file: a header, tokens, arrays, and a checksum over all.

    magic (8 bytes), length of the header (4 bytes), header (JSON), tokens (4 bytes each), arrays,
    CRC-32 of all before it (4 bytes); numbers are little-endian

The checksum finds what a crash, a full disk or a bad one has done to a file. Who may write to the
folder is not checked by it, but by the folder's permissions.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from mlxsrv.engine.storage.stored_names import Text

MAGIC = b"mlxsrvKV"
VERSION = 1
"""The version of this format, and of how KV caches are laid out in it."""

_MOST_HEADER = 4 * 1024 * 1024
_FIXED = len(MAGIC) + 4
_CHECKSUM = 4
_PIECE = 128 * 1024  # elements

_Size = Annotated[int, Meta(ge=0)]

CARRIERS = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "|u1",
    "int32": "<i4",
    "int64": "<i8",
    "bool": "|b1",
}
"""The types of arrays, and what NumPy, which has not all of them, holds them as."""


class NotANumber(ValueError):
    """The model has computed NaN: nobody knows it before a token is drawn from it, and no other
    process is to go on from there."""


class DamagedFile(ValueError):
    """The file cannot be used: it is half written, was changed, or is not one of this server's."""


class Columns(msgspec.Struct, frozen=True):
    """The tokens of a text that an array has columns for: from `begin` on, up to `end`, if any."""

    begin: _Size = 0
    end: _Size | None = None

    def count(self, tokens: int) -> int:
        """The columns for a text of so many tokens."""
        return max((tokens if self.end is None else min(tokens, self.end)) - self.begin, 0)

    def between(self, begin: int, end: int) -> slice:
        """The columns for these tokens of a text."""
        return slice(self.count(begin), self.count(end))


class ArrayKind(msgspec.Struct, frozen=True):
    """The type and the shape of one array, and the tokens that it has columns for, where a KV cache
    is stored in chunks."""

    type: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=16)]
    columns: Columns = Columns()

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(CARRIERS[self.type]).itemsize


class StoredHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a file.

    Attributes:
        version: of the format.
        fingerprint: of what has computed the KV cache.
        begin, end: the tokens of a text that it is of.
        parent: the digest of the tokens before `begin`; empty where there are none.
        arrays: in their order.
        layers: how the arrays make layers, where the KV cache is stored whole.
    """

    version: int
    fingerprint: str
    begin: _Size
    end: _Size
    parent: str = ""
    arrays: tuple[ArrayKind, ...]
    layers: Any = None


_HEADERS = msgspec.json.Decoder(StoredHeader)


class Stored(msgspec.Struct, frozen=True):
    """The contents of a file."""

    header: StoredHeader
    tokens: Text
    arrays: Sequence[np.ndarray[Any, Any]]


def encode(
    header: StoredHeader, tokens: Text, arrays: Sequence[np.ndarray[Any, Any]]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file, piece by piece.

    Args:
        header: describes the arrays.
        tokens: those of the file: from `begin` to `end`, or all of the text.
        arrays: of any strides. Each is copied when its turn comes.

    Raises:
        NotANumber: an array has one.
    """
    text = msgspec.json.encode(header)
    text += b" " * (-(_FIXED + len(text)) % 64)
    head = MAGIC + len(text).to_bytes(4, "little") + text
    head += np.ascontiguousarray(tokens, dtype="<u4").tobytes()
    checksum = zlib.crc32(head)
    yield head
    for array, kind in zip(arrays, header.arrays, strict=True):
        flat = np.ascontiguousarray(array).reshape(-1)
        for place in range(0, flat.size, _PIECE):
            part = flat[place : place + _PIECE]
            if _has_nan(part, kind.type):
                raise NotANumber
            piece = part.data.cast("B")
            checksum = zlib.crc32(piece, checksum)
            yield piece
    yield checksum.to_bytes(_CHECKSUM, "little")


def _has_nan(array: np.ndarray[Any, Any], kind: str) -> bool:
    if kind == "bfloat16":
        return bool(((array & 0x7FFF) > 0x7F80).any())
    return kind.startswith("float") and bool(np.isnan(array).any())


def peek(head: bytearray) -> Text:
    """The tokens of a file, of its first bytes; none if these are damaged, or too few."""
    length = int.from_bytes(head[len(MAGIC) : _FIXED], "little")
    try:
        header = _HEADERS.decode(memoryview(head)[_FIXED : _FIXED + length])
        count, place = header.end - header.begin, _FIXED + length
        return np.frombuffer(head, "<u4", max(count, 0), place).astype(np.uint32)
    except (msgspec.MsgspecError, ValueError):
        return np.zeros(0, np.uint32)


def decode(data: bytearray) -> Stored:
    """Read the bytes of a file. The arrays are views of them.

    Raises DamagedFile.
    """
    view = memoryview(data)
    if len(data) < _FIXED + _CHECKSUM or view[: len(MAGIC)] != MAGIC:
        raise DamagedFile("it is none of ours")
    if zlib.crc32(view[:-_CHECKSUM]) != int.from_bytes(view[-_CHECKSUM:], "little"):
        raise DamagedFile("its checksum is wrong")
    length = int.from_bytes(view[len(MAGIC) : _FIXED], "little")
    if length > min(_MOST_HEADER, len(data) - _FIXED - _CHECKSUM):
        raise DamagedFile("its header is longer than the file")
    try:
        header = _HEADERS.decode(view[_FIXED : _FIXED + length])
        sizes = [array.bytes for array in header.arrays]
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError):
        raise DamagedFile("its header cannot be read") from None
    if header.version != VERSION:
        raise DamagedFile("it is of another version")
    place = _FIXED + length
    count = header.end - header.begin
    if count <= 0 or len(data) != place + 4 * count + sum(sizes) + _CHECKSUM:
        raise DamagedFile("its size is not that of its arrays")
    tokens = np.frombuffer(data, "<u4", count, place).astype(np.uint32)
    place += 4 * count
    arrays = []
    for array, size in zip(header.arrays, sizes, strict=True):
        kind = np.dtype(CARRIERS[array.type])
        flat = np.frombuffer(data, kind, size // kind.itemsize, place)
        arrays.append(flat.reshape(array.shape))
        place += size
    return Stored(header, tokens, arrays)
