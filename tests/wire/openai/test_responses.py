"""Whole responses: folds of answers in OpenAI's shape, and the bodies of errors and tokens."""

from __future__ import annotations

from itertools import product

import pytest

from mlxsrv.errors import InvalidRequest, ServeError
from mlxsrv.generation.outputs import Answer, FinishReason, Identity, TokenScore, ToolUse, Usage
from mlxsrv.wire.openai.answers import error_response
from mlxsrv.wire.openai.builders import ChatBuilder, CompletionBuilder
from mlxsrv.wire.openai.tokens import DetokenizeResponse, TokenizeResponse, TokenPiece
from tests.support.schemas import Body, as_sent, check_chat, check_schema, check_text

WHO = Identity("chatcmpl-" + "0" * 32, 1_790_000_000, "org/name", "mlxsrv-1")
USAGE = Usage(prompt_tokens=5, completion_tokens=7)
SCORES = (
    TokenScore(b"Hel", -0.25, ((b"Hel", -0.25), (b"Hi", -1.5))),
    TokenScore(b"lo", float("-inf"), ((b"\xe2", -0.5),)),
)
TOOLS = (ToolUse("call_1", "add", '{"a": 1}'), ToolUse("call_2", "add", "{}"))
REASONS: list[FinishReason] = ["stop", "length", "tool_calls", "timeout"]


def fold_chat(*answers: Answer, usage: Usage = USAGE) -> Body:
    return as_sent(ChatBuilder(WHO, "never").whole(answers, usage))


def fold_text(*answers: Answer, usage: Usage = USAGE) -> Body:
    return as_sent(CompletionBuilder(WHO, "never").whole(answers, usage))


# Shapes.


def test_every_chat_has_openais_shape() -> None:
    answers = [
        Answer(reason, content, reasoning, tools, scores)
        for reason, content, reasoning, tools, scores in product(
            REASONS, ["", "Hello"], ["", "Hm."], [(), TOOLS], [None, (), SCORES]
        )
    ]
    for answer in answers:
        check_chat(fold_chat(answer))
    body = fold_chat(*answers)
    check_chat(body)
    assert [choice["index"] for choice in body["choices"]] == list(range(len(answers)))


def test_every_completion_has_openais_shape() -> None:
    reasons = [reason for reason in REASONS if reason != "tool_calls"]
    echo = (TokenScore(b"Once", None), *SCORES)
    answers = [
        Answer(reason, content, reasoning, (), scores)
        for reason, content, reasoning, scores in product(
            reasons, ["", "Hello"], ["", "Hm."], [None, (), SCORES, echo]
        )
    ]
    for answer in answers:
        check_text(fold_text(answer))
    body = fold_text(*answers)
    check_text(body)
    assert [choice["index"] for choice in body["choices"]] == list(range(len(answers)))


def test_a_chat_is_all_that_was_said() -> None:
    body = fold_chat(Answer("stop", "Hello", "Hm."), Answer("length", "Ad"))
    assert body == {
        "id": WHO.id,
        "object": "chat.completion",
        "created": WHO.created,
        "model": WHO.model,
        "system_fingerprint": WHO.system_fingerprint,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello",
                    "refusal": None,
                    "reasoning_content": "Hm.",
                    "reasoning": "Hm.",
                },
                "logprobs": None,
                "finish_reason": "stop",
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": "Ad", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            },
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 7,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_completion_is_all_that_was_written() -> None:
    body = fold_text(Answer("stop", " upon", "Hm."), Answer("length", "!", scores=SCORES[:1]))
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "Hm. upon", "logprobs": None, "finish_reason": "stop"},
        {
            "index": 1,
            "text": "!",
            "logprobs": {
                "tokens": ["Hel"],
                "token_logprobs": [-0.25],
                "top_logprobs": [{"Hel": -0.25, "Hi": -1.5}],
                "text_offset": [0],
            },
            "finish_reason": "length",
        },
    ]


# Tools.


def test_calls_alone_leave_no_content() -> None:
    message = fold_chat(Answer("tool_calls", tools=TOOLS))["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1}'},
        },
        {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ]


def test_calls_may_follow_content() -> None:
    message = fold_chat(Answer("tool_calls", "Let me see.", tools=TOOLS))["choices"][0]["message"]
    assert message["content"] == "Let me see."
    assert len(message["tool_calls"]) == 2


def test_an_empty_answer_is_text_all_the_same() -> None:
    message = fold_chat(Answer("stop"))["choices"][0]["message"]
    assert message["content"] == ""
    assert "tool_calls" not in message


# Scores.


@pytest.mark.parametrize("scores", [None, (), SCORES])
def test_scores_are_there_when_asked_for(scores: tuple[TokenScore, ...] | None) -> None:
    answer = Answer("stop", "Hello", scores=scores)
    chat = fold_chat(answer)["choices"][0]["logprobs"]
    text = fold_text(answer)["choices"][0]["logprobs"]
    if scores is None:
        assert chat is None
        assert text is None
    else:
        assert [token["token"] for token in chat["content"]] == ["Hel", "lo"][: len(scores)]
        assert text["tokens"] == ["Hel", "lo"][: len(scores)]


# Usage.


def test_thoughts_and_cached_tokens_are_counted() -> None:
    usage = Usage(prompt_tokens=5, completion_tokens=7, reasoning_tokens=3, cached_tokens=2)
    told = fold_chat(Answer("stop"), usage=usage)["usage"]
    assert told["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert told["prompt_tokens_details"] == {"cached_tokens": 2}


# The rest.


@pytest.mark.parametrize("param", [None, "messages[0].role"])
def test_an_error_has_one_shape(param: str | None) -> None:
    body = as_sent(error_response(InvalidRequest("no", param=param)))
    check_schema(body, "ErrorResponse")
    assert body == {
        "error": {
            "message": "no",
            "type": "invalid_request_error",
            "param": param,
            "code": "invalid_value",
        }
    }
    check_schema(as_sent(error_response(ServeError("bug"))), "ErrorResponse")


def test_tokens_and_their_pieces() -> None:
    assert as_sent(TokenizeResponse([1, 2], 2)) == {"tokens": [1, 2], "count": 2}
    pieces = [TokenPiece.make(5, "é".encode()), TokenPiece.make(6, b"\xc3")]
    assert as_sent(TokenizeResponse([*pieces], 2)) == {
        "tokens": [{"id": 5, "piece": "é"}, {"id": 6, "piece": [0xC3]}],
        "count": 2,
    }
    assert as_sent(DetokenizeResponse("é", "é")) == {"content": "é", "prompt": "é"}
