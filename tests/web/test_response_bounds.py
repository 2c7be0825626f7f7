"""A request of some bytes that continues or names what is stored: bounds for what it becomes, and
whose items its ids mean."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request

import mlxsrv
from mlxsrv.web.reading import read_aside
from mlxsrv.wire.decoding import LARGE
from tests.support.client import Body, refused
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, Server, serving
from tests.web.test_bodies import half_sent

RESPONSES = "/v1/responses"
MOST = 400_000  # bytes of a body
HELLO = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def bounded(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--max-body", str(MOST), "--max-bodies", str(2 * MOST), "--body-timeout", "60"]
    keys = ["--api-key", "one", "--api-key", "two"]
    folder = tmp_path_factory.mktemp("bounded")
    with serving(folder, "--model", f"t={folders.endless}", *options, *keys) as server:
        yield server


@contextlib.contextmanager
def client_of(server: Server, key: str) -> Iterator[httpx.Client]:
    with server.client(headers={"Authorization": f"Bearer {key}"}) as client:
        yield client


def thought(size: int, id: str) -> Body:
    """An item that the template leaves out, so that its prompt is short whatever its size."""
    content = [{"type": "reasoning_text", "text": "x" * size}]
    return {"type": "reasoning", "id": id, "content": content}


def refer(id: str) -> Body:
    return {"type": "item_reference", "id": id}


def post(client: httpx.Client, *items: Body, **fields: Any) -> httpx.Response:
    body = {"input": [HELLO, *items], "max_output_tokens": 1, **fields}
    return client.post(RESPONSES, json=body)


def made(client: httpx.Client, *items: Body, **fields: Any) -> Body:
    response = post(client, *items, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_an_item_that_is_named_often_counts_as_often(bounded: Server) -> None:
    with client_of(bounded, "one") as client:
        made(client, thought(MOST // 4, "rs_often"))
        often = made(client, *[refer("rs_often")] * 3)
        listed = client.get(f"{RESPONSES}/{often['id']}/input_items?order=asc").json()["data"]
        assert [item["id"] for item in listed[1:]] == ["rs_often"] * 3
        assert {len(item["content"][0]["text"]) for item in listed[1:]} == {MOST // 4}
        for path in ("", "/input_tokens"):
            body = {"input": [HELLO, *[refer("rs_often")] * 100]}
            response = client.post(RESPONSES + path, json=body)
            error = refused(response, 413, "request_too_large", param="input[4]")
            assert str(MOST) in error["message"]


def test_a_past_counts_as_if_it_were_sent(bounded: Server) -> None:
    with client_of(bounded, "one") as client:
        first = made(client, thought(MOST // 4, "rs_a"))
        second = made(client, thought(MOST // 4, "rs_b"), previous_response_id=first["id"])
        third = made(client, thought(MOST // 4, "rs_c"), previous_response_id=second["id"])
        fourth = post(client, thought(MOST // 4, "rs_d"), previous_response_id=third["id"])
        refused(fourth, 413, "request_too_large", param="previous_response_id")
        made(client, previous_response_id=third["id"])


def test_a_past_takes_room_beside_the_bodies_of_others(bounded: Server) -> None:
    with client_of(bounded, "one") as client:
        past = made(client, thought(MOST // 2, "rs_room"))["id"]
        with contextlib.ExitStack() as stack:
            framing = (f"Content-Length: {MOST}", "Expect: 100-continue", "X-API-Key: two")
            for _ in range(2):
                raw = stack.enter_context(half_sent(bounded, *framing))
                raw.settimeout(PATIENCE)
                assert raw.recv(999).startswith(b"HTTP/1.1 100 "), "there is room for it"
            refused(post(client, previous_response_id=past), 503, "overloaded")
            refused(post(client, refer("rs_room")), 503, "overloaded")
            listed = client.get(f"{RESPONSES}/{past}/input_items")
            refused(listed, 503, "overloaded")
            made(client)


def test_an_id_means_an_item_of_the_same_key(bounded: Server) -> None:
    with client_of(bounded, "one") as one, client_of(bounded, "two") as two:
        mine = {"type": "message", "id": "msg_1", "role": "user", "content": "mine"}
        made(one, mine)
        refused(post(two, refer("msg_1")), 404, "item_not_found", param="input[1]")
        made(two, {**mine, "content": "of another"})
        for client, text in ((one, "mine"), (two, "of another")):
            went_on = made(client, refer("msg_1"))
            items = client.get(f"{RESPONSES}/{went_on['id']}/input_items").json()["data"]
            assert items[0]["content"] == [{"type": "input_text", "text": text}]


def test_streams_go_on_while_much_is_read() -> None:
    app = mlxsrv.create_app(mlxsrv.Settings(model=("demo",)))

    async def reads_aside(size: int) -> bool:
        """Whether the loop does something else while a request of this size is read."""
        share = app.bodies.share()
        share.grow(size)
        request = Request({"type": "http", "app": app, "mlxsrv.body": share})
        went_on = threading.Event()
        asyncio.get_running_loop().call_soon(went_on.set)
        return await read_aside(request, lambda: went_on.wait(PATIENCE if size > LARGE else 0))

    async def test() -> None:
        assert await reads_aside(LARGE + 1)
        assert not await reads_aside(LARGE), "a thread costs more than a small body"
        await app.service.close()

    asyncio.run(test())
