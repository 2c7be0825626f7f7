"""Chat completions: the shape of answers, whole and streamed, and what requests may say."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import httpx
import pytest

from tests.support.client import (
    CHAT,
    Body,
    answer,
    ask,
    chat,
    check_schema,
    refused,
    stream,
    stream_async,
)
from tests.support.effort import often
from tests.support.fixtures import CONTEXT
from tests.support.serving import PATIENCE, Server

# The whole answer.


def test_answer_has_openais_shape(client: httpx.Client) -> None:
    body = ask(client, chat())
    check_schema(body, "CreateChatCompletionResponse")
    assert body["object"] == "chat.completion"
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", body["id"])
    assert abs(body["created"] - time.time()) < 60
    assert body["model"] == "t"
    [choice] = body["choices"]
    assert choice["index"] == 0
    assert choice["logprobs"] is None
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["refusal"] is None
    assert choice["message"]["content"]


def test_system_fingerprint_names_the_versions(client: httpx.Client) -> None:
    assert re.fullmatch(
        r"mlxsrv-\d[\w.]*-mlx-\d[\w.]*-mlx-lm-\d[\w.]*", ask(client, chat())["system_fingerprint"]
    )


def test_answers_have_ids_of_their_own(client: httpx.Client) -> None:
    assert ask(client, chat())["id"] != ask(client, chat())["id"]


@pytest.mark.parametrize("limit", [1, 2, 17])
def test_max_tokens_is_exact(client: httpx.Client, limit: int) -> None:
    body = ask(client, chat(max_tokens=limit))
    assert body["usage"]["completion_tokens"] == limit
    assert body["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_is_the_newer_name(client: httpx.Client) -> None:
    request = chat(max_completion_tokens=5)
    del request["max_tokens"]
    assert ask(client, request)["usage"]["completion_tokens"] == 5
    both = chat(max_completion_tokens=5, max_tokens=5)
    assert ask(client, both)["usage"]["completion_tokens"] == 5
    both = chat(max_completion_tokens=5, max_tokens=9)
    refused(client.post(CHAT, json=both), 400, "invalid_value", param="max_completion_tokens")


def test_a_follow_up_turn_is_read_from_the_cache(client: httpx.Client) -> None:
    first = chat("Tell me of the sea. " * 20, max_tokens=20)
    answered = ask(client, first)
    turns = [
        *first["messages"],
        {"role": "assistant", "content": answer(answered)},
        {"role": "user", "content": "And then?"},
    ]
    usage = ask(client, {**first, "messages": turns})["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert answered["usage"]["prompt_tokens"] <= cached + 1
    assert cached < usage["prompt_tokens"]
    again = ask(client, first)
    assert answer(again) == answer(answered)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_usage_adds_up(client: httpx.Client) -> None:
    usage = ask(client, chat())["usage"]
    assert usage["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


def test_without_max_tokens_an_answer_may_fill_the_context(client: httpx.Client) -> None:
    request = chat("sea " * 1200)
    prompt_tokens = ask(client, request)["usage"]["prompt_tokens"]
    text = "sea " * (1200 * (CONTEXT - 150) // prompt_tokens)
    body = ask(client, chat(text, max_tokens=None))
    assert body["usage"]["total_tokens"] == CONTEXT
    assert body["choices"][0]["finish_reason"] == "length"


def test_an_end_token_ends_the_answer_and_is_not_shown(client: httpx.Client) -> None:
    def once(seed: int) -> Body:
        return ask(client, chat(model="thinking", temperature=2, seed=seed, max_tokens=600))

    ended = [body for body in map(once, range(4)) if body["choices"][0]["finish_reason"] == "stop"]
    assert ended
    for body in ended:
        assert body["usage"]["completion_tokens"] <= 600
        assert "<|im_end|>" not in answer(body)
        assert "<|endoftext|>" not in answer(body)


# Streams.


def test_chunks_have_openais_shape(client: httpx.Client) -> None:
    streamed = stream(client, chat(stream_options={"include_usage": True}))
    assert streamed.status == 200
    for chunk in streamed.chunks:
        check_schema(chunk, "CreateChatCompletionStreamResponse")
        assert chunk["object"] == "chat.completion.chunk"


def test_stream_headers_keep_proxies_from_buffering(client: httpx.Client) -> None:
    headers = stream(client, chat()).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"]


def test_chunks_come_in_order(client: httpx.Client) -> None:
    chunks = stream(client, chat()).chunks
    first, *middle, last, usage = (chunk["choices"][0] for chunk in chunks)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert middle
    for choice in middle:
        assert set(choice["delta"]) == {"content"}
        assert choice["delta"]["content"]
        assert choice["finish_reason"] is None
    assert last["delta"] == {}
    assert last["finish_reason"] == "length"
    assert first["finish_reason"] is None
    assert usage == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}


def test_chunks_share_their_identity(client: httpx.Client) -> None:
    chunks = stream(client, chat(stream_options={"include_usage": True})).chunks
    shared = ("id", "created", "model", "system_fingerprint")
    assert len({tuple(chunk[key] for key in shared) for chunk in chunks}) == 1
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", chunks[0]["id"])


def test_usage_not_asked_for_comes_after_the_finish_chunk(client: httpx.Client) -> None:
    *others, last = stream(client, chat()).chunks
    assert others[-1]["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["finish_reason"] is None
    assert last["usage"]["completion_tokens"] == 8
    assert not any("usage" in chunk for chunk in others)


def test_usage_asked_for_is_a_chunk_of_its_own(client: httpx.Client) -> None:
    *others, last = stream(client, chat(stream_options={"include_usage": True})).chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in others)


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}])
def test_usage_declined_is_nowhere(client: httpx.Client, options: Body) -> None:
    chunks = stream(client, chat(stream_options=options)).chunks
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert not any("usage" in chunk for chunk in chunks)


def test_null_stream_options_are_none(client: httpx.Client) -> None:
    assert stream(client, chat(stream_options=None)).usage["completion_tokens"] == 8


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}])
def test_a_stream_says_what_the_whole_answer_says(client: httpx.Client, sampling: Body) -> None:
    request = chat("😀 你好", max_tokens=40, **sampling)
    whole, streamed = ask(client, request), stream(client, request)
    assert streamed.content == answer(whole)
    counted = ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details")
    assert [streamed.usage[key] for key in counted] == [whole["usage"][key] for key in counted]
    assert streamed.finish_reason == whole["choices"][0]["finish_reason"]


def test_request_id_of_the_client_is_on_the_stream(client: httpx.Client) -> None:
    assert stream(client, chat(), **{"X-Request-ID": "mine-1"}).headers["x-request-id"] == "mine-1"


# Stop strings.


@pytest.fixture(scope="module")
def long_answer(client: httpx.Client) -> str:
    return answer(ask(client, chat(max_tokens=40)))


def _middle(text: str, length: int) -> str:
    return text[len(text) // 2 :][:length]


@pytest.mark.parametrize("length", often([1, 2, 7, 20], [1, 20]))
@pytest.mark.parametrize("form", [str, lambda stop: [stop], lambda stop: ["never said", stop]])
def test_a_stop_string_ends_the_text_before_it(
    client: httpx.Client, long_answer: str, length: int, form: Any
) -> None:
    stop = _middle(long_answer, length)
    request = chat(max_tokens=40, stop=form(stop))
    whole, streamed = ask(client, request), stream(client, request)
    assert answer(whole) == streamed.content == long_answer[: long_answer.index(stop)]
    assert whole["choices"][0]["finish_reason"] == streamed.finish_reason == "stop"
    assert whole["usage"] == streamed.usage
    assert whole["usage"]["completion_tokens"] < 40


def test_the_earliest_of_several_stop_strings_counts(
    client: httpx.Client, long_answer: str
) -> None:
    late, early = long_answer[-5:], _middle(long_answer, 5)
    body = ask(client, chat(max_tokens=40, stop=[late, early]))
    assert answer(body) == long_answer[: long_answer.index(early)]


def test_text_that_only_began_like_a_stop_string_is_sent(
    client: httpx.Client, long_answer: str
) -> None:
    stop = _middle(long_answer, 6) + "\0never"
    streamed = stream(client, chat(max_tokens=40, stop=[stop, long_answer[-3:] + "\0"]))
    assert streamed.content == long_answer
    assert streamed.finish_reason == "length"


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop_string_is_no_stop(client: httpx.Client, long_answer: str, stop: Any) -> None:
    assert answer(ask(client, chat(max_tokens=40, stop=stop))) == long_answer


# Sampling.


def sampled(**fields: Any) -> Body:
    return chat(**{"temperature": 1, "max_tokens": 24, **fields})


def test_a_seed_names_a_text(client: httpx.Client) -> None:
    one, again, other = (answer(ask(client, sampled(seed=seed))) for seed in (1, 1, 2))
    assert one == again
    assert one != other


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_64_bit_seed_will_do(client: httpx.Client, seed: int) -> None:
    one, again = (answer(ask(client, sampled(seed=seed))) for _ in range(2))
    assert one == again


def test_a_seed_names_its_text_in_any_company(client: httpx.Client, server: Server) -> None:
    alone = answer(ask(client, sampled(seed=11)))

    async def in_company() -> str:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as together:
            others = [
                stream_async(together, sampled(max_tokens=60, seed=seed)) for seed in range(8)
            ]
            answers = await asyncio.gather(*others, stream_async(together, sampled(seed=11)))
            return answers[-1].content

    assert asyncio.run(in_company()) == alone


def test_without_a_seed_texts_differ(client: httpx.Client) -> None:
    assert len({answer(ask(client, sampled())) for _ in range(4)}) > 1


@pytest.mark.parametrize("narrowed", [{"top_k": 1}, {"top_p": 0}, {"min_p": 1}])
def test_filters_that_leave_one_token_are_greedy(client: httpx.Client, narrowed: Body) -> None:
    greedy = answer(ask(client, chat(max_tokens=24)))
    assert answer(ask(client, sampled(**narrowed))) == greedy


# Models.


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": "default"}, {"model": "t"}])
def test_the_default_model_answers(client: httpx.Client, named: Body) -> None:
    assert ask(client, chat(**named))["model"] == "t"


def test_a_model_name_may_hold_a_slash(client: httpx.Client) -> None:
    body = ask(client, chat(model="org/name"))
    assert body["model"] == "org/name"
    assert answer(body) == answer(ask(client, chat()))


# What a request may look like.


@pytest.mark.parametrize(
    "content_type", [None, "application/x-www-form-urlencoded", "text/plain", "application/json"]
)
def test_the_body_is_json_whatever_its_type_says(
    client: httpx.Client, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = client.post(CHAT, content=json.dumps(chat()).encode(), headers=headers)
    assert response.status_code == 200, response.text
    assert answer(response.json()) == answer(ask(client, chat()))


def _says(client: httpx.Client, *messages: Body) -> tuple[str, int]:
    """The answer to `messages`, and how many tokens these are."""
    body = ask(client, chat(messages=list(messages), max_tokens=16))
    return answer(body), body["usage"]["prompt_tokens"]


def test_a_developer_speaks_as_the_system(client: httpx.Client) -> None:
    user = {"role": "user", "content": "Hello"}
    system, developer = (
        _says(client, {"role": role, "content": "Be brief."}, user)
        for role in ("system", "developer")
    )
    assert system == developer


def test_content_may_come_in_parts(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "world"}]
    assert _says(client, {"role": "user", "content": parts}) == _says(
        client, {"role": "user", "content": "Hello, world"}
    )


@pytest.mark.parametrize("empty", [{"content": None}, {"content": ""}, {"content": []}, {}])
def test_content_may_be_empty(client: httpx.Client, empty: Body) -> None:
    said = _says(client, {"role": "assistant", **empty}, {"role": "user", "content": "Hello"})
    assert said == _says(
        client, {"role": "assistant", "content": ""}, {"role": "user", "content": "Hello"}
    )


def test_a_history_with_tool_calls_is_read(client: httpx.Client) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
    }
    question = {"role": "user", "content": "And?"}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"}
    with_call = _says(client, question, asked, told)
    without = _says(client, question, asked | {"tool_calls": None}, told)
    assert with_call[1] > without[1]


def test_continue_final_message_goes_on_in_it(client: httpx.Client) -> None:
    history = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "Once upon"}]
    turn, going_on = (
        ask(client, chat(messages=history, continue_final_message=flag)) for flag in (False, True)
    )
    assert going_on["usage"]["prompt_tokens"] < turn["usage"]["prompt_tokens"]
    assert answer(going_on) != answer(turn)


def test_null_is_the_default_of_every_field(client: httpx.Client) -> None:
    fields = (
        "model top_p top_k min_p seed stop max_completion_tokens stream stream_options user "
        "chat_template_kwargs reasoning_effort continue_final_message n logprobs top_logprobs "
        "frequency_penalty presence_penalty logit_bias response_format tools tool_choice "
        "parallel_tool_calls store service_tier metadata"
    )
    response = client.post(CHAT, json=chat(**dict.fromkeys(fields.split())))
    assert response.status_code == 200, response.text
    assert answer(response.json()) == answer(ask(client, chat()))
    assert "x-ignored-params" not in response.headers


# Thinking.


def thinking(**fields: Any) -> Body:
    return chat(model="thinking", chat_template_kwargs={"enable_thinking": True}, **fields)


def test_thoughts_are_reasoning_under_both_names(client: httpx.Client) -> None:
    body = ask(client, thinking())
    message = body["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["reasoning"] == message["reasoning_content"]
    assert message["content"] == ""
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8
    check_schema(body, "CreateChatCompletionResponse")


def test_thoughts_are_streamed_as_reasoning(client: httpx.Client) -> None:
    streamed, whole = stream(client, thinking()), ask(client, thinking())
    assert streamed.reasoning == whole["choices"][0]["message"]["reasoning_content"]
    assert streamed.content == ""
    assert streamed.usage == whole["usage"]
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed.chunks[1:-2]]
    assert deltas
    assert all(delta["reasoning"] == delta["reasoning_content"] for delta in deltas)


def test_a_model_that_was_not_asked_to_think_answers(client: httpx.Client) -> None:
    message = ask(client, chat(model="thinking"))["choices"][0]["message"]
    assert message["content"]
    assert "reasoning_content" not in message


def test_stop_strings_are_for_the_answer_and_not_for_thoughts(client: httpx.Client) -> None:
    thoughts = ask(client, thinking())["choices"][0]["message"]["reasoning_content"]
    stopped = ask(client, thinking(stop=thoughts[:2]))["choices"][0]
    assert stopped["message"]["reasoning_content"] == thoughts
    assert stopped["finish_reason"] == "length"
