"""The monitor: what it keeps, what it forgets, and its numbers against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.engine.events import Activations
from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.steering import FeatureStatistics
from mlxsrv.service.steering.monitor import Monitor, RunningStatistics


def watching(**options: int | bool | list[int]) -> Monitor:
    monitor = Monitor()
    monitor.configure(enabled=True, **options)  # type: ignore[arg-type]
    return monitor


def tell(monitor: Monitor, *tokens: dict[int, float], completion: str = "chatcmpl-1") -> None:
    for position, values in enumerate(tokens):
        monitor.record(completion, Activations(1, position, tuple(values.items())))


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=50), st.floats(-1e6, 1e6))
def test_running_numbers_are_numpys(values: list[float], offset: float) -> None:
    values = [value + offset for value in values]
    running = RunningStatistics()
    for value in values:
        running.note(value)
    assert (running.count, running.min, running.max) == (len(values), min(values), max(values))
    assert running.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
    assert running.active_ratio == np.mean([value > 0 for value in values])
    if len(values) == 1:
        assert running.deviation is None
    else:
        assert running.deviation == pytest.approx(np.std(values, ddof=1), rel=1e-6, abs=1e-4)


def test_nothing_is_noted_until_it_is_asked_for() -> None:
    monitor = Monitor()
    tell(monitor, {1: 2.0})
    assert (monitor.history(10), monitor.statistics()) == ([], [])
    monitor.configure(enabled=True)
    tell(monitor, {1: 2.0})
    monitor.configure(enabled=False)
    tell(monitor, {1: 3.0})
    [kept] = monitor.history(10)
    assert kept.activations == {1: 2.0}


def test_the_history_is_bounded_and_newest_first() -> None:
    monitor = watching(history_size=3)
    tell(monitor, *({7: float(n)} for n in range(5)))
    newest = monitor.history(10)
    assert [entry.token_position for entry in newest] == [4, 3, 2]
    assert [entry.activations for entry in newest] == [{7: 4.0}, {7: 3.0}, {7: 2.0}]
    assert newest[0].timestamp >= newest[-1].timestamp > 0
    assert [entry.token_position for entry in monitor.history(1)] == [4]
    monitor.configure(history_size=2)
    assert [entry.token_position for entry in monitor.history(10)] == [4, 3]
    assert (monitor.report.history_size, monitor.report.history_entries) == (2, 2)


def test_the_history_of_one_completion() -> None:
    monitor = watching()
    tell(monitor, {1: 1.0}, {1: 2.0}, completion="a")
    tell(monitor, {1: 3.0}, completion="b")
    assert [entry.activations[1] for entry in monitor.history(10, "a")] == [2.0, 1.0]
    assert [entry.activations[1] for entry in monitor.history(1, "a")] == [2.0]
    monitor.clear_history("a")
    assert [entry.request_id for entry in monitor.history(10)] == ["b"]
    monitor.clear_history()
    assert monitor.history(10) == []
    assert len(monitor.statistics()) == 1, "the history alone was cleared"


def test_statistics_by_feature() -> None:
    monitor = watching(features=[2, 1])
    tell(monitor, {1: 0.0, 2: 1.0}, {1: 4.0, 2: 3.0})
    one, two = monitor.statistics()
    assert one == FeatureStatistics(
        feature_idx=1, count=2, mean=2.0, std=8**0.5, min=0.0, max=4.0, active_ratio=0.5
    )
    assert (two.feature_idx, two.mean, two.active_ratio) == (2, 2.0, 1.0)
    assert monitor.statistics({2, 5}) == [two]
    monitor.clear_statistics({1, 5})
    assert monitor.statistics() == [two]
    monitor.clear_statistics()
    assert monitor.statistics() == []


def test_the_highest_by_each_metric() -> None:
    monitor = watching()
    tell(monitor, {1: 1.0, 2: 9.0}, {1: 2.0, 2: 0.0}, {1: 3.0}, {3: 5.0})
    order = {
        metric: [found.feature_idx for found in monitor.highest(3, metric)]
        for metric in ("mean", "max", "active_ratio", "count")
    }
    assert order == {
        "mean": [3, 2, 1],
        "max": [2, 3, 1],
        "active_ratio": [1, 3, 2],
        "count": [1, 2, 3],
    }
    assert [found.feature_idx for found in monitor.highest(1, "count")] == [1]


def test_what_is_watched() -> None:
    monitor = Monitor()
    assert (monitor.enabled, monitor.features, monitor.top) == (False, (), 10)
    monitor.configure(enabled=True, features=[5, 3, 5])
    assert (monitor.features, monitor.top) == ((3, 5), 0)
    monitor.configure(top=4)
    assert (monitor.enabled, monitor.features, monitor.top) == (True, (3, 5), 4)
    monitor.configure(top=0)
    with pytest.raises(InvalidRequest) as caught:
        monitor.configure(features=[], history_size=5)
    assert caught.value.param == "top_k"
    state = monitor.report
    assert (state.features, state.history_size) == ((3, 5), 100), "all is as it was"


def test_other_features_begin_other_statistics() -> None:
    monitor = watching()
    tell(monitor, {1: 1.0})
    monitor.configure(enabled=True, history_size=5)
    assert len(monitor.statistics()) == 1
    monitor.configure(features=[1])
    assert monitor.statistics() == []
    assert len(monitor.history(5)) == 1
