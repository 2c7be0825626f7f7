"""Requests: what is read of them, and the name and path of what is wrong."""

from __future__ import annotations

import gc
import json
import time
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsrv.errors import InvalidJSON, InvalidRequest, MissingParameter, ServeError
from mlxsrv.errors import UnsupportedParameter as Unsupported
from mlxsrv.wire.decoding import RequestDecoder
from mlxsrv.wire.openai.requests import CHAT_REQUESTS, COMPLETION_REQUESTS, ChatRequest
from mlxsrv.wire.openai.tokens import TOKENIZE_REQUESTS
from tests.support.bodies import KINDS, Kind, fields, read_completion, refusal
from tests.support.effort import examples
from tests.support.openai_bodies import chat, completion, message, tool
from tests.support.schemas import Body


def with_raw(body: Body, field: str, raw: str) -> str:
    """`body` as JSON with `field` spelled as given, which need not be JSON."""
    rest = json.dumps({name: value for name, value in body.items() if name != field})
    return f'{{"{field}": {raw}, {rest[1:]}'


def holds(read: Any, given: Any) -> bool:
    """Whether all that is given has been read, where it was."""
    if isinstance(given, dict):
        return all(holds(read.get(name), value) for name, value in given.items())
    if isinstance(given, list):
        return len(read) == len(given) and all(map(holds, read, given))
    return bool(read == given)


each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


# Values.


@each_kind
@pytest.mark.slow
def test_a_wrong_value_is_refused_by_path(kind: Kind) -> None:
    for body, param in (*kind.wrong, *kind.unsaid):
        error = refusal(kind, body)
        assert (error.code, error.param) == ("invalid_value", param), (body, error.message)
        assert error.message.startswith(f"{param}: "), body


@each_kind
def test_what_is_missing_is_named(kind: Kind) -> None:
    for body, param in kind.missing:
        error = refusal(kind, body)
        assert isinstance(error, MissingParameter), body
        assert (error.param, error.message) == (param, f"missing required parameter: {param}"), body


@each_kind
def test_what_would_change_the_output_is_not_dropped(kind: Kind) -> None:
    for body, param in kind.unsupported:
        error = refusal(kind, body)
        assert isinstance(error, Unsupported), body
        assert error.param == param, body
        assert param in error.message, body


@each_kind
def test_what_is_fine_is_read_and_named_nowhere(kind: Kind) -> None:
    for body in kind.fine:
        request, ignored = kind.decode(json.dumps(body).encode())
        idle = body.get("stream_options") is not None and not body.get("stream")
        assert ignored == (["stream_options"] if idle else []), body
        read = json.loads(msgspec.json.encode(request))
        assert holds(read, {name: value for name, value in body.items() if name in read}), body


@each_kind
def test_null_is_the_default(kind: Kind) -> None:
    absent = kind.decode(json.dumps(kind.base).encode())
    for field in fields(kind, optional=True):
        assert kind.decode(json.dumps(kind.base | {field: None}).encode()) == absent, field


@each_kind
def test_what_json_cannot_say_is_not_json(kind: Kind) -> None:
    for field in fields(kind, optional=False):
        for raw in ("NaN", "Infinity", "-Infinity", "nan", "+1", "'a'"):
            error = refusal(kind, with_raw(kind.base, field, raw))
            assert isinstance(error, InvalidJSON), (field, raw)
            assert error.param is None, (field, raw)


@each_kind
def test_a_value_beyond_all_bounds_is_the_clients_fault(kind: Kind) -> None:
    for field in fields(kind, optional=False):
        for raw in ("1e999", "-1e999", "9" * 5000, "[" * 5000 + "]" * 5000):
            error = refusal(kind, with_raw(kind.base, field, raw))
            assert error.code in {"invalid_value", "invalid_json"}, (field, raw[:9])
            if raw[0] != "[":
                assert error.param == field, (field, raw[:9])


@each_kind
def test_a_body_that_is_no_object_is_refused(kind: Kind) -> None:
    for body in ("[]", "5", "null", '"hi"', "true", "[{}]"):
        error = refusal(kind, body)
        assert (error.code, error.param) == ("invalid_value", None), body
        assert "object" in error.message, body


# Messages of errors.


def test_a_quoted_value_is_neither_a_path_nor_without_end() -> None:
    kind = KINDS["chat"]
    error = refusal(kind, chat(tool_choice="x' - at `$.evil` missing required field `evil`"))
    assert (error.code, error.param) == ("invalid_value", "tool_choice")
    error = refusal(kind, message(role="m" * 1_000_000))
    assert len(error.message) < 1000


@pytest.mark.parametrize("key", ["hello", "1.0", "", "05", "a.b", "$[0]` - at `key` in `$.x`"])
@pytest.mark.parametrize("field", ["logit_bias", "steering"])
def test_an_error_about_a_key_names_the_key(field: str, key: str) -> None:
    error = refusal(KINDS["chat"], chat(**{field: {"5": 1, key: 1, "6": 1}}))
    assert error.message.startswith(f'{field}: the key "{key}" is wrong: expected ')
    assert error.param == field


