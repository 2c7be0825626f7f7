"""Answers of several replicas, merged."""

from __future__ import annotations

import json
import statistics
from typing import Any

import msgspec
import pytest

from mlxsrv.replicas.merging import (
    ReplicaAnswer,
    merge_health,
    merge_history,
    merge_metrics,
    merge_models,
    merge_running,
    merge_statistics,
    pick_highest,
)
from mlxsrv.service.steering.monitor import RunningStatistics
from mlxsrv.wire.management import TopRequest


def answer(id: str, body: Any, status: int = 200) -> ReplicaAnswer:
    return ReplicaAnswer(id, status, body if isinstance(body, bytes) else json.dumps(body).encode())


def test_metrics_have_the_label_of_their_replica() -> None:
    one = b'# HELP a A.\n# TYPE a counter\na{m="x, y} z"} 1.0\na{m="z"} 2.0\n# HELP b B.\nb 1 2\n'
    two = b'# HELP a A.\n# TYPE a counter\na{m="z"} 3.0\n'
    merged = merge_metrics(answer("1", one), [answer("2", two), answer("3", b"no", 500)])
    assert merged.decode().splitlines() == [
        "# HELP a A.",
        "# TYPE a counter",
        'a{m="x, y} z",replica="1"} 1.0',
        'a{m="z",replica="1"} 2.0',
        'a{m="z",replica="2"} 3.0',
        "# HELP b B.",
        'b{replica="1"} 1 2',
    ]


def test_a_model_is_loaded_if_one_replica_has_it() -> None:
    def listed(*loaded: str) -> dict[str, Any]:
        return {"data": [{"id": id, "loaded": id in loaded} for id in "abc"]}

    merged = json.loads(merge_models(answer("1", listed("a")), [answer("2", listed("b"))]))
    states = {"state": "loaded", "reason": None, "download": None}
    expected = listed("a", "b")
    expected["data"][1] |= states
    assert merged == expected, "the other's model"


def test_running_models_are_told_once() -> None:
    one, two = {"models": [{"name": "a"}]}, {"models": [{"name": "b"}, {"name": "a"}]}
    merged = json.loads(merge_running(answer("1", one), [answer("2", two)]))
    assert [model["name"] for model in merged["models"]] == ["a", "b"]


def test_the_history_is_of_all_the_newest_first() -> None:
    one, two = ({"success": True, "data": [{"timestamp": t} for t in ts]} for ts in ((9, 2), (5,)))
    for limit, expected in ((3, [9, 5, 2]), (2, [9, 5]), (1, [9])):
        merged = json.loads(merge_history(answer("1", one), [answer("2", two)], limit=limit))
        assert [entry["timestamp"] for entry in merged["data"]] == expected


def test_statistics_are_those_of_all_tokens_together() -> None:
    samples = ([0.5, 2.0, -1.0], [4.0], [3.0, 0.0])

    def told(values: list[float]) -> dict[str, Any]:
        running = RunningStatistics()
        for value in values:
            running.add(value)
        return {
            "feature_idx": 7,
            "count": running.count,
            "mean": running.mean,
            "std": running.deviation,
            "min": running.min,
            "max": running.max,
            "active_ratio": running.active_ratio,
        }

    first, *others = (
        answer(str(number), {"data": [told(values)]}) for number, values in enumerate(samples)
    )
    [merged] = json.loads(merge_statistics(first, others))["data"]
    whole = told([value for values in samples for value in values])
    assert merged.keys() == whole.keys()
    for name in whole:
        assert abs(merged[name] - whole[name]) < 1e-9, name
    assert abs(merged["std"] - statistics.stdev([0.5, 2, -1, 4, 3, 0])) < 1e-9


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, [3, 2, 1]),
        ({"k": 1, "metric": "count"}, [1]),
        ({"metric": "max", "model": "m"}, [1, 3, 2]),
        ({"k": 2, "metric": "active_ratio"}, [1, 2]),
    ],
)
def test_the_highest_features_are_those_of_all_tokens_together(
    asked: dict[str, Any], expected: list[int]
) -> None:
    def told(number: int, mean: float, count: int) -> dict[str, Any]:
        same = {"std": 0.0, "min": mean, "max": mean, "active_ratio": 1.0}
        return {"feature_idx": number, "count": count, "mean": mean, **same}

    one = [told(1, 9.0, 1), told(2, 4.0, 2)]
    two = [told(1, 0.0, 3), told(3, 5.0, 2)]
    answers = answer("1", {"data": one}), [answer("2", {"data": two}), answer("3", {}, 409)]
    merged = json.loads(pick_highest(*answers, asked=msgspec.convert(asked, TopRequest)))
    assert [each["feature_idx"] for each in merged["data"]] == expected
    [first] = [each for each in merged["data"] if each["feature_idx"] == 1] or [None]
    assert first is None or (first["count"], first["mean"]) == (4, 2.25)


def test_health_names_the_replica_and_has_the_others_beside_it() -> None:
    well, stalled = {"status": "ok", "requests": 3}, {"status": "stalled"}
    merged = json.loads(merge_health(answer("1", well), [answer("2", stalled, 503)]))
    assert merged == well | {"replica": "1", "others": {"2": stalled}}
    refused = {"error": {"code": "store_failed"}}
    assert json.loads(merge_health(answer("1", refused, 503), [answer("2", well)])) == refused
