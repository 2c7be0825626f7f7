"""The patch `openblas`: OpenBLAS for MLX's CPU back end on Linux.

MLX's wheel for Linux multiplies float32 matrices with the reference BLAS, plain loops of Fortran.
OpenBLAS is some ten times as fast, but the wheel has no setting for it. Preloading does not help
either: in PyPI's OpenBLAS (scipy-openblas32, the extra `blas`) the functions' names have a prefix.
But a library calls another's functions through a table of addresses, its global offset table,
which the dynamic linker fills in and leaves writable. `bind_openblas` writes the addresses of
OpenBLAS's functions there. Where anything is not as expected, nothing is changed.

Sums are then added in another order, so results round differently; the order may depend on the
number of rows, as on GPUs.

Sources: the ELF-64 object file format, version 1.5; proc(5) for /proc/self/maps.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import NamedTuple

from mlxsrv.engine.patches.switch import enabled, log_applied

_log = logging.getLogger("mlxsrv.engine")

_FUNCTIONS = frozenset({"cblas_sgemm", "cblas_dgemm", "cblas_cgemm"})
_PREFIX = "scipy_"
_CALLER = "libmlx.so"
_REFERENCE = "libblas-"  # how the file in MLX's wheel begins

_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
_RELOCATION = struct.Struct("<QQq")  # Elf64_Rela
_RELOCATIONS = 4  # SHT_RELA


class _Mapping(NamedTuple):
    """A range of addresses and the file that is mapped there."""

    first: int
    end: int
    rights: str
    offset: int
    path: str

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


class _Section(NamedTuple):
    kind: int
    place: slice
    """Its bytes in the file."""
    link: int
    """The number of the section that this one's entries refer to."""
    subject: int
    """The number of the section that these relocations change; 0 where there are several."""


def bind_openblas() -> bool:
    """Make MLX multiply with OpenBLAS, if both are installed. Returns whether it does.

    This holds for the whole process. An address is written in one piece, so a thread that
    multiplies meanwhile calls either function.
    """
    if sys.platform != "linux" or sys.byteorder != "little" or sys.maxsize < 2**32:
        return False
    if not enabled("openblas"):
        return False
    try:
        _bind()
    except (ImportError, OSError, AttributeError, LookupError, ValueError, struct.error) as error:
        _log.debug("MLX keeps its own BLAS: %s", error)
        return False
    return True


def _bind() -> None:
    """Raises LookupError if MLX's calls do not lead from a writable table to the reference BLAS."""
    package = import_module("scipy_openblas32")
    openblas = Path(package.get_lib_dir(), package.get_library(fullname=True))
    library = ctypes.CDLL(str(openblas))
    mappings = list(_read_mappings())
    mlx = next((each for each in mappings if each.name == _CALLER and each.offset == 0), None)
    if mlx is None:
        raise LookupError(f"there is no {_CALLER}")
    changes: list[tuple[ctypes.c_uint64, int]] = []
    for name, offset in _find_calls(Path(mlx.path)):
        if "w" not in _holder(mappings, mlx.first + offset).rights:
            raise LookupError("the table is not writable")
        slot = ctypes.c_uint64.from_address(mlx.first + offset)
        callee = _holder(mappings, slot.value).name
        if callee == openblas.name:
            continue
        if not callee.startswith(_REFERENCE):
            raise LookupError(f"{name} is {callee}'s")
        function = ctypes.cast(getattr(library, _PREFIX + name), ctypes.c_void_p)
        assert function.value is not None
        changes.append((slot, function.value))
    if changes and "OPENBLAS_NUM_THREADS" not in os.environ:
        # The other half is for the threads that launch the work; hyperthreads would add nothing.
        cores = len(os.sched_getaffinity(0))
        getattr(library, _PREFIX + "openblas_set_num_threads")(max(1, cores // 2))
    for slot, address in changes:
        slot.value = address
    if changes:
        log_applied("openblas", "MLX multiplies float32 matrices with OpenBLAS")


def _read_mappings() -> Iterator[_Mapping]:
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        span, rights, offset, _, _, *path = line.split(maxsplit=5)
        first, end = span.split("-")
        yield _Mapping(
            int(first, 16), int(end, 16), rights, int(offset, 16), path[0] if path else ""
        )


def _holder(mappings: Iterable[_Mapping], address: int) -> _Mapping:
    for mapping in mappings:
        if mapping.first <= address < mapping.end:
            return mapping
    raise LookupError(f"nothing is mapped at {address:#x}")


def _find_calls(path: Path) -> list[tuple[str, int]]:
    """The BLAS functions that a shared library calls: their names, and where it keeps their
    addresses, as offsets from where it is loaded. Raises LookupError if it calls none."""
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        sections = _read_sections(content)
        calls = [
            (name, offset)
            for section in sections
            # Calls have a table of their own; the other tables are read-only by now.
            if section.kind == _RELOCATIONS and section.subject
            for names in [_find_names(content, sections, section.link)]
            for offset, info, _ in _RELOCATION.iter_unpack(content[section.place])
            if (name := names.get(info >> 32)) is not None
        ]
    if not calls:
        raise LookupError(f"{path.name} calls no BLAS")
    return calls


def _find_names(file: mmap, sections: Sequence[_Section], table: int) -> dict[int, str]:
    """The BLAS functions in a table of symbols, by their numbers there."""
    symbols = sections[table]
    strings = file[sections[symbols.link].place]
    return {
        number: name
        for number, (start, *_) in enumerate(_SYMBOL.iter_unpack(file[symbols.place]))
        for name in _FUNCTIONS
        if strings.startswith(name.encode() + b"\0", start)
    }


def _read_sections(file: mmap) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", file, 0x28)  # e_shoff
    size, count = struct.unpack_from("<HH", file, 0x3A)  # e_shentsize, e_shnum
    sections: list[_Section] = []
    for entry in range(table, table + size * count, size):
        _, kind, _, _, offset, length, link, subject, _, _ = _SECTION.unpack_from(file, entry)
        sections.append(_Section(kind, slice(offset, offset + length), link, subject))
    return sections