@pytest.mark.parametrize("value", [201, "1", None, []])
@pytest.mark.parametrize("field", ["logit_bias", "steering", "control_vector"])
def test_an_error_about_the_value_of_a_key_names_the_key(field: str, value: Any) -> None:
    error = refusal(KINDS["chat"], chat(**{field: {"5": 1, "7": value, "6": 1}}))
    assert error.message.startswith(f'{field}: at the key "7": expected ')


def test_a_key_without_end_is_named_by_its_beginning() -> None:
    error = refusal(KINDS["chat"], chat(logit_bias={"x" * 1_000_000: 1}))
    assert f'"{"x" * 64}..."' in error.message
    assert len(error.message) < 1000


def test_a_wrong_key_among_very_many_is_refused_all_the_same() -> None:
    error = refusal(KINDS["chat"], chat(steering={str(i): 1 for i in range(10_001)} | {"x": 1}))
    assert error.param == "steering"


def test_fields_that_exclude_each_other_are_both_named() -> None:
    error = refusal(KINDS["chat"], chat(guided_regex="a", response_format={"type": "json_object"}))
    assert "guided_regex" in error.message
    assert "response_format" in error.message


@pytest.mark.parametrize("name", ["whitespace_pattern", "structural_tag"])
def test_an_option_that_cannot_be_honoured_is_named(name: str) -> None:
    given = {"structured_outputs": {"json_object": True, name: "x"}}
    for kind in (KINDS["chat"], KINDS["completion"]):
        error = refusal(kind, kind.base | given)
        assert isinstance(error, Unsupported)
        assert error.param == f"structured_outputs.{name}"
        assert error.param in error.message


def test_an_unknown_tool_is_named_beside_the_known() -> None:
    error = refusal(KINDS["chat"], chat(tools=[tool("f"), tool("g")], tool_choice=tool("h")))
    assert "f, g" in error.message


def test_a_chat_says_where_a_suffix_may_be() -> None:
    assert "/v1/completions" in refusal(KINDS["chat"], chat(suffix="x")).message


@pytest.mark.parametrize(
    ("fields", "fine"),
    [
        ({"best_of": 1}, True),
        ({"best_of": 1, "n": 1}, True),
        ({"best_of": 3, "n": 3}, True),
        ({"best_of": 2}, False),
        ({"best_of": 1, "n": 2}, False),
        ({"best_of": 3, "n": 2}, False),
    ],
)
def test_best_of_is_n(fields: Body, fine: bool) -> None:
    if fine:
        assert read_completion(**fields).choices == fields.get("n", 1)
    else:
        error = refusal(KINDS["completion"], completion(**fields))
        assert (error.code, error.param) == ("unsupported_parameter", "best_of")


# Fields that mean nothing here.


@each_kind
def test_unknown_fields_are_named_in_order(kind: Kind) -> None:
    body = kind.base | {"store": True, "notes": {"a": [1]}, "": 1, "ключ": 5, "gone": None}
    assert kind.decode(json.dumps(body).encode())[1] == ["", "notes", "store", "ключ"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_hints_are_ignored_by_name(kind: str) -> None:
    hints = {"verbosity": "low", "prediction": {"type": "content", "content": "x"}}
    body = json.dumps(KINDS[kind].base | hints).encode()
    assert KINDS[kind].decode(body)[1] == ["prediction", "verbosity"]


def nested_unknowns() -> Body:
    """A chat with an unknown field, called x, in every object that is ours."""
    function = {"name": "f", "parameters": {"type": "object", "x": 1}, "x": 1}
    call = {"name": "f", "arguments": "{}", "x": 1}
    schema = {"name": "a", "schema": {"x": 1}, "x": 1}
    return {
        "messages": [
            {"role": "user", "content": "hi", "x": None},
            {"role": "user", "content": [{"type": "text", "text": "hi", "x": 1}], "x": 1},
            {"role": "user", "content": [{"type": "text", "text": "hi", "x": 1}], "x": 1},
            {"role": "assistant", "tool_calls": [{"function": call, "x": 1}]},
            {"role": "assistant", "function_call": call},
        ],
        "tools": [{"type": "function", "function": function, "x": {"x": 1}}],
        "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}, "x": 1},
        "response_format": {"type": "json_schema", "json_schema": schema, "x": 1},
        "stream": True,
        "stream_options": {"x": 1},
        "chat_template_kwargs": {"x": {"x": 1}},
        "logit_bias": {"5": 1},
        "x": 1,
    }


def test_unknown_fields_of_objects_are_named_by_path() -> None:
    _, ignored = CHAT_REQUESTS.decode(json.dumps(nested_unknowns()).encode())
    assert ignored == [
        "messages[1].content[0].x",
        "messages[1].x",
        "messages[3].tool_calls[0].function.x",
        "messages[3].tool_calls[0].x",
        "messages[4].function_call.x",
        "response_format.json_schema.x",
        "response_format.x",
        "stream_options.x",
        "tool_choice.function.x",
        "tool_choice.x",
        "tools[0].function.x",
        "tools[0].x",
        "x",
    ], "of a place in lists the first; what a client's own objects hold is no field"


@pytest.mark.slow
def test_the_search_for_unknown_fields_is_bounded() -> None:
    many = [{"role": "user", "content": "hi", f"field_{i}": 1} for i in range(5000)]
    _, ignored = CHAT_REQUESTS.decode(json.dumps({"messages": many}).encode())
    assert len(ignored) == 100
    deep = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 9000}] * 20
    late = [*deep, {"role": "user", "content": "hi", "x": 1}]
    body = json.dumps({"messages": late}).encode()
    decoder = msgspec.json.Decoder(ChatRequest)
    typed = min(_seconds(decoder.decode, body) for _ in range(3))
    assert min(_seconds(CHAT_REQUESTS.decode, body) for _ in range(3)) < 3 * typed + 0.1


