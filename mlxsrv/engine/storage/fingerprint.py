"""The fingerprint of what computes a KV cache: two that differ share no stored prompt.

It is made of the contents of the model's files, its adapter's, the kind of the KV cache, and the
version of mlx-lm. A full digest of a hundred gigabytes of weights would take minutes. So of a large
file the size, the time of its last change, its first megabyte (the header, with the names and
shapes of all tensors) and many blocks throughout it are taken. The time of change is among them
because a change of a few numbers may lie between the blocks: a copy of a model whose times were not
preserved begins anew, which costs time, while a wrong hit would cost right answers. No path is
among them, so a folder may be moved.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mlxsrv.engine.storage.node_file import VERSION

_WHOLE = 1024 * 1024
"""Bytes of the beginning that are taken, and so the size of files that are taken whole."""
_BLOCKS = 64
_BLOCK = 4096

_PATTERNS = ("model*.safetensors", "*config.json", "*.py")
_ADAPTER_PATTERNS = ("*.safetensors", "*.json")


def make_fingerprint(folder: str, adapter: str | None, kind: str, *, code: bool) -> str:
    """Make the fingerprint, in hexadecimal digits.

    Args:
        folder: the model's.
        adapter: that of the adapter on it.
        kind: what its KV cache is made of.
        code: code in the folder may run.

    Raises:
        OSError: a file cannot be read.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for part in (str(VERSION), _mlx_lm_version(), kind):
        _add(hasher, part.encode())
    patterns = _PATTERNS if code else _PATTERNS[:2]
    for name, chosen in ((folder, patterns), (adapter, _ADAPTER_PATTERNS)):
        _add(hasher, b"folder" if name is not None else b"none")
        for path in _find(name, chosen):
            _add(hasher, path.name.encode("utf-8", "surrogateescape"))
            for piece in _sample(path):
                _add(hasher, piece)
    return hasher.hexdigest()


def _add(hasher: hashlib.blake2b, piece: bytes) -> None:
    """Lengths come first, so that no two lists of pieces have the same bytes."""
    hasher.update(len(piece).to_bytes(8, "little"))
    hasher.update(piece)


def _find(folder: str | None, patterns: Iterable[str]) -> list[Path]:
    if folder is None:
        return []
    root = Path(folder)
    found = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    return sorted(found)


def _sample(path: Path) -> Iterator[bytes]:
    """The bytes of a file that count: all of a small one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        yield status.st_size.to_bytes(8, "little")
        yield os.pread(descriptor, _WHOLE, 0)
        rest = status.st_size - _WHOLE
        if rest <= 0:
            return
        yield status.st_mtime_ns.to_bytes(16, "little", signed=True)
        for block in range(_BLOCKS):
            yield os.pread(descriptor, _BLOCK, _WHOLE + rest * block // _BLOCKS)
    finally:
        os.close(descriptor)


def _mlx_lm_version() -> str:
    try:
        return version("mlx-lm")
    except PackageNotFoundError:
        return ""
