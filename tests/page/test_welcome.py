"""An empty chat invites; the sheet of shortcuts tells the truth; the theme is kept."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import expect

from tests.page.chatting import QUESTION, answers, ask, box, press, questions


def test_an_empty_chat_names_the_model_and_offers_questions(page: Any, url: str) -> None:
    page.goto(url)
    expect(page.get_by_role("heading", level=2, name="demo")).to_be_visible()
    facts = page.get_by_text(re.compile(r"[\d.]+M parameters\s· [\d.]+ MB\s· 1,000,000 tokens"))
    expect(facts).to_be_visible()
    offered = page.get_by_role("group", name="Questions to begin with").get_by_role("button")
    expect(offered).to_have_count(6)
    offered.filter(has_text=QUESTION).click()
    expect(answers(page)).to_contain_text("Ctrl-C")
    expect(offered.first).to_be_hidden()


def test_the_doors_of_an_empty_chat_lead_on(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_role("button", name="Look inside").click()
    expect(page.get_by_label("Look inside", exact=True)).to_be_checked()
    expect(box(page)).to_be_focused()
    page.get_by_role("button", name="Steer").click()
    expect(page.get_by_role("region", name="Steer", exact=True)).to_be_visible()


def test_an_empty_chat_fits_a_phone(page: Any, url: str) -> None:
    """Its doors stand above the message box, and the picker's name is whole."""
    page.set_viewport_size({"width": 390, "height": 664})  # of Safari on a phone
    page.goto(url)
    door = page.get_by_role("button", name="Steer")
    expect(page.get_by_text("1,000,000 tokens")).to_be_visible()
    below = door.bounding_box()
    assert below["y"] + below["height"] < page.locator(".composer").bounding_box()["y"]
    name = page.locator(".picker span")
    expect(name).to_have_text(re.compile("^demo"))
    assert name.evaluate("each => each.scrollWidth === each.clientWidth")
    page.get_by_role("combobox", name="Model").focus()
    page.keyboard.press("?")
    page.locator(".log").focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()


def test_the_context_that_is_used_is_told(page: Any, url: str) -> None:
    page.goto(url)
    ask(page, QUESTION)
    expect(page.locator(".meter")).to_have_text(re.compile(r"^\d+ of 1,000,000$"))


def test_keys_do_what_their_sheet_says(page: Any, url: str) -> None:
    page.goto(url)
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text(" written")
    box(page).press("ArrowUp")
    expect(questions(page).get_by_role("textbox")).to_be_focused()
    press(questions(page), "Cancel")
    page.keyboard.press("?")
    sheet = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(sheet).to_contain_text("Search the chats")
    press(sheet, "Close")
    box(page).press("?")
    expect(sheet).to_be_hidden()
    page.keyboard.press("ControlOrMeta+,")
    expect(page.get_by_role("complementary", name="Settings")).to_be_visible()


def test_the_theme_is_switched_and_kept(page: Any, url: str) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(url)
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    theme = page.get_by_role("button", name=re.compile("^Theme: "))
    theme.click()
    assert page.evaluate(back) == light
    theme.click()
    expect(theme).to_have_accessible_name("Theme: dark")
    dark = page.evaluate(back)
    assert dark != light
    page.reload()
    expect(theme).to_have_accessible_name("Theme: dark")
    assert page.evaluate(back) == dark
    theme.click()
    assert page.evaluate(back) == light
