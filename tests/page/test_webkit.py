"""The page in WebKit: what another engine may do otherwise than Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.page.chatting import ENDLESS, QUESTION
from tests.page.conftest import Serve
from tests.page.webkit import (
    BACKSPACE,
    CONTROL,
    DRIVER,
    ENTER,
    ESCAPE,
    SHIFT,
    XVFB,
    WebKit,
    browser,
    named,
)

ANSWER = "(//article[@aria-label='Answer'])[last()]"
YOU = "//article[@aria-label='You']"
CHIPS = "//ul[@aria-label='Settings in force']"

VIEWS = {"Compare": "Prompt for both", "Steer": "demo", "Server": "Ready", "Chat": "Look inside"}
"""The views, each with some words of its own."""

WIDER = """
const shown = document.querySelectorAll("html, body, main > :not([inert]), .log");
return [...shown].filter(each => each.scrollWidth > each.clientWidth).map(each => each.outerHTML);
"""
"""The elements that can be scrolled sideways."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebKit]:
    if DRIVER is None:
        pytest.skip("there is no WebKitWebDriver here; MLXSRV_WEBKIT may name one")
    if XVFB is None:
        pytest.skip("there is no Xvfb here, on which WebKit would be shown")
    with browser(tmp_path_factory.mktemp("webkit") / "log") as made:
        yield made


@pytest.fixture
def webkit(started: WebKit) -> Iterator[WebKit]:
    """A browser. The test fails if a script failed in it, or if the page's policy was broken."""
    yield started
    assert started.errors() == []


def test_an_answer_streams_and_its_figures_stay(webkit: WebKit, url: str) -> None:
    webkit.open(url)
    box = named("Message")
    webkit.press(named("Settings"))
    webkit.type(named("Other fields of the request"), ENDLESS)
    webkit.type(box, QUESTION, ENTER)
    webkit.shows(ANSWER, "Ctrl-C")
    length = len(webkit.text(ANSWER))
    webkit.until(
        "return document.querySelector('[aria-label=Answer]').innerText.length > arguments[0]",
        length + 100,
    )
    webkit.type(box, ESCAPE)
    webkit.until("return document.querySelector('[aria-label=Answer]').ariaBusy === 'false'")
    webkit.shows(ANSWER, " written")
    webkit.press(named("Remove: Other fields"))
    webkit.type(box, "What is temperature?", ENTER)
    webkit.until("return document.querySelectorAll('[aria-label=Answer]').length === 2")
    webkit.shows(ANSWER, " written")


def test_the_message_box_grows_with_its_text(webkit: WebKit, url: str) -> None:
    webkit.open(url)
    box = named("Message")
    low = webkit.height(box)
    assert low > 20, "it has a line from the start"
    webkit.type(box, SHIFT, ENTER * 11)
    assert webkit.height(box) > 5 * low
    webkit.type(box, CONTROL, "a")
    webkit.type(box, BACKSPACE)
    assert webkit.height(box) == low


@pytest.mark.parametrize("width", [390, 1280])
def test_each_view_opens_and_fits(webkit: WebKit, url: str, width: int) -> None:
    webkit.open(url, width=width)
    for name in VIEWS:
        webkit.press(f"//nav[@aria-label='Views']//a[normalize-space()='{name}']")
        webkit.until("return document.title === arguments[0]", f"{name} · mlxsrv")
        webkit.shows(f"//main/section[@aria-label='{name}'][not(@inert)]", VIEWS[name])
        assert webkit.run("return innerWidth") == width
        assert webkit.run(WIDER) == []


def test_files_go_with_a_message(webkit: WebKit, url: str, tmp_path: Path) -> None:
    """WebKit empties the list of chosen files itself, when the next may be chosen."""
    webkit.open(url)
    files = [tmp_path / "f.py", tmp_path / "g.py"]
    for file in files:
        file.write_text("def f():\n    return 1\n")
    webkit.type("//input[@type='file'][@multiple]", "\n".join(map(str, files)))
    webkit.shows("//ul[@aria-label='Attached files']", "g.py")
    webkit.type(named("Message"), "What do they do?", ENTER)
    webkit.press(f"{YOU}//summary")
    webkit.shows(f"{YOU}//pre", "return 1")
    webkit.shows(ANSWER, " written")


def test_settings_and_a_preset_survive_a_reload(webkit: WebKit, url: str) -> None:
    webkit.open(url)
    webkit.press(named("Settings"))
    webkit.type(named("Temperature"), "0.5")
    webkit.press(named("Save"))
    webkit.type(named("Seed"), "7")
    webkit.type(named("Message"), QUESTION, ENTER)
    webkit.shows(ANSWER, " written")
    webkit.call("POST", "/refresh", {})
    webkit.shows(ANSWER, "Ctrl-C")
    webkit.shows(CHIPS, "Temperature 0.5")
    webkit.shows(CHIPS, "Seed 7")
    webkit.press(named("New chat"))
    webkit.until("return !document.querySelector('[aria-label=Answer]')")
    assert webkit.text(CHIPS).split("×")[0].strip() == "Temperature 0.5"
    assert "Seed" not in webkit.text(CHIPS)


def test_a_look_inside_and_a_heat_map(webkit: WebKit, serve: Serve) -> None:
    with serve() as url:
        httpx.post(f"{url}/api/saes/demo/attach", json={}, timeout=60).raise_for_status()
        webkit.open(url)
        webkit.press("//label[normalize-space()='Look inside']")
        webkit.type(named("Message"), QUESTION, ENTER)
        webkit.shows(ANSWER, " written")
        webkit.press(f"{ANSWER}//*[@data-index='1']")
        webkit.until(
            "return document.querySelector(':popover-open').ariaLabel.startsWith('Token 2')"
        )
        webkit.run("location.hash = 'steer'")
        webkit.press("//button[contains(., 'the health check')]")
        webkit.shows("//section[@aria-label='Steered answer']", " written")
        webkit.press(named("Read the steered answer"))
        webkit.shows("//main//table", "Token")
