"""Clients that share a server: whose turn it is, and how many places each of them may have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

import mlxsrv
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings
from tests.support.client import CHAT, FIRST_CONTENT, Body, RawClient, ask, chat, refused
from tests.support.effort import often
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, Server, hosted, serving, wait_for

ROWS = 2
FEW = 2
"""Requests that others may have served before the one request of a client."""

ONE, TWO, LATE = "sk-fair-one", "sk-fair-two", "sk-fair-late"

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def short(user: str | None = None, **fields: Any) -> Body:
    return chat(
        "Hi.", max_tokens=1, stream=True, **({} if user is None else {"user": user}), **fields
    )


def endless(user: str | None = None, **fields: Any) -> Body:
    return short(user, **fields) | {"max_tokens": 500_000}


def keyed(key: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {key}"}


class House:
    """A server whose rows are all busy with endless answers, until `open`."""

    def __init__(self, server: Server, rows: int, headers: Mapping[str, str]) -> None:
        self.server = server
        self.here = ExitStack()
        self._health = server.client(headers=headers)
        self.here.enter_context(self._health)
        ask(self._health, chat(user="warm"))
        self._holders = [self.send(endless("holder"), headers) for _ in range(rows)]
        for holder in self._holders:
            holder.until(FIRST_CONTENT)

    def send(
        self, body: Body, headers: Mapping[str, str] | None = None, path: str = CHAT
    ) -> RawClient:
        client = RawClient(self.server, body, path, headers=headers or {})
        return self.here.enter_context(client)

    def open(self) -> None:
        """Free the rows."""
        for holder in self._holders:
            holder.hang_up()

    @property
    def model(self) -> Body:
        [model] = self._health.get("/health?verbose=1").json()["models"]
        return dict(model)

    def wait(self, *, requests: int, clients: int) -> None:
        """Wait until so many are in the queue for a row."""
        wait_for(
            lambda: (
                (model := self.model)["waiting_for_row"] == requests
                and model["waiting_clients"] == clients
            ),
            seconds=60,
            why=f"{requests} of {clients} wait",
        )

    def order(self, *clients: RawClient) -> list[int]:
        """The places of the clients among all requests that got a row, the holders not counted."""
        begun = [line["request"] for line in self.server.log("stream start")]
        return [
            begun.index(client.request) - begun.index(self._last_holder) - 1 for client in clients
        ]

    @property
    def _last_holder(self) -> str:
        begun = [line["request"] for line in self.server.log("stream start")]
        return max((holder.request for holder in self._holders), key=begun.index)


@contextmanager
def full(
    server: Server, rows: int = ROWS, headers: Mapping[str, str] | None = None
) -> Iterator[House]:
    house = House(server, rows, headers or {})
    with house.here:
        yield house
    with server.client(headers=headers or {}) as client:
        wait_for(lambda: is_idle(client), why="nothing is left of those who have gone")


def is_idle(client: httpx.Client) -> bool:
    [model] = client.get("/health?verbose=1").json()["models"]
    return not (model["requests"] or model["rows"] or model["waiting_for_row"])


@contextmanager
def open_server(
    folder: Path, folders: Folders, *options: str, rows: int = ROWS, queue: int = 800
) -> Iterator[Server]:
    limits = ["--max-concurrency", str(rows), "--max-queue", str(queue)]
    with serving(folder, "--model", f"t={folders.endless}", *limits, *options) as server:
        yield server


@pytest.fixture(scope="module")
def open_house(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without keys."""
    with open_server(tmp_path_factory.mktemp("open"), folders, "--allow-priority") as server:
        yield server


