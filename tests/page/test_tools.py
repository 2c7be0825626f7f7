"""Tools and schemas: calls are shown, results typed in, and forms of answers kept to."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import expect

from tests.page.chatting import answers, ask, copied, press, setting

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
ASKED = "What is the weather in Paris?"


def called(page: Any, tools: object, *, whole: bool = True) -> None:
    """Have the demo model call the tool."""
    setting(page, "Tools").fill(json.dumps(tools))
    ask(page, ASKED)
    call = answers(page).get_by_role("group", name="Tool call")
    expect(call).to_contain_text("get_weather")
    if whole:
        expect(call).to_contain_text("Paris")


def results(page: Any) -> Any:
    """The field for what the tool returned."""
    return page.get_by_role("textbox", name="Result of get_weather")


def test_a_round_trip(page: Any, url: str) -> None:
    page.goto(url)
    called(page, [{"type": "function", "function": WEATHER}])
    results(page).fill('{"temperature": 21, "sky": "clear"}')
    with page.expect_request("**/v1/chat/completions") as sent:
        press(page, "Send the results")
    user, asked, result = sent.value.post_data_json["messages"]
    assert user["role"] == "user"
    [call] = asked["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert result == {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": "get_weather",
        "content": '{"temperature": 21, "sky": "clear"}',
    }
    expect(answers(page)).to_have_count(2)
    expect(answers(page).last).to_contain_text(" written")
    expect(results(page)).to_have_count(0)
    page.reload()
    told = page.get_by_role("article", name="Results of tools")
    expect(told).to_contain_text("21")
    press(told, "Edit")
    results(page).fill('{"temperature": -5}')
    results(page).press("Enter")
    expect(told).to_contain_text("-5")
    expect(told).to_contain_text("2 / 2")
    expect(answers(page).last).to_contain_text(" written")


def test_a_function_alone_is_a_tool(page: Any, url: str) -> None:
    page.goto(url)
    called(page, WEATHER)
    expect(results(page)).to_be_visible()


def test_results_are_asked_for_after_a_reload_too(page: Any, url: str) -> None:
    page.goto(url)
    called(page, WEATHER)
    expect(results(page)).to_be_visible()
    page.reload()
    expect(results(page)).to_be_visible()


def test_an_answer_follows_the_schema(page: Any, url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}, "word": {"enum": ["yes", "no"]}},
        "required": ["sure", "word"],
    }
    whole = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    page.goto(url)
    for number, text in enumerate((schema, whole), 1):
        setting(page, "JSON schema").fill(json.dumps(text))
        ask(page, "Is it free software?")
        expect(answers(page)).to_have_count(number)
        expect(answers(page).last).to_contain_text(" written")
        press(answers(page).last, "Copy")
        expect(page.locator("#note")).to_have_text("Copied")
        answer = json.loads(copied(page))
        assert sorted(answer) == ["sure", "word"]
        assert answer["word"] in ("yes", "no")


def test_after_a_call_that_was_cut_off_the_conversation_goes_on(page: Any, url: str) -> None:
    page.goto(url)
    setting(page, "Other fields").fill('{"tool_choice": "required"}')
    setting(page, "Max tokens").fill("12")
    called(page, WEATHER, whole=False)
    expect(answers(page)).to_contain_text("limit of tokens")
    setting(page, "Other fields").fill("")
    setting(page, "Tools").fill("")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Never mind.")
    assert not any("tool_calls" in message for message in sent.value.post_data_json["messages"])
    expect(answers(page)).to_have_count(2)
    expect(answers(page).last).to_contain_text(" written")
