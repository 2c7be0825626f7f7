"""SAEs in archives of NumPy, whole and damaged."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxsrv.engine.steering.sae import load_sae
from mlxsrv.formats.sae_files import read_sae
from tests.support.sae_files import reason, write


def _npz(folder: Path) -> Path:
    return write(folder, "gemma_scope", "jumprelu") / "params.npz"


def _rewrite(path: Path, name: str, content: bytes, packing: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        held = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", packing) as archive:
        for member, old in held.items():
            archive.writestr(member, content if member == name else old)
        if name not in held:
            archive.writestr(name, content)


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "packing", "expected"),
    [
        (_npy(np.zeros(16)), zipfile.ZIP_LZMA, "a way that is not read"),
        (_npy(np.zeros(16))[:-1], zipfile.ZIP_STORED, "not that of its bytes"),
        (_npy(np.zeros(16)) + b"1", zipfile.ZIP_STORED, "not that of its bytes"),
        (_npy(np.zeros(16, np.int32)), zipfile.ZIP_STORED, "no encoder bias"),
        (_npy(np.zeros(16, ">f4")), zipfile.ZIP_STORED, "no encoder bias"),
        (_npy(np.array([{}])), zipfile.ZIP_STORED, "no encoder bias"),
        (b"\x93NUMPY\x01\x00" + b"\xff\xff" + b"(" * 65535, zipfile.ZIP_STORED, "no encoder bias"),
        (b"PK", zipfile.ZIP_STORED, "cut short"),
        (b"\x80\x04" + bytes(99), zipfile.ZIP_STORED, "not an array"),
    ],
)
def test_members_of_an_archive(content: bytes, packing: int, expected: str, tmp_path: Path) -> None:
    path = _npz(tmp_path)
    _rewrite(path, "b_enc.npy", content, packing)
    assert expected in reason(path)


def test_a_member_that_is_far_larger_than_its_file(tmp_path: Path) -> None:
    path = _npz(tmp_path)
    _rewrite(path, "b_enc.npy", _npy(np.zeros((4096, 4096))), zipfile.ZIP_DEFLATED)
    assert "unpack to far more" in reason(path)


def test_an_archive_with_a_directory_without_end(tmp_path: Path) -> None:
    """zipfile alone would read it whole: 100 bytes of memory for each byte of the file."""
    path = _npz(tmp_path)
    data = path.read_bytes() + bytes(3_000_000)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9999, 9999, 3_000_000, len(data) - 3_000_000, 0)
    path.write_bytes(data + end)
    assert "too long" in reason(path)


def test_an_archive_of_two_that_share_a_name(tmp_path: Path) -> None:
    path = _npz(tmp_path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("b_enc.npy", _npy(np.zeros(16)))
    assert "two members with one name" in reason(path)


def test_numbers_of_an_archive_that_are_damaged(tmp_path: Path) -> None:
    path = _npz(tmp_path)
    file = read_sae(path)
    data = bytearray(path.read_bytes())
    data[data.index(b"W_dec.npy") + 400] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"'params.npz' is damaged"):
        list(load_sae(file))


def test_a_packed_member_that_does_not_unpack(tmp_path: Path) -> None:
    path = _npz(tmp_path)
    _rewrite(path, "b_enc.npy", _npy(np.zeros(16)), zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    begin = data.index(b"b_enc.npy") + len("b_enc.npy")
    data[begin : begin + 4] = b"\xff" * 4  # no block of deflate begins so
    path.write_bytes(data)
    assert "'params.npz' is damaged" in reason(path)


def test_an_archive_of_a_version_that_is_not_known(tmp_path: Path) -> None:
    path = _npz(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 6] = 99  # tenths; zipfile raises NotImplementedError
    path.write_bytes(data)
    assert "'params.npz' is damaged" in reason(path)
