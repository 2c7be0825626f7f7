"""Control vectors: what their files say, and that no file can do more than be refused."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxsrv.engine.steering.steerer import load_vector
from mlxsrv.formats.control_vectors import read_vector
from tests.support.effort import examples
from tests.support.ggufs import REPENG, Array, Tensors, text, write_gguf
from tests.support.vectors import write_safetensors

WIDTH = 8
ONE = np.arange(WIDTH, dtype=np.float32) / 3
TWO = -ONE
BOTH = [("direction.2", TWO), ("direction.1", ONE)]


def write_header(path: Path, header: bytes, data: bytes = b"") -> Path:
    """A file that begins as safetensors do, whatever its header is."""
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


WRITERS = [write_gguf, write_safetensors]
Write = Callable[[Path, Tensors], Path]


def refused(path: Path) -> str:
    """Why: one line, with the file's name and not where it is."""
    with pytest.raises(ValueError, match=r"^'") as caught:
        load_vector(read_vector(path))
    reason = str(caught.value)
    assert reason.startswith(repr(path.name))
    assert str(path.parent) not in reason
    assert "\n" not in reason
    return reason


def test_what_repeng_writes(tmp_path: Path) -> None:
    file = read_vector(write_gguf(tmp_path / "happy.gguf", BOTH))
    assert (file.layers, file.width, file.model_hint) == ((1, 2), WIDTH, "qwen3")
    loaded = load_vector(file)
    assert loaded.keys() == {1, 2}
    assert {array.dtype for array in loaded.values()} == {mx.float32}
    np.testing.assert_array_equal(loaded[1], ONE)
    np.testing.assert_array_equal(loaded[2], TWO)


def test_the_same_as_safetensors(tmp_path: Path) -> None:
    file = read_vector(write_safetensors(tmp_path / "happy", BOTH))
    assert (file.layers, file.width, file.model_hint) == ((1, 2), WIDTH, None)
    np.testing.assert_array_equal(load_vector(file)[2], TWO)


def test_what_mlx_writes(tmp_path: Path) -> None:
    arrays = {"direction.0": mx.array(ONE), "direction.11": mx.array(TWO, mx.float16)}
    gguf, safetensors = str(tmp_path / "a.gguf"), str(tmp_path / "a.safetensors")
    mx.save_gguf(gguf, arrays, {"controlvector.model_hint": "llama", "some": mx.array([1, 2, 3])})
    mx.save_safetensors(safetensors, arrays | {"direction.3": mx.array(ONE, mx.bfloat16)})
    for path in (gguf, safetensors):
        expected = mx.load(path)
        assert isinstance(expected, dict)
        loaded = load_vector(read_vector(Path(path)))
        assert {f"direction.{layer}" for layer in loaded} == expected.keys()
        for name, array in expected.items():
            layer = int(name.removeprefix("direction."))
            assert mx.array_equal(loaded[layer], array.astype(mx.float32))
    assert read_vector(Path(gguf)).model_hint == "llama"


def test_our_writer_is_right(tmp_path: Path) -> None:
    """MLX reads what tests/ggufs.py writes: the tests' only witness of the format but MLX's."""
    expected = mx.load(str(write_gguf(tmp_path / "a.gguf", BOTH)))
    assert isinstance(expected, dict)
    assert mx.array_equal(expected["direction.2"], mx.array(TWO))


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 8, 256])
def test_versions_and_alignments(tmp_path: Path, version: int, alignment: int) -> None:
    fields = {**REPENG, "general.alignment": alignment}
    path = write_gguf(tmp_path / "a", BOTH, fields, version=version, alignment=alignment)
    np.testing.assert_array_equal(load_vector(read_vector(path))[2], TWO)


def test_fields_of_any_type_are_passed_over(tmp_path: Path) -> None:
    fields: dict[str, object] = {"a": 1.5, "b": True, "c": [1, 2], "d": ["x", "yz"], "e": "é"}
    path = write_gguf(tmp_path / "a", BOTH, fields | REPENG)
    assert read_vector(path).model_hint == "qwen3"


