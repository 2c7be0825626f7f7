"""Steering over HTTP: SAEs, the default steering, profiles, monitoring, and what requests ask.

All answers under `/api` are held against `/openapi.json` as well.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import mlx.core as mx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import mlxsrv
from mlxsrv.options import SettingsError
from mlxsrv.service.steering.attachments import SAEs
from tests.support.client import (
    CHAT,
    COMPLETIONS,
    Body,
    answer,
    ask,
    chat,
    completion,
    refused,
    stream,
)
from tests.support.fixtures import Folders
from tests.support.saes import write_sae
from tests.support.serving import PATIENCE, hosted, wait_for
from tests.support.tiny import write_model

D_SAE = 128
STRONG = {"5": 60.0, "9": -60.0}
"""Steering that no greedy text of the tiny models survives."""


class Api:
    """A client of the management that also sees whether its answers are as described."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self._document = client.get("/openapi.json").json()

    def __call__(
        self, method: str, path: str, body: Any = None, *, status: int = 200, **query: Any
    ) -> Any:
        """The data of an answer."""
        response = self._send(method, path, body, query)
        assert response.status_code == status, response.text
        told = response.json()
        assert (told["success"], told["error"]) == (True, None)
        return told["data"]

    def refuse(
        self,
        status: int,
        code: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        param: str | None = None,
        **query: Any,
    ) -> str:
        """The message of an answer that must be exactly such a refusal."""
        response = self._send(method, path, body, query)
        assert response.status_code == status, response.text
        error = check_refusal(response, code)
        assert error["details"] == ({} if param is None else {"param": param}), error
        return str(error["message"])

    def _send(self, method: str, path: str, body: Any, query: Body) -> httpx.Response:
        response = self.client.request(
            method, f"/api{path}", json=body, params={k: v for k, v in query.items() if v}
        )
        described = self._described(method, f"/api{path}")
        [media] = [described["responses"][str(response.status_code)]["content"]]
        schema = {
            **media["application/json"]["schema"],
            "components": self._document["components"],
        }
        jsonschema.Draft202012Validator(schema).validate(response.json())
        return response

    def _described(self, method: str, path: str) -> Body:
        for template, item in sorted(self._document["paths"].items(), key=lambda p: "{" in p[0]):
            pattern = re.sub(r"{\w+}", "[^/]+", template)
            if re.fullmatch(pattern, path) and method.lower() in item:
                return dict(item[method.lower()])
        raise AssertionError(f"{method} {path} is not described")


def check_refusal(response: httpx.Response, code: str) -> Body:
    told = response.json()
    assert set(told) == {"success", "data", "error"}
    assert (told["success"], told["data"]) == (False, None)
    error = dict(told["error"])
    assert set(error) == {"code", "message", "details"}
    assert error["code"] == code, error
    assert error["message"]
    assert response.headers["x-request-id"]
    return error


class Files(msgspec.Struct, frozen=True):
    """Models, SAEs below one folder, control vectors, and data that outlasts a server."""

    model: Path
    other: Path
    saes: Path
    data: Path
    calm: Path
    wide: Path


