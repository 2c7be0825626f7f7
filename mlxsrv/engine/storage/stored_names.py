"""Names of stored files: digests of the tokens that their KV caches have seen.

A KV cache that can be cut anywhere is stored in chunks of `CHUNK` tokens, so that texts which begin
alike share files; its last tokens, fewer than a chunk, are a file of their own. Any other is of use
only as a whole, and is one file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import msgspec
import numpy as np

Text = np.ndarray[tuple[int], np.dtype[np.uint32]]
"""Token ids."""

CHUNK = 256
"""Tokens of a chunk."""

LEAST_TAIL = 16
"""Fewer tokens behind the last chunk are not worth a file."""

SUFFIX = ".mlxkv"

_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32}|0)-([0-9]{1,9})-([0-9]{1,9})\.mlxkv")


class StoredName(msgspec.Struct, frozen=True):
    """One file: `digest` is that of all tokens of a text up to `end`, of which it holds the KV
    cache from `begin` on; `parent` is that of the tokens before, empty if there are none."""

    digest: bytes
    parent: bytes
    begin: int
    end: int

    @property
    def file(self) -> str:
        """The name in the file system."""
        parent = self.parent.hex() or "0"
        return f"{self.digest.hex()}-{parent}-{self.begin}-{self.end}{SUFFIX}"


def parse_name(file: str) -> StoredName | None:
    """The name of a file in the file system; None if it is none of ours."""
    found = _NAME.fullmatch(file)
    if found is None:
        return None
    parent = b"" if found[2] == "0" else bytes.fromhex(found[2])
    return StoredName(bytes.fromhex(found[1]), parent, int(found[3]), int(found[4]))


def digests(text: Text, ends: Iterable[int]) -> list[bytes]:
    """The digests of a text up to each of these places, which ascend."""
    hasher = hashlib.blake2b(digest_size=16)
    begin, found = 0, []
    for end in ends:
        hasher.update(np.ascontiguousarray(text[begin:end], dtype="<u4").data)
        found.append(hasher.copy().digest())
        begin = end
    return found


def split(text: Text) -> list[StoredName]:
    """The files of a text whose KV cache can be cut: its chunks in order, and its tail."""
    ends = [*range(CHUNK, text.size + 1, CHUNK)]
    last = ends[-1] if ends else 0
    if text.size - last >= LEAST_TAIL:
        ends.append(text.size)
    made = digests(text, ends)
    parts = zip(made, [b"", *made], [0, *ends], ends, strict=False)
    return [StoredName(*part) for part in parts]


def whole(text: Text) -> StoredName:
    """The file of a text whose KV cache cannot be cut."""
    return StoredName(digests(text, [text.size])[0], b"", 0, text.size)
