"""The bytes of groups: a bound that is quick to compute is never below what they take."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.engine.events import KVCost
from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.scheduling.groups import Fit, Groups
from mlxsrv.engine.scheduling.prompt_index import as_tokens
from mlxsrv.engine.scheduling.row import Row
from tests.support.fake_device import FACTS
from tests.support.situations import job

ROWS = 64
COSTS = st.sampled_from(
    [(KVCost(1000),), (KVCost(1000), KVCost(3000, 300)), (KVCost(7, 0, 90000),)]
)
LENGTHS = st.one_of(st.integers(1, 700), st.integers(1, 30_000))


class Rows:
    """Groups, and the rows that come, go and draw."""

    def __init__(self, facts: TextFacts) -> None:
        self.groups = Groups(facts, ROWS)
        self._number = 0

    def make(self, length: int) -> Row:
        self._number += 1
        order = job(self._number, length, 4000)
        return Row(order, self._number, as_tokens(order.prompt))

    def draw(self, tokens: int) -> None:
        self.groups.take_changed(tokens)
        for row in self.groups.rows:
            for _ in range(tokens):
                row.draw(1)


@given(
    costs=COSTS,
    padding=st.sampled_from([0, 1 << 20, 1 << 40]),
    script=st.lists(st.tuples(st.sampled_from("aaard"), LENGTHS), max_size=30),
    joining=st.lists(LENGTHS, max_size=8),
    tokens=st.integers(1, 300),
)
def test_no_grouping_takes_more_than_the_bound(
    costs: tuple[KVCost, ...],
    padding: int,
    script: list[tuple[str, int]],
    joining: list[int],
    tokens: int,
) -> None:
    rows = Rows(msgspec.structs.replace(FACTS, kv_costs=costs, padding=padding))
    groups = rows.groups
    for action, number in script:
        if action == "a" and len(groups.rows) < ROWS:
            groups.add([rows.make(number) for _ in range(1 + number % 15)])
        elif action == "r" and groups.rows:
            groups.remove(groups.rows[number % len(groups.rows)])
        elif action == "d":
            rows.draw(1 + number % 40)
        coming = [rows.make(length) for length in joining]
        bound = groups.bound(coming, tokens)
        assert bound >= groups.bytes
        for fit in Fit:
            for some in (coming, coming[:1], []):
                assert bound >= groups.bytes_with(some, tokens, fit)


def test_the_bound_is_near_what_is_taken() -> None:
    rows = Rows(FACTS)
    rows.groups.add([rows.make(2000) for _ in range(ROWS)])
    rows.draw(1)
    taken = rows.groups.bytes_with([rows.make(2000)], 64)
    assert rows.groups.bound([rows.make(2000)], 64) < 1.5 * taken
