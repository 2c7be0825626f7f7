"""A look inside: probabilities instead of text, and answers that go on from another token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.page.chatting import ENDLESS, QUESTION, answers, ask, copied, press, setting
from tests.page.conftest import Serve
from tests.support.tiny import write_model


def look_inside(page: Any) -> None:
    page.get_by_role("checkbox", name="Look inside").check()


def test_an_answer_goes_on_from_another_token(page: Any, url: str) -> None:
    page.goto(url)
    look_inside(page)
    setting(page, "Temperature").fill("0")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, QUESTION)
    assert sent.value.post_data_json["logprobs"] is True
    assert sent.value.post_data_json["top_logprobs"] > 1
    expect(answers(page)).to_contain_text(" written")
    tokens = answers(page).get_by_role("group", name="Tokens")
    expect(tokens).to_contain_text("Press Ctrl-C.")
    tokens.get_by_text("Press", exact=True).click()
    with page.expect_request("**/v1/chat/completions") as sent:
        answers(page).get_by_role("button", name="Type").click()
    body = sent.value.post_data_json
    assert body["messages"][-1] == {"role": "assistant", "content": "Type"}
    assert body["continue_final_message"] is True
    assert body["add_generation_prompt"] is False
    expect(answers(page)).to_contain_text("2 / 2")
    expect(answers(page)).to_contain_text(" written")
    press(answers(page), "Copy")
    expect(page.locator("#note")).to_have_text("Copied")
    whole = copied(page)
    assert whole.startswith("Type")
    assert len(whole) > 10
    expect(tokens).to_contain_text(whole)
    page.reload()
    expect(tokens).to_contain_text(whole)
    press(answers(page), "Previous branch")
    expect(tokens).to_contain_text("Press Ctrl-C.")
    page.get_by_role("checkbox", name="Look inside").uncheck()
    expect(tokens).to_have_count(0)
    expect(answers(page)).to_contain_text("Press Ctrl-C.")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JSON schema", '{"enum": ["yes", "no"]}'),
        ("Other fields", '{"response_format": {"type": "json_object"}, "max_tokens": 9}'),
        ("Other fields", '{"guided_regex": "yes|no"}'),
    ],
)
def test_with_a_form_an_answer_begins_anew_only(page: Any, url: str, name: str, value: str) -> None:
    page.goto(url)
    look_inside(page)
    setting(page, name).fill(value)
    ask(page, "Is it free software?")
    expect(answers(page)).to_contain_text(" written")
    answers(page).get_by_role("group", name="Tokens").locator("span").first.click()
    answers(page).get_by_role("button").filter(has_text="%").first.click()
    expect(page.locator("#note")).to_contain_text("JSON schema")
    expect(answers(page).get_by_text("2 / 2")).to_have_count(0)


@pytest.fixture
def endless(serve: Serve, tmp_path: Path) -> Iterator[str]:
    """The URL of a server whose answers last longer than a test."""
    model = write_model(tmp_path / "endless", "qwen3", plain=True, max_position_embeddings=10**6)
    with serve("--model", f"t={model}", "--default-max-tokens", "500000") as url:
        yield url


def test_the_alternatives_stay_open_while_the_answer_is_written(page: Any, endless: str) -> None:
    page.goto(endless)
    look_inside(page)
    ask(page, QUESTION)
    log = page.get_by_role("log")
    end = "log => log.scrollHeight - log.scrollTop - log.clientHeight"
    far = f"log => log.scrollTop > 100 && ({end})(log) < 100"
    page.wait_for_function(far, arg=log.element_handle())
    tokens = answers(page).get_by_role("group", name="Tokens").get_by_role("button")
    count = tokens.evaluate_all("all => { all.at(-1).click(); return all.length; }")
    expect(tokens.nth(count + 100)).to_be_attached()
    expect(page.get_by_role("dialog", name=f"Token {count}")).to_be_visible()
    page.keyboard.press("Escape")
    page.wait_for_function(far, arg=log.element_handle())  # the end is followed again


def test_alternatives_that_were_closed_do_not_close_the_next(page: Any, endless: str) -> None:
    page.goto(endless)
    look_inside(page)
    ask(page, QUESTION)
    log = page.get_by_role("log")
    scrolls = "log => log.scrollHeight > 2 * log.clientHeight"
    page.wait_for_function(scrolls, arg=log.element_handle())
    page.keyboard.press("Escape")
    # So many tokens of a random model may have had an end token among them.
    expect(answers(page)).to_have_attribute("aria-busy", "false")
    tokens = answers(page).get_by_role("group", name="Tokens").get_by_role("button")
    # A token half out of sight is scrolled to when it is pressed.
    name = tokens.evaluate_all(
        """async all => {
            const log = document.querySelector("[role=log]");
            const edge = log.getBoundingClientRect().top;
            const frames = async () => {
                for (let i = 0; i < 5; i++) await new Promise(requestAnimationFrame);
            };
            const { top, height } = all[0].getBoundingClientRect();
            log.scrollTop += top + height / 2 - edge;
            await frames();
            all.find(each => each.getBoundingClientRect().top > edge + 100).click();
            await frames();
            document.querySelector(":popover-open").hidePopover();
            all[0].click();
            await frames();
            return document.querySelector(":popover-open")?.ariaLabel;
        }"""
    )
    assert name is not None
    assert name.startswith("Token 1: ")


def test_escape_closes_the_alternatives_and_stops_no_answer(page: Any, url: str) -> None:
    page.goto(url)
    look_inside(page)
    setting(page, "Other fields").fill(ENDLESS)
    ask(page, QUESTION)
    log = page.get_by_role("log")
    # At the end the view would follow the answer, and its first token would be out of sight.
    page.wait_for_function(
        "log => log.scrollHeight > 2 * log.clientHeight", arg=log.element_handle()
    )
    log.evaluate(
        """log => {
            log.scrollTop = 0; // of which the page hears in the next frame
            return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
        }"""
    )
    tokens = answers(page).get_by_role("group", name="Tokens").get_by_role("button")
    first = tokens.first
    first.press("Enter")
    dialog = page.get_by_role("dialog", name="Token 1")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(first).to_be_focused()
    count = tokens.count()
    expect(tokens.nth(count + 20)).to_be_attached()  # it goes on being written
    page.keyboard.press("Escape")
    expect(answers(page)).to_contain_text("Stopped.")
