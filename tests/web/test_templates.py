"""Fields of a request that concern the prompt: thinking, templates, and how much of it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.client import CHAT, COMPLETIONS, Body, answer, ask, chat, completion, refused
from tests.support.fixtures import CONTEXT, Folders
from tests.support.serving import serving


def thinks(body: Body) -> bool:
    return bool(body["usage"]["completion_tokens_details"]["reasoning_tokens"])


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"think": True}, True),
        ({"think": False}, False),
        ({"think": "high"}, True),
        ({"think": True, "enable_thinking": True}, True),
    ],
)
def test_thinking_is_asked_for_by_any_name(
    client: httpx.Client, fields: Body, thinking: bool
) -> None:
    asked = ask(client, chat(model="thinking", max_tokens=4, ignore_eos=True, **fields))
    assert thinks(asked) == thinking


def test_a_level_of_thinking_is_the_templates(trusting: httpx.Client) -> None:
    template = "{{ reasoning_effort }} {{ enable_thinking }}"
    counts = [
        ask(trusting, chat(chat_template=template, max_tokens=1, **fields))["usage"]
        for fields in ({"think": "low"}, {"reasoning_effort": "low", "think": "low"})
    ]
    written = ask(trusting, completion("low True", max_tokens=1), COMPLETIONS)["usage"]
    assert counts[0] == counts[1] == written


def test_an_answer_need_not_be_begun(client: httpx.Client) -> None:
    def prompt_tokens(**fields: Any) -> int:
        return int(ask(client, chat(max_tokens=1, **fields))["usage"]["prompt_tokens"])

    begun = prompt_tokens()
    assert prompt_tokens(add_generation_prompt=True) == begun
    open_ended = prompt_tokens(add_generation_prompt=False)
    start = client.post("/tokenize", json={"content": "<|im_start|>assistant\n"}).json()["count"]
    assert begun - open_ended == start


# Parts of prompts.


@pytest.mark.parametrize("keep", [1, 5, 40])
def test_the_end_of_a_prompt_is_kept(client: httpx.Client, keep: int) -> None:
    ids = [7 + i % 200 for i in range(100)]
    kept = ask(client, completion(ids, truncate_prompt_tokens=keep), COMPLETIONS)
    alone = ask(client, completion(ids[-keep:]), COMPLETIONS)
    assert kept["choices"] == alone["choices"]
    assert kept["usage"]["prompt_tokens"] == keep
    text = "The quick brown fox. " * 50
    tokens = client.post("/tokenize", json={"content": text}).json()["tokens"]
    kept = ask(client, completion(text, truncate_prompt_tokens=keep, echo=True), COMPLETIONS)
    alone = ask(client, completion(tokens[-keep:], echo=True), COMPLETIONS)
    assert answer(kept) == answer(alone)


def test_the_end_of_a_chat_is_kept(client: httpx.Client) -> None:
    whole = ask(client, chat("x " * 300))
    assert whole["usage"]["prompt_tokens"] > 300
    same = ask(client, chat("x " * 300, truncate_prompt_tokens=10_000))
    assert same["choices"] == whole["choices"]
    kept = ask(client, chat("x " * 300, truncate_prompt_tokens=50))
    assert kept["usage"]["prompt_tokens"] == 50


@pytest.mark.parametrize(
    ("limit", "kept"), [(10, CONTEXT - 10), (10 * CONTEXT, CONTEXT // 2), (None, CONTEXT // 2)]
)
def test_a_chat_that_is_too_long_is_cut_to_the_context(
    client: httpx.Client, limit: int | None, kept: int
) -> None:
    """Also one of millions of characters, of which only the end is looked at."""
    for words in (CONTEXT, 1_000_000):
        body = chat("x " * words, max_tokens=limit, truncate_prompt_tokens=-1, stop=[" ", "a", "e"])
        usage = ask(client, body)["usage"]
        assert usage["prompt_tokens"] == kept


def test_a_kept_part_that_does_not_fit_is_refused(client: httpx.Client) -> None:
    body = completion([5] * (CONTEXT + 10), truncate_prompt_tokens=CONTEXT)
    refused(client.post(COMPLETIONS, json=body), 400, "context_length_exceeded", param="prompt")


# Templates of clients.


@pytest.fixture(scope="module")
def trusting(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server that runs its templates."""
    folder = tmp_path_factory.mktemp("trusting")
    options = ["--model", f"t={folders.plain}", "--allow-chat-template"]
    with serving(folder, *options) as server, server.client() as client:
        yield client


def test_a_template_is_for_the_operator_to_allow(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat(chat_template="{{ messages[0].content }}"))
    error = refused(response, 400, "unsupported_parameter", param="chat_template")
    assert "--allow-chat-template" in error["message"]


def test_a_template_of_the_clients_is_used(trusting: httpx.Client) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    asked = ask(trusting, chat("Once upon a time", chat_template=template))
    alone = ask(trusting, completion("Once upon a time", max_tokens=8), COMPLETIONS)
    assert answer(asked) == answer(alone)


def test_half_a_surrogate_pair_of_a_template_is_a_replacement_character(
    trusting: httpx.Client,
) -> None:
    body = chat(chat_template=r"{{ '\ud83d' }}")
    prompt = ask(trusting, body, "/apply-template")["prompt"]
    assert prompt == "\ufffd"


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ '' }}",
        "{{ nothing.at.all }}",
        "{% for i in messages %}" * 25 + "{% endfor %}" * 25,
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_template_that_cannot_be_rendered_is_refused(
    trusting: httpx.Client, template: str
) -> None:
    response = trusting.post(CHAT, json=chat(chat_template=template))
    refused(response, 400, "invalid_value", param="chat_template")
    assert answer(ask(trusting, chat()))
