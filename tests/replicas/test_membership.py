"""An app that is one of several: its refusals, its name, and what it shares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxsrv.errors import StoreFailed
from mlxsrv.generation.steering import ProfileObject
from mlxsrv.models.profile_store import ProfileStore, new_id
from mlxsrv.replicas.response_files import ResponseFiles
from mlxsrv.settings import Settings
from mlxsrv.web import management
from mlxsrv.web.app import App, Membership
from mlxsrv.web.paths import OperationRoute
from mlxsrv.web.security.guard import TakeRequest
from mlxsrv.web.security.rates import Allowance, RateLimit

Work = Callable[..., Coroutine[Any, Any, None]]


def run(folder: Path, work: Work, *, take: TakeRequest | None = None, **options: Any) -> None:
    """Have `work` use clients of two replicas of the demo model."""
    settings = Settings(data_dir=str(folder), **options)

    async def all_of_it() -> None:
        async with AsyncExitStack() as stack:
            clients = []
            for name in ("one", "two"):
                kept = ResponseFiles(100, 10**6, folder / "responses", name)
                app = App(settings, local=False, membership=Membership(name, kept, take))
                await stack.enter_async_context(app.lifespan())
                await app.loaded()
                client = httpx.AsyncClient(
                    transport=httpx.ASGITransport(app), base_url="http://x", timeout=60
                )
                clients.append(await stack.enter_async_context(client))
            await work(*clients)

    asyncio.run(all_of_it())


@pytest.mark.slow
def test_what_only_one_would_change_is_refused_by_name(tmp_path: Path) -> None:
    async def work(one: httpx.AsyncClient, two: httpx.AsyncClient) -> None:
        routes = [each for each in vars(management).values() if isinstance(each, OperationRoute)]
        assert len(routes) > 20
        for operation in (each.operation for each in routes):
            path = operation.path.replace("{id}", "demo").replace("{idx}", "7")
            answer = await one.request(operation.method, path)
            changes = operation.method != "GET" and not path.endswith("/top")
            refused = answer.status_code == 409
            assert refused == changes, operation.id
            if refused:
                answered = answer.json()
                assert answered["error"]["code"] == "set_at_start"
                assert f"{operation.method} {operation.path}" in answered["error"]["message"]

    run(tmp_path, work)


@pytest.mark.slow
def test_what_is_set_at_start_all_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profile = ProfileObject(
        id=new_id(),
        name="brief",
        description="",
        steering={239: 8.0},
        mode="clamp",
        model_id="demo",
        sae_id="demo",
        layer=2,
        created_at=0.0,
        updated_at=0.0,
    )
    ProfileStore(tmp_path).add(profile)

    async def work(*clients: httpx.AsyncClient) -> None:
        for client in clients:
            answered = (await client.get("/api/saes/steering")).raise_for_status().json()["data"]
            assert answered == {"enabled": True, "mode": "clamp", "values": {"239": 8.0}}
            active = (await client.get("/api/profiles/active")).raise_for_status().json()["data"]
            assert active["name"] == "brief"

    run(tmp_path, work, attach_sae=("demo",), profile=("brief", "of nobody"))
    lost = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert len(lost) == 2, "each has looked for the other profile"
    assert all("profile not activated" in each for each in lost)


@pytest.mark.slow
def test_each_says_which_one_it_is(tmp_path: Path) -> None:
    async def work(*clients: httpx.AsyncClient) -> None:
        for client, name in zip(clients, ("one", "two"), strict=True):
            answered = (await client.get("/health?verbose=1")).raise_for_status().json()
            assert answered["replica"] == name
            metrics = await client.get("/metrics")
            assert metrics.status_code == 404
            assert "ray_mlxsrv_" in metrics.json()["error"]["message"]

    run(tmp_path, work, metrics=True)


@pytest.mark.slow
def test_a_response_is_found_by_both(tmp_path: Path) -> None:
    async def work(one: httpx.AsyncClient, two: httpx.AsyncClient) -> None:
        asked = {"input": "Hello", "max_output_tokens": 4}
        first = (await one.post("/v1/responses", json=asked)).raise_for_status().json()
        later = {**asked, "previous_response_id": first["id"]}
        second = (await two.post("/v1/responses", json=later)).raise_for_status().json()
        [said] = first["output"]
        refers = {
            "max_output_tokens": 4,
            "input": [
                {"type": "message", "role": "user", "content": "Hello"},
                {"type": "item_reference", "id": said["id"]},
                {"type": "message", "role": "user", "content": "Again"},
            ],
        }
        (await two.post("/v1/responses", json=refers)).raise_for_status()
        items = await one.get(f"/v1/responses/{second['id']}/input_items")
        assert len(items.raise_for_status().json()["data"]) == 1
        (await two.delete(f"/v1/responses/{first['id']}")).raise_for_status()
        assert (await one.get(f"/v1/responses/{first['id']}")).status_code == 404
        assert (await one.post("/v1/responses", json=later)).status_code == 404

    run(tmp_path, work)


@pytest.mark.slow
def test_requests_are_counted_together(tmp_path: Path) -> None:
    rates = RateLimit(3, clock=lambda: 0.0)
    broken = False

    async def take(client: Hashable) -> Allowance:
        if broken:
            raise StoreFailed("the counter does not answer")
        return rates.take(client)

    async def work(one: httpx.AsyncClient, two: httpx.AsyncClient) -> None:
        nonlocal broken
        asked = [await each.get("/v1/models") for each in (one, two, one, two)]
        assert [each.status_code for each in asked] == [200, 200, 200, 429]
        broken = True
        refused = await one.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_failed")
        assert (await one.get("/health")).status_code == 200

    run(tmp_path, work, take=take, rate_limit=3)
