"""msgspec's errors in plain words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from mlxsrv.wording import error_in_words, values_at


def test_an_error_names_no_type_of_python() -> None:
    for kind, value, told in (
        (float | None, "hot", "expected a number, got a text"),
        (Annotated[float, Meta(le=2)], 3, "expected a number of at most 2"),
        (Annotated[float, Meta(gt=0.5)], 0, "expected a number above 0.5"),
        (Annotated[int, Meta(ge=1)], 0, "expected a whole number of at least 1"),
        (Annotated[int, Meta(lt=9)], 9, "expected a whole number of at most 8"),
        (Annotated[int, Meta(multiple_of=2)], 3, "expected a whole number that is a multiple of 2"),
        (float, msgspec.Raw(b"1e999"), "the number is too large"),
        (int, msgspec.Raw(b"1" * 5000), "the number is too large"),
        (int, 1.5, "expected a whole number, got a number"),
        (int | str | list[int] | None, {}, "expected a whole number, a text or a list, got an obj"),
        (str, None, "expected a text, got null"),
        (bool, [], "expected true or false, got a list"),
        (None, 1, "expected null, got a whole number"),
        (Annotated[str, Meta(max_length=1)], "ab", "expected a text of at most 1 character"),
        (Annotated[str, Meta(pattern="^, got `a`$")], "b", "expected a text that matches '^, got "),
        (Annotated[list[int], Meta(min_length=2)], [1], "expected a list of at least 2 items"),
        (Annotated[dict[str, int], Meta(max_length=1)], {"a": 1, "b": 2}, "of at most 1 key"),
        (tuple[int, int], [1], "expected a list of 2 items"),
        (Literal["a", "b"], "c", "it cannot be 'c'"),
        (Literal[1, 2], 3, "it cannot be 3"),
        (bytes, "?", "it is not valid base64"),
    ):
        assert told in in_words(kind, value), kind


def in_words(kind: Any, value: object) -> str:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.json.decode(msgspec.json.encode(value), type=kind)
    return error_in_words(str(error.value))


class _Inner(msgspec.Struct, tag="in", tag_field="kind"):
    mode: Literal["a", "b"] | int | None = None


class _Other(msgspec.Struct, tag="other", tag_field="kind"):
    pass


class _Whole(msgspec.Struct):
    items: list[_Inner | _Other]
    named: dict[str, Literal[1, 2]]


def test_values_that_a_type_lists_are_found_by_their_path() -> None:
    whole = msgspec.inspect.type_info(_Whole)
    for steps, values in (
        (["items", "[3]", "mode"], ["a", "b"]),
        (["items", "[0]", "kind"], ["in", "other"]),
        (["named", "[...]"], [1, 2]),
        (["items"], []),
        (["nowhere", "x"], []),
    ):
        assert [*values_at(whole, steps)] == values, steps
    assert error_in_words("Invalid enum value 'x'", ["a", 1]) == "it cannot be 'x', only 'a' or 1"
