"""Groups: which rows share arrays, in which slots, and what that takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsrv.engine.events import KVCost
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.scheduling.groups import STEP, Groups, Growth
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.generation.parameters import Sampling

COSTS = (KVCost(10), KVCost(3, window=100), KVCost(0, fixed=7))


def facts(padding: int = 1 << 40) -> TextFacts:
    return TextFacts(
        batched=True,
        cuts=True,
        pads=True,
        padding=padding,
        vocabulary=9,
        prompt_cache_bytes=0,
        kv_costs=COSTS,
    )


def make(number: int, length: int) -> Row:
    prompt = np.arange(length, dtype=np.uint32)
    return Row(Job(number, "m", (1,), 99, frozenset(), Sampling()), prompt)


def shapes(groups: Groups, tokens: int = 1) -> list[tuple[tuple[int, ...], int, int]]:
    changed = groups.take_changed(tokens)
    assert changed is not None
    return [(group.rows, group.slots, group.columns) for group in changed]


def test_the_last_row_takes_the_slot_of_one_that_leaves() -> None:
    groups = Groups(facts(), 32)
    rows = [make(number, 5) for number in range(5)]
    groups.join(rows)
    assert shapes(groups) == [((0, 1, 2, 3, 4), 8, STEP)]
    assert groups.take_changed() is None
    groups.remove(rows[1])
    assert [ids for ids, _, _ in shapes(groups)] == [(0, 4, 2, 3)]
    groups.remove(rows[3])
    assert [ids for ids, _, _ in shapes(groups)] == [(0, 4, 2)]


def test_a_row_that_comes_takes_the_slot_of_one_that_leaves() -> None:
    groups = Groups(facts(), 32)
    rows = [make(number, 5) for number in range(6)]
    groups.join(rows[:4])
    shapes(groups)
    groups.remove(rows[0])
    groups.remove(rows[2])
    groups.join(rows[4:5])
    assert [ids for ids, _, _ in shapes(groups)] == [(4, 1, 3)]
    groups.remove(rows[1])
    groups.join(rows[5:])
    assert [ids for ids, _, _ in shapes(groups)] == [(4, 5, 3)]


@pytest.mark.parametrize(("short", "long", "count"), [(3, 1, 2), (1, 3, 1)])
def test_groups_are_apart_if_padding_all_shorter_rows_takes_much(
    short: int, long: int, count: int
) -> None:
    """Padding a row of 300 tokens to 600 takes 3,000 bytes."""
    for first, second in (((300, short), (600, long)), ((600, long), (300, short))):
        groups = Groups(facts(padding=5000), 32)
        for length, number in (first, second):
            groups.join([make(length + each, length) for each in range(number)])
        assert len(groups) == count


@pytest.mark.parametrize(
    ("rows", "most", "slots"), [(1, 32, 1), (3, 32, 4), (7, 32, 8), (9, 32, 12), (29, 30, 30)]
)
def test_slots_grow_in_steps(rows: int, most: int, slots: int) -> None:
    groups = Groups(facts(), most)
    groups.join([make(number, 5) for number in range(rows)])
    [(_, found, _)] = shapes(groups)
    assert found == slots


def test_columns_grow_by_an_eighth_before_they_are_written() -> None:
    groups = Groups(facts(), 4)
    row = make(0, 4000)
    groups.join([row])
    [(_, _, columns)] = shapes(groups)
    assert columns == 4096
    while len(row.drawn) < 95:
        row.draw(1)
        assert groups.take_changed() is None
    assert groups.take_changed(2) is not None  # for a step of two tokens
    row.draw(1)
    assert groups.take_changed() is None
    for _ in range(600):
        row.draw(1)
    [(_, _, columns)] = shapes(groups)
    assert columns == 5376


def test_arrays_shrink_when_rows_change_and_half_is_unused() -> None:
    groups = Groups(facts(), 32)
    rows = [make(0, 2000), *(make(number, 5) for number in range(1, 9))]
    groups.join(rows)
    assert shapes(groups) == [((*range(9),), 12, 2048)]
    groups.remove(rows[8])
    assert shapes(groups)[0][1:] == (12, 2048)
    groups.remove(rows[0])
    assert shapes(groups)[0][1:] == (12, STEP)
    for row in rows[6:8]:
        groups.remove(row)
    assert shapes(groups)[0][1:] == (8, STEP)


def test_bytes_are_those_of_all_slots_and_columns() -> None:
    groups = Groups(facts(padding=-1), 32)
    groups.join([make(number, 5) for number in range(3)])
    groups.join([make(3, 1000)])
    shapes(groups)
    assert groups.bytes == 4 * (256 * 10 + 300 + 7) + 1 * (1024 * 10 + 300 + 7)


def test_arrays_count_until_their_rows_have_gone_over_to_those_of_a_row_that_joins() -> None:
    """Two groups are apart until a row comes whose length is between theirs."""
    groups = Groups(facts(padding=5000), 32)
    groups.join([make(0, 300), make(1, 300)])
    groups.join([make(2, 600)])
    assert len(shapes(groups)) == 2
    middle, before = make(3, 450), groups.bytes
    foreseen = groups.arrays.join([middle]).bytes_after(Growth(1))
    groups.join([middle])
    assert groups.bytes == before, "nothing has gone over yet"
    [(rows, slots, columns)] = shapes(groups)
    assert sorted(rows) == [0, 1, 2, 3]
    absorbed = groups.measure(1, 768)
    assert foreseen == groups.measure(slots, columns) + absorbed
    assert groups.bytes == foreseen - absorbed


LENGTHS = st.integers(1, 2000)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), LENGTHS), max_size=24),
    st.lists(LENGTHS, max_size=4),
    st.integers(-1, 40_000),
    st.integers(1, 20),
)
def test_bytes_are_known_before_they_are_taken(
    before: list[tuple[bool, int]], joining: list[int], padding: int, tokens: int
) -> None:
    groups = Groups(facts(padding), 12)
    for number, (leaves, length) in enumerate(before):
        if leaves and groups.rows:
            groups.remove(groups.rows[length % len(groups.rows)])
        else:
            groups.join([make(number, length)])
        assert groups.count == len(groups.rows)
        if length % 2:
            groups.take_changed()
    foreseen = groups.arrays.join([make(100 + each, each) for each in joining]).bytes_after(
        Growth(tokens, beyond_limits=True)
    )
    for number, length in enumerate(joining):
        groups.join([make(100 + number, length)])
    absorbed = groups._absorbed  # arrays that go when their rows have gone over to others
    taken = groups.take_changed(tokens)
    assert groups.bytes + absorbed == foreseen
    if taken is not None:
        assert sorted(id for group in taken for id in group.rows) == sorted(
            row.id for row in groups.rows
        )
    lengths = {row.id: row.length for row in groups.rows}
    for group in taken or ():
        assert len(group.rows) <= group.slots
        assert max(lengths[row] for row in group.rows) + tokens <= group.columns
