"""Prompt lookup proposes what followed the same tokens before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.engine.scheduling.prompt_lookup import AT_ONCE, GRAM, PromptLookup
from tests.support.growth import assert_linear

TEXTS = st.lists(st.integers(0, 3), max_size=80)  # few tokens, so that they repeat


def propose(text: Sequence[int], most: int) -> list[int]:
    """The proposals by their definition: the match is followed from the text's beginning on."""
    place = matched = 0
    for end in range(1, len(text) + 1):
        if matched and text[place] == text[end - 1]:
            place, matched = place + 1, matched + 1
            continue
        last = list(text[end - GRAM : end]) if end > GRAM else None
        places = [i for i in range(GRAM, end) if list(text[i - GRAM : i]) == last]
        place, matched = (places[-1], GRAM) if places else (0, 0)
    longer = list(text)
    for index in range(min(matched, most)):
        longer.append(longer[place + index])
    return longer[len(text) :]


@given(TEXTS, st.integers(0, 12))
def test_proposals_are_those_of_the_definition(text: list[int], most: int) -> None:
    assert PromptLookup(text).propose(most) == propose(text, most)


@given(st.lists(TEXTS, max_size=6), st.integers(1, 8))
def test_it_does_not_matter_in_what_parts_a_text_comes(parts: list[list[int]], most: int) -> None:
    lookup = PromptLookup()
    for part in parts:
        lookup.extend(part)
    assert lookup.propose(most) == propose([token for part in parts for token in part], most)


@given(TEXTS, st.integers(1, 8))
def test_what_is_proposed_followed_the_same_tokens_before(text: list[int], most: int) -> None:
    proposed = PromptLookup(text).propose(most)
    if proposed:
        last = [*text[-GRAM:], proposed[0]]
        width = len(last)
        assert last in [text[i : i + width] for i in range(len(text) - width + 1)]


def test_a_match_stays_with_its_place_where_others_are_later() -> None:
    file = [1, 2, 3, 4, 5, 6, 7, 8]
    lookup = PromptLookup([*file, 9, 5, 6, 7, 0, 9, *file[:7]])
    assert lookup.propose(1) == [8]  # and not 0, which followed 5, 6, 7 of late


def test_a_match_proposes_as_many_tokens_as_it_has() -> None:
    file = list(range(10, 40))
    for matched in range(GRAM, 12):
        assert (
            PromptLookup([*file, 1, *file[:matched]]).propose(8)
            == (file[matched : matched + min(matched, 8)])
        )


def test_a_text_that_repeats_its_end_goes_on_repeating_it() -> None:
    lookup = PromptLookup([1, 2, *[7, 8] * 6])
    assert lookup.propose(5) == [7, 8, 7, 8, 7]


def test_a_text_that_repeats_nothing_has_no_proposals() -> None:
    assert PromptLookup(list(range(1000))).propose(8) == []
    assert PromptLookup([1, 2, 3, 1, 2, 4, 2, 3]).propose(8) == []  # two tokens are a chance
    assert PromptLookup().propose(8) == []


def test_a_long_prompt_is_looked_at_in_several_calls() -> None:
    file = list(range(2 * AT_ONCE))
    lookup = PromptLookup([*file, *file[:9]])
    calls = 0
    while not lookup.propose(4):
        assert calls < 3
        lookup.extend([])
        calls += 1
    assert calls == 2
    assert lookup.propose(4) == file[9:13]


@pytest.mark.parametrize("kind", ["distinct", "alike"])
def test_no_call_takes_long(kind: str) -> None:
    """Each looks at a bounded number of tokens, and each token costs the same."""

    def read(size: int) -> None:
        prompt = list(range(size)) if kind == "distinct" else [7] * size
        lookup = PromptLookup()
        looked = [lookup.extend(prompt)]
        while sum(looked) < size:
            looked.append(lookup.extend([]))
        assert max(looked) <= AT_ONCE

    assert_linear(read, 2000)
