"""Changes are in the shared file before their clients are told, or the clients are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from mlxsrv.replicas.change_notes import ChangeNotes
from mlxsrv.replicas.shared_file import SharedFile
from mlxsrv.settings import Settings
from mlxsrv.web.app import App

PROFILE = {"name": "calm", "steering": {"1": 2.0}, "model_id": "demo", "sae_id": "x", "layer": 1}


class Pair:
    """An app that notes its changes, and the shared file as another replica sees it."""

    def __init__(self, folder: Path) -> None:
        settings = Settings(data_dir=str(folder), api_key=("sk-right",))
        self.shared, self.other = (SharedFile(folder / "shared", settings, n) for n in "ab")
        noting = partial(ChangeNotes, shared=self.shared)
        self.app = App(settings, local=False, behind_guard=[noting])

    def request(self, method: str, path: str, body: Any = None, key: str = "right") -> Any:
        async def run() -> httpx.Response:
            headers = {"authorization": f"Bearer sk-{key}"}
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.request(method, path, json=body, headers=headers)

        return asyncio.run(run())

    def noted(self) -> list[tuple[str, str]]:
        changes = (noted.change for noted in self.other.changes_after(0))
        return [(change.method, change.path) for change in changes]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.shared.close()
    pair.other.close()


def test_a_change_is_noted_when_it_is_made_and_not_when_it_is_refused(pair: Pair) -> None:
    id = pair.request("POST", "/api/profiles", PROFILE).json()["data"]["id"]
    assert pair.noted() == [], "all replicas read the profiles"
    renamed = f"/api/profiles/{id}"
    assert pair.request("PATCH", renamed, {"name": "a"}, key="wrong").status_code == 401
    assert pair.request("PATCH", "/api/profiles/none", {"name": "a"}).status_code == 404
    assert pair.noted() == []
    assert pair.request("PATCH", renamed, {"name": "a"}).status_code == 200
    assert pair.noted() == [("PATCH", renamed)]


def test_a_change_that_cannot_be_noted_is_refused_and_noted_later(pair: Pair) -> None:
    id = pair.request("POST", "/api/profiles", PROFILE).json()["data"]["id"]
    file = pair.other._file
    file.execute("ALTER TABLE changes RENAME TO away")
    refused = pair.request("PATCH", f"/api/profiles/{id}", {"name": "a"})
    assert refused.status_code == 503
    told = refused.json()
    assert (told["success"], told["error"]["code"]) == (False, "store_failed")
    assert "'shared' under --data-dir cannot be used" in told["error"]["message"]
    file.execute("ALTER TABLE away RENAME TO changes")
    assert pair.noted() == []
    [noted] = pair.shared.changes_after(0)
    assert noted.own
    assert pair.noted() == [("PATCH", f"/api/profiles/{id}")]


@pytest.mark.parametrize(
    ("path", "body", "whole", "goes_on"),
    [
        ("/api/saes/steering", b'{"feature_idx": 3, "value": 1}', True, True),
        ("/api/saes/steering", b'{"feature_idx": 3', False, False),
        ("/api/generate", b'{"model": "demo"}', True, True),
        ("/api/generate", b'{"model": "demo", "prompt": "Hello"}', True, False),
    ],
    ids=["change", "half a change", "load", "text"],
)
def test_a_client_that_leaves_ends_its_text_and_no_change(
    pair: Pair, path: str, body: bytes, *, whole: bool, goes_on: bool
) -> None:
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": not whole}

    async def send(message: Message) -> None:
        pass

    async def work() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            begun.set()
            await go_on.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        notes = ChangeNotes(app, pair.shared)
        asked = asyncio.create_task(notes(scope, receive, send))
        await begun.wait()
        running = list(notes._running)
        asked.cancel()
        await asyncio.wait([asked])
        go_on.set()
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in ended] == [not goes_on]

    asyncio.run(work())
    assert pair.noted() == ([("POST", path)] if goes_on else [])
