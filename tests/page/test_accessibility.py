"""Every view by the rules of axe-core, and with the keyboard alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import expect

from tests.page.conftest import Serve
from tests.page.scenes import SCENES

AXE = Path(__file__).parent / "node/node_modules/axe-core/axe.min.js"
VIEWS = ("chat", "compare", "steer", "server")

CONTROLS = """() => {
    const all = "a[href], button, input, select, textarea, summary, [tabindex='0']";
    const seen = (each) => each.checkVisibility({ visibilityProperty: true }) && !each.disabled;
    const reached = [...document.querySelectorAll(all)].filter((each) => seen(each) && !each.inert);
    window.controls = reached.filter((each) => each.type !== "radio" || each.checked);
    return window.controls.length;
}"""
"""Notes all that one can use, and counts it. Of radio buttons the Tab key reaches one."""

FOCUSED = "() => window.controls.indexOf(document.activeElement)"
NAME = "index => window.controls[index].outerHTML.slice(0, 200)"


def violations(page: Any) -> list[str]:
    """Return what axe-core finds wrong, with the elements."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: `make test-page` does it where there is npm")
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("() => axe.run()")
    assert found["passes"], "axe has looked at nothing"
    return [
        f"{rule['id']}: {rule['help']}: {node['html']}: {node['failureSummary']}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


def look(page: Any, scheme: Literal["light", "dark"]) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.wait_for_function("() => document.getAnimations().length === 0")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", [*SCENES])
def test_axe_finds_nothing(page: Any, url: str, name: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    SCENES[name](page, url)
    for scheme in ("light", "dark"):
        look(page, scheme)
        assert violations(page) == [], scheme


def test_axe_finds_nothing_in_the_dialog_that_asks_for_a_key(page: Any, serve: Serve) -> None:
    with serve("--api-key", "secret") as url:
        page.goto(url)
        page.get_by_role("dialog").wait_for()
        for scheme in ("light", "dark"):
            look(page, scheme)
            assert violations(page) == [], scheme


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_as_wide_as_the_window(page: Any, url: str, view: str) -> None:
    page.set_viewport_size({"width": 320, "height": 700})
    page.goto(f"{url}/#{view}")
    page.get_by_role("region", name=view.title(), exact=True).wait_for()
    expect(page.get_by_role("combobox", name="Model").locator("option")).not_to_have_count(0)
    assert page.evaluate("document.documentElement.scrollWidth") == 320


@pytest.mark.parametrize("name", [*SCENES])
def test_the_tab_key_reaches_everything(page: Any, url: str, name: str) -> None:
    SCENES[name](page, url)
    missing = set(range(page.evaluate(CONTROLS)))
    assert len(missing) > 5
    missing.discard(page.evaluate(FOCUSED))  # perhaps in a dialog, which closes behind the key
    for _ in range(2 * len(missing)):
        page.keyboard.press("Tab")
        missing.discard(page.evaluate(FOCUSED))
    assert [page.evaluate(NAME, index) for index in missing] == []


def test_who_is_skipped_to_the_content_goes_on_there(page: Any, url: str) -> None:
    page.goto(f"{url}/#server")
    page.get_by_role("button", name="Unload demo").or_(
        page.get_by_role("button", name="Load demo")
    ).wait_for()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")
