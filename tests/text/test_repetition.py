import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.generation.parameters import RepetitionLimit
from mlxsrv.text.repetition import RepetitionGuard


def found_at(tokens: list[int], limit: RepetitionLimit) -> int | None:
    """The number of tokens that have come when the guard finds the repetition."""
    guard = RepetitionGuard(limit)
    for number, token in enumerate(tokens):
        guard.feed(token)
        if guard.found:
            return number + 1
    return None


def repeats(tokens: list[int], limit: RepetitionLimit) -> bool:
    """The rule, read from the end of a text."""
    return any(
        tokens[-size * limit.count :] == tokens[-size:] * limit.count
        for size in range(limit.shortest, limit.longest + 1)
    )


@pytest.mark.parametrize(
    ("tokens", "limit", "found"),
    [
        ([1, 2, 1, 2, 1, 2], RepetitionLimit(4, count=3), 6),
        ([1, 1, 1], RepetitionLimit(4, count=3), 3),
        ([1, 1, 1, 1], RepetitionLimit(4, 2, 3), None),
        ([1, 1, 1, 1, 1, 1], RepetitionLimit(4, 2, 3), 6),
        ([1, 2, 3, 4, 5] * 3, RepetitionLimit(4, count=2), None),
        ([9, *[1, 2, 3] * 20], RepetitionLimit(3, 3, 20), 61),
        (list(range(50)), RepetitionLimit(8), None),
    ],
)
def test_a_sequence_that_comes_so_often_is_found(
    tokens: list[int], limit: RepetitionLimit, found: int | None
) -> None:
    assert found_at(tokens, limit) == found


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(2, 4),
)
def test_it_is_found_with_the_first_token_that_completes_it(
    tokens: list[int], longest: int, shortest: int, count: int
) -> None:
    limit = RepetitionLimit(longest, shortest, count)
    ends = (end for end in range(1, len(tokens) + 1) if repeats(tokens[:end], limit))
    assert found_at(tokens, limit) == next(ends, None)
