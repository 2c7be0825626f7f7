"""Heat maps in two tabs: the monitor is one, and is off when both have been read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.page.conftest import Serve
from tests.page.test_steer import Server, press, shown_heat
from tests.support.serving import wait_for


def held_back(tab: Any, path: str) -> list[Any]:
    """Hold back what a tab asks for with GET or POST from now on. Returns what is held."""
    held: list[Any] = []

    def hold(route: Any) -> None:
        if route.request.method == "DELETE":
            route.continue_()
        else:
            held.append(route)

    tab.route(path, hold)
    return held


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Server]:
    """A server with an SAE."""
    with serve() as url, httpx.Client(base_url=f"{url}/api/", timeout=60) as client:
        made = Server(url, client)
        made.post("saes/demo/attach")
        yield made


def open_view(context: Any, server: Server) -> Any:
    tab = context.new_page()
    tab.goto(f"{server.url}/#steer")
    tab.get_by_role("button", name="Detach").wait_for()
    return tab


@pytest.fixture
def view(context: Any, server: Server) -> Any:
    return open_view(context, server)


@pytest.fixture
def other(context: Any, server: Server) -> Any:
    return open_view(context, server)


NO_LOCKS = """LockManager.prototype.request = async () => {
    throw new DOMException("The request was denied.", "SecurityError");
};"""
"""As in Chromium where site data is blocked."""


def test_where_locks_are_denied_a_heat_map_is_read(context: Any, server: Server) -> None:
    context.add_init_script(NO_LOCKS)
    view = open_view(context, server)
    press(view, "Read the unsteered answer")
    view.get_by_role("table").wait_for()
    _, cells = shown_heat(view)
    assert any(cells.values())
    assert not server.get("monitoring")["enabled"]


def test_the_heat_maps_of_two_tabs_take_turns(view: Any, other: Any, server: Server) -> None:
    held = held_back(view, "**/v1/completions")
    with view.expect_request("**/v1/completions"):
        press(view, "Read the unsteered answer")
    press(other, "Read the unsteered answer")
    waiting = "navigator.locks.query().then(({ pending }) => pending.length)"
    wait_for(lambda: other.evaluate(waiting) == 1, why="the other tab waits")
    wait_for(lambda: view.evaluate("true") and held, why="the request is held")
    held[0].continue_()
    for tab in (view, other):
        tab.get_by_role("table").wait_for()
        _, cells = shown_heat(tab)
        assert any(cells.values())
    assert not server.get("monitoring")["enabled"]


def test_over_plain_http_a_tab_that_began_last_leaves_the_monitor_off_too(
    view: Any, other: Any, server: Server
) -> None:
    """There a browser has no locks, so both read at once, and the first is closed."""
    assert not server.get("monitoring")["enabled"]
    for tab in (view, other):
        tab.evaluate("delete Navigator.prototype.locks")
    held_back(view, "**/v1/completions")
    with view.expect_request("**/v1/completions"):
        press(view, "Read the unsteered answer")
    held = held_back(other, "**/api/monitoring/history?*")
    with other.expect_request("**/api/monitoring/history?*"):
        press(other, "Read the unsteered answer")
    view.goto("about:blank")
    wait_for(lambda: not server.get("monitoring")["enabled"], why="the first tab has left")
    wait_for(lambda: other.evaluate("true") and held, why="the request is held")
    held[0].continue_()
    expect(other.get_by_role("button", name="Read the unsteered answer")).to_be_enabled()
    assert not server.get("monitoring")["enabled"]


def test_a_heat_map_without_activations_is_an_error(view: Any) -> None:
    """Somebody has switched the monitor off while it was read."""
    nothing = {"success": True, "data": [], "error": None}
    view.route("**/api/monitoring/history?*", lambda route: route.fulfill(json=nothing))
    press(view, "Read the unsteered answer")
    told = view.get_by_role("region", name="Which features fire where").get_by_role("alert")
    expect(told).to_contain_text("switched the monitor off")
    expect(view.get_by_role("table")).to_be_hidden()
