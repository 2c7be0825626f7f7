"""A server with SAEs below one folder, and a client of its management."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
from tests.support.client import Body, answer, ask, chat
from tests.support.fixtures import Folders
from tests.support.saes import write_sae
from tests.support.serving import PATIENCE, hosted
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
