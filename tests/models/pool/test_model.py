"""The states of a model: what may follow what, and what each of them says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsrv.models.catalogue.catalogue import ModelEntry, ModelSource
from mlxsrv.models.pool.model import FOLLOWING, LoadState, Model
from mlxsrv.settings import Settings

UNUSED, LOADED = LoadState.UNUSED, LoadState.LOADED


def way(start: LoadState, end: LoadState) -> list[LoadState]:
    """The states after `start` on a shortest way to `end`, by the table."""
    ways = [[start]]
    for path in ways:
        if path[-1] is end:
            return path[1:]
        ways += [[*path, state] for state in FOLLOWING[path[-1]] if state not in path]
    raise AssertionError(f"no way leads from {start} to {end}")


def in_state(state: LoadState) -> Model:
    model = Model(ModelEntry("m", ModelSource(Path("/m")), 0), Settings())
    for each in way(UNUSED, state):
        model.enter(each)
    return model


@pytest.mark.parametrize("before", LoadState)
def test_a_model_enters_what_the_table_allows_and_nothing_else(before: LoadState) -> None:
    for after in LoadState:
        model = in_state(before)
        if after in FOLLOWING[before]:
            model.enter(after)
            assert model.state is after
        else:
            with pytest.raises(RuntimeError, match=f"m is {before.name.lower()}, "):
                model.enter(after)
            assert model.state is before


def test_every_state_is_reached_and_left() -> None:
    assert FOLLOWING.keys() == {*LoadState}
    for state in LoadState:
        assert LOADED in [*way(state, LOADED), state]
        assert UNUSED in [*way(state, UNUSED), state]


def test_no_model_is_loaded_without_room() -> None:
    """The one way to the device thread leads through the queue."""
    for state in LoadState:
        if state is not LoadState.WAITING:
            assert LoadState.LOADING not in FOLLOWING[state]
        if state not in (LoadState.LOADING, LoadState.CLOSING):
            assert LOADED not in FOLLOWING[state]


def test_each_state_says_what_it_means() -> None:
    told = {
        state: (model.status, model.has_memory, model.busy, model.progressing)
        for state in LoadState
        for model in [in_state(state)]
    }
    assert told == {
        LoadState.UNUSED: ("unused", False, False, False),
        LoadState.PREPARING: ("unused", False, False, True),
        LoadState.FETCHING: ("downloading", False, False, True),
        LoadState.WAITING: ("waiting for room", False, False, False),
        LoadState.LOADING: ("loading", True, True, True),
        LoadState.LOADED: ("loaded", True, False, False),
        LoadState.CLOSING: ("loaded", True, False, False),
    }
