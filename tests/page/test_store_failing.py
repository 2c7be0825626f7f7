"""No message is lost: where the browser keeps nothing, reads late, or has two tabs open."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.page.chatting import QUESTION, answers, ask, box, press, questions
from tests.page.test_store import answered, listed

FULL = """() => {
    const put = IDBObjectStore.prototype.put;
    IDBObjectStore.prototype.put = function (...given) {
        if (window.full) throw new DOMException("There is no room", "QuotaExceededError");
        return put.apply(this, given);
    };
    window.full = true;
}"""

BLOCKED = """for (const name of ["indexedDB", "sessionStorage", "localStorage"])
    Object.defineProperty(window, name, {
        get() { throw new DOMException("Site data is blocked", "SecurityError"); },
    });"""

LATE = """{
    const open = IDBFactory.prototype.open;
    IDBFactory.prototype.open = function (...given) {
        const request = open.apply(this, given);
        const late = {};
        request.onsuccess = () => {
            window.openStore = () => {
                late.result = request.result;
                late.onsuccess();
            };
        };
        return late;
    };
}"""
"""The database opens when the test calls `openStore`."""

SLOW = """async () => {
    const { Store } = await import("/page/store.js");
    const load = Store.prototype.load;
    const first = Promise.withResolvers();
    window.loads = 0;
    window.readFirst = first.resolve;
    Store.prototype.load = async function (id) {
        const found = await load.call(this, id);
        if (window.loads++ === 0) await first.promise;
        return found;
    };
}"""
"""The first conversation that is read comes when the test calls `readFirst`."""


ENDED = """() => new Promise(resolve => {
    const opened = indexedDB.open("mlxsrv /");
    opened.onsuccess = function look() {
        const all = opened.result.transaction("messages").objectStore("messages").getAll();
        const ended = () => all.result.some(({ answer }) => answer?.finish === "stop");
        all.onsuccess = () => ended() ? resolve() : look();
    };
})"""
"""Waits until an answer has ended, and is kept."""


def trouble(page: Any, text: str) -> Any:
    return page.get_by_role("region", name="Chat").get_by_role("alert").filter(has_text=text)


def test_a_full_store_is_told_of_once_and_loses_nothing(page: Any, url: str) -> None:
    page.goto(url)
    answered(page, "Who are you?")
    page.evaluate(FULL)
    answered(page, QUESTION)
    expect(trouble(page, "does not keep what is new")).to_be_visible()
    answered(page, "Thanks!")
    expect(trouble(page, "does not keep")).to_be_hidden()
    expect(listed(page)).to_have_text(["Thanks!", QUESTION, "Who are you?"])
    listed(page).nth(1).click()
    expect(questions(page)).to_contain_text(QUESTION)
    expect(answers(page)).to_contain_text("Ctrl-C")
    page.evaluate("window.full = false")
    ask(page, "Thanks!")
    expect(answers(page).last).to_contain_text(" written")
    page.reload()
    expect(questions(page)).to_have_count(2)
    expect(answers(page).first).to_contain_text("Ctrl-C")


def test_where_site_data_is_blocked_the_page_works_in_memory(page: Any, url: str) -> None:
    page.add_init_script(BLOCKED)
    page.goto(url)
    expect(trouble(page, "does not keep what is new")).to_be_visible()
    answered(page, QUESTION)
    answered(page, "Who are you?")
    listed(page).get_by_text(QUESTION).click()
    expect(answers(page)).to_contain_text("Ctrl-C")


def test_a_message_sent_before_the_store_is_open_is_kept(page: Any, url: str) -> None:
    page.goto(url)
    answered(page, "Who are you?")
    page.add_init_script(LATE)
    page.reload()
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text(" written")
    page.evaluate("openStore()")
    expect(listed(page)).to_have_text([QUESTION, "Who are you?"])
    expect(questions(page)).to_contain_text(QUESTION)
    page.reload()
    page.wait_for_function("() => window.openStore")
    page.evaluate("openStore()")
    expect(questions(page)).to_contain_text(QUESTION)
    expect(answers(page)).to_contain_text("Ctrl-C")


@pytest.mark.parametrize("then", ["another", "new"])
def test_of_two_quick_choices_the_later_counts(page: Any, url: str, then: str) -> None:
    page.goto(url)
    answered(page, "Who are you?")
    answered(page, QUESTION)
    answered(page, "Thanks!")
    page.evaluate(SLOW)
    listed(page).get_by_text("Who are you?").click()
    title = QUESTION
    if then == "another":
        listed(page).get_by_text(QUESTION).click()
    else:
        title = "New chat"
        page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("heading", name=title)).to_be_visible()
    page.evaluate("readFirst()")
    page.evaluate("new Promise(resolve => setTimeout(resolve))")  # what it would do is done
    expect(page.get_by_role("heading", name=title)).to_be_visible()


def test_an_answer_that_ends_while_its_conversation_is_read_is_whole(page: Any, url: str) -> None:
    held: list[Any] = []
    page.goto(url)
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    with page.expect_request("**/v1/chat/completions"):
        ask(page, QUESTION)
    page.get_by_role("button", name="New chat").click()
    expect(listed(page)).to_have_count(1)
    page.evaluate(SLOW)
    listed(page).click()
    page.wait_for_function("() => window.loads === 1")
    choice = {"index": 0, "delta": {"content": "Whole."}, "finish_reason": "stop"}
    held[0].fulfill(body=f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n")
    page.evaluate(ENDED)
    page.evaluate("readFirst()")
    expect(answers(page)).to_contain_text("Whole.")
    expect(answers(page)).not_to_contain_text("Stopped.")


def test_the_focus_goes_to_the_next_conversation(page: Any, url: str) -> None:
    page.goto(url)
    for question in ("Who are you?", "Thanks!", QUESTION):
        answered(page, question)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Thanks!").press("Enter")
    expect(listed(page)).to_have_text([QUESTION, "Who are you?"])
    expect(listed(page).last).to_be_focused()
    page.get_by_role("button", name="Delete Who are you?").press("Enter")
    expect(listed(page)).to_have_text([QUESTION])
    expect(listed(page)).to_be_focused()
    page.get_by_role("button", name=f"Delete {QUESTION}").press("Enter")
    expect(listed(page)).to_have_count(0)
    expect(box(page)).to_be_focused()


@pytest.fixture
def other(context: Any, told: Any, page: Any, url: str) -> Any:
    """A second tab with the conversation of the first."""
    page.goto(url)
    answered(page, QUESTION)
    made = context.new_page()
    told.watch(made)
    made.goto(url)
    listed(made).click()
    expect(answers(made)).to_contain_text("Ctrl-C")
    return made


def test_two_tabs_with_one_conversation_lose_nothing(page: Any, other: Any) -> None:
    ask(page, "Who are you?")
    expect(answers(page)).to_have_count(2)
    expect(answers(page).last).to_contain_text(" written")
    expect(trouble(other, "Another tab has changed")).to_be_visible()
    ask(other, "Thanks!")
    expect(answers(other)).to_have_count(2)
    expect(answers(other).last).to_contain_text(" written")
    for tab in (page, other):
        press(trouble(tab, "Another tab has changed"), "Read it again")
        expect(questions(tab).last).to_contain_text(re.compile("Thanks!.*[12] / 2"))
        press(questions(tab).last, "Next branch")
        expect(questions(tab).last).to_contain_text("Who are you?")
        expect(answers(tab).last).to_contain_text(" written")
        press(questions(tab).last, "Next branch")


def test_a_conversation_that_another_tab_deletes_is_closed(page: Any, other: Any) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name=f"Delete {QUESTION}").click()
    expect(other.get_by_role("heading", name="New chat")).to_be_visible()
    expect(listed(other)).to_have_count(0)
