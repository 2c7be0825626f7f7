"""The states of a row: which may follow which."""

from __future__ import annotations

import pytest

from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.prompt_index import as_tokens
from mlxsrv.engine.scheduling.row import _NEXT, Row, RowState
from mlxsrv.generation.parameters import Sampling

_READ = [RowState.WAITING, RowState.PREFILLING]
PATHS = {
    RowState.QUEUED: [],
    RowState.WAITING: [RowState.WAITING],
    RowState.FETCHING: [RowState.FETCHING],
    RowState.PREFILLING: _READ,
    RowState.FRESH: [*_READ, RowState.FRESH],
    RowState.DECODING: [*_READ, RowState.FRESH, RowState.DECODING],
    RowState.PREEMPTED: [*_READ, RowState.FRESH, RowState.PREEMPTED],
    RowState.ENDED: [RowState.ENDED],
    RowState.BROKEN: [*_READ, RowState.BROKEN],
}
"""A way to each state from the first."""


def reach(state: RowState) -> Row:
    job = Job(7, "m", (1, 2, 3), 4, frozenset({9}), Sampling())
    row = Row(job, as_tokens(job.prompt))
    for each in PATHS[state]:
        row.enter(each)
    assert row.state is state
    return row


@pytest.mark.parametrize("state", RowState)
def test_a_state_follows_another_only_by_the_table(state: RowState) -> None:
    for following in RowState:
        row = reach(state)
        if following in _NEXT[state]:
            row.enter(following)
            assert row.state is following
        else:
            with pytest.raises(RuntimeError, match=f"row 7 is {state.value}"):
                row.enter(following)
            assert row.state is state


def test_the_table_has_every_state_and_each_can_be_reached_and_left_for_an_end() -> None:
    assert {*_NEXT} == {*RowState}
    followers = {each for following in _NEXT.values() for each in following}
    assert followers == {*RowState} - {RowState.QUEUED}
    for state in RowState:
        row = reach(state)
        assert row.ended == (not _NEXT[state])
        assert row.ended or RowState.ENDED in _NEXT[state]


def test_a_fresh_rows_cache_holds_its_text_but_for_the_last_token() -> None:
    row = reach(RowState.FRESH)
    assert (row.text.tolist(), row.length, row.held) == ([1, 2, 3], 3, 2)
    row.enter(RowState.DECODING)
    assert row.held == 3
    row.draw(5)
    assert (row.text.tolist(), row.length, row.held) == ([1, 2, 3, 5], 4, 4)
    for state in (RowState.PREEMPTED, RowState.PREFILLING, RowState.FRESH):
        row.enter(state)
    assert row.held == 3


def test_a_row_finishes_at_an_end_token_or_its_limit() -> None:
    row = reach(RowState.DECODING)
    assert [row.draw(token) for token in (5, 9, 6, 6)] == [None, "stop", None, "length"]
    assert (row.drawn, row.length) == ([5, 9, 6, 6], 7)
