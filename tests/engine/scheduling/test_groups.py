"""Groups: which rows share arrays, in which slots, and what that takes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsrv.engine.events import KVCost, kv_bytes
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.scheduling.groups import NEXT, STEP, Groups, round_up
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
    return Row(Job(number, "m", (1,), 1000, frozenset(), Sampling()), prompt)


def shapes(groups: Groups) -> list[tuple[tuple[int, ...], int, int]]:
    changed = groups.take_changed()
    assert changed is not None
    return [(group.rows, group.slots, group.columns) for group in changed]


def test_classes_are_a_step_apart_and_then_an_eighth_at_most() -> None:
    classes = sorted({round_up(tokens) for tokens in range(1, 40_000)})
    assert classes[:3] == [STEP, 2 * STEP, 3 * STEP]
    for one, other in pairwise(classes):
        assert other - one <= max(STEP, one / 8)
    for tokens in range(1, 40_000):
        assert tokens <= round_up(tokens)
        assert round_up(round_up(tokens)) == round_up(tokens)


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
    """Padding a row of 512 columns to 768 takes 2,560 bytes."""
    for first, second in (((300, short), (600, long)), ((600, long), (300, short))):
        groups = Groups(facts(padding=5000), 32)
        for length, number in (first, second):
            groups.join([make(length + each, length) for each in range(number)])
        assert len(shapes(groups)) == count


@pytest.mark.parametrize(
    ("rows", "most", "slots"), [(1, 32, 1), (3, 32, 4), (7, 32, 8), (9, 32, 12), (29, 30, 30)]
)
def test_slots_grow_in_steps(rows: int, most: int, slots: int) -> None:
    groups = Groups(facts(), most)
    groups.join([make(number, 5) for number in range(rows)])
    [(_, found, _)] = shapes(groups)
    assert found == slots


def test_columns_grow_before_they_are_written() -> None:
    for proposed in (0, 8):
        groups = Groups(facts(), 4, proposed)
        row = make(0, 4000)
        groups.join([row])
        assert shapes(groups) == [((0,), 1, 4096)]
        while row.length + NEXT + proposed <= 4096:
            assert groups.take_changed() is None
            row.draw(1)
        assert shapes(groups) == [((0,), 1, 4608)]
        assert groups.take_changed() is None


def test_a_row_that_outgrows_its_class_moves_alone() -> None:
    groups = Groups(facts(padding=0), 4)
    rows = [make(0, 250), make(1, 5)]
    groups.join(rows)
    assert shapes(groups) == [((0, 1), 2, STEP)]
    for _ in range(5):
        rows[0].draw(1)
        rows[1].draw(1)
    assert shapes(groups) == [((0,), 1, 2 * STEP), ((1,), 1, STEP)]


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


def test_without_slack_arrays_are_what_their_rows_need() -> None:
    groups = Groups(facts(), 32)
    rows = [make(number, 100 * number + 5) for number in range(6)]
    groups.join(rows)
    shapes(groups)
    assert groups.bytes > groups.count_bytes(groups.rows)
    assert groups.arrange(0) == 0
    assert [ids for ids, _, _ in shapes(groups)] == [(3, 4, 5), (0, 1, 2)]
    assert groups.bytes == groups.count_bytes(groups.rows)
    groups.arrange(0)
    assert groups.take_changed() is None


LENGTHS = st.integers(1, 5000)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["join", "leave", "draw"]), LENGTHS), max_size=40),
    st.integers(-1, 40_000),
    st.integers(0, 8),
)
def test_bytes_follow_from_lengths(
    script: list[tuple[str, int]], padding: int, proposed: int
) -> None:
    """Rows need what their lengths of now need. Arrays take no more beyond that than the slack, and
    it is known before it is taken."""
    groups = Groups(facts(padding), 12, proposed)
    rows: list[Row] = []
    for number, (action, value) in enumerate(script):
        if action == "join" and len(rows) < 12:
            rows.append(make(number, value))
            groups.join(rows[-1:])
        elif action == "leave" and rows:
            groups.remove(rows.pop(value % len(rows)))
        else:
            for row in rows:
                row.draw(1)
        assert groups.count == len(groups.rows) == len(rows)
        needed = sum(kv_bytes(COSTS, round_up(row.length + NEXT + proposed)) for row in rows)
        assert groups.count_bytes(groups.rows) == needed
        if not rows:
            continue
        slack = 40 * value if value % 3 else 0
        more = groups.arrange(slack)
        assert 0 <= more <= slack
        before = groups.bytes + groups.growth
        taken = groups.take_changed()
        assert groups.bytes == before == needed + more
        lengths = {row.id: row.length for row in rows}
        if taken is not None:
            assert sorted(id for group in taken for id in group.rows) == sorted(lengths)
        for group in taken or ():
            assert len(group.rows) <= group.slots <= 12
            assert max(lengths[row] for row in group.rows) + 1 + proposed <= group.columns
