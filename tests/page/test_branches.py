"""Branches: another answer, and a question in other words."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import expect

from tests.page.chatting import ENDLESS, QUESTION, answers, ask, box, press, questions, setting


def test_regenerate_is_another_branch(page: Any, url: str) -> None:
    page.goto(url)
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text(" written")
    setting(page, "Max tokens").fill("3")
    press(answers(page), "Regenerate")
    expect(answers(page)).to_contain_text("limit of tokens")
    expect(answers(page)).to_contain_text("2 / 2")
    press(answers(page), "Previous branch")
    expect(answers(page)).to_contain_text("1 / 2")
    expect(answers(page)).not_to_contain_text("limit of tokens")
    expect(answers(page).get_by_role("button", name="Previous branch")).to_be_focused()
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("limit of tokens")


def test_an_edited_question_is_a_branch_with_its_own_answers(page: Any, url: str) -> None:
    page.goto(url)
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text("Ctrl-C")
    expect(answers(page)).to_contain_text(" written")
    ask(page, "Thanks!")
    expect(answers(page)).to_have_count(2)
    expect(answers(page).last).to_contain_text(" written")
    for number, words in ((2, "Is it free software?"), (3, "Who are you?")):
        press(questions(page).first, "Edit")
        field = questions(page).first.get_by_role("textbox", name="Your message")
        expect(field).to_be_focused()
        field.fill(words)
        with page.expect_request("**/v1/chat/completions") as sent:
            field.press("Enter")
        assert [each["content"] for each in sent.value.post_data_json["messages"]] == [words]
        expect(questions(page)).to_have_count(1)
        expect(questions(page)).to_contain_text(f"{number} / {number}")
        expect(box(page)).to_be_focused()
        expect(answers(page)).to_contain_text(" written")
    press(questions(page), "Next branch")
    expect(questions(page)).to_have_text(
        [re.compile("stop the server.*1 / 3"), re.compile("^Thanks")]
    )
    expect(answers(page).first).to_contain_text("Ctrl-C")


def test_escape_leaves_a_question_as_it_was(page: Any, url: str) -> None:
    page.goto(url)
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text(" written")
    press(questions(page), "Edit")
    questions(page).get_by_role("textbox").fill("Something else")
    page.keyboard.press("Escape")
    expect(questions(page)).to_contain_text(QUESTION)
    expect(questions(page).get_by_role("button", name="Edit")).to_be_focused()


def test_an_answer_goes_on_being_written_on_its_branch(page: Any, url: str) -> None:
    """A new branch stops the former one, so that a conversation has one row at most."""
    page.goto(url)
    setting(page, "Other fields").fill(ENDLESS)
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text("Ctrl-C")
    press(questions(page), "Edit")
    setting(page, "Other fields").fill("")
    field = questions(page).get_by_role("textbox")
    field.fill("Who are you?")
    field.press("Enter")
    expect(answers(page)).to_contain_text(" written")
    press(questions(page), "Previous branch")
    expect(answers(page)).to_contain_text("Stopped.")
