"""A long conversation: a new answer touches nothing of it, and the end is followed if wished."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.page.chatting import ENDLESS, answers, ask, press, setting

ANSWER = "The server keeps **each** prompt in a cache. It reads `config.json` first.\n\n" * 20
"""Some 400 tokens."""

OTHERS = json.dumps({**json.loads(ENDLESS), "truncate_prompt_tokens": 100})
"""Other fields: of the conversation little is read again for each answer."""

WATCH = """() => {
    window.touched = new Set();
    new MutationObserver(all => {
        for (const { target } of all) {
            const near = target.nodeType === 1 ? target : target.parentElement;
            const message = near?.closest("article");
            if (message) touched.add([...document.querySelectorAll("article")].indexOf(message));
        }
    }).observe(document.querySelector("[role=log]"),
        { subtree: true, childList: true, attributes: true, characterData: true });
}"""


def written(page: Any, characters: int) -> None:
    """Wait until the last answer has so many characters."""
    expect(answers(page).last).to_contain_text(re.compile(f".{{{characters}}}", re.DOTALL))


@pytest.fixture
def long(page: Any, url: str, tmp_path: Path) -> Any:
    """A tab with a conversation of some 8,000 tokens, whose answers now are endless."""
    messages: list[dict[str, object]] = []
    for turn in range(20):
        parent = f"a{turn - 1}" if turn else ""
        asked: dict[str, object] = {
            "role": "user",
            "content": f"Question {turn}",
            "id": f"q{turn}",
            "parent": parent,
        }
        told = {"content": ANSWER, "finish": "stop", "model": "demo"}
        answer: dict[str, object] = {
            "role": "assistant",
            "answer": told,
            "id": f"a{turn}",
            "parent": f"q{turn}",
        }
        messages += [asked, answer]
    settings = {"others": OTHERS}
    conversation = {"title": "Long", "settings": settings, "messages": messages}
    path = tmp_path / "long.json"
    path.write_text(json.dumps({"format": "mlxsrv conversations", "conversations": [conversation]}))
    page.goto(url)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import").click()
    chooser.value.set_files(path)
    expect(answers(page)).to_have_count(20)
    return page


def test_while_an_answer_is_written_no_other_message_is_touched(long: Any) -> None:
    ask(long, "How do I stop the server?")
    expect(answers(long).last).to_contain_text("Ctrl-C")
    long.evaluate(WATCH)
    written(long, 1000)
    assert long.evaluate("[...touched]") == [41]
    press(long, "Stop")
    skipped = long.locator("article").first.evaluate("it => getComputedStyle(it).contentVisibility")
    assert skipped == "auto"


def test_the_end_is_followed_until_one_scrolls_up(long: Any) -> None:
    ask(long, "How do I stop the server?")
    log = long.get_by_role("log")
    end = "log => log.scrollHeight - log.scrollTop - log.clientHeight"
    written(long, 2500)
    assert log.evaluate(end) < 100
    log.evaluate("log => { log.scrollTop = 0 }")
    written(long, 4000)
    assert log.evaluate("log => log.scrollTop") == 0
    press(long, "Stop")


def test_another_view_leaves_the_place_in_the_conversation(long: Any) -> None:
    log = long.get_by_role("log")
    view = long.get_by_role("region", name="Chat", exact=True)
    log.evaluate("log => log.scrollBy(0, -1500)")
    place = "log => log.querySelectorAll('article')[38].getBoundingClientRect().top"
    before = log.evaluate(place)
    for name in ("Compare", "Server"):
        long.get_by_role("link", name=name).click()
        expect(view).to_be_hidden()
        long.get_by_role("link", name="Chat").click()
        expect(view).to_be_visible()
        assert log.evaluate(place) == pytest.approx(before, abs=2)


def test_a_setting_of_a_file_is_kept(long: Any) -> None:
    expect(setting(long, "Other fields")).to_have_value(OTHERS)
