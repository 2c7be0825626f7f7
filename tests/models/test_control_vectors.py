"""The meaning of `--control-vector`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlxsrv.models.control_vectors import control_vectors, parse_control_vector
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings
from tests.support.ggufs import write_gguf


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def write(name: str) -> Path:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    return write_gguf(path, [("direction.1", np.ones(8, np.float32))])


@pytest.mark.parametrize(
    ("text", "name", "file", "scale"),
    [
        ("happy.gguf", "happy", "happy.gguf", 1),
        ("happy.gguf:0.5", "happy", "happy.gguf", 0.5),
        ("happy.gguf:-1e1", "happy", "happy.gguf", -10),
        ("joy=happy.gguf", "joy", "happy.gguf", 1),
        ("joy=happy.gguf:0", "joy", "happy.gguf", 0),
        ("joy=a/b=c:d.safetensors:2", "joy", "a/b=c:d.safetensors", 2),
        ("a/b=c:d.safetensors:2", "b=c:d", "a/b=c:d.safetensors", 2),
        ("a/b=c:d.safetensors", "b=c:d", "a/b=c:d.safetensors", 1),
        ("joy=v:3", "joy", "v:3", 1),
        ("joy=v:3:3", "joy", "v:3", 3),
        ("~/happy.gguf:2", "happy", "~/happy.gguf", 2),
        ("joy=~/happy.gguf", "joy", "~/happy.gguf", 1),
    ],
)
def test_ways_to_write_one(text: str, name: str, file: str, scale: float) -> None:
    for other in ("happy.gguf", "a/b=c:d.safetensors", "v:3"):
        write(other)
    assert parse_control_vector(text) == (name, Path(file).expanduser(), scale)


def test_all_of_them_in_order() -> None:
    write("one.gguf"), write("two.gguf")
    wanted = control_vectors(Settings(control_vector=("two.gguf:0", "one.gguf:-2")))
    assert [(each.name, each.scale) for each in wanted] == [("two", 0), ("one", -2)]
    assert wanted[0].file.path == Path("two.gguf")
    assert wanted[0].file.layers == (1,)
    assert control_vectors(Settings()) == ()


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["missing.gguf"], "there is no file 'missing.gguf'"),
        (["joy=missing.gguf:2"], "there is no file 'missing.gguf'"),
        (["one.gguf:"], "there is no file 'one.gguf:'"),
        (["one.gguf:much"], "there is no file 'one.gguf:much'"),
        (["=one.gguf"], "there is no file '=one.gguf'"),
        (["."], "there is no file '.'"),
        ([""], "there is no file ''"),
        (["a\0b"], "there is no file"),
        (["a" * 5000], "there is no file"),
        (["one.gguf:nan"], "not nan"),
        (["one.gguf:-inf"], "not -inf"),
        (["one.gguf:100.5"], "between -100 and 100"),
        (["one.gguf", "a/one.gguf"], "two are called 'one'; use NAME=FILE"),
        (["a\nb=one.gguf"], "is no name"),
        (["n" * 101 + "=one.gguf"], "is no name"),
        (["bad.gguf"], "'bad.gguf' is cut short, or not safetensors"),
    ],
)
def test_what_will_not_do(texts: list[str], why: str) -> None:
    write("one.gguf"), write("a/one.gguf")
    Path("bad.gguf").write_text("no vector")
    with pytest.raises(SettingsError) as caught:
        control_vectors(Settings(control_vector=tuple(texts)))
    reason = str(caught.value)
    assert reason.startswith("control_vector: ")
    assert why in reason
