"""Messages and prompts, from the wire to what templates and models take."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mlxsrv.errors import MissingParameter, UnsupportedParameter
from mlxsrv.prompts.templates.messages import plain_message
from mlxsrv.wire.openai.messages import Message, read_messages
from mlxsrv.wire.unknown import Search


def plain(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    read = read_messages(msgspec.convert(list(messages), list[Message]), Search())
    return [plain_message(message) for message in read]


def test_parts_are_joined_and_null_is_empty() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain({"role": "user", "content": parts}) == [{"role": "user", "content": "ab"}]
    assert plain({"role": "user", "content": None}) == [{"role": "user", "content": ""}]


def test_newer_and_older_role_names_become_those_of_templates() -> None:
    roles = [
        message["role"]
        for message in plain(
            {"role": "developer", "content": "x"},
            {"role": "function", "name": "f", "content": "x"},
        )
    ]
    assert roles == ["system", "tool"]


def test_a_part_that_is_not_text_is_named() -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(UnsupportedParameter, match="image_url") as error:
        plain({"role": "user", "content": "x"}, {"role": "user", "content": [part]})
    assert error.value.param == "messages[1].content[0]"


def test_media_of_old_turns_and_of_results_leave_a_note() -> None:
    note = "[image left out: this model reads text only]"
    image = {"type": "image_url", "image_url": {"url": "x"}}
    old = {"role": "user", "content": [{"type": "text", "text": "See: "}, image]}
    result = {"role": "tool", "content": [image]}
    for rest in (
        [{"role": "assistant", "content": "A cat."}],
        [{"role": "user", "content": "Well?"}],
        [{"role": "assistant", "content": "", "tool_calls": []}, result],
    ):
        search = Search()
        read = read_messages(msgspec.convert([old, *rest], list[Message]), search)
        assert read[0].content == f"See: {note}"
        assert search.paths == ["messages[0].content[1]"]
    assert plain(result)[0]["content"] == note


def test_refusals_stay_text_and_other_parts_of_answers_are_left_out() -> None:
    assert plain({"role": "assistant", "refusal": "No."})[0]["content"] == "No."
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "refusal", "refusal": "No, "},
        {"type": "text", "text": "never."},
    ]
    assert plain({"role": "assistant", "content": parts})[0]["content"] == "No, never."


def test_calls_of_custom_tools_are_calls_and_others_are_left_out() -> None:
    custom = {"id": "c", "type": "custom", "custom": {"name": "run", "input": "ls"}}
    hosted = {"id": "h", "type": "web_search"}
    [message] = plain({"role": "assistant", "tool_calls": [hosted, custom]})
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "run", "arguments": {"input": "ls"}}


def test_a_text_part_without_text_is_named() -> None:
    with pytest.raises(MissingParameter) as error:
        plain({"role": "user", "content": [{"type": "text"}]})
    assert error.value.param == "messages[0].content[0].text"


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "call_1", "function": function}]}


def test_a_calls_arguments_become_an_object() -> None:
    [message] = plain(call('{"a": 1}'))
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    nothing: list[Any] = ["", None, {}]
    for empty in nothing:
        [message] = plain(call(empty))
        assert message["tool_calls"][0]["function"]["arguments"] == {}
    [message] = plain(call({"a": 1}))  # as clients of Ollama's API give it
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(text, text) for text in ("{", "[1]", "1", '"x"', "nonsense", "null")] + [([1], "[1]")],
)
def test_arguments_that_are_no_object_stay_text(arguments: Any, text: str) -> None:
    [message] = plain(call(arguments))
    assert message["tool_calls"][0]["function"]["arguments"] == text


def test_an_old_clients_call_is_one_like_any_other() -> None:
    [message] = plain(
        {"role": "assistant", "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    )
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_come_back_under_either_name(name: str) -> None:
    [message] = plain({"role": "assistant", "content": "x", name: "because"})
    assert message["reasoning_content"] == "because"
