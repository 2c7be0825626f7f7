"""All dialects say the same of any answer, keep the order of their streams whatever comes between,
and have a place for every error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import httpx
import msgspec
import openai.types.responses as sdk
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv import errors
from mlxsrv.errors import EngineFailed, ServeError
from mlxsrv.generation.outputs import (
    AnswerBuilder,
    Ended,
    Opened,
    Output,
    PromptDone,
    TextPiece,
    ToolInput,
    ToolStarted,
    Usage,
)
from mlxsrv.wire import management
from mlxsrv.wire.anthropic import errors as anthropic
from mlxsrv.wire.anthropic.answers import MessageBuilder
from mlxsrv.wire.dialect import Builder, ErrorShape
from mlxsrv.wire.ollama import answers as ollama
from mlxsrv.wire.ollama.requests import OllamaChatRequest
from mlxsrv.wire.openai import answers as openai
from mlxsrv.wire.openai.builders import ChatBuilder
from mlxsrv.wire.responses.builder import ResponseBuilder
from tests.support.anthropic_streams import check_type, hear
from tests.support.responses_streams import WHO, check_order
from tests.support.schemas import as_sent, check_schema
from tests.web.dialects.asking import DIALECTS
from tests.web.dialects.refusals import ANTHROPICS, told_within
from tests.web.dialects.spoken import Said
from tests.wire.responses.asking import asked, read_events

REQUEST = asked()
USAGE = Usage(prompt_tokens=9, completion_tokens=7, reasoning_tokens=1, cached_tokens=4)

OLLAMA = OllamaChatRequest(model="m:latest")
BUILDERS: dict[str, Callable[[], Builder]] = {
    "chat": lambda: ChatBuilder(WHO, "asked"),
    "messages": lambda: MessageBuilder(WHO),
    "responses": lambda: ResponseBuilder(REQUEST, WHO, lambda response: None),
    "ollama": lambda: ollama.CHATS.builder(OLLAMA, WHO),
}

# Answers, as a service tells them.

ODD = ["\u2028", "\u2029", "\x85", '"', "\\", "\n", "\r\n", "\0", "👩‍👩‍👧", "data: [DONE]\n\n", "}"]
TEXT = st.lists(st.sampled_from(ODD) | st.text(max_size=4), min_size=1, max_size=3).map("".join)
OBJECTS = st.dictionaries(TEXT, TEXT | st.integers(), max_size=2)
NONSENSE = st.sampled_from(["", "{", "[1]", '{"a": ', "nonsense \u2028", "null"])


class Script(msgspec.Struct):
    """An answer, its calls that are complete, and whether others are not."""

    outputs: list[Output]
    calls: list[tuple[str, Any]]
    broken: bool
    fragment: str


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Texts, thoughts and calls in any order; the last call may be cut off."""
    told: list[Output] = [Opened(), PromptDone(USAGE.prompt_tokens, USAGE.cached_tokens)]
    calls: list[tuple[str, Any]] = []
    broken: list[int] = []
    begun = 0
    kinds = st.sampled_from(["content", "reasoning", "call", "wrong call"])
    for kind in draw(st.lists(kinds, max_size=8)):
        if kind in ("content", "reasoning"):
            told.append(TextPiece(0, kind, draw(TEXT | st.just(""))))  # type: ignore[arg-type]
            continue
        arguments = draw(OBJECTS) if kind == "call" else None
        text = draw(NONSENSE) if arguments is None else msgspec.json.encode(arguments).decode()
        if arguments is None:
            broken.append(begun)
        else:
            calls.append((f"f{begun}", arguments))
        told += _call(begun, text, draw(st.integers(0, len(text))))
        begun += 1
    reason = draw(st.sampled_from(["tool_calls" if begun else "stop", "length"]))
    fragment = draw(st.just("") | st.just('<tool_call>{"na'))
    if fragment and reason == "length" and draw(st.booleans()):
        broken.append(begun)
        told += _call(begun, "{}"[: draw(st.integers(0, 1))], 0)
    told.append(Ended(0, reason, USAGE, None, tuple(broken), fragment))  # type: ignore[arg-type]
    return Script(told, calls, bool(broken), fragment)


def _call(index: int, text: str, at: int) -> Iterator[Output]:
    yield ToolStarted(0, index, f"call_{index}", f"f{index}")
    yield from (ToolInput(0, index, part) for part in (text[:at], text[at:]) if part)


def send(
    name: str, outputs: Sequence[Output], silences: Sequence[int], error: ServeError | None = None
) -> httpx.Response:
    """The response that streams the outputs, with keep-alives before those of these numbers."""
    stream, data = BUILDERS[name](), b""
    for number, output in enumerate(outputs):
        if number in silences:
            data += stream.keepalive()
        data += stream.write(output)
    if error is not None:
        data += stream.error(error)
    assert not data or data.endswith(b"\n")
    return httpx.Response(200, content=data, headers={"content-type": DIALECTS[name].stream_type})


