"""Conversations stay in the browser, and leave and enter it as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.page.chatting import ENDLESS, QUESTION, answers, ask, box, press, questions, setting


def listed(page: Any) -> Any:
    """The titles of the conversations."""
    return page.get_by_role("navigation", name="Conversations").locator(".open")


def answered(page: Any, question: str) -> None:
    """Begin a conversation, and wait for its answer and its entry in the list."""
    page.get_by_role("button", name="New chat").click()
    ask(page, question)
    expect(answers(page)).to_contain_text(" written")
    expect(listed(page).first).to_have_text(question)


def test_a_reload_keeps_the_conversation_its_branch_and_its_settings(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "System prompt").fill("Be brief.")
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text(" written")
    setting(page, "Max tokens").fill("3")
    press(answers(page), "Regenerate")
    expect(answers(page)).to_contain_text("limit of tokens")
    press(answers(page), "Previous branch")
    page.reload()
    expect(questions(page)).to_contain_text(QUESTION)
    expect(answers(page)).to_contain_text("1 / 2")
    expect(answers(page)).to_contain_text(" written")
    expect(setting(page, "System prompt")).to_have_value("Be brief.")
    expect(setting(page, "Max tokens")).to_have_value("3")


def test_a_reload_keeps_what_was_written_so_far(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Other fields").fill(ENDLESS)
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text("Ctrl-C")
    page.reload()
    expect(answers(page)).to_contain_text("Ctrl-C")
    expect(answers(page)).to_contain_text("Stopped.")


def test_conversations_are_listed_opened_and_deleted(page: Any, url: str) -> None:
    page.goto(url)
    answered(page, "Who are you?")
    answered(page, QUESTION)
    expect(listed(page)).to_have_text([QUESTION, "Who are you?"])
    listed(page).last.click()
    expect(questions(page)).to_contain_text("Who are you?")
    expect(listed(page).last).to_have_attribute("aria-current", "true")
    page.keyboard.press("ControlOrMeta+Shift+o")
    expect(page.get_by_role("heading", name="New chat")).to_be_visible()
    expect(box(page)).to_be_focused()
    page.get_by_role("button", name="Delete Who are you?").click()
    expect(listed(page)).to_have_text([QUESTION])
    page.get_by_role("button", name="Undo").click()
    expect(listed(page)).to_have_count(2)
    expect(questions(page)).to_contain_text("Who are you?")
    expect(answers(page)).to_contain_text(" written")
    page.get_by_role("button", name="Delete Who are you?").click()
    expect(listed(page)).to_have_text([QUESTION])
    page.reload()
    expect(listed(page)).to_have_text([QUESTION])


def test_another_conversation_leaves_an_answer_running(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Other fields").fill(ENDLESS)
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text("Ctrl-C")
    page.get_by_role("button", name="New chat").click()
    expect(answers(page)).to_have_count(0)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    listed(page).click()
    expect(answers(page)).to_contain_text("Ctrl-C")
    press(page, "Stop")
    expect(answers(page)).to_contain_text("Stopped.")


def test_nothing_stays_of_a_conversation_that_is_deleted_while_it_is_answered(
    page: Any, url: str
) -> None:
    page.goto(url)
    setting(page, "Other fields").fill(ENDLESS)
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text("Ctrl-C")
    page.get_by_role("button", name=f"Delete {QUESTION}").click()
    expect(page.locator("#note")).to_contain_text("Deleted")
    kept = """() => new Promise(resolve => {
        const opened = indexedDB.open("mlxsrv /");
        opened.onsuccess = () => {
            const store = opened.result.transaction("messages").objectStore("messages");
            store.getAll().onsuccess = ({ target }) => resolve(target.result);
        };
    })"""
    assert page.evaluate(kept) == []


def test_a_tab_makes_way_for_a_newer_page(page: Any, url: str) -> None:
    page.goto(url)
    answered(page, QUESTION)
    expect(listed(page)).to_have_count(1)
    newer = """() => new Promise(resolve => {
        const asked = indexedDB.open("mlxsrv /", 2);
        asked.onblocked = () => resolve("blocked");
        asked.onsuccess = () => resolve("opened");
    })"""
    assert page.evaluate(newer) == "opened"


def test_a_file_brings_all_conversations_back(page: Any, url: str, tmp_path: Path) -> None:
    page.goto(url)
    answered(page, "Who are you?")
    answered(page, QUESTION)
    press(answers(page), "Regenerate")
    expect(answers(page)).to_contain_text("2 / 2")
    expect(answers(page)).to_contain_text(" written")
    written = answers(page).locator(".answer").inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    assert path.name == "conversations.json"
    for left in (1, 0):
        page.get_by_role("button", name="Delete ").first.click()
        expect(listed(page)).to_have_count(left)
    bring(page, path)
    expect(listed(page)).to_have_count(2)
    listed(page).get_by_text(QUESTION).click()
    expect(answers(page)).to_contain_text("2 / 2")
    expect(answers(page).locator(".answer")).to_have_text(written, use_inner_text=True)


def test_an_imported_conversation_that_was_gone_on_with_is_imported_again(
    page: Any, url: str, tmp_path: Path
) -> None:
    """Whatever the ids: the store reads messages of one number in the order of these."""
    question, answer = exchange()
    path = tmp_path / "file.json"
    path.write_text(imported(question, {**answer, "id": "~"}))
    page.goto(url)
    bring(page, path)
    expect(answers(page)).to_contain_text("Yes.")
    ask(page, "Thanks!")
    expect(answers(page).last).to_contain_text(" written")
    page.reload()
    expect(answers(page)).to_have_count(2)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    download.value.save_as(path)
    [exported] = json.loads(path.read_text())["conversations"]
    assert [message["number"] for message in exported["messages"]] == [0, 1, 2, 3]
    bring(page, path)
    expect(listed(page)).to_have_count(2)
    expect(answers(page)).to_have_count(2)


def test_a_file_may_have_its_messages_in_any_order(page: Any, url: str, tmp_path: Path) -> None:
    question, answer = exchange()
    another = {**answer, "id": "c", "answer": {"content": "No.", "finish": "stop"}}
    path = tmp_path / "file.json"
    path.write_text(imported(answer, another, question))
    page.goto(url)
    bring(page, path)
    expect(questions(page)).to_contain_text("Really?")
    expect(answers(page)).to_contain_text("Yes.")
    press(answers(page), "Next branch")
    expect(answers(page)).to_contain_text("No.")


def exchange() -> tuple[dict[str, object], dict[str, object]]:
    """A question and its answer, as a file has them."""
    told = {"content": "Yes.", "finish": "stop", "model": "demo"}
    return (
        {"role": "user", "id": "a", "parent": "", "content": "Really?"},
        {"role": "assistant", "id": "b", "parent": "a", "answer": told},
    )


def test_one_conversation_is_exported_and_a_second_import_is_a_copy(
    page: Any, url: str, tmp_path: Path
) -> None:
    page.goto(url)
    answered(page, QUESTION)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    path = tmp_path / "one.json"
    download.value.save_as(path)
    [exported] = json.loads(path.read_text())["conversations"]
    assert [message["role"] for message in exported["messages"]] == ["user", "assistant"]
    bring(page, path)
    expect(listed(page)).to_have_text([QUESTION, QUESTION])


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        "{}",
        '{"format": "mlxsrv conversations", "conversations": [{"messages": [{"role": "x"}]}]}',
        '{"format": "mlxsrv conversations", "conversations": [{"messages": '
        '[{"role": "user", "id": "a", "parent": "a", "content": "circle"}]}]}',
        '{"format": "mlxsrv conversations", "conversations": [{"messages": '
        '[{"role": "user", "id": "a"}, {"role": "user", "id": "a"}]}]}',
    ],
)
def test_other_files_are_refused(page: Any, url: str, tmp_path: Path, content: str) -> None:
    page.goto(url)
    path = tmp_path / "file.json"
    path.write_text(content)
    bring(page, path)
    expect(page.locator("#note")).to_contain_text("file")
    expect(listed(page)).to_have_count(0)


@pytest.mark.parametrize("wrong", ["text", -1, {"length": 10**12}])
def test_the_bytes_of_a_file_may_be_anything(
    page: Any, url: str, tmp_path: Path, wrong: object
) -> None:
    token = {"token": "strange", "bytes": wrong, "logprob": 0, "top_logprobs": []}
    answer = {"content": "strange", "finish": "stop", "tokens": [token]}
    path = tmp_path / "file.json"
    path.write_text(imported({"role": "assistant", "id": "a", "parent": "", "answer": answer}))
    page.goto(url)
    bring(page, path)
    expect(answers(page)).to_contain_text("strange")
    page.get_by_role("checkbox", name="Look inside").check()
    expect(answers(page).get_by_role("group", name="Tokens")).to_contain_text("strange")


def test_a_file_whose_settings_are_no_json_is_refused(page: Any, url: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    reply = {"role": "assistant", "id": "a", "parent": "", "settings": {"tools": "{"}}
    path.write_text(imported(reply))
    page.goto(url)
    bring(page, path)
    expect(page.locator("#note")).to_have_text("Tools: this is no JSON list")
    expect(listed(page)).to_have_count(0)


def imported(*messages: object) -> str:
    """Return a file of one conversation."""
    conversation = {"title": "File", "messages": messages}
    return json.dumps({"format": "mlxsrv conversations", "conversations": [conversation]})


def bring(page: Any, path: Path) -> None:
    """Import a file."""
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import").click()
    chooser.value.set_files(path)


def test_a_chat_is_renamed_and_found_by_what_was_said(page: Any, url: str) -> None:
    page.goto(url)
    answered(page, "Who are you?")
    answered(page, QUESTION)
    page.get_by_role("button", name=f"Rename {QUESTION}").click()
    name = page.get_by_role("textbox", name="Name of the chat")
    name.fill("How to stop")
    name.press("Enter")
    expect(listed(page).first).to_have_text("How to stop")
    expect(page.get_by_role("heading", level=1, name="How to stop")).to_be_visible()
    page.reload()
    expect(listed(page).first).to_have_text("How to stop")
    box(page).press("ControlOrMeta+k")
    search = page.get_by_role("searchbox", name="Search chats")
    expect(search).to_be_focused()
    for text, found in (("ctrl-c", ["How to stop"]), ("WHO ARE", ["Who are you?"]), ("zebra", [])):
        search.fill(text)
        expect(listed(page)).to_have_text(found)
    expect(page.get_by_text("Nothing found")).to_be_visible()
    search.fill("")
    expect(listed(page)).to_have_count(2)


def test_a_chat_that_is_written_to_is_marked(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Other fields").fill(ENDLESS)
    ask(page, QUESTION)
    mark = page.get_by_role("navigation", name="Conversations").locator(".writing")
    expect(mark).to_have_count(1)
    press(page, "Stop")
    expect(mark).to_have_count(0)
