"""The page itself: it opens, it changes views, and its policy holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.page.conftest import Serve

VIEWS = ("Chat", "Compare", "Steer", "Server")


def test_it_opens_with_the_chat(page: Any, url: str) -> None:
    page.goto(url)
    expect(page).to_have_title("Chat · mlxsrv")
    page.get_by_role("combobox", name="Model").locator("option").first.wait_for(state="attached")


@pytest.mark.parametrize("view", VIEWS)
def test_a_link_shows_a_view_and_back_leads_back(page: Any, url: str, view: str) -> None:
    first = "Server" if view == "Chat" else "Chat"
    page.goto(f"{url}/#{first.lower()}")
    page.get_by_role("region", name=first, exact=True).wait_for()
    page.get_by_role("navigation", name="Views").get_by_role("link", name=view).click()
    expect(page.get_by_role("region", name=view, exact=True)).to_be_visible()
    expect(page).to_have_title(f"{view} · mlxsrv")
    page.go_back()
    expect(page).to_have_title(f"{first} · mlxsrv")


@pytest.mark.parametrize("path", ["/", "/#constructor"])
def test_what_names_no_view_shows_the_chat_and_back_leaves_the_page(
    page: Any, url: str, path: str
) -> None:
    page.goto("about:blank")
    page.goto(url + path)
    chat = page.get_by_role("navigation", name="Views").get_by_role("link", name="Chat")
    expect(chat).to_have_attribute("aria-current", "page")
    assert page.url == f"{url}/#chat"
    page.go_back()
    assert page.url == "about:blank"


@pytest.mark.parametrize("view", ["Compare", "Server"])
def test_a_view_that_is_shown_again_is_where_it_was(page: Any, url: str, view: str) -> None:
    page.set_viewport_size({"width": 390, "height": 400})
    page.goto(f"{url}/#{view.lower()}")
    region = page.get_by_role("region", name=view, exact=True)
    page.wait_for_function(
        "each => (each.scrollTop = 100) && each.scrollTop === 100", arg=region.element_handle()
    )
    page.get_by_role("link", name="Chat").click()
    expect(region).to_be_hidden()
    expect(page.get_by_role("textbox", name="Message", exact=True)).to_be_focused()
    page.go_back()
    expect(region).to_be_visible()
    assert region.evaluate("each => each.scrollTop") == 100


def test_a_view_that_is_not_loaded_is_told_and_tried_again(page: Any, url: str) -> None:
    page.route("**/page/steer.js", lambda route: route.abort())
    page.goto(url)
    page.get_by_role("link", name="Steer").click()
    told = page.get_by_role("main").get_by_role("alert")
    expect(told).to_contain_text("Steer cannot be opened")
    page.get_by_role("link", name="Chat").click()
    expect(page.get_by_role("region", name="Chat", exact=True)).to_be_visible()
    page.get_by_role("link", name="Steer").click()
    expect(told).to_be_visible()
    page.unroute("**/page/steer.js")
    told.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="Steer")).to_be_visible()


def test_every_view_opens_when_the_server_is_gone(page: Any, serve: Serve) -> None:
    with serve() as url:
        page.goto(url)
        page.wait_for_load_state("networkidle")
    for view in VIEWS:
        page.get_by_role("navigation", name="Views").get_by_role("link", name=view).click()
        expect(page.get_by_role("region", name=view, exact=True)).to_be_visible()
    expect(page.get_by_text("The server does not answer; trying again")).to_be_visible()


def test_what_breaks_the_policy_is_not_run(page: Any, url: str, told: Any) -> None:
    page.goto(url)
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<img src=x onerror=window.hacked=1>'")
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.append(document.createTextNode("window.hacked = 2"));
        document.body.append(script);
        const image = document.createElement("img");
        image.src = "http://127.0.0.2:9/image.png";
        document.body.append(image);
    }""")
    assert page.evaluate("fetch('https://example.com').then(() => 'sent', () => 'kept')") == "kept"
    assert page.evaluate("window.hacked ?? null") is None
    # A browser of 2026 names the trusted type that a script lacks, an older one the directive.
    for said in ("TrustedHTML", "TrustedScript|script-src", "img-src", "connect-src"):
        assert any(re.search(said, error) for error in told.errors), said
    told.errors.clear()
