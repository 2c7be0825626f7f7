"""Several answers to one request: `n` of them, several prompts, and echoes of these."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Receive, Scope, Send

import mlxsrv
from mlxsrv.models.pool.pool import Pool
from tests.support.client import (
    CHAT,
    COMPLETIONS,
    FIRST_CONTENT,
    Body,
    HangUp,
    RawClient,
    Streamed,
    answer,
    ask,
    by_choice,
    chat,
    check_schema,
    completion,
    refused,
    stream,
    text_of,
)
from tests.support.effort import often
from tests.support.fixtures import CONTEXT, Folders
from tests.support.serving import PATIENCE, Server, hosted, serving
from tests.support.tiny import make_tokenizer

FORMS: dict[str, Callable[..., Body]] = {CHAT: chat, COMPLETIONS: completion}
FOR_EVER = 500_000
NO_USAGE: Body = {"stream_options": {}}
MAX_CHOICES = 4

both_forms = pytest.mark.parametrize("path", FORMS, ids=["chat", "text"])


def sampled(path: str, **fields: Any) -> Body:
    return FORMS[path](**{"temperature": 1, "seed": 5, "max_tokens": 16, **fields})


def texts(body: Body) -> list[str]:
    """The texts of an answer's choices, which must come in order."""
    assert [choice["index"] for choice in body["choices"]] == [*range(len(body["choices"]))]
    return [answer({"choices": [choice]}) for choice in body["choices"]]


def said(streamed: Streamed) -> list[str]:
    return [text_of(chunks) for chunks in by_choice(streamed)]


def reasons(body: Body) -> list[str]:
    return [choice["finish_reason"] for choice in body["choices"]]


