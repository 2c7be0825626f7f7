"""Streams: the order and shape of chunks, and that they say what the whole response says."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from mlxsrv.errors import EngineFailed
from mlxsrv.generation.outputs import Answer, Channel, Ended, Identity, TokenScore, ToolUse, Usage
from mlxsrv.wire.dialect import Builder
from mlxsrv.wire.openai.builders import ChatBuilder, CompletionBuilder, UsageMode, usage_mode
from mlxsrv.wire.openai.generation_request import StreamOptions
from tests.support.schemas import (
    Body,
    as_sent,
    check_chat_chunk,
    check_text,
    read_chunks,
    read_frames,
)

WHO = Identity("chatcmpl-" + "0" * 32, 1_790_000_000, "org/name", "mlxsrv-1")
USAGE = Usage(prompt_tokens=5, completion_tokens=7, reasoning_tokens=1)
MODES: list[UsageMode] = ["unasked", "asked", "never"]
SCORE = TokenScore(b"a", -0.5, ((b"a", -0.5), (b"\xe2", -2.0)))

# What a client makes of chunks.


class Heard:
    """One choice, put together from its chunks."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.role: str | None = None
        self.tools: list[Body] = []
        self.logprobs: dict[str, list[Any]] | None = None
        self.reason: str | None = None

    def add(self, choice: Body) -> None:
        assert self.reason is None, "nothing follows a choice's end"
        self.reason = choice["finish_reason"]
        delta = choice.get("delta", choice)
        self.text += delta.get("content") or delta.get("text") or ""
        self.reasoning += delta.get("reasoning_content", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        if "role" in delta:
            assert self.role is None, "the role is told once"
            self.role = delta["role"]
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(self.tools), "calls come in order, heads first"
                self.tools.append({"id": call["id"], "type": call["type"]} | {"function": {}})
            function = self.tools[call["index"]]["function"]
            for name, value in call["function"].items():
                function[name] = function.get(name, "") + value
        for name, values in (choice["logprobs"] or {}).items():
            if values is not None:
                self.logprobs = self.logprobs or {}
                self.logprobs.setdefault(name, []).extend(values)


def hear(chunks: list[Body], choices: int) -> list[Heard]:
    heard = [Heard() for _ in range(choices)]
    for chunk in chunks:
        for choice in [] if chunk.get("usage") else chunk["choices"]:
            heard[choice["index"]].add(choice)
    return heard


# Answers, and how a service tells them.

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ARGUMENTS = st.dictionaries(TEXT, TEXT, max_size=2).map(lambda a: msgspec.json.encode(a).decode())
PIECES = st.lists(st.tuples(st.sampled_from(["content", "reasoning"]), TEXT), max_size=6)
CALLS = st.lists(st.builds(ToolUse, st.just("call_1"), st.just("f"), ARGUMENTS), max_size=2)

Told = tuple[list[tuple[Channel, str]], list[ToolUse]]
TOLD = st.tuples(PIECES, CALLS)


def tell(stream: Builder, told: list[Told], *, scored: bool, order: list[int]) -> bytes:
    """The stream of some answers, whose choices take turns as `order` says."""
    scripts = [list(_script(stream, i, *answer, scored=scored)) for i, answer in enumerate(told)]
    data = stream.opening()
    for turn in order:
        if scripts[turn % len(scripts)]:
            data += scripts[turn % len(scripts)].pop(0)()
    for script in scripts:
        data += b"".join(step() for step in script)
    for i in range(len(told)):
        data += stream.end(Ended(i, "stop", USAGE if i == len(told) - 1 else None))
    return data


def _script(
    stream: Builder,
    choice: int,
    pieces: list[tuple[Channel, str]],
    calls: list[ToolUse],
    *,
    scored: bool,
) -> Any:
    for channel, text in pieces:
        scores = _scores(text) if scored and channel == "content" else ()
        yield lambda c=channel, t=text, s=scores: stream.text(choice, c, t, s)
    for index, call in enumerate(calls):
        yield lambda i=index, u=call: stream.tool(choice, i, u.id, u.name)
        for part in (call.arguments[:3], call.arguments[3:]):
            yield lambda i=index, p=part: stream.arguments(choice, i, p)


def _scores(text: str) -> tuple[TokenScore, ...]:
    """One token a byte, so that characters are cut."""
    return tuple(TokenScore(bytes([byte]), -0.5, ((b"a", -0.25),)) for byte in text.encode())


def whole(told: Told, *, scored: bool) -> Answer:
    pieces, calls = told
    content = "".join(text for channel, text in pieces if channel == "content")
    reasoning = "".join(text for channel, text in pieces if channel == "reasoning")
    scores = _scores(content) if scored else None
    return Answer("stop", content, reasoning, tuple(calls), scores)


@given(
    told=st.lists(TOLD, min_size=1, max_size=3),
    order=st.lists(st.integers(0, 2), max_size=30),
    scored=st.booleans(),
    mode=st.sampled_from(MODES),
)
def test_a_streamed_chat_says_what_the_whole_one_says(
    told: list[Told], order: list[int], scored: bool, mode: UsageMode
) -> None:
    stream = ChatBuilder(WHO, mode, choices=len(told), scored=scored)
    chunks = read_chunks(tell(stream, told, scored=scored, order=order))
    for chunk in chunks:
        check_chat_chunk(chunk)
    body = as_sent(ChatBuilder(WHO, mode).whole([whole(one, scored=scored) for one in told], USAGE))
    for heard, choice in zip(hear(chunks, len(told)), body["choices"], strict=True):
        message = choice["message"]
        assert heard.role == "assistant"
        assert heard.text == (message["content"] or "")
        assert heard.reasoning == message.get("reasoning_content", "")
        assert heard.tools == message.get("tool_calls", [])
        assert heard.reason == choice["finish_reason"]
        if heard.logprobs is not None:
            assert heard.logprobs["content"] == choice["logprobs"]["content"]
        else:
            assert not scored or not any(text for _, text in told[choice["index"]][0])


@given(
    told=st.lists(PIECES, min_size=1, max_size=3),
    order=st.lists(st.integers(0, 2), max_size=30),
    scored=st.booleans(),
    mode=st.sampled_from(MODES),
)
def test_a_streamed_completion_says_what_the_whole_one_says(
    told: list[list[tuple[Channel, str]]], order: list[int], scored: bool, mode: UsageMode
) -> None:
    texts: list[Told] = [([("content", text) for _, text in pieces], []) for pieces in told]
    stream = CompletionBuilder(WHO, mode, choices=len(told), scored=scored)
    chunks = read_chunks(tell(stream, texts, scored=scored, order=order))
    for chunk in chunks:
        check_text(chunk)
    body = as_sent(
        CompletionBuilder(WHO, mode).whole([whole(one, scored=scored) for one in texts], USAGE)
    )
    for heard, choice in zip(hear(chunks, len(told)), body["choices"], strict=True):
        assert heard.text == choice["text"]
        assert heard.reason == choice["finish_reason"]
        assert heard.logprobs == choice["logprobs"] or not texts[choice["index"]][0]


@given(
    told=st.lists(TOLD, min_size=1, max_size=2),
    scored=st.booleans(),
    mode=st.sampled_from(["asked", "unasked"]),
)
def test_openais_own_client_puts_it_together(
    told: list[Told], scored: bool, mode: UsageMode
) -> None:
    stream = ChatBuilder(WHO, mode, choices=len(told), scored=scored)
    state = ChatCompletionStreamState()
    for chunk in read_chunks(tell(stream, told, scored=scored, order=[])):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    final = state.get_final_completion()
    body = as_sent(ChatBuilder(WHO, mode).whole([whole(one, scored=scored) for one in told], USAGE))
    assert final.usage is not None
    assert final.usage.total_tokens == body["usage"]["total_tokens"]
    for choice, expected in zip(final.choices, body["choices"], strict=True):
        assert (choice.message.content or "") == (expected["message"]["content"] or "")
        calls = [
            (call.id, call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or []
            if call.type == "function"
        ]
        assert calls == [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in expected["message"].get("tool_calls", [])
        ]


# The chunks themselves.


def chunk_of(data: bytes) -> Body:
    [chunk] = read_frames(data)
    assert isinstance(chunk, dict)
    return chunk


def test_each_choice_of_a_chat_is_opened_once() -> None:
    chunks = read_frames(ChatBuilder(WHO, "never", choices=3).opening())
    assert [chunk["choices"] for chunk in chunks if isinstance(chunk, dict)] == [
        [
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ]
        for index in range(3)
    ]
    assert CompletionBuilder(WHO, "never", choices=3).opening() == b""


def test_all_chunks_share_their_identity() -> None:
    for stream in (ChatBuilder(WHO, "asked"), CompletionBuilder(WHO, "asked")):
        data = (
            stream.opening() + stream.text(0, "content", "a") + stream.end(Ended(0, "stop", USAGE))
        )
        for chunk in read_chunks(data):
            shared = ("id", "created", "model", "system_fingerprint")
            assert Identity(*(chunk[name] for name in shared)) == WHO


def test_text_is_the_only_thing_in_its_delta() -> None:
    stream = ChatBuilder(WHO, "unasked", choices=2)
    deltas: dict[Channel, Body] = {
        "content": {"content": "é\u2028"},
        "reasoning": {"reasoning_content": "é\u2028", "reasoning": "é\u2028"},
    }
    for channel, delta in deltas.items():
        for index in (0, 1):
            chunk = chunk_of(stream.text(index, channel, "é\u2028"))
            assert chunk["choices"] == [
                {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            ]
            assert "usage" not in chunk


def test_a_call_comes_head_first() -> None:
    stream = ChatBuilder(WHO, "unasked", choices=2)
    data = stream.tool(1, 0, "call_1", "f") + stream.arguments(1, 0, '{"a":')
    data += stream.tool(1, 1, "call_2", "g") + stream.arguments(1, 1, "{}")
    data += stream.arguments(1, 0, "5}") + stream.arguments(0, 0, "")
    deltas = [
        (choice["index"], choice["delta"])
        for chunk in read_frames(data)
        if isinstance(chunk, dict)
        for choice in chunk["choices"]
    ]
    head = {"type": "function", "function": {"name": "f", "arguments": ""}}
    other = {"type": "function", "function": {"name": "g", "arguments": ""}}
    assert deltas == [
        (1, {"tool_calls": [{"index": 0, "id": "call_1", **head}]}),
        (1, {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}),
        (1, {"tool_calls": [{"index": 1, "id": "call_2", **other}]}),
        (1, {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}),
        (1, {"tool_calls": [{"index": 0, "function": {"arguments": "5}"}}]}),
        (0, {"tool_calls": [{"index": 0, "function": {"arguments": ""}}]}),
    ]


@pytest.mark.parametrize("kind", [ChatBuilder, CompletionBuilder])
def test_a_scored_stream_scores_each_text_chunk_and_no_other(
    kind: type[ChatBuilder] | type[CompletionBuilder],
) -> None:
    stream = kind(WHO, "unasked", scored=True)
    texts = stream.text(0, "content", "a", [SCORE]) + stream.text(0, "content", "b")
    chunks = read_chunks(stream.opening() + texts + stream.end(Ended(0, "stop", USAGE)))
    scored = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    *opening, full, empty, end, usage = scored
    assert [*opening, end, usage] == [None] * (len(opening) + 2)
    assert all(len(values or ()) in (0, 1) for values in full.values())
    assert full.keys() == empty.keys()
    assert not any(empty.values())


def test_offsets_run_on_through_each_choice_for_itself() -> None:
    stream = CompletionBuilder(WHO, "never", choices=2, scored=True)
    offsets = []
    for choice, text in ((0, "ab"), (1, "é"), (0, "c"), (1, "d")):
        scores = [TokenScore(character.encode(), -0.5) for character in text]
        chunk = chunk_of(stream.text(choice, "content", text, scores))
        offsets.append(chunk["choices"][0]["logprobs"]["text_offset"])
    assert offsets == [[0, 1], [0], [2], [1]]


# The end.


def test_where_usage_is_told() -> None:
    assert usage_mode(None) == "unasked"
    assert usage_mode(StreamOptions()) == "never"
    assert usage_mode(StreamOptions(include_usage=False)) == "never"
    assert usage_mode(StreamOptions(include_usage=True)) == "asked"


STREAMS = list(product([ChatBuilder, CompletionBuilder], [1, 3]))


@pytest.mark.parametrize(("kind", "choices"), STREAMS)
@pytest.mark.parametrize("mode", MODES)
def test_usage_is_told_once_or_not_at_all(
    kind: type[ChatBuilder] | type[CompletionBuilder], choices: int, mode: UsageMode
) -> None:
    stream = kind(WHO, mode, choices=choices)
    data = stream.opening() + stream.text(0, "content", "a")
    for choice in reversed(range(choices)):
        assert b"[DONE]" not in data
        data += stream.end(Ended(choice, "length", USAGE if choice == 0 else None))
    chunks = read_chunks(data)
    usages = [chunk.get("usage", "absent") for chunk in chunks]
    told = {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    others: Literal["absent"] | None = None if mode == "asked" else "absent"
    assert usages == [others] * (len(usages) - 1) + [others if mode == "never" else told]
    if mode == "asked":
        assert chunks.pop()["choices"] == []
    elif mode == "unasked":
        field, empty = ("delta", {}) if kind is ChatBuilder else ("text", "")
        last = chunks.pop()
        assert last["choices"] == [
            {"index": 0, field: empty, "logprobs": None, "finish_reason": None}
        ]
        (check_chat_chunk if kind is ChatBuilder else check_text)(last)
    ends = [chunk["choices"][0] for chunk in chunks[-choices:]]
    assert [end["index"] for end in ends] == list(reversed(range(choices)))
    assert {end["finish_reason"] for end in ends} == {"length"}
    assert all(end.get("delta", {}) == {} and end.get("text", "") == "" for end in ends)


@pytest.mark.parametrize(("kind", "choices"), STREAMS)
@pytest.mark.parametrize("mode", MODES)
def test_an_error_ends_what_is_open(
    kind: type[ChatBuilder] | type[CompletionBuilder], choices: int, mode: UsageMode
) -> None:
    stream = kind(WHO, mode, choices=choices)
    data = stream.end(Ended(0, "stop")) if choices > 1 else b""
    *_, last = read_chunks(data + stream.error(EngineFailed("the engine has failed")))
    assert last["error"] == {
        "message": "the engine has failed",
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }
    assert [choice["index"] for choice in last["choices"]] == ([0] if choices == 1 else [1, 2])
    assert {choice["finish_reason"] for choice in last["choices"]} == {"error"}
    (check_chat_chunk if kind is ChatBuilder else check_text)(last)


def test_a_choice_ends_once() -> None:
    stream = ChatBuilder(WHO, "never", choices=2)
    stream.end(Ended(0, "stop"))
    with pytest.raises(KeyError):
        stream.end(Ended(0, "stop"))


def test_a_completion_calls_no_tools() -> None:
    stream = CompletionBuilder(WHO, "never")
    with pytest.raises(NotImplementedError):
        stream.tool(0, 0, "call_1", "f")
    with pytest.raises(NotImplementedError):
        stream.arguments(0, 0, "{}")
