"""The message box: it grows, keeps a draft for each chat, and loses no call of a tool."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import expect

from tests.page.chatting import QUESTION, answers, ask, box, press, questions, setting
from tests.page.test_tools import WEATHER, called, results

CHAT = "**/v1/chat/completions"


def test_the_box_grows_where_styles_cannot_do_it(page: Any, url: str) -> None:
    """As in WebKit before `field-sizing`."""

    def plain(route: Any) -> None:
        style = route.fetch()
        route.fulfill(response=style, body=style.text().replace("field-sizing: content", ""))

    page.route("**/page/chat.css", plain)
    page.add_init_script("CSS.supports = () => false")
    page.goto(url)
    low = box(page).bounding_box()["height"]
    box(page).fill("\n".join("twelve lines" for _ in range(12)))
    assert box(page).bounding_box()["height"] > 5 * low
    box(page).fill("")
    assert box(page).bounding_box()["height"] == low
    ask(page, "one\ntwo\nthree")
    expect(answers(page)).to_contain_text(" written")
    press(questions(page), "Edit")
    area = questions(page).get_by_role("textbox")
    page.wait_for_function(
        "([area, low]) => area.clientHeight > 1.8 * low", arg=[area.element_handle(), low]
    )


def test_each_chat_has_its_draft_which_a_reload_keeps(page: Any, url: str) -> None:
    page.goto(url)
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text(" written")
    box(page).fill("of the first")
    page.get_by_role("button", name="New chat").click()
    expect(box(page)).to_have_value("")
    box(page).fill("of a new one")
    page.reload()
    expect(box(page)).to_have_value("of a new one")
    page.get_by_role("navigation", name="Conversations").locator(".open").click()
    expect(questions(page)).to_contain_text(QUESTION)
    expect(box(page)).to_have_value("of the first")
    page.reload()
    expect(questions(page)).to_contain_text(QUESTION)
    expect(box(page)).to_have_value("of the first")
    box(page).press("Enter")
    expect(answers(page)).to_have_count(2)
    page.reload()
    expect(answers(page)).to_have_count(2)
    expect(box(page)).to_have_value("")


def test_a_message_behind_a_call_may_be_its_result(page: Any, url: str) -> None:
    page.goto(url)
    called(page, WEATHER)
    expect(results(page)).to_be_focused()
    ask(page, "It is 21 degrees.")
    asked = page.get_by_role("status").filter(has_text="waits for the result of get_weather")
    expect(asked).to_be_visible()
    expect(answers(page)).to_have_count(1)
    expect(box(page)).to_have_value("It is 21 degrees.")
    with page.expect_request(CHAT) as sent:
        press(asked, "Send it as the result")
    [_, _, result] = sent.value.post_data_json["messages"]
    assert result["role"] == "tool"
    assert result["content"] == "It is 21 degrees."
    expect(box(page)).to_have_value("")
    expect(answers(page).last).to_contain_text(" written")


def test_a_message_behind_a_call_may_be_a_message(page: Any, url: str) -> None:
    page.goto(url)
    called(page, WEATHER)
    expect(results(page)).to_be_focused()
    ask(page, "Never mind.")
    with page.expect_request(CHAT) as sent:
        press(page, "Send it as a message")
    assert sent.value.post_data_json["messages"][-1] == {"role": "user", "content": "Never mind."}
    expect(answers(page).last).to_contain_text(" written")


LONG = "\n".join(f"line {number}" for number in range(200))


def test_a_long_message_is_folded(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Other fields").fill(json.dumps({"truncate_prompt_tokens": 100}))
    ask(page, LONG)
    expect(answers(page)).to_contain_text(" written")
    text = questions(page).locator("p")
    folded = text.bounding_box()["height"]
    assert folded < 300
    press(questions(page), "Show all")
    assert text.bounding_box()["height"] > 10 * folded
    press(questions(page), "Show less")
    assert text.bounding_box()["height"] == folded


def test_each_line_of_a_message_has_its_own_direction(page: Any, url: str) -> None:
    page.goto(url)
    ask(page, "An English line\nשורה בעברית")
    text = questions(page).locator("p")
    lines = text.evaluate("""each => {
        const range = document.createRange();
        range.selectNodeContents(each);
        return [...range.getClientRects()].map(({ left, right }) => [left, right]);
    }""")
    whole = text.bounding_box()
    left, right = lines[0][0], lines[-1][1]
    assert left < whole["x"] + 5
    assert right > whole["x"] + whole["width"] - 5


def test_the_title_follows_the_first_question(page: Any, url: str) -> None:
    page.goto(url)
    ask(page, "What is 3 plus 4?")
    expect(answers(page)).to_contain_text(" written")
    press(questions(page), "Edit")
    questions(page).get_by_role("textbox").fill("What is 12 plus 7?")
    press(questions(page), "Send")
    expect(page.get_by_role("heading", level=1, name="What is 12 plus 7?")).to_be_visible()
    expect(answers(page)).to_contain_text(re.compile(" written"))
    press(questions(page), "Previous branch")
    expect(page.get_by_role("heading", level=1, name="What is 3 plus 4?")).to_be_visible()
