"""Answers of Ollama's API: lines in the order that clients rely on, and the same answer whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.errors import EngineFailed, ModelNotFound, UnsupportedParameter
from mlxsrv.generation.outputs import (
    AnswerBuilder,
    Ended,
    FinishReason,
    Identity,
    Output,
    TextPiece,
    Timings,
    TokenScore,
    ToolInput,
    ToolStarted,
    Usage,
)
from mlxsrv.wire.dialect import Builder
from mlxsrv.wire.ollama.answers import CHATS, TEXTS, ollama_error
from mlxsrv.wire.ollama.requests import OllamaChatRequest, OllamaGenerateRequest
from tests.support.ollama import Line, check_type, read_lines
from tests.support.schemas import as_sent

REASONS: list[FinishReason] = ["stop", "length", "tool_calls", "timeout"]
WHO = Identity("ollama-" + "0" * 32, 1_790_000_000, "org/name", "mlxsrv-1")
USAGE = Usage(50, 7, cached_tokens=48, timings=Timings(0.2, 0.5, load=0.1, total=0.9))
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCORES = st.lists(
    st.builds(
        TokenScore,
        st.binary(min_size=1, max_size=4),
        st.floats(-20, 0),
        st.lists(st.tuples(st.binary(min_size=1, max_size=4), st.floats(-20, 0)), max_size=2).map(
            tuple
        ),
    ),
    max_size=2,
).map(tuple)


@st.composite
def answers(draw: st.DrawFn, *, tools: bool) -> list[Output]:
    """The outputs of one choice, in an order that the service may give them."""
    outputs: list[Output] = [
        TextPiece(0, "reasoning", text) for text in draw(st.lists(TEXT, max_size=3))
    ]
    pieces = st.builds(TextPiece, st.just(0), st.just("content"), TEXT, SCORES)
    calls = draw(st.integers(0, 3)) if tools else 0
    outputs += draw(st.lists(pieces, max_size=3))
    for index in range(calls):
        outputs.append(ToolStarted(0, index, f"call_{index}", draw(TEXT)))
        arguments = draw(st.sampled_from(['{"a":\n [1, "\u2028"]}', "{}", "", '{"b"', "[]", "\\"]))
        cut = draw(st.integers(0, len(arguments)))
        outputs += [ToolInput(0, index, part) for part in (arguments[:cut], arguments[cut:])]
        outputs += draw(st.lists(pieces, max_size=1))
    broken = draw(st.sets(st.integers(0, calls - 1))) if calls else set()
    reason = draw(st.sampled_from(REASONS))
    outputs.append(
        Ended(0, reason, USAGE, broken=tuple(sorted(broken)), fragment=draw(TEXT) if broken else "")
    )
    return outputs


def chat_builder() -> Builder:
    return CHATS.builder(OllamaChatRequest(model="m:latest"), WHO)


def text_builder() -> Builder:
    return TEXTS.builder(OllamaGenerateRequest(model="m:latest"), WHO)


def send(stream: Builder, outputs: Iterable[Output]) -> list[Line]:
    """The lines of a stream."""
    return read_lines(stream.opening() + b"".join(map(stream.write, outputs)))


def check_order(lines: list[Line], name: str) -> None:
    """Fails unless all lines are of the type, and the last one alone is the end."""
    for line in lines:
        check_type(line, name)
        assert line["model"] == "m:latest"
        assert line["done"] == (line is lines[-1])
        assert ("done_reason" in line) == line["done"]
        assert ("eval_count" in line) == line["done"]
    last = lines[-1]
    assert last["done_reason"] in ("stop", "length")
    durations = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    assert [last[field] for field in durations] == [
        900_000_000,
        100_000_000,
        200_000_000,
        500_000_000,
    ]
    assert (last["prompt_eval_count"], last["eval_count"]) == (50, 7)


def build(outputs: Iterable[Output], *, scored: bool) -> AnswerBuilder:
    builder = AnswerBuilder(1, scored=scored)
    for output in outputs:
        builder.add(output)
    return builder


@given(answers(tools=True))
def test_a_chats_lines_are_in_order_and_say_what_it_says_whole(outputs: list[Output]) -> None:
    lines = send(chat_builder(), outputs)
    check_order(lines, "ChatResponse")
    messages = [line["message"] for line in lines]
    [answer] = build(outputs, scored=True).make()
    whole = as_sent(chat_builder().whole([answer], USAGE))
    check_type(whole, "ChatResponse")
    assert whole["message"]["content"] == "".join(each["content"] for each in messages)
    thoughts = "".join(each.get("thinking", "") for each in messages)
    assert whole["message"].get("thinking", "") == thoughts
    calls = [call for each in messages for call in each.get("tool_calls", [])]
    assert whole["message"].get("tool_calls", []) == calls
    scores = [score for line in lines for score in line.get("logprobs", [])]
    assert whole["logprobs"] == scores
    assert whole["done_reason"] == lines[-1]["done_reason"]


@given(answers(tools=True))
def test_a_call_is_sent_whole_or_not_at_all(outputs: list[Output]) -> None:
    lines = send(chat_builder(), outputs)
    sent = [call for line in lines for call in line["message"].get("tool_calls", [])]
    [answer] = build(outputs, scored=False).make()
    whole = {
        index: use
        for index, use in enumerate(answer.tools)
        if use.complete and (not use.arguments or use.arguments[-1] == "}")
    }
    assert [call["function"]["index"] for call in sent] == [*whole]
    for call, use in zip(sent, whole.values(), strict=True):
        assert (call["id"], call["function"]["name"]) == (use.id, use.name)
        assert call["function"]["arguments"] == msgspec.json.decode(use.arguments or "{}")


@given(answers(tools=False))
def test_a_texts_lines_are_in_order_and_say_what_it_says_whole(outputs: list[Output]) -> None:
    lines = send(text_builder(), outputs)
    check_order(lines, "GenerateResponse")
    [answer] = build(outputs, scored=True).make()
    whole = as_sent(text_builder().whole([answer], USAGE))
    check_type(whole, "GenerateResponse")
    for field in ("response", "thinking"):
        assert whole.get(field, "") == "".join(line.get(field, "") for line in lines)


@pytest.mark.parametrize("kind", [chat_builder, text_builder])
def test_a_keep_alive_is_a_line_without_text(kind: Callable[[], Builder]) -> None:
    [line] = read_lines(kind().keepalive())
    check_type(line, "ChatResponse" if kind is chat_builder else "GenerateResponse")
    assert not line["done"]
    assert (line["message"]["content"] if "message" in line else line["response"]) == ""


def test_an_error_is_a_line_of_its_own() -> None:
    stream = chat_builder()
    data = stream.text(0, "content", "a") + stream.error(EngineFailed("no"))
    assert read_lines(data)[1] == {"error": "no"}


def test_what_clients_look_for_is_told_in_ollamas_words() -> None:
    error = ollama_error(UnsupportedParameter("tools: the template has none", param="tools"))
    assert "does not support tools" in error.error
    assert "model not found" in ollama_error(ModelNotFound("no model 'x'", param="model")).error
