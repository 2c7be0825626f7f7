"""Changes of one replica are made at all others, at those that start later too, in one order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from mlxsrv.models.sae_library import _DEMO_FOLDER as DEMO_FOLDER
from mlxsrv.replicas.repeating import ChangeRepeater
from mlxsrv.replicas.shared_file import SharedFile, StateChange
from mlxsrv.settings import Settings
from mlxsrv.web.app import App
from tests.support.hub import Hub
from tests.support.replicas import Replicas, replicas
from tests.support.sae_libraries import remote, server
from tests.support.saes import write_sae
from tests.support.serving import PATIENCE

__all__ = ["remote", "server"]

STEERING = "/api/saes/steering"


def run(
    folder: Path, work: Callable[[Replicas], Coroutine[Any, Any, None]], **settings: Any
) -> None:
    async def all_of_it() -> None:
        async with replicas(folder, 2, **settings) as running:
            await work(running)

    asyncio.run(all_of_it())


async def post(client: httpx.AsyncClient, path: str, body: Any) -> Any:
    told = await client.post(path, json=body)
    assert told.status_code < 400, told.text
    return told.json()["data"]


async def get(client: httpx.AsyncClient, path: str) -> Any:
    return (await client.get(path)).raise_for_status().json()["data"]


async def attach(client: httpx.AsyncClient) -> str:
    id: str = (await get(client, "/api/saes"))[0]["id"]
    await post(client, f"/api/saes/{id}/attach", {})
    return id


@pytest.mark.slow
def test_a_replica_that_starts_later_has_the_state_of_the_others(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_sae(tmp_path / "saes" / name / "sae")

    async def work(running: Replicas) -> None:
        first, second = running.clients
        for name in ("one", "two"):
            await post(first, "/api/saes", {"path": f"{name}/sae", "id": f"my-{name}"})
        await attach(second)
        await post(first, "/api/monitoring/configure", {"enabled": True, "history_size": 7})
        await post(second, "/api/monitoring/configure", {"features": [3, 5], "top_k": 0})
        await post(first, STEERING, {"feature_idx": 3, "value": 1, "mode": "clamp"})
        await post(first, STEERING, {"feature_idx": 3, "value": 2})
        later = running.start()
        for path in ("/api/saes", "/api/monitoring", STEERING):
            states = [await get(client, path) for client in (first, second, later)]
            assert states[0] == states[1] == states[2], path
        assert (await get(later, "/api/monitoring"))["enabled"]
        assert await get(later, STEERING) == {
            "enabled": True,
            "mode": "clamp",
            "values": {"3": 2.0},
        }
        ids = {sae["id"] for sae in await get(later, "/api/saes")}
        assert {"my-one", "my-two"} <= ids

    run(tmp_path, work, sae_dir=(str(tmp_path / "saes"),))


@pytest.mark.slow
def test_an_sae_is_attached_when_its_download_is_over(tmp_path: Path, remote: Hub) -> None:
    remote.add("org/saes", DEMO_FOLDER)

    async def work(running: Replicas) -> None:
        first, second = running.clients
        asked = {"repository_id": "org/saes", "id": "far"}
        await post(first, "/api/saes", asked)
        async with asyncio.timeout(PATIENCE):
            while (await first.post("/api/saes/far/attach", json={})).status_code != 200:
                pass
        assert (await get(second, "/api/saes/far"))["attached_to"] == ["demo"]

    run(tmp_path, work, allow_download=True)


@pytest.mark.slow
def test_replicas_agree_on_changes_that_two_of_them_make_at_once(tmp_path: Path) -> None:
    async def work(running: Replicas) -> None:
        first, second = running.clients
        await attach(first)
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow_body() -> AsyncIterator[bytes]:
            yield b'{"feature_idx": 7,'
            begun.set()
            await go_on.wait()
            yield b' "value": 5}'

        slow = asyncio.create_task(second.post(STEERING, content=slow_body()))
        await begun.wait()
        await post(first, f"{STEERING}/batch", {"steering": {"7": 1, "8": 1}})
        go_on.set()
        assert (await slow).status_code == 200
        for client in (second, first, running.start()):
            assert (await get(client, STEERING))["values"] == {"7": 5.0, "8": 1.0}

    run(tmp_path, work)


class Held:
    """An app whose requests wait at a path until they may go on, or that fails there."""

    def __init__(self, app: App, path: str, *, fails: bool = False) -> None:
        self._app = app
        self._path = path
        self._fails = fails
        self.came: list[str] = []
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.came.append(scope["path"])
        if scope["path"] == self._path:
            if self._fails:
                raise RuntimeError("it fails")
            self.begun.set()
            await self.go_on.wait()
        await self._app(scope, receive, send)


class Followed:
    """A repeater, and the shared file as another replica sees it."""

    def __init__(self, folder: Path, path: str, *, fails: bool = False) -> None:
        settings = Settings(data_dir=str(folder))
        self.other, self.shared = (SharedFile(folder / "shared", settings, n) for n in "ab")
        self.app = Held(App(settings, local=False), path, fails=fails)
        self.repeater = ChangeRepeater(self.app, self.shared)

    def note(self, path: str, body: bytes = b"", method: str = "POST") -> None:
        self.other.add_change(StateChange(f"{path}{body!r}", method, path, b"", body))

    async def close(self) -> None:
        await self.repeater.close()
        await self.app._app.service.close()
        self.shared.close()
        self.other.close()


ENABLE, DISABLE = f"{STEERING}/enable", f"{STEERING}/disable"


def test_a_change_that_cannot_be_made_holds_up_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        followed = Followed(tmp_path, ENABLE, fails=True)
        for path in (ENABLE, DISABLE):
            followed.note(path)
        followed.note("/api/profiles/gone", method="DELETE")
        for _ in range(2):
            await followed.repeater.catch_up()
        assert followed.app.came == [ENABLE, DISABLE, "/api/profiles/gone"], "each is tried once"
        await followed.close()

    with caplog.at_level(logging.INFO, "mlxsrv.replicas"):
        asyncio.run(work())
    records = [record for record in caplog.records if record.name == "mlxsrv.replicas"]
    told = [(record.levelno, record.getMessage()) for record in records]
    assert [level for level, _ in told] == [logging.ERROR, logging.ERROR, logging.INFO], told
    assert "RuntimeError: it fails" in caplog.text
    assert "no SAE is attached" in records[1].__dict__["mlxsrv_fields"]["reason"]


def test_what_is_made_here_beside_changes_of_others_ends_in_the_order_of_the_file(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        followed = Followed(tmp_path, "/nowhere")
        followed.note(ENABLE)
        await followed.repeater.catch_up()
        for subject, after in (("x", 0), ("y", 1), ("z", 3)):
            path = f"/api/profiles/{subject}"
            followed.shared.add_change(StateChange(subject, "DELETE", path, b"", b"", after))
        await followed.repeater.catch_up()
        # x began before the other's change was made here, and y before x was made again.
        assert followed.app.came == [ENABLE, "/api/profiles/x", "/api/profiles/y"]
        await followed.close()

    asyncio.run(work())


def test_a_file_that_another_replica_holds_stops_no_stream_for_long(tmp_path: Path) -> None:
    async def work() -> None:
        followed = Followed(tmp_path, "/nowhere")
        followed.note(ENABLE)
        told: list[str] = []
        followed.shared._file._connection.set_trace_callback(told.append)
        followed.other._file.execute("BEGIN EXCLUSIVE")
        await followed.repeater.catch_up()
        looked = ["PRAGMA busy_timeout = 50", "PRAGMA busy_timeout = 5000"]
        assert [each for each in told if each.startswith("PRAGMA")] == looked
        count = len(told)
        await followed.repeater.catch_up()
        assert len(told) == count, "it does not look again at once"
        followed.other._file.execute("COMMIT")
        async with asyncio.timeout(PATIENCE):
            while not followed.app.came:
                await followed.repeater.catch_up()
                await asyncio.sleep(0.01)
        assert followed.app.came == [ENABLE]
        await followed.close()

    asyncio.run(work())


def test_a_load_is_begun_and_not_waited_for(tmp_path: Path) -> None:
    async def work() -> None:
        followed = Followed(tmp_path, "/api/generate")
        followed.note("/api/generate", b'{"model": "demo"}')
        followed.note(ENABLE)
        await followed.repeater.catch_up()
        assert ENABLE in followed.app.came, "what came later is made"
        await followed.app.begun.wait()
        followed.note("/api/generate", b'{"model": "demo", "keep_alive": 0}')
        await followed.repeater.catch_up()
        followed.app.go_on.set()
        await followed.repeater.loaded()
        assert followed.app.came.count("/api/generate") == 2
        await followed.close()

    asyncio.run(work())


def test_a_client_that_goes_away_leaves_no_change_half_made(tmp_path: Path) -> None:
    async def work() -> None:
        followed = Followed(tmp_path, ENABLE)
        followed.note(ENABLE)
        gone = asyncio.create_task(followed.repeater.catch_up())
        await followed.app.begun.wait()
        gone.cancel()
        next_one = asyncio.create_task(followed.repeater.catch_up())
        await asyncio.wait([gone])
        assert not next_one.done(), "it waits for the change"
        followed.note(DISABLE)
        followed.app.go_on.set()
        await next_one
        assert followed.app.came == [ENABLE, DISABLE], "each once, the later one too"
        await followed.close()

    asyncio.run(work())


def test_health_does_not_wait_for_changes(tmp_path: Path) -> None:
    profile = {"name": "a", "steering": {}, "model_id": "demo", "sae_id": "x", "layer": 1}

    async def work(running: Replicas) -> None:
        first, second = running.clients
        id = (await post(first, "/api/profiles", profile))["id"]
        path = f"/api/profiles/{id}"
        (await first.patch(path, json={"name": "b"})).raise_for_status()
        held = Held(running.apps[1]._app, path)
        running.apps[1]._changes._app = held
        waiting = asyncio.create_task(second.get("/v1/models"))
        await held.begun.wait()
        assert (await second.get("/health")).status_code == 200
        told = (await first.get("/health", params={"verbose": 1})).json()
        assert told["others"].keys() == {"1"}
        assert not waiting.done()
        held.go_on.set()
        assert (await waiting).status_code == 200

    run(tmp_path, work)