@pytest.mark.parametrize("write", WRITERS)
def test_half_precision_other_tensors_and_shapes_with_ones(tmp_path: Path, write: Write) -> None:
    halves = (ONE.view(np.uint32) >> 16).astype(np.uint16)
    tensors: Tensors = [
        ("other", np.zeros((2, 3), np.int32)),
        ("direction.0", halves),
        ("direction.1", ONE.astype(np.float16)),
    ]
    if write is write_gguf:
        tensors = [*tensors, ("direction.2", ONE[None])]  # a shape of (8, 1) in GGUF's order
    loaded = load_vector(read_vector(write(tmp_path / "a", tensors)))
    expected = (ONE.view(np.uint32) & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(loaded[0], expected)
    np.testing.assert_array_equal(loaded[1], ONE.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("name", "array", "why"),
    [
        ("direction", ONE, "no array"),
        ("direction.", ONE, "no layer"),
        ("direction.-1", ONE, "no layer"),
        ("direction.1.weight", ONE, "no layer"),
        ("direction.1٣", ONE, "no layer"),
        ("direction.99999", ONE, "no layer"),
        ("direction.1", np.ones((3, 2), np.float32), "not a vector"),
        ("direction.1", np.ones((0,), np.float32), "not a vector"),
        ("direction.1", np.ones((), np.float32), "not a vector"),
        ("direction.1", ONE.astype(np.int32), "no array"),
        ("direction.1", ONE + np.inf, "not finite"),
        ("direction.1", ONE * np.nan, "not finite"),
    ],
)
@pytest.mark.parametrize("write", WRITERS)
def test_what_is_no_direction(
    tmp_path: Path, write: Write, name: str, array: Array, why: str
) -> None:
    assert why in refused(write(tmp_path / "a", [(name, array)]))


@pytest.mark.parametrize("write", WRITERS)
def test_directions_of_two_widths(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "a", [("direction.1", ONE), ("direction.2", ONE[:4])])
    assert "same width" in refused(path)


def test_a_direction_that_is_there_twice(tmp_path: Path) -> None:
    assert "twice" in refused(write_gguf(tmp_path / "a", [BOTH[0], BOTH[0]]))


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "not there" in refused(tmp_path / "missing")
    (tmp_path / "folder").mkdir()
    assert "not a file" in refused(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in refused(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    assert "empty" in refused(tmp_path / "empty")


def test_a_file_that_changes_before_it_is_loaded(tmp_path: Path) -> None:
    file = read_vector(write_gguf(tmp_path / "a", BOTH))
    write_gguf(tmp_path / "a", [("direction.7", ONE)])
    with pytest.raises(ValueError, match="changed"):
        load_vector(file)


@pytest.mark.parametrize("hint", ["", "x" * 101, "two\nlines", 5])
def test_hints_that_are_none(tmp_path: Path, hint: object) -> None:
    path = write_gguf(tmp_path / "a", BOTH, {"controlvector.model_hint": hint})
    assert read_vector(path).model_hint is None


def gguf(tensors: int, fields: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + rest


MANY = 2**64 - 1
KEY, NAME = text("key"), text("direction.1")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"GGUF\1\0\0\0" + bytes(64), "version"),
        (b"GGUF\0\0\0\3" + bytes(64), "little-endian"),
        (b"GGUF", "cut short"),
        (gguf(0, 0, b""), "no array"),
        (gguf(MANY, 0, b""), "cut short"),
        (gguf(0, MANY, b""), "cut short"),
        (gguf(0, 1, struct.pack("<Q", MANY)), "cut short"),
        (gguf(0, 1, KEY + struct.pack("<I", 13)), "type"),
        (gguf(0, 1, KEY + struct.pack("<IIQ", 9, 9, 1)), "type"),
        (gguf(0, 1, KEY + struct.pack("<IIQ", 9, 12, MANY)), "cut short"),
        (gguf(0, 1, KEY + struct.pack("<IIQ", 9, 8, MANY)), "cut short"),
        (gguf(1, 0, NAME + struct.pack("<I", 2**32 - 1)), "dimensions"),
        (gguf(1, 0, NAME + struct.pack("<IQIQ", 1, 2**61, 0, 0)), "cut short"),
        (gguf(1, 0, NAME + struct.pack("<IQIQ", 1, 1, 0, MANY)), "cut short"),
        (gguf(1, 1, text("general.alignment") + struct.pack("<II", 4, 0)
              + NAME + struct.pack("<IQIQ", 1, 1, 0, 0)), "alignment"),
        (gguf(1, 1, text("general.alignment") + struct.pack("<II", 4, 12)
              + NAME + struct.pack("<IQIQ", 1, 1, 0, 0)), "alignment"),
        (struct.pack("<Q", 2**63), "not safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS"),
    ],
)  # fmt: skip
def test_hostile_headers(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    assert why in refused(path)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"", "no header"),
        (b"[1]", "no header"),
        (b'{"__metadata__":{"a":' + b"[" * 100_000, "no header"),
        (b'{"a":"\xff"}', "no header"),
        (b'{"__metadata__":[]}', "no array"),
        (b'{"direction.1":{"dtype":"F32"}}', "no header"),
        (b'{"direction.1":{"dtype":"F32","shape":[1],"data_offsets":[-8,-4]}}', "no header"),
        (b'{"direction.1":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}', "bytes"),
        (b'{"direction.1":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}', "no header"),
        (b'{"direction.1":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "cut short"),
    ],
)
def test_hostile_headers_of_safetensors(tmp_path: Path, header: bytes, why: str) -> None:
    assert why in refused(write_header(tmp_path / "a", header))


def test_directions_that_lie_on_one_another(tmp_path: Path) -> None:
    """A small file would ask for a lot of memory."""
    names = [f"direction.{layer}" for layer in range(1000)]
    entry = {"dtype": "F32", "shape": [4096], "data_offsets": [0, 16384]}
    header = json.dumps(dict.fromkeys(names, entry)).encode()
    assert "overlap" in refused(write_header(tmp_path / "a", header, bytes(16384)))
    path = write_gguf(tmp_path / "b", [(name, np.ones(4096, np.float32)) for name in names[:2]])
    same = path.read_bytes().replace(struct.pack("<Q", 16384), bytes(8))
    path.write_bytes(same[:-16384])
    assert "overlap" in refused(path)


@pytest.mark.parametrize("write", WRITERS)
def test_every_way_to_cut_a_file_short(tmp_path: Path, write: Write) -> None:
    whole = write(tmp_path / "a", [("direction.1", ONE)])
    content = whole.read_bytes()
    for length in range(len(content)):
        whole.write_bytes(content[:length])
        refused(whole)


@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=8))
def test_spoiled_files_are_read_or_refused(tmp_path: Path, spoils: list[tuple[int, int]]) -> None:
    path = write_gguf(tmp_path / "a", BOTH)
    content = bytearray(path.read_bytes())
    for place, byte in spoils:
        content[place % len(content)] = byte
    path.write_bytes(content)
    try:
        loaded = load_vector(read_vector(path))
    except ValueError:
        return
    assert loaded
