"""The free text of a custom tool, out of any arguments that hold it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.wire.responses.custom_input import CustomInput


def read(*pieces: str) -> tuple[list[str], bool]:
    """Return the texts for each piece and at the end, and whether the arguments are complete."""
    reader = CustomInput()
    texts = [reader.feed(piece) for piece in pieces]
    rest, whole = reader.finish()
    return [*texts, rest], whole


@given(
    st.text(),
    st.booleans(),
    st.sampled_from(["", " ", "\n  "]),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_any_text_comes_back(text: str, ascii: bool, space: str, cuts: list[int]) -> None:
    written = json.dumps({"input": text}, ensure_ascii=ascii)
    written = written.replace('{"input": ', f'{space}{{{space}"input"{space}:{space}', 1)
    places = [0, *sorted(cut for cut in cuts if cut < len(written)), len(written)]
    texts, whole = read(*(written[a:b] for a, b in pairwise(places)))
    assert "".join(texts) == text
    assert whole


@given(st.text(min_size=1), st.data())
def test_a_cut_text_is_a_beginning_and_never_whole(text: str, data: st.DataObject) -> None:
    written = json.dumps({"input": text})
    begun = written[: data.draw(st.integers(0, len(written) - 3))]
    texts, whole = read(begun)
    assert not whole
    if begun.startswith('{"input": "'):
        assert text.startswith("".join(texts))


def test_text_is_given_out_as_it_comes() -> None:
    assert read('{"input":', ' "a\\', 'nb"', "}") == (["", "a", "\nb", "", ""], True)


def test_half_of_a_character_waits_for_the_other() -> None:
    assert read('{"input": "\\ud83d', '\\ude00"}') == (["", "😀", ""], True)
    assert read('{"input": "\\ud83d', ' x"}') == (["", "� x", ""], True)


def test_a_line_end_as_it_is_is_one() -> None:
    assert read('{"input": "a\nb\\tc"}') == (["a\nb\tc", ""], True)


@pytest.mark.parametrize(
    ("arguments", "text", "whole"),
    [
        ('{"patch": "x"}', "x", True),
        ('{"a": 1, "b": "x"}', "x", True),
        ('{"other": 1, "input": "x"}', "x", True),
        ('"x"', "x", True),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}', False),
        ("{}", "{}", False),
        ("plain", "plain", False),
        ("", "", False),
    ],
)
def test_arguments_of_another_form_are_given_at_the_end(
    arguments: str, text: str, whole: bool
) -> None:
    assert read(arguments) == (["", text], whole)
