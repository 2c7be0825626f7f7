"""Requests that change what all replicas have, and the changes that take the place of others."""

from __future__ import annotations

import json
from typing import Any

from mlxsrv.replicas.subjects import subject_of


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
    for path, empty in (
        ("/api/chat", {"messages": []}),
        ("/api/chat", {"messages": None, "prompt": "of another route"}),
        ("/api/generate", {"prompt": "", "suffix": None, "images": ["x"]}),
        ("/api/embed", {"input": ""}),
        ("/api/embed", {"input": []}),
        ("/api/embeddings", {"prompt": "", "keep_alive": 0}),
    ):
        assert change("POST", path, {"model": "a", **empty}) == load, (path, empty)
    for path, full in (
        ("/api/chat", {"messages": [{}]}),
        ("/api/generate", {"suffix": "x"}),
        ("/api/generate", {"prompt": "[]"}),
        ("/api/embed", {"input": ["a"]}),
        ("/api/embeddings", {"prompt": "null"}),
    ):
        assert change("POST", path, {"model": "a", **full}) is None, (path, full)
    spaced = b'{"model": "a", "messages": [ \n ]}'
    made = subject_of("POST", "/api/chat")
    assert made is not None
    assert made("POST", "/api/chat", b"", spaced) is not None
    for wrong in (b"", b"{", b"[]", b"\xff", b'{"\xff": 1}', 2000 * b"[", b'{"messages": 1}'):
        assert made("POST", "/api/chat", b"", wrong) is None, wrong
    assert change("POST", "/api/chat", {"model": "a", "keep_alive": 0}) == load


def test_the_same_feature_is_one_subject() -> None:
    def feature(number: int, value: float) -> str | None:
        asked = {"feature_idx": number, "value": value}
        return change("POST", "/api/saes/steering", asked)

    assert feature(1, 2.0) == feature(1, 3.0)
    assert feature(1, 2.0) != feature(2, 2.0)
    batch = [change("POST", "/api/saes/steering/batch", {"steering": {n: 1}}) for n in "12"]
    assert batch[0] != batch[1]


def test_what_sets_something_else_is_another_subject() -> None:
    """A new replica repeats the last change of each subject, and has the state of the others."""
    for method, path, bodies in (
        ("POST", "/api/saes", [{"path": "a"}, {"path": "b"}, {"repository_id": "a"}]),
        ("POST", "/api/monitoring/configure", [{"enabled": True}, {"features": [1]}, {"top_k": 1}]),
        ("PATCH", "/api/profiles/p", [{"name": "a"}, {"steering": {"1": 1}}]),
        (
            "POST",
            "/api/saes/steering",
            [{"feature_idx": 1, "value": 1}, {"feature_idx": 1, "value": 1, "mode": "clamp"}],
        ),
        ("POST", "/api/saes/x/attach", [{"model": "a"}, {"model": "b"}]),
    ):
        subjects = [change(method, path, body) for body in bodies]
        assert len(set(subjects)) == len(bodies), path
    on, off = ({"enabled": value, "features": None} for value in (True, False))
    assert change("POST", "/api/monitoring/configure", on) == change(
        "POST", "/api/monitoring/configure", off
    )
