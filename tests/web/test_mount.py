"""Mounted in other apps: everything works under a prefix, and apps stay apart."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from litestar import Litestar, asgi
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import mlxsrv
from mlxsrv.web.app import App
from tests.support.client import CHAT, answer, ask, chat, check_schema, refused, stream
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, hosted, wait_for

PREFIX = "/llm"

Parent = Callable[[App], Any]


def in_starlette(app: App) -> Any:
    return Starlette(routes=[Mount(PREFIX, app=app)])


def in_fastapi(app: App) -> Any:
    parent = FastAPI()
    parent.mount(PREFIX, app)
    return parent


def in_litestar(app: App) -> Any:
    return Litestar(route_handlers=[asgi(PREFIX, is_mount=True, copy_scope=True)(app)])


def starlette_with_lifespan(app: App) -> Any:
    return Starlette(routes=[Mount(PREFIX, app=app)], lifespan=app.lifespan)


def fastapi_with_lifespan(app: App) -> Any:
    @contextlib.asynccontextmanager
    async def lifespan(parent: FastAPI) -> AsyncIterator[None]:
        async with mlxsrv.lifespan(app):
            yield

    parent = FastAPI(lifespan=lifespan)
    parent.mount(PREFIX, app)
    return parent


def litestar_with_lifespan(app: App) -> Any:
    return Litestar(
        route_handlers=[asgi(PREFIX, is_mount=True, copy_scope=True)(app)],
        lifespan=[lambda parent: mlxsrv.lifespan(app)],
    )


PARENTS = [in_starlette, in_fastapi, in_litestar]
PARENTS_THAT_START_IT = [starlette_with_lifespan, fastapi_with_lifespan, litestar_with_lifespan]


def make_app(folders: Folders, name: str = "t") -> App:
    return mlxsrv.create_app(mlxsrv.Settings(model=(f"{name}={folders.plain}",)))


@contextlib.contextmanager
def mounted(parent: Parent, app: App) -> Iterator[httpx.Client]:
    with (
        hosted(parent(app)) as url,
        httpx.Client(base_url=url + PREFIX, timeout=PATIENCE) as client,
    ):
        yield client


@pytest.fixture(params=[*PARENTS, *PARENTS_THAT_START_IT], scope="module")
def under(request: pytest.FixtureRequest, folders: Folders) -> Iterator[httpx.Client]:
    """A client of the app, mounted in each kind of parent."""
    with mounted(request.param, make_app(folders)) as client:
        yield client


def test_answers_are_those_of_the_server_alone(under: httpx.Client, client: httpx.Client) -> None:
    expected = answer(ask(client, chat()))
    assert answer(ask(under, chat())) == expected
    assert stream(under, chat()).content == expected


def test_the_catalogue_is_there(under: httpx.Client) -> None:
    models = under.get("/v1/models").json()
    check_schema(models, "ListModelsResponse")
    assert "t" in {model["id"] for model in models["data"]}
    assert under.get("/v1/models/t").json()["id"] == "t"
    answer(ask(under, chat()))  # the model is loaded then
    assert under.get("/health").status_code == 200


def test_errors_keep_their_shape(under: httpx.Client) -> None:
    refused(under.get("/v1/nowhere"), 404, "not_found")
    refused(under.get(CHAT), 405, "method_not_allowed")
    refused(under.get("/v1/models/nobody"), 404, "model_not_found", param="model")
    refused(under.post(CHAT, json=chat(temperature=5)), 400, "invalid_value", param="temperature")
    refused(under.post(CHAT, content=b"{"), 400, "invalid_json")


@pytest.mark.parametrize("parent", PARENTS)
def test_without_a_lifespan_it_starts_with_the_first_request(
    folders: Folders, parent: Parent
) -> None:
    with mounted(parent, make_app(folders)) as client:
        assert client.get("/v1/models/t").json()["loaded"] is False
        assert answer(ask(client, chat()))
        assert client.get("/v1/models/t").json()["loaded"] is True


@pytest.mark.parametrize("parent", PARENTS_THAT_START_IT)
def test_a_parents_lifespan_loads_the_default_model(folders: Folders, parent: Parent) -> None:
    with mounted(parent, make_app(folders)) as client:
        wait_for(lambda: client.get("/v1/models/t").json()["loaded"], why="the model is loaded")
        assert client.get("/health").json()["status"] == "ok"


def test_two_apps_share_the_device_and_nothing_else(folders: Folders) -> None:
    one, other = make_app(folders, "one"), make_app(folders, "other")
    parent = Starlette(routes=[Mount("/one", app=one), Mount("/other", app=other)])
    with hosted(parent) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        for mine, others in (("one", "other"), ("other", "one")):
            assert ask(client, chat(model=mine), f"/{mine}{CHAT}")["model"] == mine
            assert ask(client, chat(), f"/{mine}{CHAT}")["model"] == mine
            response = client.post(f"/{mine}{CHAT}", json=chat(model=others))
            refused(response, 404, "model_not_found", param="model")
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("mlxsrv-device") == 1


def test_an_app_can_be_served_again(folders: Folders) -> None:
    app = make_app(folders)
    for _ in range(2):
        with mounted(in_starlette, app) as client:
            assert answer(ask(client, chat()))


@pytest.mark.parametrize("entered", [False, True])
def test_a_test_client_can_be_used_twice(folders: Folders, entered: bool) -> None:
    app = make_app(folders)
    texts = []
    for _ in range(2):
        client = TestClient(app)
        with client if entered else contextlib.nullcontext():
            response = client.post(CHAT, json=chat())
            assert response.status_code == 200, response.text
            texts.append(answer(response.json()))
            texts.append(answer(client.post(CHAT, json=chat()).json()))
    assert len(set(texts)) == 1


def test_the_factory_reads_the_environment(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSRV_MODEL", f"mine={folders.plain}")
    with hosted(mlxsrv.create_app()) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        assert ask(client, chat())["model"] == "mine"