def check_rules(name: str, response: httpx.Response) -> None:
    """Fails unless the stream keeps the rules that its readers below do not check."""
    if name == "messages":
        assert hear(response.content).state in ("over", "failed")
    elif name == "responses":
        check_order(read_events(response.content))


def fold(name: str, outputs: Sequence[Output]) -> Said:
    builder = AnswerBuilder(1, scored=False)
    for output in outputs:
        builder.add(output)
    [answer] = builder.make()
    return DIALECTS[name].read(as_sent(BUILDERS[name]().whole([answer], USAGE)))


SILENCES = st.lists(st.integers(0, 30), max_size=4)


@given(scripts(), SILENCES)
def test_any_answer_is_the_same_in_all_dialects(script: Script, silences: list[int]) -> None:
    heard: dict[str, Said] = {}
    for name, spoken in DIALECTS.items():
        response = send(name, script.outputs, silences)
        check_rules(name, response)
        heard[name] = spoken.hear(response)
        heard[f"{name}, whole"] = fold(name, script.outputs)
    first = heard["chat"]
    for name, said in heard.items():
        assert [(call.name, call.arguments) for call in said.calls] == script.calls, name
        assert said.thoughts == first.thoughts
        assert (said.usage.prompt, said.usage.answer) == (9, 7)
        assert said.usage.cached in (None, 4)
        assert said.usage.thoughts in (None, 1)
        if script.broken:
            assert said.finish != "tool_calls" or not name.startswith("messages")
        else:  # a call without a name is no call of chat completions, and text elsewhere
            left_out = "" if name.startswith("chat") else script.fragment
            assert said.text == first.text + left_out
            assert said.finish == first.finish


def test_a_call_that_is_cut_off_before_its_name_leaves_the_one_before_it_whole() -> None:
    told: list[Output] = [Opened(), PromptDone(9, 4), *_call(0, '{"a":1}', 3)]
    told.append(Ended(0, "length", USAGE, None, (), '<tool_call>{"na'))
    for name, spoken in DIALECTS.items():
        for said in (spoken.hear(send(name, told, [])), fold(name, told)):
            assert [(call.name, call.arguments) for call in said.calls] == [("f0", {"a": 1})]
            assert said.text == ("" if name == "chat" else '<tool_call>{"na')
            assert said.finish == "length"


@given(scripts(), SILENCES, st.integers(0, 40))
def test_any_answer_may_fail_at_any_place(script: Script, silences: list[int], at: int) -> None:
    begun = script.outputs[:-1][:at]
    for name, spoken in DIALECTS.items():
        response = send(name, begun, silences, EngineFailed("it broke"))
        check_rules(name, response)
        assert told_within(spoken, response, EngineFailed) == "it broke"


# Errors.


def kinds_of(error: type[ServeError]) -> Iterator[type[ServeError]]:
    yield error
    for kind in error.__subclasses__():
        yield from kinds_of(kind)


ERRORS = sorted(kinds_of(ServeError), key=lambda kind: kind.__name__)
SHAPES = {
    "openai": openai.ERRORS,
    "anthropic": anthropic.ERRORS,
    "ollama": ollama.ERRORS,
    "management": management.ERRORS,
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_error_has_a_place_in_every_shape(name: str) -> None:
    for error in ERRORS:
        check_place(name, error)


def check_place(name: str, error: type[ServeError]) -> None:
    shape: ErrorShape = SHAPES[name]
    made = error("temperature: no", param="temperature")
    status, body = shape.status(made), as_sent(shape.body(made, "some-id"))
    assert status // 100 == error.status // 100
    match name:
        case "openai":
            check_schema(body, "ErrorResponse")
            told = {"type": error.type, "code": error.code, "param": "temperature"}
            assert body == {"error": {**told, "message": "temperature: no"}}
        case "anthropic":
            if status != 413:
                check_type(body, "ErrorResponse")
            assert body["error"]["type"] == ANTHROPICS.get(status, "invalid_request_error")
            assert status in ANTHROPICS or status < 500
            assert body["error"]["details"] == {"error_code": error.code}
            assert body["request_id"] == "some-id"
            assert body["error"]["message"] == "temperature: no"
        case "ollama":
            assert body.keys() == {"error"}
            assert body["error"].endswith("temperature: no")  # sometimes in Ollama's own words
        case "management":
            assert body["success"] is False
            assert body["error"]["code"] == error.code
            assert body["error"]["message"] == "temperature: no"


def test_every_error_can_end_a_response() -> None:
    """With a code that the SDK knows; it types no other, and Codex knows one more."""
    codes = {*get_args(sdk.ResponseError.model_fields["code"].annotation)}
    for error in ERRORS:
        body = read_events(BUILDERS["responses"]().error(error("no")))[-1]["response"]
        known = {"context_length_exceeded"} if error is errors.ContextLengthExceeded else codes
        assert body["error"]["code"] in known, error
        assert (body["error"]["code"] == "server_error") == (error.status >= 500), error
