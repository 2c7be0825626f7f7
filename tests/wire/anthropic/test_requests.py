"""Requests of messages: what they say in no dialect, and what is wrong with others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxsrv.errors import (
    MissingParameter,
    ServeError,
    ThreadNotFound,
    UnsupportedParameter,
)
from mlxsrv.generation.spec import (
    ChatMessage,
    ChatPrompt,
    GenerationSpec,
    JSONForm,
    PastCall,
    SamplingWishes,
    ToolChoice,
    ToolSpec,
)
from mlxsrv.wire.anthropic.requests import MESSAGES_REQUESTS
from tests.support.growth import assert_linear
from tests.support.schemas import Body

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "f", "description": "F", "input_schema": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
MARK = {"cache_control": {"type": "ephemeral"}}


def user(content: Any = "hi") -> Body:
    return {"role": "user", "content": content}


def assistant(content: Any) -> Body:
    return {"role": "assistant", "content": content}


def text(words: str, **fields: Any) -> Body:
    return {"type": "text", "text": words, **fields}


def result(content: Any = "sunny", **fields: Any) -> Body:
    return {"type": "tool_result", "tool_use_id": "call_1", "content": content, **fields}


def decode(*messages: Body, **fields: Any) -> tuple[GenerationSpec, list[str]]:
    body = {"model": "demo", "max_tokens": 5, "messages": list(messages) or [user()], **fields}
    request, ignored = MESSAGES_REQUESTS.decode(json.dumps(body).encode())
    return request.spec(), ignored


def prompt(*messages: Body, **fields: Any) -> ChatPrompt:
    spec, _ = decode(*messages, **fields)
    assert isinstance(spec.prompt, ChatPrompt)
    return spec.prompt


def chat(*messages: Body, **fields: Any) -> list[ChatMessage]:
    return list(prompt(*messages, **fields).messages)


def refusal(*messages: Body, **fields: Any) -> ServeError:
    with pytest.raises(ServeError) as error:
        decode(*messages, **fields)
    return error.value


# Messages.


def test_a_system_prompt_comes_first() -> None:
    said = ChatMessage(role="user", content="hi")
    for system in ("a\n\nb", [text("a", **MARK), text("b")]):
        assert chat(system=system) == [ChatMessage(role="system", content="a\n\nb"), said]
    nothing: list[Any] = [None, "", []]
    for system in nothing:
        assert chat(system=system) == [said]


@pytest.mark.parametrize("rest", [[], ["a"], ["a", "b"]])
def test_the_line_that_changes_with_each_request_is_left_out(rest: list[str]) -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"
    blocks = [text(each) for each in [billing, *rest]]
    assert chat(system=blocks) == chat(system=[text(each) for each in rest])
    assert chat(system="\n".join([billing, *rest])) == chat(system="\n".join(rest))


def test_a_later_line_like_it_is_text() -> None:
    [system, _] = chat(system=[text("a"), text("x-anthropic-billing-header: b")])
    assert system.content == "a\n\nx-anthropic-billing-header: b"


def test_marks_of_the_cache_change_nothing() -> None:
    plain = decode(user([text("a")]), system=[text("s")], tools=[TOOL])
    marked = decode(
        user([text("a", **MARK)]), system=[text("s", **MARK)], tools=[{**TOOL, **MARK}], **MARK
    )
    assert plain == marked


def test_turns_of_one_role_are_one() -> None:
    assert chat(user("a"), user([text("b")]), assistant("c"), assistant("d"), user("e")) == [
        ChatMessage(role="user", content="a\n\nb"),
        ChatMessage(role="assistant", content="c\n\nd"),
        ChatMessage(role="user", content="e"),
    ]


@pytest.mark.slow
def test_many_turns_are_read_in_time() -> None:
    """Texts are joined once."""

    def join(count: int) -> None:
        assert len(chat(*[{"role": "user", "content": "x" * 2000}] * count)) == 1

    assert_linear(join, 625)


def test_a_system_message_stays_where_it_stands() -> None:
    asked = prompt(user("a"), {"role": "system", "content": [text("b")]}, user("c"))
    assert [message.role for message in asked.messages] == ["user", "system", "user"]


def test_calls_and_results_keep_their_order() -> None:
    use = {"type": "tool_use", "id": "call_1", "name": "f", "input": {"city": "Paris"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    signed = {"type": "thinking", "signature": "s"}
    assert chat(
        user("a"),
        assistant([thought, hidden, signed, text("b"), use]),
        user([result(), result([text("x"), text("y")], is_error=True), text("c")]),
    ) == [
        ChatMessage(role="user", content="a"),
        ChatMessage(
            role="assistant",
            content="b",
            reasoning="hm",
            calls=(PastCall("f", {"city": "Paris"}, "call_1"),),
        ),
        ChatMessage(role="tool", content="sunny", call_id="call_1"),
        ChatMessage(role="tool", content="Error: x\n\ny", call_id="call_1"),
        ChatMessage(role="user", content="c"),
    ]


@pytest.mark.parametrize("content", [None, "", []])
def test_a_result_may_be_empty(content: Any) -> None:
    [message] = chat(user([result(content)]))
    assert message == ChatMessage(role="tool", content="", call_id="call_1")
    [failed] = chat(user([result(content, is_error=True)]))
    assert failed.content == "Error"


@pytest.mark.parametrize(
    ("block", "read"),
    [
        (
            {"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"},
            "t\n\nd",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [text("d")]}},
            "d",
        ),
        ({"type": "document", "source": {"type": "content", "content": "d"}}, "d"),
        (
            {"type": "search_result", "source": "s", "title": "t", "content": [text("d")]},
            "t\n\ns\n\nd",
        ),
        ({"type": "tool_reference", "tool_name": "f"}, "f"),
    ],
)
def test_what_has_a_text_is_read(block: Body, read: str) -> None:
    [message] = chat(user([block]))
    assert message.content == read
    [answered] = chat(user([result([block])]))
    assert answered.content == read


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "x", "data": "aGk="}}


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ([text("a"), IMAGE], "messages[0].content[1]"),
        ([result(), IMAGE], "messages[0].content[1]"),
        ([PDF], "messages[0].content[0].source"),
        (
            [{"type": "document", "source": {"type": "content", "content": [IMAGE]}}],
            "messages[0].content[0].source.content[0]",
        ),
    ],
)
def test_what_cannot_be_read_is_named(content: Any, path: str) -> None:
    error = refusal(user(content))
    assert isinstance(error, UnsupportedParameter)
    assert error.param == path
    assert error.message.startswith(path)


NOTE = "[image left out: this model reads text only]"
HOSTED = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
]


def test_a_block_that_cannot_stand_in_a_question_is_named() -> None:
    use = {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}
    blocks: list[Body] = [use, {"type": "hologram"}, {"type": "video", "source": {}}]
    for block in blocks:
        refused = refusal(user([block]))
        assert refused.param == "messages[0].content[0]"
        assert str(block["type"]) in refused.message


@pytest.mark.parametrize(
    ("turns", "read", "path"),
    [
        ([user([result([IMAGE])])], NOTE, "messages[0].content[0].content[0]"),
        ([user([text("a"), IMAGE]), assistant("b")], f"a\n\n{NOTE}", "messages[0].content[1]"),
        ([user([IMAGE]), user("a")], f"{NOTE}\n\na", "messages[0].content[0]"),
        (
            [user([PDF]), assistant("b"), user("a")],
            "[document left out: this model reads text only]",
            "messages[0].content[0].source",
        ),
    ],
)
def test_media_of_old_turns_and_of_results_leave_a_note(
    turns: list[Any], read: str, path: str
) -> None:
    spec, ignored = decode(*turns)
    assert isinstance(spec.prompt, ChatPrompt)
    assert spec.prompt.messages[0].content == read
    assert path in ignored


def test_blocks_of_hosted_tools_are_left_out_by_name() -> None:
    turns = [user("a"), assistant([*HOSTED, text("b")]), user("c")]
    assert [message.content for message in chat(*turns)] == ["a", "b", "c"]
    _, ignored = decode(*turns)
    assert ignored == ["messages[1].content[0]"]


@pytest.mark.parametrize(
    ("messages", "continues"),
    [
        ([user()], False),
        ([user(), assistant("I am")], True),
        ([user(), assistant([text("I am")])], True),
        ([user(), assistant("")], False),
        ([user(), assistant("I am"), user()], False),
    ],
)
def test_a_last_message_of_the_assistants_is_continued(
    messages: list[Body], continues: bool
) -> None:
    assert prompt(*messages).continues == continues


# Tools.


def test_tools_of_the_clients_are_given_and_others_left_out() -> None:
    spec, ignored = decode(tools=[SEARCH, TOOL, {**TOOL, "name": "g", "type": "custom"}])
    assert isinstance(spec.prompt, ChatPrompt)
    assert [tool.name for tool in spec.prompt.tools] == ["f", "g"]
    assert spec.prompt.tools[0] == ToolSpec(name="f", description="F", parameters=SCHEMA)
    assert "tools[0]" in ignored


@pytest.mark.parametrize(
    ("given", "choice", "parallel"),
    [
        (None, ToolChoice("auto"), True),
        ({"type": "auto"}, ToolChoice("auto"), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto"), False),
        ({"type": "any"}, ToolChoice("required"), True),
        ({"type": "tool", "name": "f"}, ToolChoice("required", ("f",)), True),
        ({"type": "none"}, ToolChoice("none"), True),
    ],
)
def test_choices_of_tools(given: Any, choice: ToolChoice, parallel: bool) -> None:
    asked = prompt(tools=[TOOL], tool_choice=given)
    assert (asked.tool_choice, asked.parallel) == (choice, parallel)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"steering_mode": "set"}, "steering_mode"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_wrong_fields_are_named(fields: Body, param: str) -> None:
    assert refusal(**fields).param == param


def test_what_is_required_is_named() -> None:
    with pytest.raises(MissingParameter, match="messages"):
        MESSAGES_REQUESTS.decode(b'{"max_tokens": 5}')


# The rest.


@pytest.mark.parametrize(
    ("given", "thinks"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive", "display": "summarized"}, None),
        ({"type": "between_tools"}, None),
    ],
)
def test_thinking(given: Any, thinks: bool | None) -> None:
    assert prompt(thinking=given).thinking is thinks


def test_effort_and_form() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    spec, _ = decode(output_config={"effort": "low", "format": form})
    assert isinstance(spec.prompt, ChatPrompt)
    assert spec.prompt.effort == "low"
    assert spec.form == JSONForm("output_config.format", SCHEMA)
    older, _ = decode(output_format=form)
    assert older.form == JSONForm("output_format", SCHEMA)


def test_sampling_and_limits() -> None:
    spec, ignored = decode(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_sequences=["x"],
        stream=True,
        metadata={"user_id": "u"},
        seed=7,
    )
    assert spec.sampling == SamplingWishes(temperature=0.5, top_p=0.9, top_k=5)
    assert (spec.stops, spec.limit, spec.streamed, spec.user) == (["x"], 5, True, "u")
    assert ignored == ["seed"]


def test_steering_is_asked_for_as_in_other_dialects() -> None:
    spec, _ = decode(steering={"5": 1.5}, steering_mode="clamp")
    assert spec.steering.features == {5: 1.5}
    assert spec.steering.mode == "clamp"


def test_what_means_nothing_here_is_ignored_by_name() -> None:
    spec, ignored = decode(
        user([text("a", foo=1)]),
        tools=[{**TOOL, "defer_loading": True}],
        context_management={"edits": []},
        thinking={"type": "enabled", "budget_tokens": 1024},
        thread={"type": "create"},
    )
    assert ignored == [
        "context_management",
        "messages[0].content[0].foo",
        "thread",
        "tools[0].defer_loading",
    ]
    assert spec.limit == 5


@pytest.mark.parametrize(
    "thread",
    [
        {"type": "continue", "previous_message_id": "msg_1"},
        {"type": "create", "previous_message_id": "msg_1"},
    ],
)
def test_no_thread_is_continued(thread: Body) -> None:
    error = refusal(thread=thread)
    assert isinstance(error, ThreadNotFound)
    assert (error.status, error.code) == (404, "thread_not_found")
