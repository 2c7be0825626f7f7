"""JSON files: what is an object, what is missing, and what cannot be used."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mlxsrv.formats.files import (
    UnusableFile,
    positive_int,
    read_json,
    read_object,
    read_optional_object,
)


def write(folder: Path, text: str) -> Path:
    path = folder / "config.json"
    path.write_text(text)
    return path


def test_a_file_is_read_as_python_writes_it(tmp_path: Path) -> None:
    assert read_object(write(tmp_path, '{"a": Infinity}')) == {"a": math.inf}
    assert read_json(write(tmp_path, "[1, 2]")) == [1, 2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "not a JSON object with something in it"),
        ("[1]", "not a JSON object"),
        ('{"a": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": "\udcff"}', "not valid JSON"),
        ("", "is empty"),
        ("version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ('{"a": "' + "b" * 1000 + '"}', "too large"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    limit = 500 if reason == "too large" else 10**6
    with pytest.raises(UnusableFile, match=reason) as error:
        read_object(path, limit=limit)
    assert "'config.json'" in str(error.value)
    assert str(tmp_path) not in str(error.value)


def test_only_an_optional_file_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_optional_object(path) == {}
    with pytest.raises(UnusableFile, match="is not there"):
        read_object(path)


def test_an_optional_file_may_be_empty_of_keys_and_nothing_else(tmp_path: Path) -> None:
    assert read_optional_object(write(tmp_path, "{}")) == {}
    with pytest.raises(UnusableFile, match="not a JSON object"):
        read_optional_object(write(tmp_path, "[]"))


def test_a_link_to_nothing_and_a_folder_are_no_missing_files(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.json").mkdir()
    for name in ("link.json", "folder.json"):
        with pytest.raises(UnusableFile):
            read_optional_object(tmp_path / name)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, 10**30])
def test_a_size_is_a_positive_integer(value: object) -> None:
    assert positive_int({"a": value, "b": 3}, "a", "b") == 3
    assert positive_int({"a": value}, "a") is None
