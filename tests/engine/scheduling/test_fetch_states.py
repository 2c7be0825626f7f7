"""The states of a fetch: which may follow which."""

from __future__ import annotations

from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.prompt_index import as_tokens
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.engine.scheduling.store_schedule import _NEXT, Fetch, FetchState
from mlxsrv.generation.parameters import Sampling

PATHS = {
    FetchState.QUEUED: [],
    FetchState.READING: [FetchState.READING],
    FetchState.RESTORING: [FetchState.READING, FetchState.RESTORING],
    FetchState.OVER: [FetchState.OVER],
}
"""A way to each state from the first."""


def reach(state: FetchState) -> Fetch:
    job = Job(7, "m", (1, 2, 3), 4, frozenset({9}), Sampling())
    fetch = Fetch(Row(job, as_tokens(job.prompt)), 2)
    for each in PATHS[state]:
        fetch.enter(each)
    return fetch


def test_a_state_follows_another_only_by_the_table() -> None:
    assert {*_NEXT} == {*FetchState}
    for state in FetchState:
        assert state is FetchState.OVER or FetchState.OVER in _NEXT[state]
        for following in FetchState:
            fetch, refused = reach(state), False
            try:
                fetch.enter(following)
            except RuntimeError:
                refused = True
            case = f"{state.value}, then {following.value}"
            assert refused == (following not in _NEXT[state]), case
            assert fetch.state is (state if refused else following), case
