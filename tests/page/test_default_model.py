"""A default model that is still to come, or cannot: the page says so, and asks no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.page.chatting import answers, ask
from tests.page.conftest import Serve
from tests.support.hub import Hub
from tests.support.scripted import write_scripted

WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the servers of a test download from."""
    with Hub() as hub:
        for name, value in hub.environment(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted(tmp_path_factory.mktemp("models") / "first", ["Here", " I", " am", "."])


def picker(page: Any) -> Any:
    return page.get_by_role("combobox", name="Model")


def test_a_download_is_shown_and_waited_for(page: Any, serve: Serve, hub: Hub, first: Path) -> None:
    hub.add("org/first", first)
    size = (first / WEIGHTS).stat().st_size
    hub.hold(WEIGHTS, at=size // 2)
    with serve("--model", "org/first") as url:
        page.goto(url)
        expect(picker(page)).to_have_value("org/first")
        chosen = picker(page).locator("option:checked")
        expect(chosen).to_have_text(re.compile(r"org/first \(downloading [1-9]\d? %\)"))
        told = page.get_by_role("status").filter(has_text="org/first: downloading")
        expect(told).to_be_visible()
        expect(page.get_by_role("progressbar", name="Download")).to_be_visible()
        ask(page, "Hello")
        expect(answers(page)).to_contain_text(re.compile(r"The model is downloading [1-9]\d? %\."))
        page.get_by_role("link", name="Server").click()
        row = page.get_by_role("row", name=re.compile("^org.first "))
        expect(row).to_contain_text(re.compile(r"downloading [1-9]\d? %"))
        load = row.get_by_role("button", name="Load org/first")
        expect(load).to_have_attribute("aria-disabled", "true")
        page.get_by_role("link", name="Chat").click()
        hub.mend()
        expect(answers(page)).to_contain_text("Here I am.")
        expect(told).to_be_hidden()
        expect(chosen).to_have_text(re.compile(r"^org/first · [\d.]+ [kM]B$"))


def test_a_load_that_fails_is_told_and_tried_again(
    page: Any, serve: Serve, hub: Hub, first: Path
) -> None:
    with serve("--model", "org/first") as url:
        page.goto(url)
        expect(picker(page)).to_have_value("org/first")
        told = page.get_by_text("org/first could not be loaded: the hub has no repository")
        expect(told).to_be_visible()
        page.get_by_role("link", name="Server").click()
        view = page.get_by_role("region", name="Server", exact=True)
        expect(view.get_by_role("status")).to_contain_text("Failed: the hub has no repository")
        expect(told).to_be_hidden()
        page.get_by_role("link", name="Chat").click()
        ask(page, "Hello")
        again = page.get_by_role("button", name="Try again")
        expect(answers(page)).to_contain_text("The hub has no repository")
        expect(told).to_be_hidden()  # it is the answer's error
        expect(again).to_have_count(1)
        page.get_by_role("button", name="New chat").click()
        expect(told).to_be_visible()
        hub.add("org/first", first)
        again.click()
        expect(told).to_be_hidden()
        ask(page, "Hello")
        expect(answers(page)).to_contain_text("Here I am.")


def test_a_load_has_its_bar(page: Any, url: str) -> None:
    """As a model of many gigabytes tells it; the demo model is loaded in a moment."""
    loading = {
        "state": "loading",
        "loaded": False,
        "load": {"completed": 10**9, "total": 4 * 10**9},
    }

    def tell(route: Any, name: str) -> None:
        told = route.fetch().json()
        told[name][0].update(loading)
        route.fulfill(json=told)

    page.route("**/v1/models", lambda route: tell(route, "data"))
    page.route("**/health?verbose=1", lambda route: tell(route, "models"))
    page.goto(url)
    expect(page.get_by_role("progressbar", name="Load")).to_have_js_property("value", 0.25)
    expect(page.get_by_text("1 GB of 4 GB")).to_be_visible()
    expect(picker(page).locator("option:checked")).to_have_text("demo (loading 25 %)")
