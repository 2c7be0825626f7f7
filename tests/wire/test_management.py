"""Bodies of the management: the envelope, and each body's fields and bounds."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from mlxsrv.errors import InvalidRequest, MissingParameter, SAENotFound
from mlxsrv.wire import management
from mlxsrv.wire.decoding import RequestDecoder, read_query
from mlxsrv.wire.management import HistoryQuery, StatisticsQuery
from mlxsrv.wire.openapi import document
from mlxsrv.wire.operation import Operation
from tests.support.operations import every_operation
from tests.support.schemas import Body, as_sent

PROFILE: Body = {
    "name": "calm",
    "steering": {"5": 1.5},
    "model_id": "m",
    "sae_id": "s",
    "layer": 3,
}
EXPORT: Body = {"format": "mlxsrv-profile", "version": 1, "profile": PROFILE}
MANAGED = [operation for operation in every_operation() if operation.enveloped]

MODEL_REQUESTS = RequestDecoder(management.ModelRequest)
REGISTER_REQUESTS = RequestDecoder(management.RegisterRequest)
ATTACH_REQUESTS = RequestDecoder(management.AttachRequest)
FEATURE_REQUESTS = RequestDecoder(management.FeatureRequest)
FEATURES_REQUESTS = RequestDecoder(management.FeaturesRequest)
PROFILE_REQUESTS = RequestDecoder(management.ProfileRequest)
PROFILE_UPDATES = RequestDecoder(management.ProfileUpdate)
IMPORT_REQUESTS = RequestDecoder(management.ImportRequest)
MONITOR_REQUESTS = RequestDecoder(management.MonitorRequest)
TOP_REQUESTS = RequestDecoder(management.TopRequest)

Table = list[tuple[RequestDecoder[Any], Body, str | None]]
"""Bodies by what reads them; with the param of the error, or None where they are fine."""


def wrong(decoder: RequestDecoder[Any], base: Body, **values: list[Any]) -> Table:
    """Each of the values, in a body that is fine but for it."""
    return [(decoder, {**base, name: value}, name) for name in values for value in values[name]]


CASES: Table = [
    (MODEL_REQUESTS, {}, None),
    (MODEL_REQUESTS, {"model": "org/name"}, None),
    (MODEL_REQUESTS, {"model": 5}, "model"),
    (REGISTER_REQUESTS, {"repository_id": "a/b", "revision": "main", "id": "x"}, None),
    (REGISTER_REQUESTS, {"path": "a", "file_path": None}, None),
    *wrong(REGISTER_REQUESTS, {}, repository_id=["", 5, []], path=["", 5], revision=["", 5]),
    *wrong(REGISTER_REQUESTS, {}, file_path=["", 5], id=["", 5]),
    (ATTACH_REQUESTS, {"layer": 0}, None),
    *wrong(ATTACH_REQUESTS, {}, layer=[-1, "1", 1.5, True]),
    (FEATURE_REQUESTS, {"feature_idx": 5, "value": -200, "mode": "clamp"}, None),
    (FEATURE_REQUESTS, {"feature_idx": "5", "value": 1}, "feature_idx"),
    (FEATURE_REQUESTS, {"feature_idx": 5, "value": 200.5}, "value"),
    (FEATURE_REQUESTS, {"feature_idx": 5, "value": 1, "mode": "add"}, "mode"),
    (FEATURES_REQUESTS, {"steering": {}}, None),
    (FEATURES_REQUESTS, {"steering": {"5": 1, "7": -200}}, None),
    (FEATURES_REQUESTS, {"steering": {"x": 1}}, "steering"),
    (FEATURES_REQUESTS, {"steering": {"5": 201}}, "steering"),
    (FEATURES_REQUESTS, {"steering": {str(n): 1 for n in range(1001)}}, "steering"),
    (PROFILE_REQUESTS, PROFILE, None),
    (PROFILE_REQUESTS, {**PROFILE, "mode": "clamp", "description": "x" * 500}, None),
    (PROFILE_REQUESTS, {**PROFILE, "name": "é" * 100}, None),
    *wrong(
        PROFILE_REQUESTS,
        PROFILE,
        name=["", "x" * 101, None, 5],
        description=["x" * 501, 5],
        steering=[None, [], {"a": 1}, {"1": -200.5}, {"1": None}],
        model_id=["", None],
        sae_id=["", None],
        layer=[-1, None, "1"],
        mode=["x"],
    ),
    (PROFILE_UPDATES, {}, None),
    (PROFILE_UPDATES, {"name": None, "steering": {}}, None),
    (PROFILE_UPDATES, {"name": ""}, "name"),
    (PROFILE_UPDATES, {"steering": {"1": 300}}, "steering"),
    (IMPORT_REQUESTS, EXPORT, None),
    (IMPORT_REQUESTS, {**EXPORT, "version": 2}, "version"),
    (IMPORT_REQUESTS, {**EXPORT, "format": "other"}, "format"),
    (IMPORT_REQUESTS, {**EXPORT, "profile": {**PROFILE, "layer": -1}}, "profile.layer"),
    (MONITOR_REQUESTS, {}, None),
    (MONITOR_REQUESTS, {"enabled": True, "features": [1, 2], "history_size": 1000}, None),
    (MONITOR_REQUESTS, {"features": list(range(257))}, "features"),
    (MONITOR_REQUESTS, {"features": ["1"]}, "features[0]"),
    *wrong(MONITOR_REQUESTS, {}, history_size=[0, 1001, "5"], top_k=[-1, 101, True]),
    (TOP_REQUESTS, {}, None),
    (TOP_REQUESTS, {"k": 100, "metric": "active_ratio"}, None),
    *wrong(TOP_REQUESTS, {}, k=[0, 101, 1.5], metric=["median"]),
]


@cache
def read_document() -> Body:
    """The document of these routes, as a client reads it."""
    return dict(json.loads(json.dumps(document(MANAGED))))


def described(decoder: RequestDecoder[Any]) -> jsonschema.Draft202012Validator:
    """The schema of what the decoder reads."""
    name = type(decoder.decode(json.dumps(_least(decoder)).encode())[0]).__name__
    schema = {"$ref": f"#/components/schemas/{name}", "components": read_document()["components"]}
    return jsonschema.Draft202012Validator(schema)


def _least(decoder: RequestDecoder[Any]) -> Body:
    return next(body for known, body, param in CASES if known is decoder and param is None)


@pytest.mark.parametrize(("decoder", "body", "param"), CASES)
def test_a_body_is_read_or_refused_by_path_and_so_says_its_schema(
    decoder: RequestDecoder[Any], body: Body, param: str | None
) -> None:
    text = json.dumps(body).encode()
    assert described(decoder).is_valid(body) == (param is None)
    if param is None:
        read, ignored = decoder.decode(text)
        assert ignored == []
        told = as_sent(read)
        assert all(told[name] == value for name, value in body.items() if name != "profile")
        return
    with pytest.raises(InvalidRequest) as caught:
        decoder.decode(text)
    assert (caught.value.code, caught.value.param) == ("invalid_value", param)


@pytest.mark.parametrize("name", PROFILE)
def test_what_is_missing_is_named(name: str) -> None:
    body = {key: value for key, value in PROFILE.items() if key != name}
    for decoder, text, param in (
        (PROFILE_REQUESTS, body, name),
        (IMPORT_REQUESTS, {**EXPORT, "profile": body}, f"profile.{name}"),
    ):
        with pytest.raises(MissingParameter) as caught:
            decoder.decode(json.dumps(text).encode())
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({}, None),
        ({"limit": "1000", "request_id": "chatcmpl-1", "model": "m", "other": "x"}, None),
        ({"limit": "0"}, "limit"),
        ({"limit": "1001"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": ""}, "limit"),
    ],
)
def test_a_query_is_read_or_refused_by_name(query: dict[str, str], param: str | None) -> None:
    if param is None:
        read = read_query(HistoryQuery, query)
        assert read.limit == int(query.get("limit", 100))
        assert (read.request_id, read.model) == (query.get("request_id"), query.get("model"))
        return
    with pytest.raises(InvalidRequest) as caught:
        read_query(HistoryQuery, query)
    assert caught.value.param == param


def test_features_of_a_query() -> None:
    assert read_query(StatisticsQuery, {}).chosen is None
    assert read_query(StatisticsQuery, {"features": "7,0,12"}).chosen == frozenset({0, 7, 12})
    for text in ("", "a", "1,", "-1", "1 2", "1\n", "9" * 10):
        with pytest.raises(InvalidRequest) as caught:
            read_query(StatisticsQuery, {"features": text})
        assert caught.value.param == "features"


def test_the_envelope() -> None:
    assert as_sent(management.success([1])) == {"success": True, "data": [1], "error": None}
    assert as_sent(management.failure(SAENotFound("no x", param="id"))) == {
        "success": False,
        "data": None,
        "error": {"code": "sae_not_found", "message": "no x", "details": {"param": "id"}},
    }
    assert as_sent(management.failure(SAENotFound("no x")))["error"]["details"] == {}


@pytest.mark.parametrize("operation", MANAGED, ids=lambda each: f"{each.method} {each.path}")
def test_answers_and_refusals_are_described_in_their_envelope(operation: Operation) -> None:
    responses = read_document()["paths"][operation.path][operation.method.lower()]["responses"]
    for status, response in responses.items():
        schema = response["content"]["application/json"]["schema"]
        validator = jsonschema.Draft202012Validator(
            {**schema, "components": read_document()["components"]}
        )
        failed = as_sent(management.failure(InvalidRequest("no", param="a")))
        assert validator.is_valid(failed) == (int(status) >= 400)
    assert str(operation.status) in responses


def test_queries_are_described() -> None:
    parameters = read_document()["paths"]["/api/monitoring/history"]["get"]["parameters"]
    found = {each["name"]: each["schema"] for each in parameters}
    assert found["limit"] == {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}
    assert found["request_id"] == found["model"] == {"type": "string"}
    [id, *_] = read_document()["paths"]["/api/saes/{id}/compatibility"]["get"]["parameters"]
    assert (id["name"], id["in"], id["required"]) == ("id", "path", True)
