"""The chat: an answer arrives, is stopped, is asked for again; its request runs as it is copied."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

from playwright.sync_api import expect

from tests.page.chatting import (
    ENDLESS,
    QUESTION,
    answers,
    ask,
    box,
    copied,
    press,
    questions,
    rows,
    setting,
)
from tests.support.serving import wait_for


def test_a_first_answer(page: Any, url: str) -> None:
    page.goto(url)
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text("Ctrl-C")
    expect(answers(page)).to_contain_text(" written")
    expect(page.get_by_role("heading", name=QUESTION)).to_be_visible()
    expect(box(page)).to_be_focused()
    expect(box(page)).to_have_value("")


def test_a_finished_answer_is_announced_once(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Temperature").fill("0")
    ask(page, QUESTION)
    heard = page.get_by_role("region", name="Chat").get_by_role("status")
    expect(heard).to_contain_text("Answer: Press Ctrl-C.")
    expect(page.get_by_role("log")).to_have_attribute("aria-live", "off")


def test_shift_enter_begins_a_line(page: Any, url: str) -> None:
    page.goto(url)
    box(page).press_sequentially("one")
    box(page).press("Shift+Enter")
    box(page).press_sequentially("two")
    expect(box(page)).to_have_value("one\ntwo")
    expect(answers(page)).to_have_count(0)


INPUT_METHOD = """(element, key) => element.dispatchEvent(
    new KeyboardEvent("keydown", { key, keyCode: 229, bubbles: true, cancelable: true })
)"""
"""A key that ends a composition, as Safari tells it: behind its end."""


def test_the_keys_of_an_input_method_send_and_stop_nothing(page: Any, url: str) -> None:
    page.goto(url)
    box(page).fill("日本")
    box(page).evaluate(INPUT_METHOD, "Enter")
    expect(box(page)).to_have_value("日本")
    expect(answers(page)).to_have_count(0)
    setting(page, "Other fields").fill(ENDLESS)
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text("Ctrl-C")
    box(page).evaluate(INPUT_METHOD, "Escape")
    length = len(answers(page).inner_text())
    longer = "([answer, length]) => answer.innerText.length > length + 100"
    page.wait_for_function(longer, arg=[answers(page).element_handle(), length])
    press(questions(page), "Edit")
    field = questions(page).get_by_role("textbox")
    field.evaluate(INPUT_METHOD, "Escape")
    expect(field).to_be_visible()


def test_an_answer_without_text_stays_in_the_conversation(page: Any, url: str) -> None:
    """Some templates refuse two questions that follow each other."""
    page.goto(url)
    setting(page, "Temperature").fill("0")
    setting(page, "Other fields").fill('{"stop": ["P"]}')
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text(" written")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Thanks!")
    [_, answer, _] = sent.value.post_data_json["messages"]
    assert answer == {"role": "assistant", "content": ""}
    expect(answers(page).last).to_contain_text(" written")


def test_an_answer_without_text_is_not_gone_on_with(page: Any, url: str) -> None:
    page.goto(url)
    body = """async content => {
        const [{ chatBody }, { defaults }] = await Promise.all(
            [import("./page/request.js"), import("./page/settings.js")]
        );
        return chatBody(defaults(), "demo", [{ role: "assistant", content }]);
    }"""
    assert page.evaluate(body, "Yes")["continue_final_message"] is True
    assert "continue_final_message" not in page.evaluate(body, "")


def test_stop_frees_the_row_and_keeps_what_there_is(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Other fields").fill(ENDLESS)
    for stop in (lambda: page.keyboard.press("Escape"), lambda: press(page, "Stop")):
        ask(page, QUESTION)
        expect(answers(page).last).to_contain_text("Ctrl-C")
        assert rows(url) == 1
        stop()
        expect(answers(page).last).to_contain_text("Stopped.")
        expect(answers(page).last).to_contain_text("Ctrl-C")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        wait_for(lambda: rows(url) == 0, why="the row is free")


def test_what_was_answered_is_read_again(page: Any, url: str) -> None:
    page.goto(url)
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text(" written")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Thanks!")
    roles = [message["role"] for message in sent.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_settings_are_sent_and_only_those_that_are_set(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "System prompt").fill("Be brief.")
    setting(page, "Temperature").fill("0.5")
    setting(page, "Top k").fill("40")
    setting(page, "Seed").fill("7")
    setting(page, "Thinking").select_option("On")
    setting(page, "Other fields").fill('{"stop": ["!"]}')
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hello")
    assert sent.value.post_data_json == {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        "temperature": 0.5,
        "top_k": 40,
        "seed": 7,
        "think": True,
        "stop": ["!"],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    expect(answers(page).get_by_text("Thought for")).to_be_visible()


def test_thinking_is_switched_beside_the_message_box(page: Any, url: str) -> None:
    page.goto(url)
    switch = page.get_by_role("button", name=re.compile("^Thinking: "))
    for said, sent in (("default", None), ("off", False), ("on", True), ("default", None)):
        expect(switch).to_have_text(f"Thinking: {said}")
        with page.expect_request("**/v1/chat/completions") as asked:
            ask(page, "Hello")
        assert asked.value.post_data_json.get("think") == sent
        expect(answers(page).last).to_contain_text(" written")
        switch.click()


def test_what_is_no_json_is_told_and_not_sent(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "JSON schema").fill('{"type": ')
    ask(page, "Hello")
    expect(setting(page, "JSON schema")).to_be_focused()
    field = page.locator(".field").filter(has=page.get_by_label("JSON schema"))
    expect(field.get_by_role("alert").filter(has_text="no JSON")).to_be_visible()
    expect(box(page)).to_have_value("Hello")
    expect(answers(page)).to_have_count(0)


def test_the_copied_requests_give_the_same_answer(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Temperature").fill("0")
    setting(page, "Top k").fill("50")
    setting(page, "System prompt").fill('It\'s "quoted" $HOME `x` \\ é 😀\nJSON\n')
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text(" written")
    press(answers(page), "Copy")
    answer = copied(page)
    press(answers(page), "More")
    press(answers(page), "Copy as curl")
    streamed = _run("bash", "-c", copied(page))
    assert '"role":"assistant"' in streamed
    assert streamed.count("data: ") > 3
    press(answers(page), "Copy as Python")
    assert _run(sys.executable, "-c", copied(page)) == answer + "\n"
    assert "".join(_deltas(streamed)) == answer


def _run(*command: str) -> str:
    """Run a program without proxies. Returns what it says."""
    options = {name: text for name, text in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _deltas(streamed: str) -> list[str]:
    """The pieces of a streamed answer."""
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.splitlines()
        if line.startswith("data: {")
    ]
    return [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]]


def test_of_several_choices_the_first_is_the_answer(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Temperature").fill("0")
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text(" written")
    alone = answers(page).locator(".markdown").last.inner_text()
    setting(page, "Other fields").fill('{"n": 2}')
    press(answers(page), "Regenerate")
    expect(answers(page)).to_contain_text("2 / 2")
    expect(answers(page)).to_contain_text(" written")
    assert answers(page).locator(".markdown").last.inner_text() == alone


def test_an_error_of_the_server_is_told_in_words(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Other fields").fill('{"temperature": 5}')
    ask(page, QUESTION)
    told = answers(page).locator(".end")
    expect(told).to_have_text("Temperature: expected a number of at most 2")
    expect(answers(page).get_by_role("button", name="Try again")).to_be_hidden()
