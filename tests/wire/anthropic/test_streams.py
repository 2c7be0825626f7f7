"""Streams of messages: the order of events, their types, and that they say what the whole says."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.errors import EngineFailed, Overloaded
from mlxsrv.generation.outputs import (
    AnswerBuilder,
    Ended,
    Identity,
    Output,
    PromptDone,
    TextPiece,
    ToolInput,
    ToolStarted,
    Usage,
)
from mlxsrv.wire.anthropic.answers import MessageBuilder
from tests.support.anthropic_streams import check_type, hear
from tests.support.schemas import Body, as_sent

WHO = Identity("msg_" + "0" * 32, 1_790_000_000, "org/name", "mlxsrv-1")
USAGE = Usage(prompt_tokens=9, completion_tokens=7, reasoning_tokens=1, cached_tokens=4)


# Outputs, as a service tells them.

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
OBJECT = st.dictionaries(TEXT, TEXT, max_size=2).map(lambda a: msgspec.json.encode(a).decode())
CALLS = st.tuples(st.just("call"), OBJECT, st.booleans())
PIECES = st.tuples(st.sampled_from(["content", "reasoning"]), TEXT, st.booleans())


@st.composite
def outputs(draw: st.DrawFn) -> list[Output]:
    """Pieces and calls in any order, and an end that they allow."""
    told: list[Output] = []
    calls, broken = 0, []
    for kind, text, whole in draw(st.lists(PIECES | CALLS, max_size=8)):
        if kind != "call":
            told.append(TextPiece(0, kind, text))  # type: ignore[arg-type]
            continue
        told.append(ToolStarted(0, calls, f"call_{calls}", "f"))
        told += [ToolInput(0, calls, part) for part in (text[:2], text[2:]) if part and whole]
        if not whole:
            broken.append(calls)
        calls += 1
    reason = draw(st.sampled_from(["length", "timeout", "tool_calls" if calls else "stop"]))
    stop = draw(st.none() | st.just("END"))
    fragment = draw(st.just("") | TEXT)
    return [
        PromptDone(USAGE.prompt_tokens, USAGE.cached_tokens),
        *told,
        Ended(0, reason, USAGE, stop, tuple(broken), fragment),  # type: ignore[arg-type]
    ]


def fold(told: list[Output]) -> Body:
    answers = AnswerBuilder(1, scored=False)
    for output in told:
        answers.add(output)
    [answer] = answers.make()
    assert answers.usage is not None
    return as_sent(MessageBuilder(WHO).whole([answer], answers.usage))


def joined(content: list[Body], kind: str) -> str:
    return "".join(block[kind] for block in content if block["type"] == kind)


@pytest.mark.slow
@given(told=outputs())
def test_a_stream_keeps_its_order_and_says_what_the_whole_says(told: list[Output]) -> None:
    stream, data = MessageBuilder(WHO), b""
    for output in told:
        data += stream.write(output)
        if output is not told[-1]:
            data += stream.keepalive()
    heard = hear(stream.opening() + stream.keepalive() + data)
    assert heard.state == "over"
    whole = fold(told)
    check_type(whole, "Message")
    for name in ("id", "model", "role", "type", "stop_reason", "stop_sequence", "usage"):
        assert heard.message[name] == whole[name]
    content, ended = heard.message["content"], told[-1]
    assert isinstance(ended, Ended)
    assert joined(content, "thinking") == joined(whole["content"], "thinking")
    calls = [block for block in content if block["type"] == "tool_use"]
    good = [block for i, block in enumerate(calls) if i not in ended.broken]
    assert [(block["id"], block["name"], json.loads(block["partial"])) for block in good] == [
        (block["id"], block["name"], block["input"])
        for block in whole["content"]
        if block["type"] == "tool_use"
    ]
    if not ended.broken:
        assert joined(content, "text") == joined(whole["content"], "text")
    else:
        assert whole["stop_reason"] != "tool_use"


@given(told=outputs(), at=st.integers(0, 20))
def test_a_stream_may_fail_at_any_place(told: list[Output], at: int) -> None:
    stream = MessageBuilder(WHO)
    data = b"".join(stream.write(output) for output in told[:-1][:at])
    heard = hear(data + stream.error(EngineFailed("it broke")))
    assert heard.state == "failed"
    assert heard.error is not None
    assert (heard.error["type"], heard.error["message"]) == ("api_error", "it broke")


def test_an_error_before_the_message_is_an_event_alone() -> None:
    stream = MessageBuilder(WHO)
    heard = hear(stream.opening() + stream.keepalive() + stream.error(Overloaded("full")))
    assert heard.error is not None
    assert heard.error["type"] == "overloaded_error"


def test_text_after_a_call_is_a_block_of_its_own() -> None:
    stream = MessageBuilder(WHO)
    told: list[Output] = [
        PromptDone(9, 0),
        TextPiece(0, "reasoning", "hm"),
        TextPiece(0, "content", "a"),
        ToolStarted(0, 0, "call_1", "f"),
        ToolInput(0, 0, "{}"),
        TextPiece(0, "content", "b"),
        Ended(0, "tool_calls", Usage(9, 5)),
    ]
    content = hear(b"".join(stream.write(output) for output in told)).message["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "text"]
    assert content[0]["signature"], "clients give back thoughts with a signature only"


def test_what_was_written_of_a_call_without_a_name_is_text() -> None:
    told: list[Output] = [
        PromptDone(9, 0),
        TextPiece(0, "content", "a"),
        Ended(0, "length", Usage(9, 5), None, (), '<tool_call>{"na'),
    ]
    stream = MessageBuilder(WHO)
    heard = hear(b"".join(stream.write(output) for output in told))
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": '<tool_call>{"na'}]
    assert heard.message["content"] == fold(told)["content"] == texts
    assert heard.message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (Ended(0, "stop", USAGE), "end_turn"),
        (Ended(0, "length", USAGE), "max_tokens"),
        (Ended(0, "timeout", USAGE), "max_tokens"),
        (Ended(0, "tool_calls", USAGE), "tool_use"),
        (Ended(0, "stop", USAGE, "END"), "stop_sequence"),
        (Ended(0, "tool_calls", USAGE, None, (0,)), "end_turn"),
        (Ended(0, "length", USAGE, None, (0,)), "max_tokens"),
    ],
)
def test_stop_reasons(ended: Ended, reason: str) -> None:
    told: list[Output] = [PromptDone(9, 4), ToolStarted(0, 0, "call_1", "f"), ToolInput(0, 0, "{}")]
    if ended.reason == "stop":
        del told[1:]
    stream = MessageBuilder(WHO)
    heard = hear(b"".join(stream.write(output) for output in [*told, ended]))
    whole: dict[str, Any] = fold([*told, ended])
    assert heard.message["stop_reason"] == whole["stop_reason"] == reason
    assert heard.message["stop_sequence"] == whole["stop_sequence"] == ended.stop


def test_the_parts_of_the_input_add_up() -> None:
    told: list[Output] = [PromptDone(9, 4), Ended(0, "stop", USAGE)]
    assert fold(told)["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 1},
    }
    stream = MessageBuilder(WHO)
    assert hear(stream.end(Ended(0, "length", USAGE))).message["usage"] == fold(told)["usage"]
