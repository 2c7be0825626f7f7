"""Answers of several replicas, merged; and which requests change what all have."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from mlxsrv.replicas.gathering import Gathering, gathering_of
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
from mlxsrv.replicas.subjects import subject_of
from mlxsrv.service.steering.monitor import RunningStatistics


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
    assert merged == listed("a", "b")


def test_running_models_are_told_once() -> None:
    one, two = {"models": [{"name": "a"}]}, {"models": [{"name": "b"}, {"name": "a"}]}
    merged = json.loads(merge_running(answer("1", one), [answer("2", two)]))
    assert [model["name"] for model in merged["models"]] == ["a", "b"]


def test_the_history_is_of_all_the_newest_first() -> None:
    one, two = ({"success": True, "data": [{"timestamp": t} for t in ts]} for ts in ((9, 2), (5,)))
    merged = json.loads(merge_history(answer("1", one), [answer("2", two)]))
    assert [entry["timestamp"] for entry in merged["data"]] == [9, 5, 2]


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
    merge = pick_highest(json.dumps(asked).encode() if asked else b"")
    merged = json.loads(merge(answer("1", {"data": one}), [answer("2", {"data": two})]))
    assert [each["feature_idx"] for each in merged["data"]] == expected
    [first] = [each for each in merged["data"] if each["feature_idx"] == 1] or [None]
    assert first is None or (first["count"], first["mean"]) == (4, 2.25)


def test_health_names_the_replica_and_has_the_others_beside_it() -> None:
    well, stalled = {"status": "ok", "requests": 3}, {"status": "stalled"}
    merged = json.loads(merge_health(answer("1", well), [answer("2", stalled, 503)]))
    assert merged == well | {"replica": "1", "others": {"2": stalled}}
    refused = {"error": {"code": "store_failed"}}
    assert json.loads(merge_health(answer("1", refused, 503), [answer("2", well)])) == refused


def gathered(method: str, path: str, query: bytes = b"", body: bytes = b"") -> Gathering | None:
    gather = gathering_of({"method": method, "query_string": query}, path)
    return gather and gather(body)


def test_what_all_replicas_are_asked() -> None:
    statistics, top = "/api/monitoring/statistics", "/api/monitoring/statistics/top"
    for method, path, query in (
        ("GET", "/health", b""),
        ("GET", "/health", b"verbose=0"),
        ("GET", "/health/live", b""),
        ("POST", "/v1/models", b""),
        ("DELETE", statistics, b""),
        ("GET", top, b""),
        ("GET", "/v1/responses/resp_1", b""),
    ):
        assert gathered(method, path, query) is None, path
    for path, query in (("/metrics", b""), (statistics, b"features=1"), ("/health", b"verbose=1")):
        found = gathered("GET", path, query)
        assert found is not None
        assert (found.path, found.query) == (path, query)
    found = gathered("POST", top, body=b'{"model": "a b"}')
    assert found is not None
    assert (found.path, found.query) == (statistics, b"model=a+b")


def change(method: str, path: str, body: Any = None, query: bytes = b"") -> str | None:
    subject = subject_of(method, path)
    made = subject and subject(method, path, query, json.dumps(body).encode() if body else b"")
    return made.subject if made else None


def test_changes_are_known_from_questions() -> None:
    for method, path in (
        ("GET", "/api/saes"),
        ("POST", "/api/monitoring/statistics/top"),
        ("POST", "/api/profiles"),
        ("POST", "/api/profiles/import"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/api/pull"),
        ("DELETE", "/v1/responses/resp_1"),
    ):
        assert change(method, path) is None, path
    for method, path in (
        ("POST", "/api/saes"),
        ("DELETE", "/api/saes/x"),
        ("POST", "/api/saes/x/attach"),
        ("POST", "/api/saes/steering/enable"),
        ("DELETE", "/api/saes/steering/7"),
        ("POST", "/api/profiles/p/activate"),
        ("PATCH", "/api/profiles/p"),
        ("DELETE", "/api/profiles/p"),
        ("POST", "/api/monitoring/configure"),
        ("DELETE", "/api/monitoring/statistics"),
    ):
        assert change(method, path) is not None, path


def test_a_load_or_unload_is_a_change_and_a_question_is_not() -> None:
    assert change("POST", "/api/chat", {"model": "a", "messages": [{"role": "user"}]}) is None
    assert change("POST", "/api/generate", {"model": "a", "prompt": "b"}) is None
    load = change("POST", "/api/generate", {"model": "a"})
    assert load is not None
    assert change("POST", "/api/chat", {"model": "a", "keep_alive": 0}) == load


def test_the_same_feature_is_one_subject() -> None:
    def feature(number: int, value: float) -> str | None:
        asked = {"feature_idx": number, "value": value}
        return change("POST", "/api/saes/steering", asked)

    assert feature(1, 2.0) == feature(1, 3.0)
    assert feature(1, 2.0) != feature(2, 2.0)
    batch = [change("POST", "/api/saes/steering/batch", {"steering": {n: 1}}) for n in "12"]
    assert batch[0] != batch[1]
