"""Streams of the Responses API: their order, and that they say what the last event says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState

from mlxsrv.errors import ContextLengthExceeded, EngineFailed, RateLimited, ServeError
from mlxsrv.generation.outputs import (
    AnswerBuilder,
    Ended,
    FinishReason,
    Output,
    TextPiece,
    TokenScore,
    ToolInput,
    ToolStarted,
    Usage,
    is_object,
)
from mlxsrv.wire.responses.answers import ResponseObject
from mlxsrv.wire.responses.builder import ResponseBuilder
from mlxsrv.wire.responses.requests import RESPONSES_REQUESTS, ResponsesRequest
from tests.support.responses_streams import WHO, check_order, content_of
from tests.support.schemas import Body, as_sent
from tests.wire.responses.asking import TOOLS, asked, check_response, read_events, sdk_event, short

USAGE = Usage(prompt_tokens=5, completion_tokens=7, reasoning_tokens=1, cached_tokens=2)
PARIS = '{"city": "Paris"}'
REQUEST = asked(tools=TOOLS)


class Sent:
    """A stream of outputs: its events, and what was kept."""

    def __init__(
        self,
        outputs: Sequence[Output],
        request: ResponsesRequest = REQUEST,
        *,
        error: ServeError | None = None,
        silent: int = 0,
    ) -> None:
        self.kept: list[ResponseObject] = []
        stream = ResponseBuilder(request, WHO, self.kept.append)
        data = b"".join(stream.keepalive() for _ in range(silent)) + stream.opening()
        for output in outputs:
            data += stream.write(output)
        if error is not None:
            data += stream.error(error)
        self.events = read_events(data)
        check_order(self.events)

    @property
    def types(self) -> list[str]:
        return [short(event["type"]) for event in self.events]

    @property
    def response(self) -> Body:
        return dict(self.events[-1]["response"])

    @property
    def output(self) -> list[Body]:
        return list(self.response["output"])


def text(*pieces: str, channel: Any = "content") -> list[Output]:
    return [TextPiece(0, channel, piece) for piece in pieces]


def call(index: int, name: str, *pieces: str) -> list[Output]:
    started = ToolStarted(0, index, f"call_{index}", name)
    return [started, *(ToolInput(0, index, piece) for piece in pieces)]


def end(reason: FinishReason = "stop", *broken: int, fragment: str = "") -> list[Output]:
    return [Ended(0, reason, USAGE, broken=broken, fragment=fragment)]


# Answers.


def test_a_text_has_all_its_events() -> None:
    sent = Sent([*text("Hel", "lo"), *end()])
    assert sent.types == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]
    [message] = sent.output
    assert message["content"] == [
        {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    ]
    assert message["status"] == "completed"
    assert sent.response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 12,
    }
    assert [as_sent(response) for response in sent.kept] == [sent.response]


def test_a_call_has_all_its_events() -> None:
    sent = Sent([*text("So: "), *call(0, "get_weather", '{"city":', ' "Paris"}'), *end()])
    assert sent.types[7:] == [
        *("output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    item = sent.output[1]
    assert item == {
        "type": "function_call",
        "id": item["id"],
        "call_id": "call_0",
        "name": "get_weather",
        "arguments": PARIS,
        "status": "completed",
    }


def test_a_custom_tools_input_is_plain_text() -> None:
    sent = Sent([*call(0, "apply_patch", '{"inp', 'ut": "a\\n', "\\u00e9", '"}'), *end()])
    deltas = [event["delta"] for event in sent.events if event["type"].endswith("delta")]
    assert deltas == ["a\n", "é"]
    [item] = sent.output
    assert (item["type"], item["name"], item["input"]) == (
        "custom_tool_call",
        "apply_patch",
        "a\né",
    )
    assert "namespace" not in item


@pytest.mark.parametrize(("flat", "name"), [("agents__spawn", "spawn"), ("agents__note", "note")])
def test_a_namespace_is_put_back(flat: str, name: str) -> None:
    [item] = Sent([*call(0, flat, '{"input": "x"}'), *end()]).output
    assert (item["name"], item["namespace"]) == (name, "agents")


def test_thoughts_are_an_item_before_the_message() -> None:
    sent = Sent([*text("Hm", ".", channel="reasoning"), *text("So"), *end()])
    assert "reasoning_text.delta" in sent.types
    assert not [type for type in sent.types if "summary" in type]
    reasoning, message = sent.output
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert reasoning["summary"] == []
    assert reasoning["encrypted_content"] is None
    assert message["content"][0]["text"] == "So"


def test_a_summary_has_the_thoughts_where_one_is_asked_for() -> None:
    request = asked(reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])
    sent = Sent([*text("Hm", ".", channel="reasoning"), *text("So"), *end()], request)
    assert sent.types[2:8] == [
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.delta", "reasoning_summary_text.done"),
        "reasoning_summary_part.done",
    ]
    reasoning = sent.output[0]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert reasoning["content"] == []
    assert reasoning["encrypted_content"]


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    for outputs in (end(), [*text("Hm", channel="reasoning"), *end()]):
        message = Sent(outputs).output[-1]
        assert (message["type"], content_of(message)) == ("message", "")


def test_scores_are_with_their_text() -> None:
    scores = (TokenScore(b"a", -0.5, ((b"a", -0.5), (b"\xe2", -2.0))),)
    request = asked(include=["message.output_text.logprobs"], top_logprobs=2)
    outputs: list[Output] = [TextPiece(0, "content", "a", scores), *text("b"), *end()]
    sent = Sent(outputs, request)
    [first, second] = [event for event in sent.events if event["type"].endswith("delta")]
    [logprob] = first["logprobs"]
    assert (logprob["token"], logprob["logprob"], logprob["bytes"]) == ("a", -0.5, [97])
    assert [top["logprob"] for top in logprob["top_logprobs"]] == [-0.5, -2.0]
    assert second["logprobs"] == []
    assert sent.output[0]["content"][0]["logprobs"] == [logprob]


def test_a_score_without_text_opens_no_message() -> None:
    scored = TextPiece(0, "content", "", (TokenScore(b"<tool_call>", -0.5),))
    sent = Sent([scored, *call(0, "get_weather", PARIS), scored, *end("tool_calls")])
    assert [item["type"] for item in sent.output] == ["function_call"]


def test_line_ends_of_a_request_break_no_event() -> None:
    hosted = {"type": "mcp", "server_label": "a\u2028b"}
    body = json.dumps({"input": "hi", "tools": [*TOOLS, hosted]}, indent=1)
    request, _ = RESPONSES_REQUESTS.decode(body.encode())
    assert Sent([*text("a"), *end()], request).response["tools"][-1] == hosted


# Ends.


@pytest.mark.parametrize(
    ("reason", "told"), [("length", "max_output_tokens"), ("timeout", "timeout")]
)
def test_a_limit_makes_it_incomplete(reason: FinishReason, told: str) -> None:
    sent = Sent([*text("Hel"), *end(reason)])
    assert sent.types[-1] == "incomplete"
    assert sent.response["incomplete_details"] == {"reason": told}
    assert sent.output[0]["status"] == "incomplete"
    assert sent.kept


CUT = end("length", 1, fragment="<tool_call>...")


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("get_weather", '{"city": "Par'),
        ("get_weather", ""),
        ("get_weather", "{}"),
        ("apply_patch", '{"input": "*** Begin'),
        ("apply_patch", '{"input": "aa"'),
    ],
)
def test_a_call_that_is_cut_off_is_never_done(name: str, piece: str) -> None:
    sent = Sent([*call(0, "get_weather", PARIS), *call(1, name, piece), *CUT])
    done = [event["item"]["call_id"] for event in sent.events if event["type"].endswith("m.done")]
    assert done == ["call_0"]
    assert sent.types.count("function_call_arguments.done") == 1
    assert "custom_tool_call_input.done" not in sent.types
    assert [item["status"] for item in sent.output] == ["completed", "incomplete"]
    assert sent.response["status"] == "incomplete"


@pytest.mark.parametrize("fragment", ["", '<tool_call>\n{"na'])
def test_a_call_before_the_limit_is_whole(fragment: str) -> None:
    """Also where the next call was cut off before its name was known."""
    sent = Sent([*call(0, "get_weather", PARIS), *end("length", fragment=fragment)])
    assert sent.output[0]["status"] == "completed"
    assert sent.response["status"] == "incomplete"


@pytest.mark.parametrize("arguments", ["[1]", "{", "", '"x"', "nonsense"])
def test_arguments_that_are_no_object_are_incomplete(arguments: str) -> None:
    """The client reports the error to its model, so the item is done."""
    outputs = [*call(0, "get_weather", arguments), *call(1, "get_weather", PARIS)]
    sent = Sent([*outputs, *end("tool_calls", 0)])
    assert [item["status"] for item in sent.output] == ["incomplete", "completed"]
    assert sent.types.count("output_item.done") == 2
    last = Sent([*call(0, "get_weather", arguments), *end("tool_calls", 0)])
    assert [item["status"] for item in last.output] == ["incomplete"]
    assert last.types[-2:] == ["output_item.done", "completed"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineFailed("it failed"), "server_error"),
        (RateLimited("no"), "rate_limit_exceeded"),
        (ContextLengthExceeded("too long"), "context_length_exceeded"),
    ],
)
def test_a_failure_ends_with_the_response(error: ServeError, code: str) -> None:
    for outputs in ([], text("Hel"), call(0, "apply_patch", '{"input": "a')):
        sent = Sent(outputs, error=error)
        assert sent.types[-1] == "failed"
        assert sent.response["error"] == {"code": code, "message": error.message}
        assert not sent.kept, "a response that failed is not stored"


def test_a_failure_in_silence_opens_the_stream_first() -> None:
    stream = ResponseBuilder(REQUEST, WHO, lambda response: None)
    types = [short(event["type"]) for event in read_events(stream.error(EngineFailed("no")))]
    assert types == ["created", "in_progress", "failed"]


def test_a_keepalive_is_an_event() -> None:
    sent = Sent([*text("a"), *end()], silent=3)
    assert sent.types[:5] == ["created", *["in_progress"] * 3, "output_item.added"]
    stream = ResponseBuilder(REQUEST, WHO, lambda response: None)
    data = stream.opening() + stream.text(0, "content", "a")
    data += stream.keepalive() + stream.text(0, "content", "b")
    types = [short(event["type"]) for event in read_events(data)]
    assert types[-2:] == ["in_progress", "output_text.delta"]


# Any answer.

words = st.text(min_size=1, max_size=12)
objects = st.dictionaries(words, words | st.integers(), max_size=3).map(json.dumps)
inputs = st.builds(lambda word: json.dumps({"input": word}), words)
arguments = objects | inputs | words


@st.composite
def answers(draw: st.DrawFn) -> list[Output]:
    """The outputs of an answer, in any order that a model may write them in."""
    outputs: list[Output] = []
    calls = 0
    broken: set[int] = set()
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            channel = draw(st.sampled_from(["content", "reasoning"]))
            outputs += text(*draw(st.lists(words, min_size=1, max_size=3)), channel=channel)
        else:
            name, written = draw(st.sampled_from(NAMES)), draw(arguments)
            outputs += call(calls, name, *pieces(draw, written))
            broken |= set() if is_object(written) else {calls}
            calls += 1
    reason: FinishReason = draw(st.sampled_from(["stop", "tool_calls", "length", "timeout"]))
    if outputs and isinstance(outputs[-1], ToolInput) and draw(st.booleans()):
        return [*outputs, *end(reason, *broken | {calls - 1}, fragment="<tool_call>...")]
    return [*outputs, *end(reason, *broken)]


NAMES = [*REQUEST.toolbox.tools, "made_up"]


def pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=3)))
    places = [0, *cuts, len(text)]
    return [text[a:b] for a, b in pairwise(places)]


REQUESTS = [
    REQUEST,
    asked(tools=TOOLS, reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"]),
]


@given(answers(), st.sampled_from(REQUESTS), st.integers(0, 2))
def test_any_answer_is_told_in_order(
    outputs: list[Output], request: ResponsesRequest, silent: int
) -> None:
    sent = Sent(outputs, request, silent=silent)
    check_response(sent.response)
    heard = sdk_output(sent.events)
    assert [item["id"] for item in heard] == [item["id"] for item in sent.output]
    assert [*map(content_of, heard)] == [*map(content_of, sent.output)]


@given(answers(), st.data())
def test_any_failure_is_told_in_order(outputs: list[Output], data: st.DataObject) -> None:
    begun = outputs[: data.draw(st.integers(0, len(outputs) - 1))]
    sent = Sent(begun, error=EngineFailed("it failed"))
    assert sent.response["status"] == "failed"


@given(answers(), st.sampled_from(REQUESTS))
def test_a_whole_response_says_what_a_stream_says(
    outputs: list[Output], request: ResponsesRequest
) -> None:
    builder = AnswerBuilder(1, scored=False)
    for output in outputs:
        builder.add(output)
    [answer] = builder.make()
    whole = as_sent(ResponseBuilder(request, WHO, lambda response: None).whole([answer], USAGE))
    check_response(whole)
    streamed = Sent(outputs, request).response
    assert essence(whole) == essence(streamed)


def essence(response: Body) -> Body:
    """All but ids, times, and how texts are spread over items."""
    calls = [
        {name: value for name, value in item.items() if name != "id"}
        for item in response["output"]
        if item["type"].endswith("call")
    ]
    texts = {
        type: "".join(content_of(item) for item in response["output"] if item["type"] == type)
        for type in ("message", "reasoning")
    }
    return {
        **{name: response[name] for name in ("status", "incomplete_details", "usage", "tools")},
        "calls": calls,
        **texts,
    }


def sdk_output(events: list[Body]) -> list[Body]:
    """The output that the SDK's own accumulator has at the end of a stream."""
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    heard: Any = None
    for event in events:
        [heard] = state.handle_event(sdk_event(event))
    return [item.to_dict() for item in heard.response.output]