def _seconds(work: Any, *arguments: Any) -> float:
    begun = time.thread_time()  # others on the machine take what they want
    work(*arguments)
    return time.thread_time() - begun


class Inner(msgspec.Struct):
    a: int = 0


class Tagged(msgspec.Struct, tag_field="kind", tag="one"):
    inner: Inner | None = None


class Other(msgspec.Struct, tag_field="kind", tag="two"):
    pass


class Outer(msgspec.Struct):
    either: Tagged | Other | str | None = None
    lists: list[list[Inner] | Inner] | str | None = None
    own: dict[str, Any] | None = None


def test_every_struct_of_a_request_is_looked_into() -> None:
    """No list by hand: what msgspec says of the types."""
    decode = RequestDecoder(Outer).decode
    body = {
        "either": {"kind": "one", "inner": {"x": 1}, "y": 1},
        "lists": [{"a": 1}, [{"x": 1}], {"x": 2}],
        "own": {"x": 1},
    }
    names = ["either.inner.x", "either.y", "lists[1][0].x", "lists[2].x"]
    assert decode(json.dumps(body).encode())[1] == names
    assert decode(b'{"either": {"kind": "two", "inner": 5}}')[1] == ["either.inner"]
    assert decode(b'{"either": "x", "lists": "y"}')[1] == []


def test_tokens_know_no_field_of_a_generation() -> None:
    body = json.dumps({"content": "x", "tools": [tool()], "stream_options": {}, "n": 5}).encode()
    assert TOKENIZE_REQUESTS.decode(body)[1] == ["n", "stream_options", "tools"]


def test_options_of_a_stream_mean_nothing_without_one() -> None:
    for stream, ignored in (({}, ["stream_options"]), ({"stream": True}, [])):
        body = json.dumps(chat(stream_options={"include_usage": True}, **stream)).encode()
        assert CHAT_REQUESTS.decode(body)[1] == ignored


# Anything at all.

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
TRIED = [
    value
    for kind in KINDS.values()
    for body in [*(body for body, _ in kind.wrong + kind.missing + kind.unsupported), *kind.fine]
    for value in body.values()
]
"""Values of every field: one that is right for its own may be wrong for another."""
NAMES = sorted({name for kind in KINDS.values() for name in kind.struct.__struct_fields__})
BODIES = st.dictionaries(
    st.sampled_from(NAMES) | st.text(max_size=5), JSON | st.sampled_from(TRIED), max_size=6
)


@settings(max_examples=examples(400))
@given(kind=st.sampled_from(list(KINDS.values())), body=BODIES | JSON, fine=st.booleans())
def test_no_json_is_a_bug(kind: Kind, body: Any, fine: bool) -> None:
    if fine and isinstance(body, dict):
        body = kind.base | body
    text = json.dumps(body).encode()
    error = None
    try:
        request, ignored = kind.decode(text)
    except ServeError as caught:
        error = caught
    else:
        assert isinstance(request, kind.struct)
        assert all(name.startswith(tuple(body)) for name in ignored)
    assert error is None or (error.status == 400 and error.message)


@settings(max_examples=examples(200))
@given(
    kind=st.sampled_from(list(KINDS.values())),
    junk=st.binary(min_size=1, max_size=4),
    at=st.integers(0, 200),
)
def test_no_bytes_are_a_bug(kind: Kind, junk: bytes, at: int) -> None:
    text = json.dumps(kind.base | {"extra": "x"}).encode()
    with suppress(InvalidRequest):
        kind.decode(text[:at] + junk + text[at:])


def test_there_are_only_so_many_fields() -> None:
    body = {"prompt": "a"} | {f"x{i}": 1 for i in range(10_000)}
    with pytest.raises(InvalidRequest, match="10000 fields"):
        COMPLETION_REQUESTS.decode(json.dumps(body).encode())


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_looked_for_in_a_large_body(enabled: bool) -> None:
    seen = []

    def see(phase: str, info: dict[str, int]) -> None:
        seen.append(phase)

    was = gc.isenabled()
    lists = b"[" + b"[]," * 400_000 + b"1]"
    body = b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":%s}}' % lists
    try:
        (gc.enable if enabled else gc.disable)()
        gc.callbacks.append(see)
        CHAT_REQUESTS.decode(body)
        gc.callbacks.remove(see)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
    assert len(seen) < 10
