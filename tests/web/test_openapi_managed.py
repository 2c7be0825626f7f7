"""Whatever is asked under `/api`, the answer is as described, and never the server's own fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.core import NOT_SET
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from mlxsrv.wire.operation import Operation
from tests.support.client import CHAT, Body, chat
from tests.support.effort import examples, often
from tests.support.fixtures import Folders
from tests.support.operations import every_operation
from tests.support.saes import write_sae
from tests.support.serving import PATIENCE, serving

EXAMPLES = examples(32, usual=5)
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
MANAGED = [operation for operation in every_operation() if operation.enveloped]
ASKING = [operation for operation in MANAGED if operation.asks is not None]
FEATURES = {"steering": {"3": 2.5, "7": -1}}


class Managed:
    """A server on which every kind of thing is: an SAE on the model, and another, a profile, and
    something watched."""

    def __init__(self, client: httpx.Client, sae: str) -> None:
        self.client = client
        self.document: Body = client.get("/openapi.json").json()
        self.schema = schemathesis.openapi.from_dict(self.document)
        self.sae = sae
        self.profile = ""
        self.restore()

    def restore(self) -> None:
        """Bring back what requests may have taken away."""
        profiles = self.client.get("/api/profiles").json()["data"]
        if self.profile not in [profile["id"] for profile in profiles]:
            profile = {"name": "one", **FEATURES, "model_id": "t", "sae_id": self.sae, "layer": 1}
            self.profile = self._post("/api/profiles", profile)["id"]
        held = self.client.get("/api/saes/attachment", params={"model": "t"}).json()["data"]
        if not held["attached"]:
            self._post(f"/api/saes/{self.sae}/attach", {"model": "t", "layer": 1})
        self._post("/api/saes/steering/batch", {"model": "t", **FEATURES})
        self._post("/api/monitoring/configure", {"model": "t", "enabled": True, "top_k": 3})
        assert self.client.post(CHAT, json=chat(model="t", max_tokens=2)).status_code == 200

    def _post(self, path: str, body: Body) -> Any:
        response = self.client.post(path, json=body)
        assert response.is_success, response.text
        return response.json()["data"]


@pytest.fixture(scope="module")
def managed(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Managed]:
    root = tmp_path_factory.mktemp("managed")
    for name in ("one", "two"):
        write_sae(root / "saes" / name, d_in=64, d_sae=128)
    options = ["--model", f"t={folders.plain}", "--sae-dir", f"{root / 'saes'}"]
    options += ["--data-dir", f"{root / 'data'}"]
    # A hub that is not there: whatever is to be downloaded fails at once.
    variables = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    with serving(root, *options, variables=variables) as server, server.client() as client:
        known = [sae["id"] for sae in client.get("/api/saes").json()["data"]]
        yield Managed(client, next(id for id in known if id.endswith("one")))


def attempt(managed: Managed, operation: Operation, mode: GenerationMode) -> list[int]:
    """Ask what the document allows (or, in the negative mode, does not); the statuses. Of four
    cases three name what there is, and the fourth stays as it was made up."""
    statuses: list[int] = []

    def check(case: Case[Any]) -> None:
        if len(statuses) % 4 < 3:
            aim(case, managed, operation, model=mode is GenerationMode.POSITIVE)
        response = case.call(base_url=f"{managed.client.base_url}", timeout=PATIENCE)
        case.validate_response(response, checks=CHECKS)
        assert response.status_code < 500 or response.status_code == 503, response.text
        # Nothing at all is an empty object, which schemathesis does not take for a body.
        if mode is GenerationMode.NEGATIVE and case.body is not NOT_SET:
            assert response.status_code in (400, 404, 409), response.text
        statuses.append(response.status_code)

    @given(case=managed.schema[operation.path][operation.method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    def run(case: Case[Any]) -> None:
        check(case)

    run()
    managed.restore()
    return statuses


def aim(case: Case[Any], managed: Managed, operation: Operation, *, model: bool) -> None:
    """Let a case name what there is. A body that is wrong by its `model` alone keeps that."""
    if "id" in case.path_parameters:
        of_sae = operation.path.startswith("/api/saes")
        case.path_parameters["id"] = managed.sae if of_sae else managed.profile
    if "idx" in case.path_parameters:
        case.path_parameters["idx"] = "3"
    for place in (case.query, case.body) if model else ():
        if isinstance(place, dict) and "model" in place:
            place["model"] = "t"


def named(operation: Operation) -> str:
    return operation.id


@pytest.mark.parametrize("operation", often(MANAGED, MANAGED[::2]), ids=named)
def test_what_is_allowed_is_answered_as_described(managed: Managed, operation: Operation) -> None:
    assert attempt(managed, operation, GenerationMode.POSITIVE)


@pytest.mark.parametrize("operation", often(ASKING, ASKING[::2]), ids=named)
def test_what_is_not_allowed_is_refused_as_described(
    managed: Managed, operation: Operation
) -> None:
    assert attempt(managed, operation, GenerationMode.NEGATIVE)


@pytest.mark.parametrize("layer", [2**63, 2**200])
def test_a_layer_beyond_all_bounds_is_the_clients_fault(managed: Managed, layer: int) -> None:
    """As it was once found: the store keeps numbers of 64 bits."""
    profile = {"name": "deep", **FEATURES, "model_id": "t", "sae_id": managed.sae, "layer": layer}
    response = managed.client.post("/api/profiles", json=profile)
    assert response.status_code == 400
    assert response.json()["error"]["details"] == {"param": "layer"}
