"""Wrong fields: each gets its code and its path; random bodies are never a bug."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.client import (
    CHAT,
    COMPLETIONS,
    chat,
    check_error,
    completion,
    read_stream,
    refused,
)
from tests.support.effort import examples
from tests.support.wrong_bodies import ENDPOINTS, post_text, with_raw, wrong_param

Table = dict[str, list[Any]]
"""Fields and the values that a test tries, each in a request that is fine but for it."""


def _cases(both: Table, of_chat: Table, of_completion: Table) -> list[Any]:
    """The first value of each field in every run, the others in long ones: tests/wire/ decodes
    them all."""
    return [
        pytest.param(
            path,
            field,
            value,
            id=f"{path[4:8]}-{field}-{value!r:.12}",
            marks=pytest.mark.long if place else (),
        )
        for path, table in ((CHAT, both | of_chat), (COMPLETIONS, both | of_completion))
        for field, values in table.items()
        for place, value in enumerate(values)
    ]


# Values.

WRONG: Table = {
    "model": [5, [], {}, True],
    "temperature": ["0.5", -0.1, 2.1, True, [], {}],
    "top_p": ["1", -0.1, 1.1, False, []],
    "top_k": ["5", -2, 1.5, True, 2**31],
    "min_p": ["0", -0.1, 1.1, True],
    "seed": ["1", 1.5, True, 2**63, -(2**63) - 1, []],
    "stop": [5, True, {}, [5], [None], ["x"] * 17],
    "max_tokens": ["8", 0, -5, 1.5, True, []],
    "stream": ["true", 1, 0, []],
    "stream_options": [True, "x", []],
    "user": [5, {}, []],
    "n": [0, -1, 129, 1.5, True, "1"],
    "frequency_penalty": ["0", -2.1, 2.1, True],
    "presence_penalty": ["0", -2.1, 2.1, []],
    "repetition_penalty": ["1", 0, -1, 11, True],
    "repeat_penalty": ["1", 0, True],
    "dry_multiplier": ["1", -1, True],
    "dry_base": ["2", 0.5],
    "dry_allowed_length": [-1, 1.5],
    "dry_penalty_last_n": [-2, "64"],
    "dry_sequence_breakers": ["\n", [5]],
    "n_predict": ["8", 0, -2, 1.5],
    "truncate_prompt_tokens": ["8", 0, -2, 1.5],
    "min_tokens": ["8", -1, 1.5, 10**6],
    "ignore_eos": ["yes", 1],
    "stop_token_ids": [5, "5", [-1], ["5"], [512]],
    "bad_words": ["a", [""], [" "], [5]],
    "allowed_token_ids": [5, [], [-1], ["5"], [512]],
    "logit_bias": [5, {"x": 1}, {"5": 101}, {"5": "1"}, {"-1": 1}, {"512": 1}],
    "guided_regex": [5, "", "("],
    "guided_choice": ["a", [], [5]],
    "guided_grammar": [5, "", "no grammar"],
    "guided_json": [5, "{", [1]],
    "profile": [5, ""],
    "steering": [[], {"a": 1}, {"5": 201}, {"5": "1"}],
    "steering_mode": ["sum", "clamp"],
    "control_vector": [5, "", "nothing", {"nothing": 1}, {"nothing": 101}],
}
WRONG_CHAT: Table = {
    "logprobs": [1, "true", []],
    "top_logprobs": [21, -1, "5", True, 1],
    "tools": ["f", [5], [{"type": "function"}], [{"type": "x", "function": {"name": "f"}}]],
    "tool_choice": ["some", 5, "required", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": ["no", 0],
    "response_format": ["json", {}, {"type": "xml"}, {"type": "json_schema"}],
    "messages": [None, [], {}, "hi", 5],
    "max_completion_tokens": ["8", 0, -2, 1.5],
    "chat_template_kwargs": [[], "x", 5, True],
    "reasoning_effort": [5, True, {}, "x" * 101],
    "enable_thinking": ["yes", 1],
    "think": [1, [], "x" * 101],
    "add_generation_prompt": ["yes", 1],
    "chat_template": ["", 5],
    "continue_final_message": ["yes", 1],
}
WRONG_COMPLETION: Table = {
    "logprobs": [21, -1, "5", True],
    "echo": ["yes", 1],
    "best_of": [0, "2"],
    "prompt": [None, 5, True, {}, [], [1.5], [True], [None], [[[1]]], "", [[]], [""]],
}


@pytest.mark.parametrize(("path", "field", "value"), _cases(WRONG, WRONG_CHAT, WRONG_COMPLETION))
def test_a_wrong_value_is_refused_by_name(
    client: httpx.Client, path: str, field: str, value: Any
) -> None:
    response = client.post(path, json=ENDPOINTS[path](**{field: value}))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert re.match(rf"{field}\b", error["param"] or ""), error
    assert error["code"] in {
        "invalid_value",
        "unsupported_parameter",
        "missing_required_parameter",
    }
    check_error(response, response.json(), error["code"], param=error["param"])


NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"]


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("field", NUMBERS)
def test_what_json_cannot_say_is_not_a_number(client: httpx.Client, field: str, raw: str) -> None:
    refused(post_text(client, with_raw(chat(), field, raw)), 400, "invalid_json")


@pytest.mark.parametrize("raw", ["1e999", "-1e999", "9" * 5000])
@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_beyond_all_bounds_is_refused(client: httpx.Client, field: str, raw: str) -> None:
    response = post_text(client, with_raw(chat(), field, raw))
    assert response.status_code == 400, response.text
    check_error(response, response.json(), "invalid_value", param=field)


@pytest.mark.parametrize("field", ["metadata", "unheard_of", "n", "logit_bias"])
@pytest.mark.parametrize("raw", ["1e999", "9" * 5000, "[1e999]", '{"a": 1e999}'])
def test_a_number_beyond_all_bounds_is_no_bug_anywhere(
    client: httpx.Client, field: str, raw: str
) -> None:
    response = post_text(client, with_raw(chat(), field, raw))
    assert response.status_code in {200, 400}, response.text


@pytest.mark.parametrize("value", [0, 1, 2, 2.0, 0.5])
def test_an_integer_will_do_for_a_float(client: httpx.Client, value: float) -> None:
    assert client.post(CHAT, json=chat(temperature=value)).status_code == 200


def test_include_usage_is_a_boolean(client: httpx.Client) -> None:
    body = chat(stream=True, stream_options={"include_usage": "yes"})
    response = client.post(CHAT, json=body, headers={"Accept": "application/json"})
    refused(response, 400, "invalid_value", param="stream_options.include_usage")


@pytest.mark.parametrize("tokens", [[512], [5, 10**6], [[5, 2**40]], [5, -1], [2**80]], ids=repr)
def test_a_token_id_must_be_the_models(client: httpx.Client, tokens: Any) -> None:
    response = client.post(COMPLETIONS, json=completion(tokens))
    error = check_error(response, response.json(), "invalid_value", param=wrong_param(response))
    assert response.status_code == 400
    assert error["param"].startswith("prompt")


# Messages.


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([5], "messages[0]"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        ([{"role": None, "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": "hi"}, {"role": "User"}], "messages[1].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text", "text": "hi"}}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "hi", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": "f()"}], "messages[0].tool_calls"),
    ],
)
def test_a_wrong_message_is_named(client: httpx.Client, messages: Any, param: str) -> None:
    refused(client.post(CHAT, json=chat(messages=messages)), 400, "invalid_value", param=param)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": [{"text": "hi"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}],
            "messages[0].tool_calls[0].function",
        ),
    ],
)
def test_a_message_that_lacks_something_says_what(
    client: httpx.Client, messages: Any, param: str
) -> None:
    response = client.post(CHAT, json=chat(messages=messages))
    refused(response, 400, "missing_required_parameter", param=param)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_no_text_is_named(client: httpx.Client, kind: str) -> None:
    parts = [{"type": kind, kind: {"url": "data:,"}}, {"type": "text", "text": "What is it?"}]
    response = client.post(CHAT, json=chat(messages=[{"role": "user", "content": parts}]))
    error = refused(response, 400, "unsupported_parameter", param="messages[0].content[0]")
    assert kind in error["message"]


@pytest.mark.parametrize("arguments", ["[" * 50_000, '{"a": ' + "[" * 900 + "]" * 900 + "}"])
def test_arguments_nested_deeply_are_text(client: httpx.Client, arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    response = client.post(CHAT, json=chat(messages=history, truncate_prompt_tokens=50))
    assert response.status_code == 200, response.text


# The chat template.


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "conversation", "add_generation_prompt", "return_dict", "tools"],
)
def test_rendering_itself_is_not_the_clients_to_change(client: httpx.Client, name: str) -> None:
    response = client.post(CHAT, json=chat(chat_template_kwargs={name: "{{ 1 }}"}))
    refused(response, 400, "invalid_value", param=f"chat_template_kwargs.{name}")


@pytest.mark.parametrize("name", ["self", "messages", "", "a-b", "loop", "range", "é"])
def test_an_odd_template_variable_is_no_bug(client: httpx.Client, name: str) -> None:
    response = client.post(CHAT, json=chat(chat_template_kwargs={name: {"a": [None]}}))
    assert response.status_code in {200, 400}, response.text


def test_a_template_variable_nested_deeply_is_the_clients_fault(client: httpx.Client) -> None:
    nested: Any = "x"
    for _ in range(900):
        nested = [nested]
    response = client.post(CHAT, json=chat(chat_template_kwargs={"enable_thinking": nested}))
    assert response.status_code == 400, response.text


# What is known and cannot be honoured yet.

UNSUPPORTED_CHAT: Table = {
    "functions": [[{"name": "f"}]],
    "function_call": [{"name": "f"}],
    "modalities": [["text", "audio"]],
    "audio": [{"voice": "ash"}],
    "chat_template": ["{{ messages }}"],
}
UNSUPPORTED_COMPLETION: Table = {
    "best_of": [2],
    "suffix": ["the end"],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "response_format": [{"type": "json_object"}],
}
NEUTRAL: Table = {
    "n": [None, 1],
    "logprobs": [None],
    "top_k": [None, 0, -1],
    "max_completion_tokens": [None, -1],
    "n_predict": [None, -1],
    "truncate_prompt_tokens": [None, -1, 4000],
    "min_tokens": [None, 0],
    "ignore_eos": [None, False],
    "stop_token_ids": [None, []],
    "bad_words": [None, []],
    "allowed_token_ids": [None],
    "frequency_penalty": [None, 0, 0.0],
    "presence_penalty": [None, 0],
    "repetition_penalty": [None, 1, 1.0],
    "repeat_penalty": [None, 1],
    "dry_multiplier": [None, 0],
    "dry_base": [None, 1.5],
    "dry_allowed_length": [None, 1],
    "dry_penalty_last_n": [None, 64],
    "dry_sequence_breakers": [None, [], ["\n"]],
    "logit_bias": [None, {}],
}
NEUTRAL_CHAT: Table = {
    "tools": [None, []],
    "tool_choice": [None, "none", "auto"],
    "functions": [None, []],
    "response_format": [None, {"type": "text"}],
    "top_logprobs": [None, 0],
    "enable_thinking": [None, False],
    "think": [None, False, "low"],
    "add_generation_prompt": [None, True],
    "chat_template": [None],
    "modalities": [None, ["text"]],
}
NEUTRAL_COMPLETION: Table = {
    "best_of": [None, 1],
    "echo": [None, False],
    "suffix": [None, ""],
}


@pytest.mark.parametrize(
    ("path", "field", "value"),
    _cases({}, UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION),
)
def test_what_would_change_the_output_is_not_dropped(
    client: httpx.Client, path: str, field: str, value: Any
) -> None:
    response = client.post(path, json=ENDPOINTS[path](**{field: value}))
    error = refused(response, 400, "unsupported_parameter", param=field)
    assert field in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    _cases(NEUTRAL, NEUTRAL_CHAT, NEUTRAL_COMPLETION),
)
def test_what_asks_for_nothing_is_accepted(
    client: httpx.Client, path: str, field: str, value: Any
) -> None:
    response = client.post(path, json=ENDPOINTS[path](**{field: value}))
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers


# Anything at all.

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool", "robot"]) | JSON,
        "content": st.text(max_size=20)
        | st.lists(
            st.fixed_dictionaries({"type": st.just("text") | JSON, "text": JSON}), max_size=2
        )
        | JSON,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {"function": st.fixed_dictionaries({"name": JSON, "arguments": st.text() | JSON})}
            ),
            max_size=2,
        ),
    },
)
FEW = st.integers(1, 4) | JSON.filter(
    lambda value: value is not None and not isinstance(value, int)
)
NAMES = sorted({*WRONG, *WRONG_CHAT, *UNSUPPORTED_CHAT, *UNSUPPORTED_COMPLETION})
BODIES = st.builds(
    lambda base, wild, unknown, limits: base | wild | unknown | limits,
    st.fixed_dictionaries(
        {
            "messages": st.just([{"role": "user", "content": "hi"}])
            | st.lists(MESSAGE, max_size=3),
            "prompt": st.just("hi") | st.lists(st.integers(-1, 600), max_size=4) | JSON,
        }
    ),
    st.dictionaries(
        st.sampled_from([n for n in NAMES if n not in {"messages", "prompt"}]), JSON, max_size=2
    ),
    st.dictionaries(st.text(max_size=8), JSON, max_size=2),
    # Both always, so that no example asks for thousands of tokens.
    st.fixed_dictionaries({"max_tokens": FEW, "max_completion_tokens": st.integers(1, 4)}),
)
THOROUGHLY = settings(
    max_examples=examples(150),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def check_any(response: httpx.Response) -> None:
    """An answer or the client's fault, in a form that a client can read."""
    assert response.status_code in {200, 400, 404}, response.text
    assert response.headers["x-request-id"]
    if response.headers["content-type"].startswith("text/event-stream"):
        assert read_stream(response).finish_reason in {"length", "error"}
    elif response.status_code == 200:
        assert response.json()["usage"]["completion_tokens"] <= 4
    else:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@THOROUGHLY
@given(body=BODIES | JSON, path=st.sampled_from([CHAT, COMPLETIONS]))
def test_no_json_is_a_bug(client: httpx.Client, body: Any, path: str) -> None:
    check_any(post_text(client, json.dumps(body), path))


@THOROUGHLY
@given(
    body=st.binary(max_size=60)
    | st.builds(
        lambda text, at, part: text[:at] + part + text[at:],
        # One of the limits stays whole, or an answer would fill the context.
        st.just(json.dumps(chat(max_tokens=1, max_completion_tokens=1)).encode()),
        st.integers(0, 150),
        st.binary(min_size=1, max_size=4),
    )
)
def test_no_bytes_are_a_bug(client: httpx.Client, body: bytes) -> None:
    check_any(client.post(CHAT, content=body))