@pytest.fixture(scope="module")
def files(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("steering")
    files = Files(folders.plain, *(root / name for name in Files.__struct_fields__[1:]))
    write_model(files.other, "qwen3", plain=True, seed=1)
    one: dict[str, Any] = {"d_in": 64, "d_sae": D_SAE}
    write_sae(files.saes / "one", **one)
    write_sae(files.saes / "spare", **one)
    write_sae(files.saes / "two", **one, layer=0, before=True, architecture="jumprelu", seed=1)
    write_sae(files.saes / "wide", d_in=32, d_sae=D_SAE)
    write_sae(files.saes / "deep", **one, layer=9)
    write_sae(
        files.saes / "vague",
        **one,
        layout="saelens_old",
        hook_name=...,
        hook_layer=...,
        model_name="org/somebody-7b",
    )
    weights = write_sae(files.saes / "broken", **one) / "sae_weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    for path, size in ((files.calm, 64), (files.wide, 32)):
        direction = mx.random.normal((size,), key=mx.random.key(5)) / 4
        mx.save_safetensors(f"{path}.safetensors", {"direction.0": direction})
    return files


@contextmanager
def serve(files: Files, *, mounted: bool = False, **options: Any) -> Iterator[httpx.Client]:
    """A server of the two models, `t` and `u`, with all SAEs. Mounted, it loads nothing before the
    first request."""
    settings = mlxsrv.Settings(
        **{
            "model": (f"t={files.model}", f"u={files.other}"),
            "sae_dir": (str(files.saes),),
            "data_dir": str(files.data),
            "hf_cache": False,
            **options,
        }
    )
    app: Starlette = mlxsrv.create_app(settings)
    if mounted:
        app = Starlette(routes=[Mount("/", app=app)])
    with (
        hosted(app) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(files: Files) -> Iterator[httpx.Client]:
    with serve(files) as client:
        yield client


@pytest.fixture(scope="module")
def shared(client: httpx.Client) -> Api:
    return Api(client)


@pytest.fixture
def api(shared: Api) -> Iterator[Api]:
    """The management of a server to which nothing is attached, and which has no profiles."""
    yield shared
    for sae in shared("GET", "/saes"):
        for model in sae["attached_to"]:
            shared("POST", f"/saes/{sae['id']}/detach", {"model": model})
    for profile in shared("GET", "/profiles"):
        shared("DELETE", f"/profiles/{profile['id']}")


@pytest.fixture
def attached(api: Api) -> Api:
    """As `api`, with `one` at layer 1 of the default model."""
    api("POST", "/saes/one/attach")
    return api


def say(client: httpx.Client, **fields: Any) -> str:
    return answer(ask(client, chat(**fields)))


def profile(name: str = "calm", **fields: Any) -> Body:
    made = {"name": name, "steering": STRONG, "model_id": "t", "sae_id": "one", "layer": 1}
    return {**made, **fields}


def listed(api: Api) -> dict[str, Body]:
    return {sae["id"]: sae for sae in api("GET", "/saes")}


# SAEs.


def test_saes_are_told_by_their_files(api: Api) -> None:
    assert {"one", "two", "wide", "deep", "vague"} <= listed(api).keys()
    one = api("GET", "/saes/one")
    assert one == listed(api)["one"]
    assert one.pop("origin")
    assert one == {
        "id": "one",
        "state": "ready",
        "architecture": "standard",
        "d_in": 64,
        "d_sae": D_SAE,
        "layer": 1,
        "hook_name": "blocks.1.hook_resid_post",
        "model_name": "tiny",
        "bytes": 4 * (2 * 64 * D_SAE + D_SAE + 64),
        "warnings": [],
        "problem": None,
        "attached_to": [],
    }
    assert listed(api)["vague"]["layer"] is None


def test_what_is_not_known(api: Api) -> None:
    for method, path in (
        ("GET", "/saes/none"),
        ("DELETE", "/saes/none"),
        ("GET", "/saes/none/compatibility"),
        ("POST", "/saes/none/attach"),
        ("POST", "/saes/none/detach"),
    ):
        api.refuse(404, "sae_not_found", method, path)
    for method, path in (
        ("GET", "/saes/one/compatibility"),
        ("GET", "/saes/attachment"),
        ("GET", "/saes/steering"),
        ("DELETE", "/saes/steering"),
        ("DELETE", "/saes/steering/5"),
        ("GET", "/profiles/active"),
        ("GET", "/monitoring"),
        ("GET", "/monitoring/history"),
        ("DELETE", "/monitoring/history"),
        ("GET", "/monitoring/statistics"),
        ("DELETE", "/monitoring/statistics"),
    ):
        api.refuse(404, "model_not_found", method, path, param="model", model="nobody")
    posts: list[tuple[str, Body]] = [
        ("/saes/one/attach", {}),
        ("/saes/one/detach", {}),
        ("/saes/steering", {"feature_idx": 5, "value": 1}),
        ("/saes/steering/batch", {"steering": {}}),
        ("/saes/steering/enable", {}),
        ("/saes/steering/disable", {}),
        ("/profiles/deactivate", {}),
        ("/monitoring/configure", {}),
        ("/monitoring/statistics/top", {}),
    ]
    for path, body in posts:
        asked = {**body, "model": "nobody"}
        api.refuse(404, "model_not_found", "POST", path, asked, param="model")


def test_an_sae_is_registered_and_forgotten(api: Api, files: Files) -> None:
    path = str(files.saes / "spare")
    known = api("POST", "/saes", {"path": path, "id": "named"}, status=202)
    assert (known["id"], known["state"], known["d_sae"]) == ("named", "ready", D_SAE)
    other = {"path": str(files.saes / "one"), "id": "named"}
    api.refuse(409, "sae_exists", "POST", "/saes", other, param="id")
    api("POST", "/saes/named/attach")
    api.refuse(409, "sae_attached", "DELETE", "/saes/named")
    api("POST", "/saes/named/detach")
    assert api("DELETE", "/saes/named") is None
    api.refuse(404, "sae_not_found", "GET", "/saes/named")
    for body, param in (
        ({}, "repository_id"),
        ({"path": "/etc"}, "path"),
        ({"repository_id": "org/name"}, "repository_id"),
        ({"repository_id": "org/name", "path": path}, "repository_id"),
        ({"path": path, "id": "steering"}, "id"),
        ({"path": path, "id": "a/b"}, "id"),
    ):
        api.refuse(400, "invalid_value", "POST", "/saes", body, param=param)


def test_what_fits_is_known_without_a_load(api: Api) -> None:
    assert api("GET", "/saes/one/compatibility")["compatible"] is True
    for id, query, reason in (
        ("wide", {}, "32 wide"),
        ("deep", {}, "no layer 9"),
        ("one", {"layer": 2}, "no layer 2"),
        ("vague", {}, "which layer"),
    ):
        told = api("GET", f"/saes/{id}/compatibility", **query)
        assert told["compatible"] is False
        assert reason in " ".join(told["reasons"])
    assert api("GET", "/saes/deep/compatibility", layer=1)["compatible"] is True
    told = api("GET", "/saes/vague/compatibility", layer=1, model="u")
    assert told["compatible"] is True
    assert "org/somebody-7b" in " ".join(told["warnings"])
    api.refuse(400, "invalid_value", "GET", "/saes/one/compatibility", param="layer", layer="x")


def test_attaching(api: Api) -> None:
    begun = time.time()
    nothing = api("GET", "/saes/attachment")
    assert (nothing["attached"], nothing["model"], nothing["sae_id"]) == (False, "t", None)
    told = api("POST", "/saes/one/attach", {})
    assert told == api("GET", "/saes/attachment") == api("GET", "/saes/attachment", model="t")
    assert told["bytes"] > 0
    assert begun <= told["since"] <= time.time()
    wanted = {"attached": True, "model": "t", "sae_id": "one", "layer": 1, "hook": "resid_post"}
    wanted |= {"d_in": 64, "d_sae": D_SAE, "architecture": "standard"}
    assert told == told | wanted
    assert (listed(api)["one"]["state"], listed(api)["one"]["attached_to"]) == ("attached", ["t"])
    api.refuse(409, "sae_attached", "POST", "/saes/one/attach")
    assert "one" in api.refuse(409, "sae_attached", "POST", "/saes/two/attach")
    api.refuse(409, "sae_attached", "DELETE", "/saes/one")
    there = api("POST", "/saes/two/attach", {"model": "u"})
    assert (there["model"], there["layer"], there["hook"]) == ("u", 0, "resid_pre")
    assert api("GET", "/saes/attachment", model="u") == there
    assert "u" in api.refuse(400, "sae_not_attached", "POST", "/saes/two/detach")
    gone = api("POST", "/saes/one/detach")
    assert gone == nothing
    api.refuse(400, "sae_not_attached", "POST", "/saes/one/detach")
    assert listed(api)["one"]["state"] == "ready"
    assert api("GET", "/saes/attachment", model="u") == there, "it stays"


def test_what_does_not_fit_is_not_attached(api: Api) -> None:
    api.refuse(400, "sae_incompatible", "POST", "/saes/wide/attach")
    api.refuse(400, "sae_incompatible", "POST", "/saes/deep/attach")
    api.refuse(400, "sae_incompatible", "POST", "/saes/one/attach", {"layer": 2})
    api.refuse(400, "sae_incompatible", "POST", "/saes/vague/attach", param="layer")
    broken = api("GET", "/saes/broken")
    assert (broken["state"], broken["d_in"]) == ("failed", None)
    assert api("GET", "/saes/broken/compatibility")["reasons"] == [broken["problem"]]
    message = api.refuse(400, "sae_incompatible", "POST", "/saes/broken/attach")
    assert broken["problem"] in message
    assert api("GET", "/saes/attachment")["attached"] is False
    assert api("POST", "/saes/vague/attach", {"layer": 0})["layer"] == 0


def test_an_sae_whose_files_are_gone_can_be_detached(api: Api, files: Files) -> None:
    folder = write_sae(files.saes / "gone", d_in=64, d_sae=D_SAE)
    api("POST", "/saes/gone/attach")
    folder.rename(files.saes.parent / "elsewhere")
    try:
        assert "gone" not in listed(api)
        assert say(api.client, steering=STRONG) != say(api.client)
    finally:
        assert api("POST", "/saes/gone/detach")["attached"] is False
    api.refuse(404, "sae_not_found", "POST", "/saes/gone/detach")


def test_two_attach_at_once_and_one_does(api: Api) -> None:
    with ThreadPoolExecutor(4) as threads:
        asked = [
            threads.submit(api.client.post, f"/api/saes/{id}/attach") for id in ("one", "two") * 2
        ]
        codes = sorted(future.result().status_code for future in asked)
    assert codes == [200, 409, 409, 409]
    assert api("GET", "/saes/attachment")["attached"] is True


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


# Bodies and errors.


def test_what_is_sent_need_not_say_anything(attached: Api) -> None:
    response = attached.client.post("/api/saes/steering/enable", content=b"")
    assert response.status_code == 200
    response = attached.client.post("/api/saes/steering/enable", json={"color": "red"})
    assert response.headers["x-ignored-params"] == "color"
    for content in (b"{", b"[]", b"5"):
        response = attached.client.post("/api/saes/steering/enable", content=content)
        assert response.status_code == 400
        check_refusal(response, "invalid_json" if content == b"{" else "invalid_value")


def check_refusals(client: httpx.Client, prefix: str, data: Path) -> None:
    for method, path, status, code in (
        ("PUT", "/api/saes", 405, "method_not_allowed"),
        ("GET", "/api/saes", 500, "internal_error"),
        ("GET", "/api/profiles", 503, "store_failed"),
    ):
        response = client.request(method, prefix + path)
        assert response.status_code == status, response.text
        error = check_refusal(response, code)
        assert str(data) not in error["message"]
    response = client.post(f"{prefix}/api/profiles", content=b" " * 2000)
    assert response.status_code == 413
    check_refusal(response, "request_too_large")
    # Where there is no route there is no envelope.
    refused(client.get(f"{prefix}/api/nothing"), 404, "not_found")


def test_whatever_goes_wrong_is_told_in_the_envelope(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profiles.sqlite3").write_bytes(b"no database, but long enough" * 100)
    settings = mlxsrv.Settings(
        model=(f"t={files.model}",), hf_cache=False, max_body=1024, data_dir=str(tmp_path)
    )
    app = mlxsrv.create_app(settings)
    parent = Starlette(routes=[Mount("/llm", app=app)])

    async def fail(_: SAEs) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(SAEs, "all", fail)
    for served, prefix in ((app, ""), (parent, "/llm")):
        with hosted(served) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
            check_refusals(client, prefix, tmp_path)


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


def test_a_failed_attachment_is_logged_and_the_server_goes_on(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(files, attach_sae=("nothing", "u=wide")) as client:

        def failed() -> list[Any]:
            return [each for each in caplog.records if each.getMessage() == "SAE not attached"][1:]

        wait_for(failed, why="both have failed")
        response = client.post(CHAT, json=chat(steering={"5": 1}))
        refused(response, 400, "sae_not_attached", param="steering")
        assert say(client)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"attach_sae": ("a b",)}, "attach_sae"),
        ({"attach_sae": ("one@x",)}, "attach_sae"),
        ({"attach_sae": ("nobody=one",)}, "nobody"),
        ({"attach_sae": ("one", "t=two")}, "not two"),
        ({"sae_dir": ("/nonexistent",)}, "sae_dir"),
        ({"control_vector": ("/nonexistent",)}, "control_vector"),
    ],
)
def test_wrong_settings_are_told_at_once(files: Files, wrong: Body, reason: str) -> None:
    settings = mlxsrv.Settings(**{"model": (f"t={files.model}",), "hf_cache": False, **wrong})
    with pytest.raises(SettingsError, match=reason):
        mlxsrv.create_app(settings)


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
