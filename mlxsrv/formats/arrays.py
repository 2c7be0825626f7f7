"""Arrays in a file of weights, safetensors or NumPy's npz: where each one is, and its numbers.

No file is trusted or read whole. Sizes come from headers that are checked against the file, and
numbers are read in pieces of bounded size.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeAlias

import msgspec
import numpy as np

from mlxsrv.formats.files import UnusableFile, check_content
from mlxsrv.formats.safetensors import read_header

Floats: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float32]]

PIECE_BYTES = 16 * 1024 * 1024
"""The most bytes of one piece of an array, in float32."""

_LONGEST_HEADER = 1024 * 1024  # bytes, of a dozen arrays
_MOST_COMPRESSION = 100  # times; weights hardly shrink, but zeros shrink a thousand times
_LAYOUTS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_NPY_TYPES = {layout: name for name, layout in _LAYOUTS.items() if name != "BF16"}
_NPY_START = struct.Struct("<6s2B")
_NPY_HEADER = re.compile(
    rb"\{'descr': '(<f[248])', 'fortran_order': (True|False), 'shape': \(([0-9, ]{0,99})\), \}\s*"
)
"""A header as NumPy writes it. Other Python literals are allowed, but nobody writes them."""


class StoredArray(msgspec.Struct, frozen=True):
    """One array: its shape, and where its numbers are.

    Attributes:
        start: the first byte in the file, or in the `member` of an archive.
        swapped: a matrix that is written column by column.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int
    member: str | None = None
    swapped: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(_LAYOUTS[self.dtype]).itemsize


def list_arrays(path: Path) -> dict[str, StoredArray]:
    """Return the arrays of floating-point numbers in a file, by name.

    Raises:
        UnusableFile: the file cannot be read, or contradicts itself.
    """
    with reading_file(path):
        size = check_content(path)
        found = _list_npz(path, size) if path.suffix == ".npz" else _list_safetensors(path)
        # If arrays overlapped, a small file could ask for any amount of memory.
        if path.suffix != ".npz" and sum(stored.bytes for stored in found.values()) > size:
            raise UnusableFile(f"{path.name!r} has arrays that overlap")
        return found


def read_array(path: Path, stored: StoredArray) -> Iterator[Floats]:
    """Yield the array's numbers in pieces `(rows, width)`, in the order of the file.

    A vector is one row. The rows of a swapped matrix are its columns.

    Raises:
        UnusableFile: the file is damaged, or a number in it is not finite.
    """
    width = stored.shape[0 if stored.swapped else -1] if stored.shape else 1
    total = math.prod(stored.shape) // max(width, 1)
    layout = np.dtype(_LAYOUTS[stored.dtype])
    step = max(1, PIECE_BYTES // (4 * max(width, 1)))
    with reading_file(path), _opened(path, stored) as file:
        for done in range(0, total, step):
            rows = min(step, total - done)
            data = _read(file, rows * width * layout.itemsize)
            yield _floats(data, stored.dtype).reshape(rows, width)


def _floats(data: bytes, dtype: str) -> Floats:
    numbers = np.frombuffer(data, _LAYOUTS[dtype])
    if dtype == "BF16":  # the upper half of a float32
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        numbers = numbers.astype(np.float32, copy=False)
    if not np.isfinite(numbers).all():
        raise UnusableFile("it has numbers that are not finite")
    return numbers


def _read(file: IO[bytes], count: int) -> bytes:
    """Read exactly so many bytes, in pieces, since the file's own sizes are not trusted."""
    pieces = []
    while count:
        piece = file.read(min(count, _LONGEST_HEADER))
        if not piece:
            raise UnusableFile("it is cut short")
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """Turn all errors of reading a file into UnusableFile with the file's name."""
    try:
        yield
    except UnusableFile as error:
        text = str(error)
        raise UnusableFile(text if repr(path.name) in text else f"{path.name!r}: {text}") from None
    except OSError as error:
        raise UnusableFile(f"{path.name!r}: {error.strerror or 'it cannot be read'}") from None
    except (
        *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, IndexError),
        *(ValueError, RuntimeError, OverflowError),  # zipfile raises them for odd archives
    ):
        raise UnusableFile(f"{path.name!r} is damaged") from None


