"""Prompts that were read before: what is found, and what is dropped."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.engine.outcomes import KeptPrompt
from mlxsrv.engine.plans import Keep
from mlxsrv.engine.scheduling import prompt_index
from mlxsrv.engine.scheduling.prompt_index import (
    LEAST,
    PromptIndex,
    Source,
    Tokens,
    as_tokens,
    common_prefix,
)
from mlxsrv.generation.parameters import Steering

IDS = st.lists(st.integers(0, 3), max_size=80)
BYTES = 1 << 20


@given(IDS, IDS, IDS)
def test_a_common_prefix_is_what_it_says(head: list[int], a: list[int], b: list[int]) -> None:
    one, two = head + a, head + b
    expected = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))))
    assert common_prefix(np.array(one, np.uint32), np.array(two, np.uint32)) == expected


def prompt(n: int, start: int = 0) -> Tokens:
    return as_tokens(range(start, start + n))


def keep(
    index: PromptIndex,
    tokens: Tokens,
    *,
    bytes: int = 100,
    cuts: bool = True,
    steering: Steering | None = None,
    lasting: bool = False,
) -> int:
    """Keep a prompt, as the runner would."""
    promised = index.promise(tokens, steering, lasting=lasting)
    index.confirm([promised], [KeptPrompt(promised.entry, bytes, cuts)])
    return promised.entry


def test_an_entry_that_can_be_cut_is_of_use_as_far_as_it_is_shared() -> None:
    index = PromptIndex(BYTES)
    entry = keep(index, prompt(200))
    assert index.find(np.concatenate([prompt(100), prompt(50, 1000)])) == Source(entry, tokens=100)
    assert index.find(prompt(300)) == Source(entry, tokens=200)
    assert index.find(prompt(300, 5000)) == Source()


def test_of_many_that_begin_alike_few_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def count(a: Tokens, b: Tokens) -> int:
        nonlocal compared
        compared += 1
        return common_prefix(a, b)

    monkeypatch.setattr(prompt_index, "common_prefix", count)
    index = PromptIndex(BYTES)
    begin = prompt(5000)
    entries = [keep(index, np.concatenate([begin, prompt(9, 6000 + 10 * n)])) for n in range(50)]
    asked = np.concatenate([begin, prompt(5, 6000 + 10 * 30)])
    assert index.find(asked) == Source(entries[30], tokens=5005)
    assert compared <= 3


def test_one_that_cannot_be_cut_serves_only_prompts_that_begin_with_all_of_it() -> None:
    index = PromptIndex(BYTES)
    entry = keep(index, prompt(100), cuts=False)
    assert index.find(prompt(99)) == Source()
    assert index.find(np.concatenate([prompt(90), prompt(50, 1000)])) == Source()
    assert index.find(prompt(120)) == Source(entry, tokens=100)


def test_an_entry_is_for_prompts_that_are_steered_alike() -> None:
    index = PromptIndex(BYTES)
    steering = Steering(attachment=1, values=((3, 2.0),))
    entry = keep(index, prompt(100), steering=steering)
    assert index.find(prompt(100)) == Source()
    assert index.find(prompt(100), steering) == Source(entry, tokens=100)


def test_what_a_longer_entry_covers_is_dropped_only_if_it_can_be_cut() -> None:
    index = PromptIndex(BYTES)
    first = keep(index, prompt(100))
    keep(index, prompt(150))
    assert len(index) == 1
    assert index.take_dropped() == (first,)
    keep(index, prompt(100, 5000), cuts=False)
    keep(index, prompt(150, 5000), cuts=False)
    assert len(index) == 3


def test_short_beginnings_are_not_kept_nor_looked_for() -> None:
    index = PromptIndex(BYTES)
    assert not index.wants(LEAST - 1)
    assert index.wants(LEAST)
    entry = keep(index, prompt(LEAST))
    assert index.find(prompt(LEAST - 1)) == Source()
    assert index.find(prompt(LEAST)) == Source(entry, tokens=LEAST)


def test_the_least_recently_used_go_first() -> None:
    index = PromptIndex(300)
    entries = [keep(index, prompt(100, 1000 * i)) for i in range(3)]
    index.use(entries[0], 100)
    keep(index, prompt(100, 9000))
    assert index.bytes == 300
    assert index.take_dropped() == (entries[1],)
    assert index.find(prompt(100)) == Source(entries[0], tokens=100)
    assert index.find(prompt(100, 1000)) == Source()


def test_an_entry_larger_than_all_that_may_be_kept_drops_no_other() -> None:
    index = PromptIndex(300)
    small = keep(index, prompt(100))
    large = keep(index, prompt(200, 1000), bytes=301)
    assert index.take_dropped() == (large,)
    assert index.find(prompt(100)) == Source(small, tokens=100)


def test_of_a_growing_chat_the_newest_and_the_first_checkpoint_stay_longest() -> None:
    index = PromptIndex(300)
    system = keep(index, prompt(100), cuts=False, lasting=True)
    older = keep(index, prompt(150), cuts=False)
    newest = keep(index, prompt(200), cuts=False)
    gone: list[int] = []
    for number in range(2):
        keep(index, prompt(100, 1000 * (number + 1)))
        gone += index.take_dropped()
    assert gone == [older, system]
    assert index.find(prompt(200)) == Source(newest, tokens=200)


def test_what_an_entry_can_be_cut_back_to_is_not_kept_beside_it() -> None:
    index = PromptIndex(BYTES)
    whole = keep(index, prompt(200))
    part = keep(index, prompt(100))
    assert index.take_dropped() == (part,)
    assert index.find(prompt(100)) == Source(whole, tokens=100)
    assert index.bytes == 100
    uncut = keep(index, prompt(200, 5000), cuts=False)
    keep(index, prompt(100, 5000), cuts=False)
    assert index.find(prompt(250, 5000)) == Source(uncut, tokens=200)
    assert len(index) == 3


def test_what_a_row_was_lent_comes_back_with_its_uses() -> None:
    index = PromptIndex(300)
    views = keep(index, prompt(100))
    for _ in range(2):
        index.use(views, 100)
    uses = index.move_out(views, 100)
    assert uses == (100, 100)
    assert index.move_out(views, 100) is None, "it is there no more"
    promised = index.promise(prompt(150), asked=100, uses=uses)
    grown = promised.entry
    index.confirm([promised], [KeptPrompt(grown, 100, True)])
    index.take_dropped()
    others = [keep(index, prompt(100, 1000 * n)) for n in range(1, 4)]
    assert index.take_dropped() == (others[0],)
    assert index.find(prompt(150)) == Source(grown, tokens=150)


def test_no_row_is_lent_what_cannot_be_cut_back() -> None:
    index = PromptIndex(BYTES)
    assert index.move_out(keep(index, prompt(100), cuts=False), 100) is None
    assert len(index) == 1


def test_of_several_that_share_as_much_the_shortest_is_found() -> None:
    index = PromptIndex(BYTES)
    begin = prompt(100)
    entries = [
        keep(index, np.concatenate([begin, prompt(size, 1000 * size)])) for size in (70, 30, 50)
    ]
    for _ in range(2):
        assert index.find(np.concatenate([begin, prompt(9, 9000)])) == Source(
            entries[1], tokens=100
        )
        index.use(entries[1], 100)


@pytest.mark.parametrize(
    ("wanted", "free", "stay"),
    [(0, 0, 3), (1, 100, 2), (100, 100, 2), (101, 200, 1), (900, 300, 0)],
)
def test_kept_prompts_give_way_to_so_many_bytes(wanted: int, free: int, stay: int) -> None:
    index = PromptIndex(BYTES)
    entries = [keep(index, prompt(100, 1000 * i)) for i in range(3)]
    promised = index.promise(prompt(100, 9000)).entry
    changes = index.changes
    assert index.give_way(wanted) == free
    assert (index.bytes, len(index)) == (300 - free, stay)
    assert index.take_dropped() == tuple(entries[: 3 - stay])
    assert (index.changes > changes) == (free > 0), "who was to go on from one looks again"
    assert index.find(prompt(100, 9000)) == Source(promised, tokens=100)


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_promised_is_of_use_unless_it_could_not_be_kept(kept: bool) -> None:
    index = PromptIndex(BYTES)
    promised = index.promise(prompt(100))
    number = promised.entry
    assert index.find(prompt(100)) == Source(number, tokens=100)
    assert (len(index), index.bytes) == (0, 0)
    index.confirm([promised], [KeptPrompt(number, 10, True)] if kept else [])
    assert index.find(prompt(100)) == (Source(number, tokens=100) if kept else Source())
    assert index.bytes == (10 if kept else 0)


def test_what_is_fetched_is_of_use_once_it_is_there() -> None:
    index = PromptIndex(BYTES)
    number = index.promise(prompt(100), fetched=True).entry
    assert index.find(prompt(100)) == Source()
    assert index.promised == [100]
    index.confirm([Keep(number, 70)], [KeptPrompt(number, 10, True)])
    assert index.find(prompt(100)) == Source(number, tokens=70)
    assert index.promised == []
    assert index.list_unwritten() == [], "it is on disk"


def test_a_row_is_gone_on_from_where_it_shares_more() -> None:
    index = PromptIndex(BYTES)
    entry = keep(index, prompt(100))
    held = [(7, prompt(200)), (8, prompt(300, 5000))]
    assert index.find(prompt(150), rows=lambda _: held) == Source(row=7, tokens=150)
    assert index.find(prompt(100), rows=lambda _: held) == Source(entry, tokens=100)


def test_what_a_broken_row_began_from_is_dropped() -> None:
    index = PromptIndex(BYTES)
    begun, other = keep(index, prompt(100), cuts=False), keep(index, prompt(100, 5000))
    index.drop_prefixes(prompt(150))
    assert index.take_dropped() == (begun,)
    assert index.find(prompt(100, 5000)) == Source(other, tokens=100)


def test_no_bytes_keep_nothing() -> None:
    assert not PromptIndex(0).wants(1000)
