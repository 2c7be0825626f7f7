"""Settings: they stay with their chat, are seen above the message box, and are checked at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.page.chatting import QUESTION, answers, ask, box, press, setting
from tests.page.conftest import Serve

SCHEMA = '{"type": "object"}'


def chips(page: Any) -> Any:
    return page.get_by_role("list", name="Settings in force").get_by_role("listitem")


def test_a_new_chat_begins_without_the_settings_of_another(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "JSON schema").fill(SCHEMA)
    setting(page, "System prompt").fill("Be brief.")
    setting(page, "Max tokens").fill("3")
    ask(page, QUESTION)
    expect(answers(page)).to_contain_text("limit of tokens")
    page.get_by_role("button", name="New chat").click()
    expect(chips(page)).to_have_count(0)
    page.reload()
    expect(page.get_by_role("heading", name="New chat")).to_be_visible()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, QUESTION)
    body = sent.value.post_data_json
    assert [each["role"] for each in body["messages"]] == ["user"]
    assert not {"max_tokens", "response_format"} & body.keys()


def test_chips_say_what_is_in_force_and_take_it_back(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "System prompt").fill("Be brief.")
    setting(page, "Temperature").fill("0.5")
    setting(page, "JSON schema").fill(SCHEMA)
    expect(chips(page).locator("button:first-child")).to_have_text(
        ["System prompt", "Temperature 0.5", "JSON schema"]
    )
    page.get_by_role("button", name="Remove: JSON schema").click()
    expect(setting(page, "JSON schema")).to_have_value("")
    expect(box(page)).to_be_focused()
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_role("button", name="Temperature 0.5", exact=True).click()
    expect(setting(page, "Temperature")).to_be_focused()
    expect(chips(page)).to_have_count(2)


def test_presets_are_saved_used_and_deleted(page: Any, url: str) -> None:
    page.goto(url)
    note = page.locator("#note")
    setting(page, "Temperature").fill("0.5")
    press(page, "Save")
    expect(note).to_have_text("Preset “default” saved")
    setting(page, "System prompt").fill("Be brief.")
    setting(page, "Preset").fill("brief")
    press(page, "Save")
    expect(note).to_have_text("Preset “brief” saved")
    page.reload()
    expect(chips(page)).to_have_text("Temperature 0.5×")
    setting(page, "Preset").fill("brief")
    press(page, "Use")
    expect(chips(page)).to_have_text(["System prompt×", "Temperature 0.5×"])
    setting(page, "Preset").fill("none")
    press(page, "Use")
    expect(note).to_have_text("There is no preset “none”")
    setting(page, "Preset").fill("")
    press(page, "Delete")
    expect(note).to_have_text("Preset “default” deleted")
    page.get_by_role("button", name="New chat").click()
    expect(chips(page)).to_have_count(0)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("Temperature", "3", "Temperature: a number from 0 to 2"),
        ("Top k", "1.5", "Top k: a whole number of at least 0"),
    ],
)
def test_a_number_out_of_range_is_told_at_its_field(
    page: Any, url: str, name: str, value: str, said: str
) -> None:
    page.goto(url)
    setting(page, name).fill(value)
    field = page.locator(".field").filter(has=page.get_by_label(name))
    expect(field.get_by_role("alert")).to_have_text(said)
    ask(page, "Hello")
    expect(setting(page, name)).to_be_focused()
    expect(box(page)).to_have_value("Hello")
    expect(answers(page)).to_have_count(0)


def test_what_is_wrong_is_in_sight_on_a_phone(page: Any, url: str) -> None:
    page.set_viewport_size({"width": 390, "height": 664})
    page.goto(url)
    page.get_by_role("button", name="Settings", exact=True).click()
    setting(page, "Seed").fill("-1")
    expect(page.get_by_text("Seed: a whole number")).to_be_in_viewport(ratio=1)


def test_an_empty_field_says_what_counts_in_its_place(page: Any, url: str) -> None:
    page.goto(url)
    expect(setting(page, "Temperature")).to_have_attribute("placeholder", "0")  # the model's own
    expect(setting(page, "Top p")).to_have_attribute("placeholder", "1")


def test_the_profiles_of_the_model_are_offered(page: Any, serve: Serve) -> None:
    with serve() as url:
        post = partial(httpx.post, timeout=60)
        post(f"{url}/api/saes/demo/attach", json={}).raise_for_status()
        place = {"model_id": "demo", "sae_id": "demo", "layer": 2}
        profile = {"name": "short", "steering": {"239": 8}, "mode": "additive", **place}
        post(f"{url}/api/profiles", json=profile).raise_for_status()
        page.goto(url)
        setting(page, "Steering profile").select_option("short")
        expect(chips(page)).to_have_text("Profile short×")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, QUESTION)
        assert sent.value.post_data_json["profile"] == "short"
        expect(answers(page)).to_contain_text(" written")
