"""JSON values as models write them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.text.call_formats.json_values import JsonValue

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
# Text with what is hard in it more often than chance would put it there.
TEXTS = st.lists(
    st.sampled_from(
        [*"\"'{}[],:\\\n tnux01 ", "True", "None", "Tr", '"a"', "'b'", '{"k": ', "\\u00e9", ", }"]
    )
).map("".join)


def written(text: str, sizes: list[int]) -> tuple[str, int]:
    """Return what is made of a value in pieces of some sizes, and where it ended."""
    out: list[str] = []
    value = JsonValue(text[0], out)
    place = 0
    while place < len(text) and not value.complete:
        piece = text[place : place + sizes[place % len(sizes)]]
        place += value.advance(piece, 0)
    return "".join(out), place


@given(value=st.lists(VALUES) | st.dictionaries(st.text(), VALUES), plain=st.booleans())
def test_json_stays_as_it_is(value: Any, plain: bool) -> None:
    text = json.dumps(value, ensure_ascii=plain, indent=None if plain else 1)
    for sizes in ([1], [len(text)]):
        assert written(text + "x", [*sizes]) == (text, len(text))


@given(text=TEXTS.map("{".__add__), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_pieces_make_no_difference(text: str, sizes: list[int]) -> None:
    assert written(text, sizes) == written(text, [len(text)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{'a': 'b'}", {"a": "b"}),
        ("{'a': 'it's', \"b\": 'say \"x\"'}", {"a": "it's", "b": 'say "x"'}),
        ("{'a': [True, False, None]}", {"a": [True, False, None]}),
        ('{"a": [1, 2, ], "b": {"c": "d",\n},}', {"a": [1, 2], "b": {"c": "d"}}),
        ('{"a": "x\ny\tz\0"}', {"a": "x\ny\tz\0"}),
        (r'{"a": "\d+ \" \\ C:\Users"}', {"a": r'\d+ " \ C:\Users'}),
        (r"{'a': 'it\'s'}", {"a": "it's"}),
        ('{"a": "True, None, }"}', {"a": "True, None, }"}),
    ],
)
def test_what_models_write_in_place_of_json(text: str, expected: Any) -> None:
    for sizes in ([1], [3], [len(text)]):
        assert json.loads(written(text, sizes)[0]) == expected
