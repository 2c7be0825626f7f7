"""The encoder: every frame is one event to every parser."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.wire.sse import PLACEHOLDER, encode_json, frame, text_frames

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
def test_a_text_frame_is_what_encoding_the_whole_chunk_gives(text: str) -> None:
    chunk = {"a": [1, {"delta": PLACEHOLDER}], "again": PLACEHOLDER, "z": None}
    expected = {"a": [1, {"delta": text}], "again": text, "z": None}
    data = text_frames(chunk)(text)
    assert data == frame(expected)
    assert json.loads(data.removeprefix(b"data: ")) == expected


@given(TEXT)
def test_a_frame_is_one_line_to_every_line_splitter(text: str) -> None:
    data = frame({"text": text})
    assert data.endswith(b"\n\n")
    line = data.removesuffix(b"\n\n")
    assert line.splitlines() == [line]
    assert line.decode().splitlines() == [line.decode()]  # str splits at more than bytes do


def test_nothing_is_escaped_that_need_not_be() -> None:
    assert encode_json("é😀你/<>") == '"é😀你/<>"'.encode()


def test_separators_that_split_lines_are_escaped() -> None:
    assert encode_json("a\u2028b\u2029c\u0085d\n") == rb'"a\u2028b\u2029c\u0085d\n"'


def test_a_chunk_without_a_placeholder_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="placeholder"):
        text_frames({"text": "none"})


def test_structs_are_encoded_as_msgspec_does() -> None:
    class Point(msgspec.Struct):
        x: int
        y: str

    assert (
        frame(Point(1, PLACEHOLDER))
        == b"data: " + msgspec.json.encode(Point(1, PLACEHOLDER)) + b"\n\n"
    )
