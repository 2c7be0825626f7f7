"""Bodies of Anthropic's Messages, right and wrong."""

from __future__ import annotations

from tests.support.openai_bodies import (
    FINE,
    JSON_SCHEMA,
    WRONG,
    Table,
)
from tests.support.schemas import Body


def turn(*blocks: Body, role: str = "user") -> Body:
    return {"messages": [{"role": role, "content": [*blocks]}]}


_SHARED = (
    *("model", "temperature", "top_p", "top_k", "stream", "profile", "steering"),
    *("steering_mode", "control_vector"),
)
"""Fields that mean what they mean in chats."""

SCHEMA_FORMAT = {"type": "json_schema", "schema": JSON_SCHEMA}
OWN_TOOL = {"name": "f", "input_schema": JSON_SCHEMA}

WRONG_MESSAGES: Table = {name: WRONG[name] for name in _SHARED} | {
    "messages": [[], "hi", {}, 5],
    "max_tokens": ["8", -1, 1.5, True, []],
    "system": [5, {}, True],
    "tools": [5, {}, "f", True],
    "tool_choice": ["auto", 5, []],
    "thinking": ["enabled", True, []],
    "output_config": ["low", 5, []],
    "output_format": ["json", 5, []],
    "stop_sequences": ["x", 5, {}, ["x"] * 17],
    "metadata": ["u", 5, []],
    "thread": ["create", 5, []],
    "cache_control": ["ephemeral", 5, []],
}
WRONG_WITHIN_MESSAGES: list[tuple[Body, str]] = [
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (turn({"type": "text", "text": 5}), "messages[0].content[0].text"),
    (turn({"type": 5}), "messages[0].content[0].type"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ({"thinking": {"type": "deeply"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "text", "schema": {}}}}, "output_config.format.type"),
    ({"metadata": {"user_id": "u" * 1001}}, "metadata.user_id"),
]
MISSING_MESSAGES: list[tuple[Body, str]] = [
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (turn({"type": "text"}), "messages[0].content[0].text"),
    (turn({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (
        turn({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text"}]}),
        "messages[0].content[0].content[0].text",
    ),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "custom", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [OWN_TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
]
UNSAID_MESSAGES: list[tuple[Body, str]] = [
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [OWN_TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"profile": "p", "steering": {"1": 1}}, "steering"),
    ({"steering_mode": "clamp"}, "steering_mode"),
]
FINE_MESSAGES: Table = {name: FINE[name] for name in _SHARED if name in FINE} | {
    "max_tokens": [0, 1, 64_000],
    "system": ["", "Be kind.", [{"type": "text", "text": "x", "cache_control": {}}]],
    "tools": [[], [OWN_TOOL], [{**OWN_TOOL, "type": "custom", "strict": True}]],
    "tool_choice": [{"type": "auto", "disable_parallel_tool_use": True}, {"type": "none"}],
    "thinking": [{"type": kind} for kind in ("enabled", "disabled", "adaptive")],
    "output_config": [{}, {"effort": "low"}, {"format": SCHEMA_FORMAT}],
    "output_format": [SCHEMA_FORMAT],
    "stop_sequences": [[], ["x"], ["x"] * 16],
    "metadata": [{}, {"user_id": "u"}],
    "cache_control": [{"type": "ephemeral"}],
    "messages": [
        [{"role": "user", "content": "hi"}, {"role": "system", "content": "x"}],
        turn(
            {"type": "tool_result", "tool_use_id": "c"},
            {"type": "tool_result", "tool_use_id": "c", "content": "x", "is_error": True},
            {"type": "document", "source": {"type": "text", "data": "x"}, "title": "t"},
            {"type": "search_result", "source": "s", "title": "t", "content": []},
        )["messages"],
        turn(
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "c", "name": "f", "input": '{"a": '},
            role="assistant",
        )["messages"],
    ],
}
