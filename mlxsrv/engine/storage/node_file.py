"""A node on disk: a stretch of a text and its KV cache, in one safetensors file named by a digest.

A KV cache that can be cut anywhere is stored in nodes of `NODE` tokens, so that texts which begin
alike share files; what is left behind the last whole node is not stored. Any other KV cache is of
use only as a whole, and is one node. The digest is that of all tokens up to the node's end: so the
nodes of a text are found one behind the other, and no file lists them.

A file has the `tokens` of its node, the arrays, and last a `checksum`: the CRC-32 of all before it.
It finds what a crash, a full disk or a bad one has done to a file. Who may write to the folder is
not checked by it, but by the folder's permissions.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mlxsrv.formats.safetensors import Tensor

VERSION = 2
"""The version of these files, and of how KV caches are laid out in them."""

NODE = 64
"""Tokens of a node of a KV cache that can be cut."""

SUFFIX = ".safetensors"

_FORMAT = "mlxsrv-prompt"
_MOST_HEADER = 4 * 1024 * 1024
_CHECKSUM = "checksum"
_CHECKSUM_BYTES = 4
_PIECE = 128 * 1024  # elements

Text = np.ndarray[tuple[int], np.dtype[np.uint32]]
"""Token ids."""

HostArray = np.ndarray[Any, Any]

BFLOAT16 = np.dtype("V2")
"""NumPy has no bfloat16, but may carry its bytes."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("|u1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "BOOL": np.dtype("|b1"),
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""The types of arrays that can be stored, and what safetensors calls them."""


class NotANumber(ValueError):
    """The model has computed NaN: nobody knows it before a token is drawn from it, and no other
    process is to go on from there."""


class DamagedFile(ValueError):
    """The file cannot be used: it is half written, was changed, or is not one of this server's."""


class NodeName(NamedTuple):
    """The node of the tokens from `begin` to `end` of a text."""

    digest: bytes
    begin: int
    end: int

    @property
    def file(self) -> str:
        """The name in the file system."""
        return f"{self.digest.hex()}-{self.end}{SUFFIX}"


class StoredNode(msgspec.Struct, frozen=True):
    """The contents of a file.

    Attributes:
        fingerprint: of what has computed the KV cache.
        tokens: of the node.
        arrays: of the layers, by name.
        states: what else the layers note, as JSON has it.
    """

    fingerprint: str
    tokens: Text
    arrays: dict[str, HostArray]
    states: Any


def name_nodes(text: Text, ends: Iterable[int], *, cuts: bool) -> Iterator[NodeName]:
    """Name the nodes of a text that end at these places, which ascend.

    Args:
        cuts: each begins where the one before it ends; else each is a whole one.
    """
    hasher = hashlib.blake2b(digest_size=16)
    begin = 0
    for end in ends:
        hasher.update(np.ascontiguousarray(text[begin:end], dtype="<u4").data)
        yield NodeName(hasher.copy().digest(), begin if cuts else 0, end)
        begin = end


def split(text: Text, *, cuts: bool) -> Iterator[NodeName]:
    """The nodes that a text and its KV cache are stored in."""
    ends = range(NODE, text.size + 1, NODE) if cuts else (text.size,)
    return name_nodes(text, ends, cuts=cuts)


def encode(node: StoredNode) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file, piece by piece. Arrays may have any strides: each is copied when
    its turn comes.

    Raises:
        NotANumber: an array has one.
    """
    arrays = {"tokens": node.tokens, **node.arrays}
    states = msgspec.json.encode(node.states).decode()
    metadata = {"format": _FORMAT, "fingerprint": node.fingerprint, "states": states}
    fields: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    for name, array in arrays.items():
        end = place + array.nbytes
        fields[name] = Tensor(DTYPE_NAMES[array.dtype], [*array.shape], (place, end))
        place = end
    fields[_CHECKSUM] = Tensor("U8", [_CHECKSUM_BYTES], (place, place + _CHECKSUM_BYTES))
    text = msgspec.json.encode(fields)
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    checksum = zlib.crc32(head)
    yield head
    for array in arrays.values():
        flat = np.ascontiguousarray(array).reshape(-1)
        for begin in range(0, flat.size, _PIECE):
            part = flat[begin : begin + _PIECE]
            if _has_nan(part):
                raise NotANumber
            piece = part.view(np.uint8).data
            checksum = zlib.crc32(piece, checksum)
            yield piece
    yield checksum.to_bytes(_CHECKSUM_BYTES, "little")


def _has_nan(array: HostArray) -> bool:
    if array.dtype == BFLOAT16:
        return bool(((array.view(np.uint16) & 0x7FFF) > 0x7F80).any())
    return array.dtype.kind == "f" and bool(np.isnan(array).any())


def decode(file: BufferedReader) -> StoredNode:
    """Read a file. Each array has memory of its own.

    Raises:
        DamagedFile: it cannot be used.
        OSError: it cannot be read.
    """
    left = os.fstat(file.fileno()).st_size - 8
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if length > min(_MOST_HEADER, left):
        raise DamagedFile("its header is longer than the file")
    text = file.read(length)
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(fields.pop("__metadata__"), type=dict[str, str])
        tensors = {name: msgspec.json.decode(raw, type=Tensor) for name, raw in fields.items()}
        states = msgspec.json.decode(metadata["states"])
        fingerprint = metadata["fingerprint"]
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError):
        raise DamagedFile("its header cannot be read") from None
    sizes = [tensor.bytes for tensor in tensors.values()]
    sound = all(each.consistent and each.dtype in _DTYPES for each in tensors.values())
    if not sound or [*tensors][-1:] != [_CHECKSUM] or sum(sizes) != left - length:
        raise DamagedFile("its size is not that of its arrays")
    checksum = zlib.crc32(text, zlib.crc32(start))
    arrays: dict[str, HostArray] = {}
    for name, tensor in tensors.items():
        data: HostArray = np.empty(tensor.bytes, np.uint8)
        if file.readinto(data.data) < tensor.bytes:
            raise DamagedFile("it has become shorter")
        if name == _CHECKSUM and checksum != int.from_bytes(data.tobytes(), "little"):
            raise DamagedFile("its checksum is wrong")
        checksum = zlib.crc32(data.data, checksum)
        arrays[name] = data.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
    del arrays[_CHECKSUM]
    tokens = arrays.pop("tokens", np.zeros(0, np.uint32))
    return StoredNode(fingerprint, tokens, arrays, states)
