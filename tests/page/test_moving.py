"""Something moves as long as a model works: thoughts, tokens, their speed."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import expect

from tests.page.chatting import ENDLESS, QUESTION, answers, ask, press, setting

THINKING = json.dumps({**json.loads(ENDLESS), "bad_words": ["</think>"]})
"""Other fields of a request, with which the demo model thinks for longer than a test lasts."""


def test_thinking_says_for_how_long_and_shows_its_last_line(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Thinking").select_option("On")
    setting(page, "Other fields").fill(THINKING)
    ask(page, QUESTION)
    summary = answers(page).locator("summary")
    expect(summary).to_have_text(re.compile(r"^Thinking, [1-9]\d* s$"))
    glimpse = answers(page).locator(".glimpse")
    expect(glimpse).to_be_visible()
    before = glimpse.inner_text()
    expect(glimpse).not_to_have_text(before)
    press(page, "Stop")
    expect(summary).to_have_text(re.compile(r"Thought for [\d.]+ m?s"))
    expect(glimpse).to_be_hidden()


def test_tokens_are_counted_while_they_come_and_when_they_are_stopped(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Other fields").fill(ENDLESS)
    ask(page, QUESTION)
    figures = answers(page).locator(".figures")
    live = re.compile(r"^([\d,]+) tokens\s· [\d.]+ tokens/s$")
    expect(figures).to_have_text(live)
    before = figures.inner_text()
    expect(figures).not_to_have_text(before)
    press(page, "Stop")
    expect(figures).to_have_text(
        re.compile(r"^\d+ tokens read( \(\d+ cached\))?\s· [\d,]+ written\s· .* tokens/s$")
    )