@pytest.fixture(scope="module")
def locked_house(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with three keys; the requests of one of them wait for all others."""
    folder = tmp_path_factory.mktemp("locked")
    file = folder / "keys"
    file.write_text(f"{ONE}\n{TWO}  # the second\n{LATE} priority=5 # for nights\n")
    options = ["--api-key-file", str(file), "--allow-priority"]
    with open_server(folder, folders, *options) as server:
        yield server


@pytest.fixture(scope="module")
def small(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without keys that has one row, and a queue of two."""
    with open_server(tmp_path_factory.mktemp("small"), folders, rows=1, queue=2) as server:
        yield server


# Turns.


@pytest.mark.parametrize("queued", often([150, 500], [150]))
def test_a_crowd_of_one_client_delays_another_by_few(open_house: Server, queued: int) -> None:
    with full(open_house) as house:
        for _ in range(queued):
            house.send(short("crowd"))
        house.wait(requests=queued, clients=1)
        other = house.send(short("other"))
        house.wait(requests=queued + 1, clients=2)
        house.open()
        other.until(rb"\[DONE\]")
        assert house.order(other)[0] <= FEW


def test_keys_are_clients_whatever_users_they_name(locked_house: Server) -> None:
    with full(locked_house, headers=keyed(LATE)) as house:
        for i in range(120):
            house.send(short(f"user {i}"), keyed(ONE))
        house.wait(requests=120, clients=1)
        other = house.send(short("user 0"), keyed(TWO))
        house.wait(requests=121, clients=2)
        house.open()
        other.until(rb"\[DONE\]")
        assert house.order(other)[0] <= FEW
    log = locked_house.log_text()
    assert not any(key in log for key in (ONE, TWO, LATE))


def test_who_hangs_up_in_the_queue_has_no_turn(open_house: Server) -> None:
    with full(open_house) as house:
        crowd = [house.send(short("crowd")) for _ in range(60)]
        house.wait(requests=60, clients=1)
        others = [house.send(short(user)) for user in ("one", "two", "one", "two")]
        house.wait(requests=64, clients=3)
        for client in (*crowd[:-1], *others[:2]):
            client.hang_up("rst")
        house.wait(requests=3, clients=3)
        house.open()
        for client in (crowd[-1], *others[2:]):
            client.until(rb"\[DONE\]")
        assert sorted(house.order(crowd[-1], *others[2:])) == [0, 1, 2]


# Places.


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        pytest.param(
            (chat(user="a"), CHAT, {}),
            (chat(user="b"), CHAT, {}),
            id="user",
            marks=pytest.mark.long,
        ),
        pytest.param((chat(), CHAT, {}), (chat(user="b"), CHAT, {}), id="no user"),
        pytest.param(
            (chat(safety_identifier="a"), CHAT, {}),
            (chat(safety_identifier="b"), CHAT, {}),
            id="safety identifier",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ({"input": "Hi.", "safety_identifier": "a"}, RESPONSES, {}),
            ({"input": "Hi.", "user": "b"}, RESPONSES, {}),
            id="responses",
        ),
        pytest.param(
            (chat(metadata={"user_id": "a"}), MESSAGES, {}),
            (chat(metadata={"user_id": "b"}), MESSAGES, {}),
            id="messages",
        ),
        pytest.param(
            (chat(), CHAT, {"X-Forwarded-For": "10.0.0.1"}),
            (chat(), CHAT, {"X-Forwarded-For": "10.0.0.2"}),
            id="address",
        ),
    ],
)
def test_one_client_cannot_take_all_places(
    small: Server,
    mine: tuple[Body, str, Mapping[str, str]],
    others: tuple[Body, str, Mapping[str, str]],
) -> None:
    """Each has one place in the queue; then each is refused, with the status of a full queue."""
    with full(small, rows=1) as house, small.client() as client:

        def refuse(asked: tuple[Body, str, Mapping[str, str]], why: str) -> None:
            body, path, headers = asked
            response = client.post(path, json=body, headers=headers)
            assert response.status_code == (529 if path == MESSAGES else 503)
            assert int(response.headers["retry-after"]) >= 1
            assert re.search(why, response.json()["error"]["message"])

        for number, (body, path, headers) in enumerate((mine, others), start=1):
            house.send(body, headers, path)
            house.wait(requests=number, clients=number)
            refuse((body, path, headers), "this client" if number == 1 else "3 requests already")
        house.open()


def test_a_place_is_free_when_its_client_has_left(small: Server) -> None:
    with full(small, rows=1) as house, small.client() as client:
        for how in ("fin", "rst"):
            waiting = house.send(short("a"))
            house.wait(requests=1, clients=1)
            refused(client.post(CHAT, json=chat(user="a")), 503, "overloaded")
            waiting.hang_up(how)
            house.wait(requests=0, clients=0)
        last = house.send(short("a"))
        house.wait(requests=1, clients=1)
        house.open()
        last.until(rb"\[DONE\]")


def test_eight_streams_of_one_client_leave_a_place(folders: Folders, tmp_path: Path) -> None:
    with (
        open_server(tmp_path, folders, rows=4, queue=4) as server,
        server.client() as client,
        ExitStack() as stack,
    ):

        def requests() -> int:
            [model] = client.get("/health?verbose=1").json()["models"]
            return int(model["requests"])

        ask(client, chat(user="warm"))
        crowd = [stack.enter_context(RawClient(server, endless("crowd"))) for _ in range(8)]
        wait_for(lambda: requests() == 7, why="seven are in")
        wait_for(lambda: len(server.log("request", status="503")) == 1, why="one is refused")
        refused(client.post(CHAT, json=endless("crowd")), 503, "overloaded")
        other = stack.enter_context(RawClient(server, short("other")))
        wait_for(lambda: requests() == 8, why="there is a place for another client")
        for one in crowd:
            one.hang_up()
        other.until(rb"\[DONE\]")


