"""Requests of the Responses API: what they ask for, what they ignore, what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from mlxsrv.errors import InvalidRequest, ServeError
from mlxsrv.generation.spec import (
    AS_MANY_AS_FIT,
    ChatMessage,
    ChatPrompt,
    GrammarForm,
    JSONForm,
    PastCall,
    RegexForm,
    ToolChoice,
)
from mlxsrv.wire.responses.conversation import seal, unseal
from mlxsrv.wire.responses.requests import RESPONSES_REQUESTS, Past
from tests.support.schemas import Body
from tests.wire.responses.asking import (
    FUNCTION,
    NAMESPACE,
    PATCH,
    TOOLS,
    asked,
    decode,
    prompt,
    spec,
    user,
)

CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "5"}


def said(text: str, role: str = "assistant") -> Body:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": role, "content": [part], "status": "completed"}


def thought(text: str) -> Body:
    return {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def messages(*items: Body, **fields: Any) -> list[ChatMessage]:
    return list(prompt(input=list(items), **fields).messages)


def roles(found: list[ChatMessage]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in found]


# Messages.


def test_a_text_is_a_users_message() -> None:
    assert prompt(input="hi").messages == [ChatMessage(role="user", content="hi")]
    assert roles(messages({"role": "user", "content": "hi"})) == [("user", "hi")]
    two = {"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}
    assert roles(messages(two)) == [("user", "ab")]


def test_system_messages_stay_where_they_stand() -> None:
    first = [{"role": "developer", "content": "B"}, {"role": "system", "content": "C"}]
    late = {"role": "developer", "content": "D"}
    found = messages(*first, user("hi"), late, instructions="A")
    first_texts = [("system", text) for text in "ABC"]
    assert roles(found) == [*first_texts, ("user", "hi"), ("system", "D")]


def test_media_of_old_turns_and_of_outputs_leave_a_note() -> None:
    image = {"type": "input_image", "image_url": "data:,"}
    old = {"role": "user", "content": [{"type": "input_text", "text": "What is it? "}, image]}
    note = "[image left out: this model reads text only]"
    for items in ([old, said("A cat."), user("So?")], [old, user("Well?")], [old, CALL, OUTPUT]):
        found = spec(input=items)
        assert isinstance(found.prompt, ChatPrompt)
        assert found.prompt.messages[0].content == f"What is it? {note}"
        assert found.ignored == ["input[0].content[1]"]
    [_, _, output] = messages(user("hi"), CALL, {**OUTPUT, "output": [image]})
    assert output.content == note


def test_a_turn_of_the_assistants_is_one_message() -> None:
    items = [user("hi"), thought("Hm."), said("I look."), CALL, {**CALL, "call_id": "call_2"}]
    found = messages(*items, OUTPUT, said("So: 5"), user("Thanks"))
    assert found[1] == ChatMessage(
        role="assistant",
        content="I look.",
        reasoning="Hm.",
        calls=[PastCall("f", {"a": 1}, "call_1"), PastCall("f", {"a": 1}, "call_2")],
    )
    assert found[2] == ChatMessage(role="tool", content="5", call_id="call_1")
    assert roles(found[3:]) == [("assistant", "So: 5"), ("user", "Thanks")]


def test_calls_of_custom_tools_and_namespaces_have_the_models_names() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "+a"}
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"}
    spawn = {**CALL, "name": "spawn", "namespace": "agents"}
    found = messages(user("hi"), custom, result, spawn, {**spawn, "namespace": "mcp__x__"})
    assert found[1].calls == [PastCall("apply_patch", {"input": "+a"}, "c")]
    assert roles(found[2:3]) == [("tool", "Done")]
    assert [call.name for call in found[3].calls] == ["agents__spawn", "mcp__x__spawn"]


@pytest.mark.parametrize("arguments", ["[1]", '{"a": ', "nonsense"])
def test_nonsense_of_the_models_can_be_given_back(arguments: str) -> None:
    [_, message] = messages(user("hi"), {**CALL, "arguments": arguments, "status": "incomplete"})
    assert message.calls[0].arguments == arguments
    [_, message] = messages(user("hi"), {**CALL, "arguments": ""})
    assert message.calls[0].arguments == {}


@pytest.mark.parametrize(
    ("given", "read", "stored"),
    [({"a": 1}, {"a": 1}, '{"a":1}'), (None, {}, "{}"), ([1], "[1]", "[1]"), ("[1", "[1", "[1")],
)
def test_arguments_that_are_no_text_are_read_and_stored_as_text(
    given: Any, read: Any, stored: str
) -> None:
    call = {**CALL, "arguments": given}
    [_, message] = messages(user("hi"), call)
    assert message.calls[0].arguments == read
    [(_, kept)] = asked(input=[call]).stored_input()
    assert json.loads(kept or b"")["arguments"] == stored


def test_thoughts_come_from_the_first_place_that_has_them() -> None:
    summary = [{"type": "summary_text", "text": "in short"}]
    sealed = {"type": "reasoning", "summary": summary, "encrypted_content": seal("Hm…")}
    foreign = {**sealed, "encrypted_content": "gAAAA"}
    for item, expected in (
        ({**sealed, **thought("in full")}, "in full"),
        (sealed, "Hm…"),
        ({**sealed, "content": None, "id": "rs_1", "status": None}, "Hm…"),
        (foreign, "in short"),
        ({"type": "reasoning", "summary": []}, None),
    ):
        assert messages(user("hi"), item, said("So"))[1].reasoning == expected


def test_what_is_sealed_is_unsealed() -> None:
    assert unseal(seal("Žluť 🚀")) == "Žluť 🚀"
    for other in ("", "gAAAA", seal("a") + "!", seal("a")[:-2]):
        assert unseal(other) is None


def test_parts_of_an_output_and_refusals_are_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    found = messages(user("hi"), refusal, CALL, {**OUTPUT, "output": parts})
    assert found[1].content == "No."
    assert found[2].content == "ab"


def test_stored_items_come_first() -> None:
    past = Past(
        [json.dumps(each).encode() for each in ({**user("S"), "role": "system"}, user("One"))],
        {"fc_1": json.dumps(CALL).encode()},
    )
    reference = {"type": "item_reference", "id": "fc_1"}
    found = list(prompt(past, input=[reference, OUTPUT], instructions="I").messages)
    assert roles(found)[:3] == [("system", "I"), ("system", "S"), ("user", "One")]
    assert found[3].calls == [PastCall("f", {"a": 1}, "call_1")]
    assert asked(input=[{"id": "fc_1"}]).references == [("fc_1", "input[0]")]
    only = prompt(past, input=None, previous_response_id="resp_1")
    assert roles(list(only.messages)) == [("system", "S"), ("user", "One")]


# Tools.


def test_tools_are_functions_to_the_model() -> None:
    function, patch, spawn, note = prompt(tools=TOOLS).tools
    assert (function.name, function.parameters) == ("get_weather", FUNCTION["parameters"])
    assert patch.parameters is not None
    assert patch.parameters["required"] == ["input"]
    assert "start: /a+/" in patch.parameters["properties"]["input"]["description"]
    assert patch.input_form == GrammarForm("tools[1].format.definition", "start: /a+/")
    assert (spawn.name, note.name) == ("agents__spawn", "agents__note")
    assert note.input_form is None
    regex = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    [tool] = prompt(tools=[{**PATCH, "format": regex}]).tools
    assert tool.input_form == RegexForm("tools[0].format.definition", "a+")


@pytest.mark.parametrize(
    ("asked_for", "choice"),
    [
        (None, ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "get_weather"}, ToolChoice("required", ("get_weather",))),
        ({"type": "custom", "name": "apply_patch"}, ToolChoice("required", ("apply_patch",))),
        ({"type": "function", "name": "spawn"}, ToolChoice("required", ("agents__spawn",))),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [PATCH, {"type": "mcp"}]},
            ToolChoice("required", ("apply_patch",)),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]},
            ToolChoice("auto", ("get_weather",)),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, ToolChoice("none")),
    ],
)
def test_the_choice_of_a_tool(asked_for: Any, choice: ToolChoice) -> None:
    assert prompt(tools=TOOLS, tool_choice=asked_for).tool_choice == choice


HOSTED = [
    {"type": "web_search", "external_web_access": False},
    {"type": "mcp", "server_label": "x", "tools": 5},
    {"type": "local_shell"},
]


def test_hosted_tools_are_left_out_with_a_note() -> None:
    request, ignored = decode(tools=[FUNCTION, *HOSTED])
    assert [*request.toolbox.tools] == ["get_weather"]
    assert ignored == ["tools[1]"]
    for choice in ("required", {"type": "web_search"}, {"type": "mcp"}):
        request, ignored = decode(tools=HOSTED, tool_choice=choice)
        assert request.choice == ToolChoice()
        assert ignored == ["tool_choice", "tools[0]"]


def test_the_response_repeats_the_tools() -> None:
    shown = asked(tools=[{**FUNCTION, "strict": None}, HOSTED[0]]).toolbox.shown
    assert shown[0] == {**FUNCTION, "strict": None, "description": None}
    assert shown[1] == HOSTED[0]


# The store.


def test_items_are_stored_with_all_that_a_client_may_leave_out() -> None:
    items = [{"role": "user", "content": "hi"}, said("So"), {"type": "reasoning"}, CALL, OUTPUT]
    junk = {"role": "assistant", "content": "x", "junk": 1}
    bare = [{"type": "output_text", "text": "b"}, {"type": "input_text", "text": "c"}]
    parts = [{"role": role, "content": bare} for role in ("assistant", "user")]
    nothing = {"role": "assistant", "content": None}
    request = asked(input=[*items, junk, *parts, nothing])
    found = [json.loads(stored or b"") for _, stored in request.stored_input()]
    assert [item["type"] for item in found] == [
        *("message", "message", "reasoning", "function_call", "function_call_output"),
        *4 * ("message",),
    ]
    prefixes = ["msg", "msg", "rs", "fc", "fco", *4 * ["msg"]]
    assert [item["id"].split("_")[0] for item in found] == prefixes
    assert {item["status"] for item in found} == {"completed"}
    assert found[0]["content"] == [{"type": "input_text", "text": "hi"}]
    assert found[1]["content"] == said("So")["content"]
    for item in found:
        TypeAdapter(ResponseItem).validate_python(item)
    assert found[2]["summary"] == []
    assert found[5]["content"] == [{"type": "output_text", "text": "x", "annotations": []}]
    past = Past([stored or b"" for _, stored in request.stored_input()])
    again = prompt(past, input=None, previous_response_id="resp_1")
    assert again.messages == request.spec(Past()).prompt.messages  # type: ignore[union-attr]


# The rest.


def test_the_other_fields() -> None:
    found = spec(
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=7,
        stop="x",
        user="me",
        truncation="auto",
        stream=True,
        profile="calm",
    )
    assert (found.limit, found.truncate, found.streamed, found.user) == (5, -1, True, "me")
    assert found.stops == ["x"]
    assert found.sampling.seed == 7
    assert found.sampling.top_k == 3
    assert found.steering.profile == "calm"
    assert spec(max_output_tokens=-1).limit == spec().limit == AS_MANY_AS_FIT
    assert spec().path("messages") == "input"


@pytest.mark.parametrize(
    ("effort", "thinking", "told"),
    [(None, None, None), ("none", False, "none"), ("low", True, "low"), ("xhigh", True, "xhigh")],
)
def test_effort_turns_thinking_on_or_off(effort: Any, thinking: Any, told: Any) -> None:
    found = prompt(reasoning={"effort": effort, "summary": None})
    assert (found.thinking, found.effort) == (thinking, told)


def test_the_form_of_a_text() -> None:
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert spec(text={"format": form}).form == JSONForm("text.format.schema", schema)
    assert spec(text={"format": {"type": "json_object"}}).form == JSONForm(
        "text.format", {"type": "object"}
    )
    for none in (None, {}, {"format": None}, {"format": {"type": "text"}}):
        assert spec(text=none).form is None


def test_scores_where_they_are_asked_for() -> None:
    assert spec().logprobs is None
    assert spec(include=["message.output_text.logprobs"]).logprobs == 0
    assert spec(include=["message.output_text.logprobs"], top_logprobs=3).logprobs == 3
    assert spec(top_logprobs=0).logprobs is None


def test_what_is_ignored_is_named() -> None:
    _, ignored = decode(
        input=[
            {**user("hi"), "unknown": 1},
            {"type": "web_search_call", "id": "ws_1", "action": {}},
            {"type": "compaction", "encrypted_content": "x"},
        ],
        prompt_cache_key="k",
        service_tier="auto",
        text={"verbosity": "low"},
        reasoning={"summary": "auto", "generate_summary": None, "context": "auto"},
        tools=[{**FUNCTION, "defer_loading": True}],
        stream_options={"include_obfuscation": False},
        background=False,
    )
    assert ignored == [
        *("input[0].unknown", "input[1]", "prompt_cache_key", "reasoning.context"),
        *("service_tier", "stream_options", "text.verbosity", "tools[0].defer_loading"),
    ]


BAD_PART = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}

WRONG: list[tuple[Body, str, str]] = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": 5}, "input", "invalid_value"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": [5]}, "input[0]", "invalid_value"),
    ({"input": [{}]}, "input[0].type", "missing_required_parameter"),
    ({"input": [{"type": 5}]}, "input[0].type", "invalid_value"),
    ({"input": [user("hi"), {"role": "robot"}]}, "input[1].role", "invalid_value"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_value"),
    ({"input": [BAD_PART]}, "input[0].content[0]", "unsupported_parameter"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "missing_required_parameter",
    ),
    ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id", "invalid_value"),
    ({"input": [{"type": "function_call"}]}, "input[0].call_id", "missing_required_parameter"),
    ({"tools": {}}, "tools", "invalid_value"),
    ({"tools": [{}]}, "tools[0].type", "missing_required_parameter"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    ({"tools": [{**FUNCTION, "name": "a b"}]}, "tools[0].name", "invalid_value"),
    (
        {"tools": [{**NAMESPACE, "tools": [FUNCTION, {**FUNCTION, "parameters": 5}]}]},
        "tools[0].tools[1].parameters",
        "invalid_value",
    ),
    (
        {"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark"}}]},
        "tools[0].format.definition",
        "missing_required_parameter",
    ),
    ({"tools": [FUNCTION], "tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    (
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice.name",
        "invalid_value",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
        "tool_choice.tools",
        "invalid_value",
    ),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"temperature": "0"}, "temperature", "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata", "invalid_value"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ({"profile": "a", "steering": {"1": 2}}, "steering", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), WRONG)
def test_an_error_names_its_field(fields: Body, param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        spec(**fields)
    assert (error.value.param, error.value.code) == (param, code)
    assert param in error.value.message


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": [{"type": "new", "x": "\xff"}]}',
        b'{"input": "hi", "tools": [{"type": "new", "x": "\xff"}]}',
        b'{"input": [{"type": "new", "x": "a}]}',
        b'{"input": [' + b"[" * 100_000,
    ],
)
def test_what_is_left_out_must_be_json_too(body: bytes) -> None:
    with pytest.raises(ServeError) as error:
        RESPONSES_REQUESTS.decode(body)
    assert error.value.code == "invalid_json"


def test_the_tools_of_namespaces_count_among_the_tools() -> None:
    function = {"type": "function", "name": "f"}
    spaces = [{"type": "namespace", "name": f"n{i}", "tools": [function] * 333} for i in range(3)]
    assert len(asked(tools=spaces[:2]).toolbox.tools) == 2
    with pytest.raises(InvalidRequest, match="at most 1000 tools") as error:
        decode(tools=spaces)
    assert error.value.param == "tools[2].tools"
