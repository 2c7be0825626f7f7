"""The tables of formats: each name that detection gives has its format."""

from mlxsrv.formats.answer_formats import _ENDS
from mlxsrv.formats.format_names import NONE, names
from mlxsrv.text.formats import CALLS, THOUGHTS, formats_of


def test_each_name_has_a_format_and_each_format_a_name() -> None:
    assert {*CALLS} == {*names("calls")} - {NONE}
    assert {*THOUGHTS} == {*names("thoughts")}
    assert {*_ENDS} <= {*CALLS, *THOUGHTS}


def test_without_a_name_nothing_is_read() -> None:
    formats = formats_of((NONE, NONE))
    assert formats.calls is None
    assert not formats.thoughts.thinks
