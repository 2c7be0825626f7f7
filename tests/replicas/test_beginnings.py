"""Keys of conversations."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.replicas.beginnings import MOST_BODY, conversation_key, key_of_response
from tests.support.growth import least_seconds

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Which endpoints do you serve?"}
ANSWER = {"role": "assistant", "content": "Many."}
MORE = {"role": "user", "content": "Which?"}


def key(**body: Any) -> str | None:
    return conversation_key(json.dumps(body).encode())


TURNS = [
    ({"messages": [SYSTEM, USER]}, {"messages": [SYSTEM, USER, ANSWER, MORE], "stream": True}),
    (
        {"system": "Be brief.", "messages": [USER], "max_tokens": 9},
        {
            "system": "Be brief.",
            # The mark of what to cache moves from turn to turn.
            "messages": [
                USER | {"content": [{"type": "text", "text": USER["content"]}]},
                ANSWER,
                MORE | {"content": [{"type": "text", "text": "x", "cache_control": {}}]},
            ],
        },
    ),
    (
        {"instructions": "Be brief.", "input": "Grüß Gott"},
        {
            "instructions": "Be brief.",
            "input": [{"role": "user", "content": "Grüß Gott"}, ANSWER, MORE],
        },
    ),
    ({"prompt": 2000 * "a"}, {"prompt": 2000 * "a" + "b"}),
]


@pytest.mark.parametrize(("first", "later"), TURNS)
def test_all_turns_have_one_key(first: dict[str, Any], later: dict[str, Any]) -> None:
    assert key(model="m", **first) == key(**later, model="m") is not None
    assert key(model="n", **first) != key(model="m", **first)


def test_other_conversations_have_other_keys() -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": [SYSTEM, USER]},
        {"messages": [USER]},
        {"messages": [SYSTEM, MORE]},
        {"system": "Be brief.", "messages": [USER]},
        {"prompt": "Be brief."},
        {"input": "Be brief."},
        {"input": [{"role": "user", "content": "Be briefer."}]},
    ]
    assert len({key(**body) for body in bodies}) == len(bodies)


def test_a_responses_id_leads_to_its_conversation() -> None:
    first = key(input="Hello")
    assert first is not None
    id = f"resp_{first}{32 * 'f'}"
    assert key_of_response(id) == first
    assert key(input="And?", previous_response_id=id) == first
    assert key(input="And?", previous_response_id="resp_me") is None


def test_what_is_no_turn_has_no_key() -> None:
    for body in (b"", b"[1]", b"{", b"\xff", b"null", b'{"messages": 1}', b'{"messages": [1]}'):
        assert conversation_key(body) is None, body
    assert key(messages=[]) is None
    assert key(query="a", documents=["b"]) is None
    assert conversation_key(json.dumps({"input": MOST_BODY * "a"}).encode()) is None
    assert conversation_key(b'{"messages": ' + 100_000 * b"[") is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [%s{}]}',
        b'{"messages": [{"role": "user", "content": [%s{}]}]}',
        b'{"messages": [{"role": "user", "content": {"a": [%s{}]}}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "model": [%s{}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "system": [%s{}]}',
        b'{"input": "x", "previous_response_id": [%s{}]}',
        b'{"prompt": [%s{}]}',
    ],
)
def test_what_is_not_needed_is_skipped(body: bytes) -> None:
    """A key takes not much longer than to read over the body: a body with objects in it takes more
    than ten times as long to decode, and every stream waits for it."""
    large = body % (b"{}," * (MOST_BODY // 4))
    skip = msgspec.json.Decoder(msgspec.Raw).decode
    skipped = least_seconds(lambda: skip(large))
    assert least_seconds(lambda: conversation_key(large)) < 5 * skipped


def test_a_conversation_of_some_size_has_a_key() -> None:
    turns = [SYSTEM, USER, *([ANSWER, MORE] * 2_000)]
    assert key(messages=turns) == key(messages=[SYSTEM, USER])
    tools = [{"type": "function", "function": {"parameters": {"a": {}}}}] * 20_000
    assert key(messages=turns, tools=tools) == key(messages=turns)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)


@given(st.dictionaries(st.sampled_from(["messages", "input", "prompt", "model"]), json_values))
def test_no_body_is_too_much(body: dict[str, Any]) -> None:
    key(**body)


@given(st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": json_values})))
def test_no_message_is_too_much(messages: list[Any]) -> None:
    assert (key(messages=messages) is None) == (not messages)
