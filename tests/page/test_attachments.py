"""Text files go with a message: chosen, dropped or pasted; folded on the page, whole when sent."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import expect

from tests.page.chatting import QUESTION, answers, ask, box, press, questions, setting
from tests.page.conftest import Serve

CHAT = "**/v1/chat/completions"
LONG = "The sea is wide and deep. " * 100

GIVE = """(element, [event, field, given]) => {
    const data = new DataTransfer();
    if (typeof given === "string") data.setData("text/plain", given);
    else data.items.add(new File([new Uint8Array(given.bytes)], given.name));
    const props = { bubbles: true, cancelable: true, [field]: data };
    const made = event === "paste" ? new ClipboardEvent(event, props) : new DragEvent(event, props);
    return !element.dispatchEvent(made);
}"""
"""Drops a file on an element, or pastes a text into it; tells whether the page took it."""


def attached(page: Any) -> Any:
    return page.get_by_role("list", name="Attached files").get_by_role("listitem")


def test_a_file_goes_with_a_message(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Max tokens").fill("3")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach text files").click()
    text = 'def f():\n    return "```"\n'
    chooser.value.set_files([{"name": "f.py", "mimeType": "", "buffer": text.encode()}])
    expect(attached(page)).to_contain_text("f.py26 B")
    with page.expect_request(CHAT) as sent:
        ask(page, "What does it do?")
    [message] = sent.value.post_data_json["messages"]
    assert message["content"] == f"f.py:\n\n````py\n{text}````\n\nWhat does it do?"
    expect(attached(page)).to_have_count(0)
    expect(answers(page)).to_contain_text("limit of tokens")
    page.reload()
    file = questions(page).get_by_role("group").filter(has_text="f.py")
    expect(file.locator("pre")).to_have_count(0)
    file.locator("summary").click()
    expect(file.locator("pre")).to_contain_text("return")
    expect(file.locator(".keyword").first).to_have_text("def")
    press(questions(page), "Edit")
    with page.expect_request(CHAT) as again:
        press(questions(page), "Send")
    assert again.value.post_data_json["messages"] == [message]


def test_a_file_may_be_dropped_and_a_long_text_pasted(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Max tokens").fill("3")
    file = {"name": "notes.txt", "bytes": list(b"Buy milk.")}
    chat = page.get_by_role("region", name="Chat", exact=True)
    assert chat.evaluate(GIVE, ["dragover", "dataTransfer", file])
    assert chat.evaluate(GIVE, ["drop", "dataTransfer", file])
    expect(attached(page)).to_have_count(1)
    assert box(page).evaluate(GIVE, ["paste", "clipboardData", LONG])
    expect(attached(page)).to_have_count(2)
    assert not box(page).evaluate(GIVE, ["paste", "clipboardData", "short"])
    page.get_by_role("button", name="Remove notes.txt").click()
    expect(attached(page)).to_contain_text(["Pasted text2.6 kB"])
    page.get_by_role("button", name="New chat").click()
    expect(attached(page)).to_have_count(1)  # a new chat has one draft
    with page.expect_request(CHAT) as sent:
        box(page).press("Enter")
    assert LONG in sent.value.post_data_json["messages"][0]["content"]
    expect(page.get_by_role("heading", level=1, name="Pasted text")).to_be_visible()


HOLD = """
const released = new Promise(release => { window.release = release; });
const getAll = IDBObjectStore.prototype.getAll;
IDBObjectStore.prototype.getAll = function (...query) {
    const asked = getAll.apply(this, query);
    const held = {};
    asked.onsuccess = () => released.then(() => {
        held.result = asked.result;
        held.onsuccess();
    });
    return held;
};
"""
"""Holds what is read from the browser's store until it is released."""


def test_what_is_given_before_a_chat_is_read_is_of_that_chat(page: Any, url: str) -> None:
    page.goto(url)
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text(" written")
    page.add_init_script(HOLD)
    page.reload()
    chat = page.get_by_role("region", name="Chat", exact=True)
    assert chat.evaluate(GIVE, ["drop", "dataTransfer", {"name": "a.txt", "bytes": [65]}])
    expect(attached(page)).to_contain_text("a.txt")
    box(page).fill("And this?")
    expect(answers(page)).to_have_count(0)
    page.evaluate("release()")
    expect(answers(page)).to_contain_text("Ctrl-C")
    expect(attached(page)).to_contain_text("a.txt")
    expect(box(page)).to_have_value("And this?")
    page.get_by_role("button", name="New chat").click()
    expect(attached(page)).to_have_count(0)
    expect(box(page)).to_have_value("")


def test_what_is_no_text_is_refused(page: Any, url: str) -> None:
    page.goto(url)
    chat = page.get_by_role("region", name="Chat", exact=True)
    chat.evaluate(GIVE, ["drop", "dataTransfer", {"name": "a.png", "bytes": [137, 80, 0, 255]}])
    expect(page.locator("#note")).to_have_text("a.png is no text file")
    expect(attached(page)).to_have_count(0)


def test_what_does_not_fit_is_told_before_it_is_sent(page: Any, serve: Serve) -> None:
    with serve("--max-context", "500") as url:
        page.goto(url)
        told = page.get_by_text("Too long")
        meter = page.locator(".meter")
        assert box(page).evaluate(GIVE, ["paste", "clipboardData", LONG])
        expect(told).to_have_text(re.compile(r"[\d,]+ tokens with this message, of 500\. "))
        expect(meter).to_have_text(re.compile(r"^[\d,]+ of 500$"))
        page.get_by_role("button", name="Remove Pasted text").click()
        expect(told).to_be_hidden()
        expect(meter).to_have_text("")
        box(page).fill("word " * 399)  # less than is counted where there is room
        expect(told).to_be_visible()
        setting(page, "Other fields").fill("{")  # what cannot be sent is not counted
        expect(told).to_be_hidden()
        setting(page, "Other fields").fill("")
        expect(told).to_be_visible()
        box(page).fill("How are you?")
        expect(told).to_be_hidden()
