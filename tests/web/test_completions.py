"""Text completions: the shape of answers and the forms of prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

import mlxsrv
from tests.support.client import (
    COMPLETIONS,
    Body,
    answer,
    ask,
    chat,
    check_schema,
    completion,
    stream,
)
from tests.support.serving import hosted
from tests.support.tiny import END_TOKENS, make_tokenizer, write_model

TEXT = "The quick brown fox"


def test_answer_has_openais_shape(client: httpx.Client) -> None:
    body = ask(client, completion(), COMPLETIONS)
    check_schema(body, "CreateCompletionResponse")
    assert body["object"] == "text_completion"
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", body["id"])
    [choice] = body["choices"]
    assert choice["text"]
    assert choice["index"] == 0
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 8


def test_chunks_are_answers_whose_reason_may_be_open(client: httpx.Client) -> None:
    chunks = stream(client, completion(), COMPLETIONS).chunks
    for chunk in chunks:
        [choice] = chunk["choices"]
        known = choice | {"finish_reason": choice["finish_reason"] or "stop"}
        check_schema(chunk | {"choices": [known]}, "CreateCompletionResponse")
        assert chunk["object"] == "text_completion"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


def test_chunks_come_in_order(client: httpx.Client) -> None:
    *texts, last, usage = (
        chunk["choices"][0] for chunk in stream(client, completion(), COMPLETIONS).chunks
    )
    assert texts
    assert all(choice["text"] and choice["finish_reason"] is None for choice in texts)
    assert last["text"] == ""
    assert last["finish_reason"] == "length"
    assert usage == {"index": 0, "text": "", "logprobs": None, "finish_reason": None}


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (None, ["after"]),
        ({"include_usage": True}, ["own"]),
        ({"include_usage": False}, []),
        ({}, []),
    ],
)
def test_usage_is_where_stream_options_put_it(
    client: httpx.Client, options: Body | None, where: list[str]
) -> None:
    chunks = stream(client, completion(stream_options=options), COMPLETIONS).chunks
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    assert ["after" if chunk["choices"] else "own" for chunk in with_usage] == where
    assert with_usage in ([], [chunks[-1]])


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}])
def test_a_stream_says_what_the_whole_answer_says(client: httpx.Client, sampling: Body) -> None:
    request = completion("今日は 🚀", max_tokens=40, **sampling)
    whole, streamed = ask(client, request, COMPLETIONS), stream(client, request, COMPLETIONS)
    assert streamed.content == answer(whole)
    assert streamed.usage == whole["usage"]
    assert streamed.finish_reason == whole["choices"][0]["finish_reason"]


@pytest.mark.parametrize("unset", [{}, {"max_tokens": None}])
def test_sixteen_tokens_are_the_default(client: httpx.Client, unset: Body) -> None:
    request = {"prompt": TEXT, "temperature": 0, **unset}
    assert ask(client, request, COMPLETIONS)["usage"]["completion_tokens"] == 16


def _tokens() -> list[int]:
    return list(make_tokenizer().encode(TEXT).ids)


@pytest.mark.parametrize(
    "prompt",
    [[TEXT], _tokens(), [_tokens()]],
    ids=["list of one", "token ids", "list of token ids"],
)
def test_a_prompt_has_four_forms(client: httpx.Client, prompt: Any) -> None:
    one, other = (ask(client, completion(form), COMPLETIONS) for form in (TEXT, prompt))
    assert answer(one) == answer(other)
    assert one["usage"] == other["usage"]


def test_a_prompt_of_one_token_is_enough(client: httpx.Client) -> None:
    body = ask(client, completion([5]), COMPLETIONS)
    assert body["usage"]["prompt_tokens"] == 1
    assert body["usage"]["completion_tokens"] == 8


def test_a_stop_string_ends_the_text_before_it(client: httpx.Client) -> None:
    text = answer(ask(client, completion(max_tokens=40), COMPLETIONS))
    stop = text[len(text) // 2 :][:6]
    request = completion(max_tokens=40, stop=stop)
    streamed, whole = stream(client, request, COMPLETIONS), ask(client, request, COMPLETIONS)
    assert streamed.content == answer(whole) == text[: text.index(stop)]
    assert streamed.finish_reason == "stop"


def test_a_completion_goes_on_where_the_prompt_ends(client: httpx.Client) -> None:
    text = answer(ask(client, completion(_tokens(), max_tokens=12), COMPLETIONS))
    so_far = answer(ask(client, completion(_tokens(), max_tokens=6), COMPLETIONS))
    assert text.startswith(so_far)
    assert len(text) > len(so_far)


def test_the_marker_of_a_turns_end_ends_chats_only(tmp_path: Path) -> None:
    """Nothing but the chat template names `<|im_end|>` here; mlx-lm's text goes on behind it."""
    folder = write_model(tmp_path / "m", "qwen3")
    marker, end = (make_tokenizer().token_to_id(token) for token in END_TOKENS)
    for file, values in (
        ("config.json", {"eos_token_id": end}),
        ("generation_config.json", {"eos_token_id": end}),
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
    ):
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    settings = mlxsrv.Settings(model=(f"m={folder}",), hf_cache=False)
    only = {"logit_bias": {str(marker): 100}, "max_tokens": 3}
    with hosted(mlxsrv.create_app(settings)) as url, httpx.Client(base_url=url) as client:
        chatted = client.post("/v1/chat/completions", json=chat(**only)).json()
        written = client.post("/v1/completions", json={"prompt": "a", **only}).json()
        bound = {"prompt": "a", "guided_choice": ["b"], "logit_bias": {str(marker): 100}}
        chosen = client.post("/v1/completions", json=bound).json()
    assert chatted["choices"][0]["finish_reason"] == "stop"
    assert chatted["usage"]["completion_tokens"] == 1
    assert written["choices"][0]["finish_reason"] == "length"
    assert written["usage"]["completion_tokens"] == 3
    assert chosen["choices"][0]["text"] == "b"
    assert chosen["choices"][0]["finish_reason"] == "stop"