@pytest.fixture(scope="module")
def one_row(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that decodes one choice at a time and makes few."""
    options = ["--max-concurrency", "1", "--max-choices", f"{MAX_CHOICES}"]
    folder = tmp_path_factory.mktemp("one-row")
    with serving(folder, "--model", f"t={folders.plain}", *options) as server:
        yield server


@pytest.fixture(scope="module")
def one_row_client(one_row: Server) -> Iterator[httpx.Client]:
    with one_row.client() as client:
        yield client


# Several answers.


@both_forms
def test_n_answers_come_in_order_and_in_openais_shape(client: httpx.Client, path: str) -> None:
    body = ask(client, FORMS[path](n=3, temperature=1, seed=1), path)
    kind = "CreateChatCompletionResponse" if path == CHAT else "CreateCompletionResponse"
    check_schema(body, kind)
    assert [*map(bool, texts(body))] == [True] * 3
    assert reasons(body) == ["length"] * 3


@both_forms
def test_usage_counts_every_answer_and_the_prompt_once(client: httpx.Client, path: str) -> None:
    one, three = (ask(client, FORMS[path](n=n), path)["usage"] for n in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"] == 24
    assert three["total_tokens"] == three["prompt_tokens"] + three["completion_tokens"]
    assert three["prompt_tokens_details"]["cached_tokens"] <= three["prompt_tokens"]


@both_forms
def test_each_choice_of_a_stream_begins_and_ends(client: httpx.Client, path: str) -> None:
    streamed = stream(client, sampled(path, n=3) | NO_USAGE, path)
    choices = by_choice(streamed)
    assert len(choices) == 3
    for chunks in choices:
        *open_ones, last = [chunk["choices"][0] for chunk in chunks]
        assert all(choice["finish_reason"] is None for choice in open_ones)
        assert last["finish_reason"] == "length"
        if path == CHAT:
            first, *middle = (choice["delta"] for choice in open_ones)
            assert first == {"role": "assistant", "content": ""}
            assert all(delta.keys() == {"content"} for delta in middle)
            assert last["delta"] == {}
        else:
            assert last["text"] == ""
    assert len({(chunk["id"], chunk["created"]) for chunk in streamed.chunks}) == 1


@both_forms
@pytest.mark.parametrize(
    ("options", "where"),
    [(None, "after"), ({"include_usage": True}, "own"), ({"include_usage": False}, None)],
)
def test_usage_of_a_stream_is_told_once(
    client: httpx.Client, path: str, options: Body | None, where: str | None
) -> None:
    body = sampled(path, n=3)
    chunks = stream(client, body | {"stream_options": options}, path).chunks
    telling = [chunk for chunk in chunks if chunk.get("usage")]
    if where is None:
        assert not telling
        return
    assert telling == [chunks[-1]]
    assert bool(chunks[-1]["choices"]) == (where == "after")
    assert not reasons(chunks[-1]) or reasons(chunks[-1]) == [None]
    assert all(("usage" in chunk) == (where == "own") for chunk in chunks[:-1])
    whole = ask(client, body, path)["usage"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][count] == whole[count]


def test_choices_interleave(folders: Folders, tmp_path: Path) -> None:
    body = sampled(CHAT, n=2, max_tokens=FOR_EVER, stream=True)
    with (
        serving(tmp_path, "--model", f"t={folders.endless}") as server,
        RawClient(server, body) as client,
    ):
        client.until(rb'(?s)("index":0,"delta":{"content.*"index":1,"delta":{"content.*){3}')
        assert b'"finish_reason":"' not in client.data


@both_forms
def test_a_stream_says_what_the_whole_answers_say(client: httpx.Client, path: str) -> None:
    body = sampled(path, n=3, max_tokens=40)
    whole, streamed = ask(client, body, path), stream(client, body | NO_USAGE, path)
    assert said(streamed) == texts(whole)
    ends = [chunks[-1]["choices"][0]["finish_reason"] for chunks in by_choice(streamed)]
    assert ends == reasons(whole)


# Seeds.


@both_forms
def test_a_seed_names_all_answers(client: httpx.Client, path: str) -> None:
    one, again, other = (
        texts(ask(client, sampled(path, n=3, seed=seed), path)) for seed in (5, 5, 99)
    )
    assert one == again
    assert one != other
    assert len({*one}) == 3, "each answer has luck of its own"


@both_forms
def test_the_first_answer_is_that_of_a_single_one(client: httpx.Client, path: str) -> None:
    alone = texts(ask(client, sampled(path), path))
    assert texts(ask(client, sampled(path, n=1), path)) == alone
    assert texts(ask(client, sampled(path, n=4), path))[:1] == alone
    assert texts(ask(client, sampled(path, n=4), path))[:2] == texts(
        ask(client, sampled(path, n=2), path)
    )


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), -1])
def test_any_seed_has_several_answers(client: httpx.Client, seed: int) -> None:
    assert len({*texts(ask(client, sampled(CHAT, n=2, seed=seed)))}) == 2


def test_without_a_seed_answers_differ(client: httpx.Client) -> None:
    assert len({*texts(ask(client, sampled(CHAT, n=4, seed=None)))}) > 1


@both_forms
def test_greedy_answers_are_all_the_same(client: httpx.Client, path: str) -> None:
    [alone] = texts(ask(client, FORMS[path](max_tokens=24), path))
    assert texts(ask(client, FORMS[path](max_tokens=24, n=4), path)) == [alone] * 4


# Ends of their own.


@both_forms
def test_a_stop_string_ends_those_answers_that_have_it(client: httpx.Client, path: str) -> None:
    body = sampled(path, n=3, max_tokens=30)
    full = texts(ask(client, body, path))
    stop = full[1][len(full[1]) // 2 :][:5]
    body |= {"stop": stop}
    whole, streamed = ask(client, body, path), stream(client, body, path)
    expected = [text.partition(stop)[0] for text in full]
    assert said(streamed) == texts(whole) == expected
    assert reasons(whole) == ["stop" if stop in text else "length" for text in full]
    assert {*reasons(whole)} == {"stop", "length"}, "a stop string of one answer is only its own"
    assert whole["usage"]["completion_tokens"] == streamed.usage["completion_tokens"] < 90


def test_an_end_token_ends_its_own_answer_only(client: httpx.Client) -> None:
    body = sampled(CHAT, model="thinking", temperature=2, n=6, max_tokens=400, seed=11)
    whole = ask(client, body)
    assert {*reasons(whole)} == {"stop", "length"}
    assert said(stream(client, body)) == texts(whole)
    assert whole["usage"]["completion_tokens"] < 6 * 400


def test_the_sdk_puts_the_answers_of_a_stream_together(server: Server) -> None:
    asked: dict[str, Any] = {
        "model": "t",
        "messages": [{"role": "user", "content": "Tell me of the sea."}],
        "n": 3,
        "seed": 5,
        "max_tokens": 16,
    }
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        whole = sdk.chat.completions.create(**asked)
        with sdk.chat.completions.stream(**asked) as events:
            for _ in events:
                pass
            final = events.current_completion_snapshot
    assert len(final.choices) == 3
    for streamed, complete in zip(final.choices, whole.choices, strict=True):
        assert streamed.index == complete.index
        assert streamed.message.content == complete.message.content
        assert streamed.finish_reason == complete.finish_reason


# Limits.


@pytest.mark.parametrize("streaming", [False, True])
@both_forms
def test_more_answers_than_the_server_makes_are_refused(
    one_row_client: httpx.Client, path: str, streaming: bool
) -> None:
    body = FORMS[path](n=MAX_CHOICES + 1, stream=streaming)
    response = one_row_client.post(path, json=body)
    error = refused(response, 400, "invalid_value", param="n")
    assert f"{MAX_CHOICES}" in error["message"]


def test_prompts_times_n_are_not_more_than_the_server_makes(one_row_client: httpx.Client) -> None:
    fits = completion(["a", "b"], n=MAX_CHOICES // 2, max_tokens=1)
    assert len(texts(ask(one_row_client, fits, COMPLETIONS))) == MAX_CHOICES
    for over in (completion(["a", "b", "c"], n=2), completion(["a"] * (MAX_CHOICES + 1))):
        response = one_row_client.post(COMPLETIONS, json=over)
        refused(response, 400, "invalid_value", param="prompt")


@both_forms
def test_one_row_makes_several_answers_in_turn(
    one_row_client: httpx.Client, client: httpx.Client, path: str
) -> None:
    body = sampled(path, n=MAX_CHOICES)
    expected = texts(ask(client, body, path))
    assert texts(ask(one_row_client, body, path)) == expected
    assert said(stream(one_row_client, body, path)) == expected


# Clients that leave.


@pytest.mark.parametrize("how", often(["fin", "rst"], ["rst"]))
def test_leaving_gives_back_the_row_and_the_turns_of_answers_to_come(
    narrow: Server, how: HangUp
) -> None:
    with RawClient(narrow, chat(n=4, max_tokens=FOR_EVER, stream=True)) as leaver:
        leaver.until(FIRST_CONTENT)
        leaver.hang_up(how)
    assert narrow.logged("stream end", request=leaver.request)["finish"] == "disconnected"
    with narrow.client() as client:
        assert len(texts(ask(client, chat(n=4)))) == 4


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("rows", [2, 4, 8])
def test_leaving_gives_back_every_row(folders: Folders, rows: int, streaming: bool) -> None:
    settings = mlxsrv.Settings(model=(f"t={folders.endless}",), max_concurrency=rows)
    app = mlxsrv.create_app(settings)
    pools: list[Pool] = []

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        pools.append(app.service.pool)
        await app(scope, receive, send)

    def lent() -> int | None:
        """Rows that are lent; None before the first request."""
        model = pools[-1].model("t") if pools else None
        return None if model is None else len(model.running)

    async def leave(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            body = chat(n=4, max_tokens=FOR_EVER, stream=streaming)
            asking = asyncio.create_task(_read(client, body))
            await _until(lambda: lent() == min(rows, 4))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await _until(lambda: lent() == 0)
            model = pools[-1].model("t")
            assert model is not None
            assert not model.queued
            answered = (await client.post(CHAT, json=chat(n=4))).json()
            assert len(texts(answered)) == 4

    with hosted(watched) as url:
        asyncio.run(leave(url))


async def _read(client: httpx.AsyncClient, body: Body) -> None:
    async with client.stream("POST", CHAT, json=body) as response:
        async for _ in response.aiter_bytes():
            pass


async def _until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110 - rows are another loop's, and tell no event
            await asyncio.sleep(0.01)


# Several prompts.

PROMPTS = ["The quick brown fox", "Once", "今日は 🚀 and a longer one than all others"]


def ids(text: str) -> list[int]:
    return list(make_tokenizer().encode(text).ids)


@pytest.mark.parametrize("form", [str, ids], ids=["strings", "token ids"])
def test_each_prompt_is_answered_as_if_alone(client: httpx.Client, form: Any) -> None:
    alone = [ask(client, completion(prompt, max_tokens=16), COMPLETIONS) for prompt in PROMPTS]
    body = completion([form(prompt) for prompt in PROMPTS], max_tokens=16)
    whole = ask(client, body, COMPLETIONS)
    check_schema(whole, "CreateCompletionResponse")
    assert texts(whole) == [answer(one) for one in alone]
    assert said(stream(client, body, COMPLETIONS)) == texts(whole)
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][count] == sum(one["usage"][count] for one in alone)


def test_token_ids_are_one_prompt_and_a_list_of_them_several(client: httpx.Client) -> None:
    flat, [one], several = ids(PROMPTS[0]), [ids(PROMPTS[0])], [[id] for id in ids(PROMPTS[0])]
    assert len(texts(ask(client, completion(flat), COMPLETIONS))) == 1
    assert len(texts(ask(client, completion([one]), COMPLETIONS))) == 1
    assert len(texts(ask(client, completion(several), COMPLETIONS))) == len(flat) > 1


def test_answers_come_prompt_by_prompt(client: httpx.Client) -> None:
    alone = [
        texts(ask(client, sampled(COMPLETIONS, n=2) | {"prompt": prompt}, COMPLETIONS))
        for prompt in PROMPTS
    ]
    body = sampled(COMPLETIONS, n=2) | {"prompt": PROMPTS}
    whole = ask(client, body, COMPLETIONS)
    assert texts(whole) == [text for both in alone for text in both]
    assert said(stream(client, body, COMPLETIONS)) == texts(whole)
    one = ask(client, body | {"n": 1}, COMPLETIONS)["usage"]
    assert whole["usage"]["prompt_tokens"] == one["prompt_tokens"]


def test_a_prompt_given_twice_is_two_prompts(client: httpx.Client) -> None:
    alone = ask(client, completion(), COMPLETIONS)
    twice = ask(client, completion([PROMPTS[0]] * 2), COMPLETIONS)
    assert texts(twice) == texts(alone) * 2
    assert twice["usage"]["prompt_tokens"] == 2 * alone["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("prompt", "code", "param"),
    [
        (["a", ""], "invalid_value", "prompt[1]"),
        ([[1], [2], []], "invalid_value", "prompt[2]"),
        ([1, 2, 512], "invalid_value", "prompt[2]"),
        ([[1], [2, 512]], "invalid_value", "prompt[1][1]"),
        ([[1], [2, -1]], "invalid_value", "prompt"),
        ([[1], "a"], "invalid_value", "prompt"),
        ([], "invalid_value", "prompt"),
        (["a", "b " * CONTEXT], "context_length_exceeded", "prompt[1]"),
        ([[1], [2] * CONTEXT], "context_length_exceeded", "prompt[1]"),
        ("b " * CONTEXT, "context_length_exceeded", "prompt"),
        ([2] * CONTEXT, "context_length_exceeded", "prompt"),
    ],
    ids=lambda value: f"{value!r:.18}",
)
def test_a_refusal_says_which_prompt_is_wrong(
    client: httpx.Client, prompt: Any, code: str, param: str
) -> None:
    response = client.post(COMPLETIONS, json=completion(prompt))
    found = response.json()["error"]["param"]
    if param == "prompt":  # the parser may know more precisely where
        assert found.partition("[")[0] == param
        param = found
    refused(response, 400, code, param=param)


# Echoes.


@pytest.mark.parametrize("form", [str, ids], ids=["string", "token ids"])
@pytest.mark.parametrize("fields", [{}, {"n": 2, "temperature": 1, "seed": 3}, {"stop": "e"}])
def test_an_echo_is_the_prompt_before_its_answer(
    client: httpx.Client, fields: Body, form: Any
) -> None:
    body = completion([form(prompt) for prompt in PROMPTS], **fields)
    plain, echoed = (ask(client, body | {"echo": echo}, COMPLETIONS) for echo in (False, True))
    n = fields.get("n", 1)
    expected = [PROMPTS[i // n] + text for i, text in enumerate(texts(plain))]
    assert texts(echoed) == expected
    assert said(stream(client, body | {"echo": True}, COMPLETIONS)) == expected
    assert reasons(echoed) == reasons(plain)
    assert echoed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_an_echo_alone_draws_nothing(client: httpx.Client, logprobs: int | None) -> None:
    body = completion(PROMPTS, max_tokens=0, echo=True, logprobs=logprobs)
    whole, streamed = ask(client, body, COMPLETIONS), stream(client, body, COMPLETIONS)
    assert texts(whole) == said(streamed) == PROMPTS
    assert reasons(whole) == ["length"] * 3
    assert whole["usage"]["completion_tokens"] == streamed.usage["completion_tokens"] == 0
    assert whole["usage"]["prompt_tokens"] == sum(len(ids(prompt)) for prompt in PROMPTS)


def test_an_echo_alone_may_fill_the_context(client: httpx.Client) -> None:
    body = completion([7] * CONTEXT, max_tokens=0, echo=True)
    assert ask(client, body, COMPLETIONS)["usage"]["total_tokens"] == CONTEXT


def test_nothing_at_all_is_no_answer(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json=completion(max_tokens=0))
    refused(response, 400, "invalid_value", param="max_tokens")