def test_users_of_a_key_that_all_share_are_clients(folders: Folders, tmp_path: Path) -> None:
    with (
        open_server(tmp_path, folders, "--api-key", ONE, rows=1, queue=2) as server,
        full(server, rows=1, headers=keyed(ONE)) as house,
    ):
        for number, user in enumerate("ab", start=1):
            house.send(short(user), keyed(ONE))
            house.wait(requests=number, clients=number)
        house.open()


def test_a_client_without_an_address_is_served(folders: Folders) -> None:
    """As behind a Unix socket, or in a parent app that tells none."""
    app = mlxsrv.create_app(Settings(model=(f"t={folders.plain}",), hf_cache=False))

    async def unaddressed(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "client": None}, receive, send)

    with hosted(unaddressed) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        assert ask(client, chat())


# Priorities.


def test_a_lower_number_is_served_earlier(open_house: Server) -> None:
    with full(open_house) as house:
        asked = {priority: house.send(short("a", priority=priority)) for priority in (7, 1, 3)}
        house.wait(requests=3, clients=1)
        asked[0] = house.send(short("a"))
        asked[-2] = house.send(
            {"messages": short()["messages"], "max_tokens": 1, "priority": -2}, path=MESSAGES
        )
        house.wait(requests=5, clients=2)
        house.open()
        for client in asked.values():
            client.until(rb"\[DONE\]|end_turn|max_tokens")
        order = house.order(*(asked[priority] for priority in sorted(asked)))
        assert order == sorted(order)


def test_a_key_has_a_priority_that_its_requests_cannot_better(locked_house: Server) -> None:
    with full(locked_house, headers=keyed(LATE)) as house:
        late = []
        for number, body in enumerate((short(priority=-9), short(), short(priority=6)), start=1):
            late.append(house.send(body, keyed(LATE)))
            house.wait(requests=number, clients=1)
        early = [house.send(short(priority=number), keyed(ONE)) for number in (4, -9)]
        house.wait(requests=5, clients=2)
        house.open()
        for client in (*late, *early):
            client.until(rb"\[DONE\]")
        order = house.order(*reversed(early), *late)
        # On two rows, two that follow each other may begin together.
        assert order == sorted(order)


def test_a_priority_that_is_not_allowed_is_ignored_by_name(small: Server) -> None:
    with full(small, rows=1) as house, small.client() as client:
        first = house.send(short("a"))
        house.wait(requests=1, clients=1)
        second = house.send(short("b", priority=-5))
        house.wait(requests=2, clients=2)
        house.open()
        for one in (first, second):
            one.until(rb"\[DONE\]")
        assert house.order(first, second) == [0, 1]
        for path, body in (
            (CHAT, chat()),
            (MESSAGES, chat()),
            (RESPONSES, {"input": "Hi.", "max_output_tokens": 1}),
            ("/v1/completions", {"prompt": "Hi.", "max_tokens": 1}),
            ("/api/chat", {**chat(), "model": "t", "stream": False, "options": {"num_predict": 1}}),
            ("/v1/embeddings", {"input": "Hi."}),
        ):
            response = client.post(path, json={**body, "priority": 1})
            assert response.status_code == 200, response.text
            assert "priority" in response.headers["x-ignored-params"].split(", "), path


@pytest.mark.parametrize("priority", [1.5, "1", True, 2**31])
def test_a_priority_is_a_whole_number(open_house: Server, priority: Any) -> None:
    with open_house.client() as client:
        response = client.post(CHAT, json=chat(priority=priority))
        refused(response, 400, "invalid_value", param="priority")


@pytest.mark.parametrize(
    "line",
    ["priority=", "priority=1.5", "priority=x", "priority=1 2", "Priority=1", "priority = 1"],
)
def test_a_key_file_with_a_wrong_priority_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{ONE}\n{TWO} {line}\n")
    with pytest.raises(SettingsError, match="line 2") as refusal:
        mlxsrv.create_app(Settings(api_key_file=str(file)))
    assert TWO not in str(refusal.value)


def test_a_key_with_two_priorities_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{ONE} priority=1\n{ONE} priority=1 # again\n")
    mlxsrv.create_app(Settings(api_key_file=str(file)))
    with pytest.raises(SettingsError, match="twice") as refusal:
        mlxsrv.create_app(Settings(api_key_file=str(file), api_key=(ONE,)))
    assert ONE not in str(refusal.value)
