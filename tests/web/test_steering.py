"""Steering over HTTP: what requests ask, the default, profiles, monitoring, control vectors.

All answers under `/api` are held against `/openapi.json` as well.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.client import CHAT, COMPLETIONS, Body, ask, chat, completion, refused, stream
from tests.support.managing import (
    D_SAE,
    STRONG,
    Api,
    Files,
    api,
    attached,
    client,
    files,
    profile,
    say,
    serve,
    shared,
)

__all__ = ["api", "attached", "client", "files", "shared"]


# What requests ask.


def test_steering_changes_the_request_that_asks_and_no_other(attached: Api) -> None:
    client = attached.client
    usual = say(client)
    steered = say(client, steering=STRONG)
    assert steered != usual
    assert say(client, steering=STRONG, steering_mode="additive") == steered
    assert say(client, steering=STRONG, steering_mode="clamp") not in (usual, steered)
    assert say(client) == say(client, steering={}) == usual
    assert say(client, steering={"5": 0, "9": 0.0}) == usual
    silenced = dict.fromkeys(map(str, range(D_SAE)), 0)
    assert say(client, steering=silenced) == usual
    assert say(client, steering=silenced, steering_mode="clamp") != usual
    assert stream(client, chat(steering=STRONG)).content == steered
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(lambda each: say(client, steering=each), [STRONG, {}] * 4))
    assert texts == [steered, usual] * 4
    body = completion(["a", "b"], n=2, steering=STRONG)
    assert ask(client, body, COMPLETIONS) != ask(client, completion(["a", "b"], n=2), COMPLETIONS)


def test_steering_that_cannot_be(attached: Api) -> None:
    client = attached.client
    for index in ("128", "-1", "999999999999"):
        body = chat(steering={"0": 1, index: 1.0})
        response = client.post(CHAT, json=body)
        error = refused(response, 400, "invalid_feature_index", param="steering")
        assert "0 to 127" in error["message"]
    body = chat(steering={"5": 1.0}, model="u")
    refused(client.post(CHAT, json=body), 400, "sae_not_attached", param="steering")
    refused(
        client.post(CHAT, json={**body, "stream": True}), 400, "sae_not_attached", param="steering"
    )
    for fields, param in (
        ({"profile": "a", "steering": {}}, "steering"),
        ({"profile": "a", "steering_mode": "clamp"}, "steering_mode"),
        ({"steering": {"a": 1}}, "steering"),
        ({"steering": {"1": 201}}, "steering"),
    ):
        refused(client.post(CHAT, json=chat(**fields)), 400, "invalid_value", param=param)


def test_a_profile_on_a_request(attached: Api) -> None:
    client = attached.client
    attached("POST", "/profiles", profile(), status=201)
    attached("POST", "/profiles", profile("elsewhere", sae_id="two"), status=201)
    attached("POST", "/profiles", profile("layer", layer=0), status=201)
    attached("POST", "/profiles", profile("other", model_id="u"), status=201)
    attached("POST", "/profiles", profile("far", steering={"128": 1}), status=201)
    assert say(client, profile="calm") == say(client, steering=STRONG) != say(client)
    unknown = client.post(CHAT, json=chat(profile="nothing"))
    refused(unknown, 404, "profile_not_found", param="profile")
    for name in ("elsewhere", "layer", "other"):
        response = client.post(CHAT, json=chat(profile=name))
        refused(response, 400, "sae_not_attached", param="profile")
    attached("POST", "/saes/one/attach", {"model": "u"})
    refused(client.post(CHAT, json=chat(profile="other")), 400, "sae_not_attached", param="profile")
    assert say(client, profile="other", model="u") == say(client, steering=STRONG, model="u")
    response = client.post(CHAT, json=chat(profile="far"))
    refused(response, 400, "invalid_feature_index", param="profile")
    attached("POST", "/saes/one/detach")
    response = client.post(CHAT, json=chat(profile="calm"))
    refused(response, 400, "sae_not_attached", param="profile")


# The default steering.


def test_the_default_steering_is_for_requests_that_name_none(attached: Api) -> None:
    client = attached.client
    usual, steered = say(client), say(client, steering=STRONG)
    start = {"enabled": True, "mode": "additive", "values": {}}
    assert attached("GET", "/saes/steering") == start
    five = {"feature_idx": 5, "value": 60.0}
    assert attached("POST", "/saes/steering", five)["values"] == {"5": 60.0}
    told = attached("POST", "/saes/steering/batch", {"steering": {"9": -60}})
    assert told == attached("GET", "/saes/steering") == {**start, "values": STRONG}
    assert say(client) == steered
    assert say(client, steering={}) == usual
    assert say(client, steering={"5": 60.0}) not in (usual, steered)
    assert attached("POST", "/saes/steering/disable") == {**told, "enabled": False}
    assert say(client) == usual
    assert attached("POST", "/saes/steering/enable") == told
    assert attached("DELETE", "/saes/steering/9")["values"] == {"5": 60.0}
    assert say(client) == say(client, steering={"5": 60.0})
    clamped = {"feature_idx": 5, "value": 0, "mode": "clamp"}
    assert attached("POST", "/saes/steering", clamped)["mode"] == "clamp"
    assert say(client) == say(client, steering={"5": 0}, steering_mode="clamp")
    assert attached("DELETE", "/saes/steering")["values"] == {}
    assert say(client) == usual
    assert say(client, model="u") == say(client, model="u", steering={})


def test_the_default_steering_changes_as_a_whole_or_not(attached: Api) -> None:
    attached("POST", "/saes/steering", {"feature_idx": 5, "value": 1})
    for method, path, body, param in (
        ("POST", "/saes/steering", {"feature_idx": D_SAE, "value": 1}, "feature_idx"),
        ("POST", "/saes/steering", {"feature_idx": -1, "value": 1}, "feature_idx"),
        ("POST", "/saes/steering/batch", {"steering": {"1": 1, "128": 1}}, "steering"),
        ("DELETE", f"/saes/steering/{D_SAE}", None, "idx"),
        ("DELETE", "/saes/steering/x", None, "idx"),
    ):
        attached.refuse(400, "invalid_feature_index", method, path, body, param=param)
    value = {"feature_idx": 5, "value": 200.5}
    attached.refuse(400, "invalid_value", "POST", "/saes/steering", value, param="value")
    missing = "missing_required_parameter"
    attached.refuse(400, missing, "POST", "/saes/steering", param="feature_idx")
    assert attached("GET", "/saes/steering")["values"] == {"5": 1.0}


def test_with_nothing_attached_there_is_nothing_to_set(api: Api) -> None:
    for method, path, body in (
        ("GET", "/saes/steering", None),
        ("POST", "/saes/steering", {"feature_idx": 5, "value": 1}),
        ("POST", "/saes/steering/batch", {"steering": {"5": 1}}),
        ("POST", "/saes/steering/enable", None),
        ("POST", "/saes/steering/disable", None),
        ("DELETE", "/saes/steering", None),
        ("DELETE", "/saes/steering/5", None),
        ("POST", "/profiles/deactivate", None),
        ("GET", "/monitoring", None),
        ("POST", "/monitoring/configure", {"enabled": True}),
        ("GET", "/monitoring/history", None),
        ("DELETE", "/monitoring/history", None),
        ("GET", "/monitoring/statistics", None),
        ("DELETE", "/monitoring/statistics", None),
        ("POST", "/monitoring/statistics/top", {}),
    ):
        api.refuse(400, "sae_not_attached", method, path, body)
    refused(
        api.client.post(CHAT, json=chat(steering={"5": 1})),
        *(400, "sae_not_attached"),
        param="steering",
    )


def test_a_detached_sae_takes_its_steering_along(attached: Api) -> None:
    client = attached.client
    usual = say(client, steering={})
    made = attached("POST", "/profiles", profile(), status=201)
    attached("POST", f"/profiles/{made['id']}/activate")
    attached("POST", "/monitoring/configure", {"enabled": True})
    attached("POST", "/saes/one/detach")
    assert say(client) == usual
    assert attached("GET", "/profiles/active") is None
    attached("POST", "/saes/one/attach")
    assert attached("GET", "/saes/steering")["values"] == {}
    assert attached("GET", "/profiles/active") is None
    assert attached("GET", "/monitoring")["enabled"] is False
    assert say(client) == usual
    assert attached("GET", "/monitoring/history") == []


# Profiles.


def test_profiles_are_made_read_changed_and_removed(api: Api) -> None:
    assert api("GET", "/profiles") == []
    begun = time.time()
    made = api("POST", "/profiles", profile("b", description="x" * 500, mode="clamp"), status=201)
    assert re.fullmatch(r"prof_[0-9a-f]{12}", made["id"])
    assert begun <= made["created_at"] == made["updated_at"] <= time.time()
    given = profile("b", description="x" * 500, mode="clamp")
    assert made == made | given
    plain = api("POST", "/profiles", profile("a"), status=201)
    assert (plain["description"], plain["mode"]) == ("", "additive")
    assert [each["name"] for each in api("GET", "/profiles")] == ["a", "b"]
    path = f"/profiles/{made['id']}"
    assert api("GET", path) == made
    api.refuse(409, "profile_exists", "POST", "/profiles", profile("b"), param="name")
    api.refuse(409, "profile_exists", "PATCH", path, {"name": "a"}, param="name")
    changed = api("PATCH", path, {"name": "c", "steering": {"1": 2}, "description": None})
    assert changed.pop("updated_at") >= made.pop("updated_at")
    assert changed == {**made, "name": "c", "steering": {"1": 2.0}}
    api.refuse(400, "invalid_value", "PATCH", path, {"name": "x" * 101}, param="name")
    minus = {"steering": {"-1": 1}}
    api.refuse(400, "invalid_feature_index", "PATCH", path, minus, param="steering")
    wrong = profile("d", **minus)
    api.refuse(400, "invalid_feature_index", "POST", "/profiles", wrong, param="steering")
    assert api("DELETE", path) is None
    for method, end in (
        *(("GET", ""), ("PATCH", ""), ("DELETE", ""), ("GET", "/export")),
        *(("POST", "/activate"), ("POST", "/deactivate")),
    ):
        api.refuse(404, "profile_not_found", method, path + end, {} if method == "PATCH" else None)


def test_a_profile_leaves_and_comes_back(api: Api) -> None:
    made = api("POST", "/profiles", profile("é", mode="clamp", description="d"), status=201)
    document = api("GET", f"/profiles/{made['id']}/export")
    assert document == {
        "format": "mlxsrv-profile",
        "version": 1,
        "profile": profile("é", mode="clamp", description="d"),
    }
    api.refuse(409, "profile_exists", "POST", "/profiles/import", document, param="name")
    api("DELETE", f"/profiles/{made['id']}")
    again = api("POST", "/profiles/import", document, status=201)
    assert again["id"] != made["id"]
    assert api("GET", f"/profiles/{again['id']}/export") == document
    newer = {**document, "version": 2}
    api.refuse(400, "invalid_value", "POST", "/profiles/import", newer, param="version")
    del document["profile"]["name"]
    api.refuse(
        *(400, "missing_required_parameter", "POST", "/profiles/import", document),
        param="profile.name",
    )


def test_a_profile_as_the_default_steering(attached: Api) -> None:
    client = attached.client
    usual, steered = say(client), say(client, steering=STRONG)
    made = attached("POST", "/profiles", profile(), status=201)
    path = f"/profiles/{made['id']}"
    attached("POST", "/saes/steering", {"feature_idx": 7, "value": 1, "mode": "clamp"})
    attached("POST", "/saes/steering/disable")
    told = attached("POST", f"{path}/activate")
    assert told == {"enabled": True, "mode": "additive", "values": STRONG}
    assert attached("GET", "/saes/steering") == told
    assert attached("GET", "/profiles/active") == made
    assert say(client) == steered
    attached("PATCH", path, {"steering": {"9": 2}})
    assert attached("GET", "/saes/steering")["values"] == {"9": 2.0}
    attached("PATCH", path, {"layer": 0})
    assert attached("GET", "/saes/steering")["values"] == {}, "it does not fit any more"
    assert attached("GET", "/profiles/active") is None
    attached.refuse(400, "sae_not_attached", "POST", f"{path}/activate")
    attached("PATCH", path, {"layer": 1, "steering": STRONG})
    for end in ("/profiles/deactivate", f"{path}/deactivate"):
        attached("POST", f"{path}/activate")
        assert attached("POST", end)["values"] == {}
        assert attached("GET", "/profiles/active") is None
        assert say(client) == usual
    attached("POST", f"{path}/activate")
    by_hand = attached("POST", "/saes/steering", {"feature_idx": 7, "value": 1})
    assert by_hand["values"] == {**STRONG, "7": 1.0}
    assert attached("GET", "/profiles/active") is None
    assert attached("POST", f"{path}/deactivate") == by_hand, "it is not the active one"
    attached("POST", f"{path}/activate")
    attached("DELETE", path)
    assert attached("GET", "/saes/steering")["values"] == {}


def test_of_profiles_activated_at_once_one_is_active_as_a_whole(attached: Api) -> None:
    made = {}
    for n in range(4):
        body = profile(f"p{n}", steering={str(n): n + 1, "100": n + 1}, mode="clamp")
        told = attached("POST", "/profiles", body, status=201)
        made[told["id"]] = body["steering"]
    with ThreadPoolExecutor(4) as threads:
        paths = [f"/api/profiles/{id}/activate" for id in made] * 3
        told = [response.json()["data"] for response in threads.map(attached.client.post, paths)]
    assert [each["values"] for each in told] == [*made.values()] * 3
    active = attached("GET", "/profiles/active")["id"]
    assert attached("GET", "/saes/steering")["values"] == made[active]


# Monitoring.


def test_features_are_watched_while_streams_run(attached: Api) -> None:
    client = attached.client
    wanted = {"enabled": True, "features": [7, 3, 5], "history_size": 1000}
    state = attached("POST", "/monitoring/configure", wanted)
    assert state == attached("GET", "/monitoring")
    assert (state["enabled"], state["features"], state["top_k"]) == (True, [3, 5, 7], 0)
    with ThreadPoolExecutor(3) as threads:
        bodies = [chat(f"Tell me of {n}.", max_tokens=20) for n in range(3)]
        streams = list(threads.map(lambda body: stream(client, body), bodies))
    history = attached("GET", "/monitoring/history", limit=1000)
    by_request: dict[str, list[Body]] = {}
    for entry in history:
        assert set(entry["activations"]) == {"3", "5", "7"}
        by_request.setdefault(entry["request_id"], []).append(entry)
    assert by_request.keys() == {each.chunks[0]["id"] for each in streams}
    times = [entry["timestamp"] for entry in history]
    assert times == sorted(times, reverse=True)
    for id, entries in by_request.items():
        positions = [entry["token_position"] for entry in entries]
        assert positions == sorted(positions, reverse=True)
        assert len({*positions}) == len(positions) >= 19
        found = attached("GET", "/monitoring/history", request_id=id, limit=5)
        assert found == entries[:5]
    [three, five, seven] = attached("GET", "/monitoring/statistics")
    assert {each["count"] for each in (three, five, seven)} == {len(history)}
    values = [entry["activations"]["5"] for entry in history]
    assert five["mean"] == pytest.approx(statistics.mean(values))
    assert five["std"] == pytest.approx(statistics.stdev(values))
    assert (five["min"], five["max"]) == (min(values), max(values))
    assert five["active_ratio"] == statistics.mean(value > 0 for value in values)
    assert attached("GET", "/monitoring/statistics", features="5,99") == [five]
    [top] = attached("POST", "/monitoring/statistics/top", {"k": 1, "metric": "max"})
    assert top["max"] == max(each["max"] for each in (three, five, seven))
    assert len(attached("POST", "/monitoring/statistics/top")) == 3
    state = attached("DELETE", "/monitoring/statistics", features="5")
    assert state["features_seen"] == 2
    assert attached("DELETE", "/monitoring/statistics")["features_seen"] == 0
    kept = attached("DELETE", "/monitoring/history", request_id=streams[0].chunks[0]["id"])
    assert 0 < kept["history_entries"] < len(history)
    assert attached("DELETE", "/monitoring/history")["history_entries"] == 0
    attached("POST", "/monitoring/configure", {"enabled": False})
    say(client)
    assert attached("GET", "/monitoring/history") == []


def test_watching_changes_no_text_and_sees_what_was_before_steering(attached: Api) -> None:
    client = attached.client
    usual, steered = say(client), say(client, steering=STRONG)
    assert attached("POST", "/monitoring/configure", {"enabled": True, "top_k": 4})["top_k"] == 4
    assert (say(client), say(client, steering=STRONG)) == (usual, steered)
    newest = attached("GET", "/monitoring/history")
    assert newest
    assert all(len(entry["activations"]) <= 4 for entry in newest)
    told = attached("POST", "/monitoring/configure", {"history_size": 3})
    assert (told["history_size"], told["history_entries"], told["top_k"]) == (3, 3, 4)
    prompt = {"max_tokens": 1, "model": "t"}
    attached("POST", "/monitoring/configure", {"features": [5], "top_k": 0, "history_size": 1000})
    attached("DELETE", "/monitoring/history")
    say(client, **prompt)
    plain = attached("GET", "/monitoring/history", limit=1000)
    attached("DELETE", "/monitoring/history")
    say(client, **prompt, steering=STRONG)
    pushed = attached("GET", "/monitoring/history", limit=1000)
    # The SAE is at the last layer, so no attention carries its steering to later positions.
    seen = {entry["token_position"]: entry["activations"]["5"] for entry in pushed}
    for entry in plain:
        position = entry["token_position"]
        if position in seen:
            assert seen[position] == pytest.approx(entry["activations"]["5"], abs=1e-4)
    assert plain


def test_wrong_monitoring(attached: Api) -> None:
    for body, code, param in (
        ({"features": [D_SAE]}, "invalid_feature_index", "features"),
        ({"features": [-1]}, "invalid_feature_index", "features"),
        ({"history_size": 0}, "invalid_value", "history_size"),
        ({"history_size": 1001}, "invalid_value", "history_size"),
        ({"enabled": True, "top_k": 0}, "invalid_value", "top_k"),
    ):
        attached.refuse(400, code, "POST", "/monitoring/configure", body, param=param)
    assert attached("GET", "/monitoring")["enabled"] is False
    for path, param, text in (
        ("/monitoring/history", "limit", "1001"),
        ("/monitoring/statistics", "features", "x"),
    ):
        attached.refuse(400, "invalid_value", "GET", path, param=param, **{param: text})
    for param, value in (("k", 0), ("k", 101), ("metric", "std")):
        path = "/monitoring/statistics/top"
        attached.refuse(400, "invalid_value", "POST", path, {param: value}, param=param)


# Over restarts, and at start.


def test_profiles_outlast_the_server(files: Files, tmp_path: Path) -> None:
    """And what is to be attached at start is there for the first request that names it."""
    with serve(files, data_dir=str(tmp_path)) as client:
        made = Api(client)("POST", "/profiles", profile(), status=201)
        assert client.post("/api/saes/one/attach", json={}).status_code == 200
        steered = say(client, profile="calm")
        usual = say(client)
    with serve(files, data_dir=str(tmp_path), attach_sae=("u=two@1", "one")) as client:
        assert say(client, profile="calm") == steered != usual
        api = Api(client)
        assert api("GET", "/profiles") == [made]
        assert api("GET", "/profiles/active") is None
        assert api("GET", "/saes/attachment")["sae_id"] == "one"
        there = api("GET", "/saes/attachment", model="u")
        assert (there["sae_id"], there["layer"], there["hook"]) == ("two", 1, "resid_pre")


# Control vectors.


def test_control_vectors(files: Files) -> None:
    calm, wide = f"{files.calm}.safetensors", f"{files.wide}.safetensors"
    vectors = (calm, f"off={calm}:0", f"twice={calm}:2", wide)
    with serve(files) as client:
        usual = {model: say(client, model=model) for model in ("t", "u")}
    with serve(files, mounted=True, control_vector=vectors) as client:
        steered = say(client)
        plain = say(client, control_vector={})
        assert steered != plain == usual["t"]
        assert say(client, steering={}) == steered, "that is another thing"
        assert say(client, control_vector={"calm": 3}) == steered, "1 and 2 of the same"
        alone = say(client, control_vector="calm")
        assert alone == say(client, control_vector={"off": 1}) not in (plain, steered)
        assert say(client, control_vector="off") == alone, "where it is usually 0, 1 is meant"
        assert say(client, control_vector={"calm": 2}) == say(client, control_vector="twice")
        assert say(client, model="u") == usual["u"], "the default is for the default model"
        assert say(client, model="u", control_vector="calm") != usual["u"]
        for asked in ("nothing", {"calm": 1, "wide": 1}):
            response = client.post(CHAT, json=chat(control_vector=asked))
            error = refused(response, 400, "invalid_value", param="control_vector")
            assert "'calm', 'off', 'twice'" in error["message"]
        body = json.dumps(chat(control_vector={"calm": 101}))
        refused(client.post(CHAT, content=body), 400, "invalid_value", param="control_vector")
