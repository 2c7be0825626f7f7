"""Fields of other servers that say what an answer may not have, and when it may not end."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.client import (
    CHAT,
    COMPLETIONS,
    Body,
    answer,
    ask,
    chat,
    completion,
    refused,
    stream,
)

END = 507
"""`<|im_end|>` of the tiny models."""

ENDING: Body = {"model": "thinking", "logit_bias": {str(END): 100}, "temperature": 0}
"""Nothing is likelier than the end."""

POST = [(CHAT, chat), (COMPLETIONS, completion)]


def tokens(client: httpx.Client, text: str) -> list[int]:
    return list(client.post("/tokenize", json={"content": text}).json()["tokens"])


def ended(body: Body) -> tuple[str, int]:
    return body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]


@pytest.mark.parametrize(("path", "form"), POST)
def test_an_end_may_be_ignored_and_does_not_show(
    client: httpx.Client, path: str, form: Any
) -> None:
    assert ended(ask(client, form(**ENDING, max_tokens=6), path)) == ("stop", 1)
    body = form(**ENDING, max_tokens=6, ignore_eos=True)
    asked = ask(client, body, path)
    assert ended(asked) == ("length", 6)
    assert answer(asked) == ""
    streamed = stream(client, body, path)
    assert (streamed.content, streamed.finish_reason) == ("", "length")


@pytest.mark.parametrize("streaming", [False, True])
def test_an_end_has_one_name_in_log_probabilities(client: httpx.Client, streaming: bool) -> None:
    """In its place, among the alternatives, and where it is ignored."""
    for more, places in (({}, 1), ({"ignore_eos": True}, 3), ({"min_tokens": 2}, 3)):
        body = completion(**ENDING, max_tokens=3, logprobs=3, **more)
        if streaming:
            parts = [
                chunk["choices"][0]["logprobs"]
                for chunk in stream(client, body, COMPLETIONS).chunks
                if chunk["choices"][0].get("logprobs")
            ]
        else:
            parts = [ask(client, body, COMPLETIONS)["choices"][0]["logprobs"]]
        names = [name for part in parts for name in part["tokens"]]
        alternatives = [top for part in parts for top in part["top_logprobs"]]
        assert len(names) == len(alternatives) == places
        ends = range(places) if "min_tokens" not in more else [2]
        for i in ends:
            assert names[i] == "<|im_end|>"
        for name, top in zip(names, alternatives, strict=True):
            assert len(top) == 3 + (name not in [*top][:3])
            assert "" not in top
    told = ask(client, chat(**ENDING, max_tokens=2, logprobs=True, top_logprobs=2, ignore_eos=True))
    for each in told["choices"][0]["logprobs"]["content"]:
        assert (each["token"], each["bytes"]) == ("<|im_end|>", [])
        assert len(each["top_logprobs"]) == 2
        assert each["top_logprobs"][0]["token"] == "<|im_end|>"


@pytest.mark.parametrize("least", [1, 2, 7])
@pytest.mark.parametrize(("path", "form"), POST)
def test_an_answer_has_its_least_tokens_before_its_end(
    client: httpx.Client, path: str, form: Any, least: int
) -> None:
    body = form(**ENDING, max_tokens=20, min_tokens=least)
    assert ended(ask(client, body, path)) == ("stop", least + 1)
    assert stream(client, body, path).usage["completion_tokens"] == least + 1
    free = ask(client, form(model="thinking", temperature=0, max_tokens=least), path)
    if free["choices"][0]["finish_reason"] == "length":
        assert answer(ask(client, body, path)) == answer(free)


def test_every_choice_has_its_least_tokens(client: httpx.Client) -> None:
    body = chat(**ENDING | {"temperature": 1}, max_tokens=20, min_tokens=4, n=3, seed=5)
    asked = ask(client, body)
    assert [choice["finish_reason"] for choice in asked["choices"]] == ["stop"] * 3
    assert asked["usage"]["completion_tokens"] == 15


@pytest.mark.parametrize(("path", "form"), POST)
def test_a_token_of_the_clients_ends_an_answer_and_is_not_shown(
    client: httpx.Client, path: str, form: Any
) -> None:
    body = form(max_tokens=12, temperature=0, seed=1)
    whole = ask(client, body | {"logprobs": True if path == CHAT else 0}, path)
    logprobs = whole["choices"][0]["logprobs"]
    pieces = [each["token"] for each in logprobs["content"]] if path == CHAT else logprobs["tokens"]
    [stop, *_] = tokens(client, pieces[5])
    first = pieces.index(pieces[5])
    for more in ({}, {"ignore_eos": True}):
        asked = ask(client, body | {"stop_token_ids": [stop], **more}, path)
        assert ended(asked) == ("stop", first + 1)
        assert answer(asked) == "".join(pieces[:first])
    asked = ask(client, body | {"stop_token_ids": [stop], "min_tokens": 9}, path)
    assert stop not in tokens(client, answer(asked))
    assert asked["usage"]["completion_tokens"] > 9


@pytest.mark.parametrize(("path", "form"), POST)
def test_only_allowed_tokens_are_drawn(client: httpx.Client, path: str, form: Any) -> None:
    allowed = tokens(client, "the sea")
    body = form(max_tokens=20, temperature=1, seed=3, allowed_token_ids=allowed)
    for text in (answer(ask(client, body, path)), stream(client, body, path).content):
        assert text
        assert set(text) <= set("the sea")


@pytest.mark.parametrize(("path", "form"), POST)
def test_a_bad_word_is_not_said(client: httpx.Client, path: str, form: Any) -> None:
    body = form(max_tokens=30, temperature=0)
    text = answer(ask(client, body, path))
    bad = [text[i : i + 3] for i in (0, 7, 15) if text[i : i + 3].strip()]
    said = ask(client, body | {"bad_words": bad}, path)
    spelled = [tokens(client, start + word.lstrip()) for word in bad for start in ("", " ")]
    drawn = tokens(client, answer(said))
    assert answer(said) != text
    for word in spelled:
        assert word not in [drawn[i : i + len(word)] for i in range(len(drawn))]
    assert stream(client, body | {"bad_words": bad}, path).content == answer(said)


def test_a_stop_string_does_not_end_what_is_too_short(client: httpx.Client) -> None:
    body = completion(max_tokens=24, temperature=0)
    text = answer(ask(client, body, COMPLETIONS))
    stop = text[4:6]
    cut = ask(client, body | {"stop": stop}, COMPLETIONS)
    assert answer(cut) == text[: text.index(stop)]
    whole = ask(client, body | {"stop": stop, "min_tokens": 24}, COMPLETIONS)
    assert answer(whole) == text
    assert ended(whole) == ("length", 24)
    assert stream(client, body | {"stop": stop, "min_tokens": 24}, COMPLETIONS).content == text


def test_a_grammar_ends_where_it_can_only_end(client: httpx.Client) -> None:
    for more in ({"min_tokens": 12}, {"ignore_eos": True}, {"allowed_token_ids": [1]}):
        asked = ask(client, chat(max_tokens=16, guided_regex="(ab){2}", **more))
        assert answer(asked) == "abab"
        assert asked["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_ids_of_no_token_are_refused(client: httpx.Client, path: str, field: str) -> None:
    body = (chat if path == CHAT else completion)(**{field: [1, 512]})
    refused(client.post(path, json=body), 400, "invalid_value", param=f"{field}[1]")
