"""Management over HTTP: SAEs and their attachment, refusals in the envelope, settings.

All answers under `/api` are held against `/openapi.json` as well.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import mlxsrv
from mlxsrv.options import SettingsError
from mlxsrv.service.steering.attachments import SAEs
from tests.support.client import CHAT, Body, chat, refused
from tests.support.managing import (
    D_SAE,
    STRONG,
    Api,
    Files,
    api,
    attached,
    check_refusal,
    client,
    files,
    listed,
    say,
    serve,
    shared,
)
from tests.support.saes import write_sae
from tests.support.serving import PATIENCE, hosted, wait_for

__all__ = ["api", "attached", "client", "files", "shared"]


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
