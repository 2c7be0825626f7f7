"""Clients that leave: each gives back its row or its place in the queue, whenever it goes."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.client import (
    CHAT,
    COMPLETIONS,
    FIRST_CONTENT,
    ROLE,
    HangUp,
    RawClient,
    answer,
    ask,
    chat,
    completion,
    refused,
)
from tests.support.fixtures import MAX_QUEUE, Folders
from tests.support.leaving import LONG, ended_unread, endless, left, queued, started
from tests.support.serving import Server, serving, wait_for

BEHIND = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"

KEEPALIVE = rb": keep-alive\n\n"


@pytest.fixture
def narrow_client(narrow: Server) -> Iterator[httpx.Client]:
    with narrow.client() as client:
        yield client


@pytest.fixture(params=["fin", "rst"])
def how(request: pytest.FixtureRequest) -> HangUp:
    """Two ways for a client to leave: it says goodbye, or its end of the connection is gone."""
    how: HangUp = request.param
    return how


def test_leaving_mid_stream_frees_the_row(
    narrow: Server, narrow_client: httpx.Client, how: HangUp
) -> None:
    with RawClient(narrow, endless()) as leaver:
        leaver.until(FIRST_CONTENT)
        leaver.hang_up(how)
    assert left(narrow, leaver)
    assert answer(ask(narrow_client, chat()))


def test_leaving_mid_prefill_frees_the_row(
    narrow: Server, narrow_client: httpx.Client, how: HangUp
) -> None:
    with RawClient(narrow, endless(messages=LONG)) as leaver:
        leaver.until(ROLE)  # the engine has it and reads
        assert not re.search(FIRST_CONTENT, leaver.data)
        leaver.hang_up(how)
    assert ended_unread(narrow, leaver)
    assert answer(ask(narrow_client, chat()))


def test_leaving_the_queue_frees_the_place(narrow: Server, how: HangUp) -> None:
    with RawClient(narrow, endless()) as running:
        running.until(FIRST_CONTENT)
        with RawClient(narrow, endless()) as leaver:
            leaver.until(KEEPALIVE)
            leaver.hang_up(how)
            assert left(narrow, leaver)
            assert started(narrow, running, leaver) == [running.request]
        with RawClient(narrow, chat(stream=True)) as next_one:
            next_one.until(KEEPALIVE)
            running.hang_up(how)
            next_one.until(rb"\[DONE\]")
    assert left(narrow, running)


def test_leaving_without_waiting_for_the_whole_answer_frees_the_row(
    narrow: Server, narrow_client: httpx.Client, how: HangUp
) -> None:
    with RawClient(narrow, endless(stream=False)) as leaver:
        wait_for(lambda: started(narrow, leaver), why="the request gets its row")
        leaver.hang_up(how)
    assert left(narrow, leaver)
    assert answer(ask(narrow_client, chat()))


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_with_another_request_behind_frees_the_row(
    narrow: Server, narrow_client: httpx.Client, how: HangUp, stream: bool
) -> None:
    with RawClient(narrow, endless(stream=stream), more=BEHIND) as leaver:
        wait_for(lambda: started(narrow, leaver), why="the request gets its row")
        leaver.hang_up(how)
    assert left(narrow, leaver)
    assert answer(ask(narrow_client, chat()))


def test_leaving_the_queue_of_whole_answers_frees_the_place(narrow: Server, how: HangUp) -> None:
    with RawClient(narrow, endless()) as running:
        running.until(FIRST_CONTENT)
        with RawClient(narrow, endless(stream=False)) as leaver:
            wait_for(lambda: queued(narrow) == 1, why="it is queued")
            leaver.hang_up(how)
        assert left(narrow, leaver)


def test_fifty_clients_that_leave_at_once_leave_nothing_behind(
    narrow: Server, narrow_client: httpx.Client
) -> None:
    dice = random.Random(5)
    leavers = []
    for i in range(50):
        with RawClient(narrow, endless(stream=bool(i % 3))) as leaver:
            time.sleep(dice.random() / 50)
            leaver.hang_up("rst" if i % 2 else "fin")
        leavers.append(leaver)

    def forgotten() -> bool:
        ended = {line["request"] for line in narrow.log("stream end")}
        return set(started(narrow, *leavers)) <= ended and not queued(narrow)

    wait_for(forgotten, why="all that began has ended, and none is in the queue")
    wait_for(lambda: narrow_client.post(CHAT, json=chat()).is_success, why="the row is free")
    wait_for(forgotten, why="nothing came late")
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(narrow, endless()))]
        clients[0].until(FIRST_CONTENT)
        clients += [stack.enter_context(RawClient(narrow, endless())) for _ in range(MAX_QUEUE)]
        for client in clients[1:]:
            client.until(KEEPALIVE)
        wait_for(lambda: queued(narrow) == MAX_QUEUE, why="all are queued")
        assert narrow_client.post(CHAT, json=chat()).status_code == 503
    for client in clients:
        assert left(narrow, client)


def test_a_full_queue_refuses_and_is_served_in_order(
    narrow: Server, narrow_client: httpx.Client
) -> None:
    with ExitStack() as stack:
        running = stack.enter_context(RawClient(narrow, endless()))
        running.until(FIRST_CONTENT)
        waiting = []
        for _ in range(MAX_QUEUE):
            waiting.append(stack.enter_context(RawClient(narrow, chat(stream=True))))
            waiting[-1].until(KEEPALIVE)
            wait_for(lambda: queued(narrow) == len(waiting), why="it is queued behind the others")

        for streaming in (False, True):
            response = narrow_client.post(
                CHAT, json=chat(stream=streaming), headers={"Accept": "application/json"}
            )
            refused(response, 503, "overloaded")
            assert int(response.headers["retry-after"]) >= 1

        running.hang_up()
        for client in waiting:
            client.until(rb"\[DONE\]")
        order = [client.request for client in (running, *waiting)]
        assert started(narrow, running, *waiting) == order
    assert answer(ask(narrow_client, chat()))


def test_what_is_wrong_is_refused_before_it_queues(
    narrow: Server, narrow_client: httpx.Client
) -> None:
    with RawClient(narrow, endless()) as running:
        running.until(FIRST_CONTENT)
        headers = {"Accept": "application/json"}
        long = completion([5] * (10**6 + 1), stream=True)
        too_long = narrow_client.post(COMPLETIONS, json=long, headers=headers)
        refused(too_long, 400, "context_length_exceeded", param="prompt")
        unknown = narrow_client.post(CHAT, json=endless(model="nobody"), headers=headers)
        refused(unknown, 404, "model_not_found", param="model")


def test_a_client_that_stops_reading_keeps_its_row_no_longer_than_a_request_may_take(
    folders: Folders, tmp_path: Path
) -> None:
    # The name is in every frame: with a long one the buffers between the two are soon full. Where
    # that takes longer than the request may, the stream ends at once; else its write still waits
    # for the client, until --stall-timeout.
    name = "/".join(["m" * 200] * 15)
    options = ["--max-concurrency", "1", "--request-timeout", "2", "--stall-timeout", "5"]
    with (
        serving(tmp_path, "--model", f"{name}={folders.endless}", *options) as server,
        server.client() as client,
    ):
        wait_for(lambda: client.post(CHAT, json=chat()).is_success, why="the model is loaded")
        with RawClient(server, endless()) as stalled:
            stalled.until(FIRST_CONTENT)
            wait_for(lambda: client.post(CHAT, json=chat()).is_success, why="the row is free")
            server.logged("stream end", request=stalled.request, finish="timeout")
