"""Details of an answer that a request may ask for: token ids, log-probabilities of the prompt,
usage as it grows, and timings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from tests.support.client import (
    CHAT,
    COMPLETIONS,
    Body,
    Streamed,
    ask,
    chat,
    check_schema,
    completion,
    refused,
    stream,
)
from tests.support.fixtures import Folders
from tests.support.tiny import make_tokenizer

TEXT = "The quick brown fox"
DETOKENIZE = "/detokenize"
RATES = {"per_token_ms", "per_second"}


def ids(text: str) -> list[int]:
    return list(make_tokenizer().encode(text).ids)


def text_of(client: httpx.Client, tokens: list[int]) -> str:
    return str(ask(client, {"tokens": tokens}, DETOKENIZE)["content"])


def drawn(streamed: Streamed, choice: int = 0) -> list[int]:
    """The token ids of a choice's chunks, joined."""
    return [
        id
        for chunk in streamed.chunks
        for each in chunk["choices"]
        if each["index"] == choice
        for id in each.get("token_ids", [])
    ]


# Token ids.


@pytest.mark.parametrize("streamed", [False, True])
def test_token_ids_are_those_of_prompt_and_answer(client: httpx.Client, streamed: bool) -> None:
    body = chat(return_token_ids=True, max_tokens=8)
    whole = ask(client, body)
    check_schema(whole, "CreateChatCompletionResponse")
    [choice] = whole["choices"]
    prompt, tokens = whole["prompt_token_ids"], choice["token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    assert len(tokens) == whole["usage"]["completion_tokens"]
    assert text_of(client, tokens) == choice["message"]["content"]
    if streamed:
        read = stream(client, body)
        assert drawn(read) == tokens
        [told] = [chunk["prompt_token_ids"] for chunk in read.chunks if "prompt_token_ids" in chunk]
        assert told == prompt
        assert read.content == choice["message"]["content"]


def test_token_ids_of_completions_are_told_by_choice(client: httpx.Client) -> None:
    body = completion([TEXT, "Once"], return_token_ids=True, n=2, temperature=1, seed=1)
    whole = ask(client, body, COMPLETIONS)
    check_schema(whole, "CreateCompletionResponse")
    read = stream(client, body, COMPLETIONS)
    for index, choice in enumerate(whole["choices"]):
        assert choice["prompt_token_ids"] == ids([TEXT, "Once"][index // 2])
        assert text_of(client, choice["token_ids"]).startswith(choice["text"])
        assert drawn(read, index) == choice["token_ids"]
        [prompt] = [
            each["prompt_token_ids"]
            for chunk in read.chunks
            for each in chunk["choices"]
            if each["index"] == index and "prompt_token_ids" in each
        ]
        assert prompt == choice["prompt_token_ids"]


def test_the_end_token_is_told_and_what_a_stop_string_cuts_is_not(client: httpx.Client) -> None:
    end = ids("<|im_end|>")
    body = ask(
        client, completion(logit_bias={str(end[0]): 100}, return_token_ids=True), COMPLETIONS
    )
    [choice] = body["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", end)
    whole = ask(client, completion(return_token_ids=True), COMPLETIONS)["choices"][0]
    stop = whole["text"][4:6]
    body = ask(client, completion(return_token_ids=True, stop=stop), COMPLETIONS)
    [cut] = body["choices"]
    assert cut["finish_reason"] == "stop"
    assert cut["token_ids"] == whole["token_ids"][: body["usage"]["completion_tokens"]]


def test_nothing_is_told_that_was_not_asked_for(client: httpx.Client) -> None:
    for path, body in ((CHAT, chat()), (COMPLETIONS, completion())):
        told = {"prompt_token_ids", "token_ids", "prompt_logprobs", "timings"}
        whole = ask(client, body, path)
        for each in (whole, *stream(client, body, path).chunks):
            assert not told & each.keys()
            assert not any(told & choice.keys() for choice in each["choices"])


def test_tokens_may_be_named_by_their_ids(client: httpx.Client) -> None:
    fields: Body = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    whole = ask(client, chat(logprobs=True, top_logprobs=3, **fields))
    plain = ask(client, chat(logprobs=True, top_logprobs=3))
    [choice], [other] = whole["choices"], plain["choices"]
    content, spelled = choice["logprobs"]["content"], other["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{id}" for id in choice["token_ids"]]
    for each, as_text in zip(content, spelled, strict=True):
        assert (each["logprob"], each["bytes"]) == (as_text["logprob"], as_text["bytes"])
        for top, as_text_top in zip(each["top_logprobs"], as_text["top_logprobs"], strict=True):
            assert make_tokenizer().decode([number(top["token"])]) == as_text_top["token"]

    body = completion(TEXT, logprobs=2, echo=True, **fields)
    [choice] = ask(client, body, COMPLETIONS)["choices"]
    named = [f"token_id:{id}" for id in choice["prompt_token_ids"] + choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == named
    for name, top in zip(named[1:], choice["logprobs"]["top_logprobs"][1:], strict=True):
        assert name in top
        assert all(key.startswith("token_id:") for key in top)


def number(name: str) -> int:
    return int(name.removeprefix("token_id:"))


# The prompt's scores.


def scored(folders: Folders, tokens: list[int]) -> Any:
    """Log-probabilities of the model at each of the tokens, by mlx-lm alone."""
    model, _ = load_model(folders.plain)
    logits = model(mx.array(tokens)[None])[0].astype(mx.float32)
    return np.asarray(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("top", [0, 3])
def test_prompt_scores_are_the_models_own(
    client: httpx.Client, folders: Folders, path: str, top: int
) -> None:
    body = (chat if path == CHAT else completion)(prompt_logprobs=top, return_token_ids=True)
    whole = ask(client, body, path)
    told = whole if path == CHAT else whole["choices"][0]
    tokens, scores = told["prompt_token_ids"], told["prompt_logprobs"]
    assert len(scores) == len(tokens)
    assert scores[0] is None
    expected = scored(folders, tokens)
    for place, (token, at) in enumerate(zip(tokens[1:], scores[1:], strict=True)):
        row = expected[place]
        own = at[str(token)]
        assert own["logprob"] == pytest.approx(row[token], abs=1e-3)
        assert abs(own["rank"] - (1 + int((row > row[token]).sum()))) <= 1  # rounding
        assert own["decoded_token"] == make_tokenizer().decode([token], skip_special_tokens=False)
        best = [int(id) for id in np.argsort(-row)[:top]]
        assert {*at} == {str(token), *map(str, best)}
        for rank, id in enumerate(best, start=1):
            assert at[str(id)]["rank"] == rank


def test_prompt_scores_and_an_echo_go_together(client: httpx.Client) -> None:
    both = completion(TEXT, echo=True, logprobs=1, prompt_logprobs=4)
    [choice] = ask(client, both, COMPLETIONS)["choices"]
    [alone] = ask(client, completion(TEXT, echo=True, logprobs=1), COMPLETIONS)["choices"]
    assert choice["logprobs"] == alone["logprobs"]
    assert all(4 <= len(at) <= 5 for at in choice["prompt_logprobs"][1:])


def test_prompt_scores_are_not_streamed(client: httpx.Client) -> None:
    for path, body in ((CHAT, chat()), (COMPLETIONS, completion())):
        asked = body | {"stream": True, "prompt_logprobs": 1}
        refused(client.post(path, json=asked), 400, "invalid_value", param="prompt_logprobs")


# Usage as it grows.


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_chunk_tells_usage_so_far(client: httpx.Client, path: str) -> None:
    body = chat() if path == CHAT else completion()
    options = {"include_usage": True, "continuous_usage_stats": True}
    read = stream(client, body | {"stream_options": options, "return_token_ids": True}, path)
    assert_counted(read, lambda chunk: chunk["usage"]["completion_tokens"])
    told = [chunk["usage"] for chunk in read.chunks]
    counts = [usage["completion_tokens"] for usage in told]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert len({usage["prompt_tokens"] for usage in told}) == 1
    assert read.chunks[-1]["choices"] == []
    plain = stream(client, body | {"stream_options": {"include_usage": True}}, path)
    assert told[-1] == plain.chunks[-1]["usage"] | {
        "prompt_tokens_details": told[-1]["prompt_tokens_details"]
    }
    assert all(chunk["usage"] is None for chunk in plain.chunks[:-1])


def assert_counted(read: Streamed, count: Callable[[Body], int]) -> None:
    """Each chunk with token ids counts the tokens so far, however many came together."""
    tokens = 0
    for chunk in read.chunks:
        ids = [id for choice in chunk["choices"] for id in choice.get("token_ids", [])]
        tokens += len(ids)
        assert not ids or count(chunk) == tokens
    assert tokens == 8


def test_usage_so_far_needs_usage(client: httpx.Client) -> None:
    body = chat(stream=True, stream_options={"continuous_usage_stats": True})
    path = "stream_options.continuous_usage_stats"
    refused(client.post(CHAT, json=body), 400, "invalid_value", param=path)


# Times.


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", ["verbose", "timings_per_token"])
def test_times_are_told_when_asked_for(client: httpx.Client, path: str, field: str) -> None:
    body = (chat if path == CHAT else completion)(**{field: True})
    whole = ask(client, body, path)
    check_times(whole["timings"], whole["usage"])
    read = stream(client, body | {"return_token_ids": True}, path)
    check_times(read.chunks[-1]["timings"], read.usage)
    told = [chunk["timings"] for chunk in read.chunks if "timings" in chunk]
    if field == "verbose":
        assert len(told) == 1
        return
    counts = [each["predicted_n"] for each in told]
    assert counts == sorted(counts)
    assert_counted(read, lambda chunk: chunk["timings"]["predicted_n"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [{"include_usage": True}, {}])
def test_times_are_on_the_last_chunk_whatever_it_is(
    client: httpx.Client, path: str, options: Body
) -> None:
    body = (chat if path == CHAT else completion)(verbose=True, stream_options=options)
    read = stream(client, body, path)
    assert [("timings" in chunk) for chunk in read.chunks] == [False] * (len(read.chunks) - 1) + [
        True
    ]


def check_times(times: Body, usage: Body) -> None:
    names = {f"{part}_{each}" for part in ("prompt", "predicted") for each in ("n", "ms", *RATES)}
    assert times.keys() == {"cache_n", *names}
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert times["cache_n"] == cached
    assert times["prompt_n"] == usage["prompt_tokens"] - cached
    assert times["predicted_n"] == usage["completion_tokens"] == 8
    for part in ("prompt", "predicted"):
        count, ms = times[f"{part}_n"], times[f"{part}_ms"]
        assert 0 < ms < 20_000
        assert times[f"{part}_per_token_ms"] == pytest.approx(ms / count)
        assert times[f"{part}_per_second"] == pytest.approx(count / ms * 1000)