@contextmanager
def _opened(path: Path, stored: StoredArray) -> Iterator[IO[bytes]]:
    if stored.member is None:
        with path.open("rb") as file:
            file.seek(stored.start)
            yield file
    else:
        with _archive(path) as archive, archive.open(stored.member) as member:
            _read(member, stored.start)
            yield member


# safetensors


def _list_safetensors(path: Path) -> dict[str, StoredArray]:
    tensors, _ = read_header(path, limit=_LONGEST_HEADER)
    with path.open("rb") as file:
        data = 8 + int.from_bytes(file.read(8), "little")
    return {
        name: StoredArray(tuple(tensor.shape), tensor.dtype, data + tensor.data_offsets[0])
        for name, tensor in tensors.items()
        if tensor.dtype in _LAYOUTS
    }


# npz: a zip archive of one npy file an array, compressed or not.


class _BoundedFile(io.FileIO):
    """A file that refuses to be read in large pieces: zipfile trusts the sizes in an archive."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            here = self.tell()
            size = max(0, self.seek(0, io.SEEK_END) - here)
            self.seek(here)
        if size > _LONGEST_HEADER:
            raise UnusableFile("its directory is too long")
        return super().read(size) or b""


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    with _BoundedFile(path) as file, zipfile.ZipFile(file) as archive:
        yield archive


def _list_npz(path: Path, size: int) -> dict[str, StoredArray]:
    with _archive(path) as archive:
        members = archive.infolist()
        if len({member.filename for member in members}) < len(members):
            raise UnusableFile("it has two members with one name")
        # The check of each member compares its two sizes, which only the directory has.
        if sum(member.compress_size for member in members) > size:
            raise UnusableFile("it has members that overlap, or lie beyond its end")
        found: dict[str, StoredArray] = {}
        for member in members:
            stored = _look_into(archive, member)
            if stored is not None:
                found[member.filename.removesuffix(".npy")] = stored
        return found


def _look_into(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> StoredArray | None:
    """Return the member's array; None if it has no floating-point numbers."""
    if member.flag_bits & 1 or member.compress_type not in (
        zipfile.ZIP_STORED,
        zipfile.ZIP_DEFLATED,
    ):
        raise UnusableFile(f"{member.filename[:40]!r} is packed in a way that is not read")
    # A bias may be all zeros, so a small member may shrink by any factor.
    if member.file_size > PIECE_BYTES + _MOST_COMPRESSION * member.compress_size:
        raise UnusableFile(f"{member.filename[:40]!r} would unpack to far more bytes than it has")
    if not member.filename.endswith(".npy"):
        return None
    with archive.open(member) as file:
        magic, version, _ = _NPY_START.unpack(_read(file, _NPY_START.size))
        if magic != b"\x93NUMPY":
            raise UnusableFile(f"{member.filename[:40]!r} is not an array")
        digits = 2 if version == 1 else 4
        length = int.from_bytes(_read(file, digits), "little")
        if length > _LONGEST_HEADER:
            raise UnusableFile(f"{member.filename[:40]!r} has a header that is too long")
        header = _read(file, length)
    match = _NPY_HEADER.fullmatch(header)
    if match is None:
        return None
    dtype, swapped, sizes = (group.decode() for group in match.groups())
    shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    start = _NPY_START.size + digits + length
    stored = StoredArray(shape, _NPY_TYPES[dtype], start, member.filename, swapped == "True")
    if stored.bytes + start != member.file_size:
        raise UnusableFile(f"{member.filename[:40]!r} has a shape that is not that of its bytes")
    return stored
