"""Log-probabilities: equal to mlx-lm's own, whole in streams, and true to the text."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model, load_tokenizer

from mlxsrv.text.thoughts import FRAME_FORMATS
from tests.support.client import (
    CHAT,
    COMPLETIONS,
    Body,
    answer,
    ask,
    chat,
    check_schema,
    completion,
    refused,
    stream,
)
from tests.support.effort import often
from tests.support.fixtures import Folders
from tests.support.scripted import cut, spell, write_scripted
from tests.support.serving import Server, serving
from tests.support.tiny import MARKER_TOKENS, Array, make_tokenizer
from tests.support.turns import write_turns

TEXT = "The quick brown fox"
NEAR = 1e-3

THOUGHTS = "Let me see: 世界 🚀."
SPOKEN = "Hello, 世界! 🚀 is a rocket, größer than you."


@pytest.fixture(scope="module")
def folder(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scores")


@pytest.fixture(scope="module")
def scripted(folder: Path) -> Iterator[httpx.Client]:
    """A server of models that say what is written for them: in pieces of a byte or two, some of
    which are parts of characters; after thoughts; before a call."""
    thought: list[str | bytes] = ["<think>", *cut(f"\n{THOUGHTS}\n", 2), "</think>"]
    call = ["<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>"]
    models = {
        "says": write_scripted(folder / "says", cut(SPOKEN, 2)),
        "coarse": write_scripted(folder / "coarse", cut(SPOKEN, 6)),
        "thinks": write_scripted(folder / "thinks", [*thought, "\n\n", *cut(SPOKEN, 3)]),
        "runs on": write_scripted(folder / "runs", [*thought, *cut(f"\n\n{SPOKEN}", 5)]),
        "thinks again": write_scripted(
            folder / "again", ["So", *thought, "\n then", " it", " is."]
        ),
        "calls": write_scripted(folder / "calls", ["Look", ".", " \n", *call]),
        "calls at once": write_scripted(folder / "at-once", ["Look", ".\n", *call]),
    }
    arguments = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
    with serving(folder, *arguments) as server, server.client() as client:
        yield client


def ids(text: str) -> list[int]:
    return list(make_tokenizer().encode(text).ids)


def spelled(id: int) -> str:
    return str(make_tokenizer().decode([id]))


def scores(body: Body) -> Any:
    """The log-probabilities of an answer's one choice."""
    [choice] = body["choices"]
    return choice["logprobs"]


def written(content: Sequence[Body]) -> bytes:
    return b"".join(bytes(token["bytes"]) for token in content)


def streamed_scores(client: httpx.Client, body: Body, path: str = CHAT) -> dict[str, list[Any]]:
    """Each list of the log-probabilities of a stream, joined."""
    joined: dict[str, list[Any]] = {}
    for chunk in stream(client, body, path).chunks:
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                joined.setdefault(name, []).extend(values or [])
    return joined


# The shape.


def test_scores_of_a_chat_have_openais_shape(client: httpx.Client) -> None:
    body = ask(client, chat(logprobs=True, top_logprobs=3))
    check_schema(body, "CreateChatCompletionResponse")
    content = scores(body)["content"]
    assert scores(body)["refusal"] is None
    assert len(content) == body["usage"]["completion_tokens"] == 8
    for token in content:
        assert token.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert bytes(token["bytes"]).decode() == token["token"]
        assert all(
            top.keys() == {"token", "logprob", "bytes"} and bytes(top["bytes"]).decode()
            for top in token["top_logprobs"]
            if top["token"]
        )


def test_chunks_with_scores_have_openais_shape(client: httpx.Client) -> None:
    for chunk in stream(client, chat(logprobs=True, top_logprobs=3, n=2)).chunks:
        known = {key: value for key, value in chunk.items() if key != "usage"}
        check_schema(known, "CreateChatCompletionStreamResponse")
        delta = chunk["choices"][0]["delta"]
        assert bool(delta.get("content")) == bool(
            (chunk["choices"][0]["logprobs"] or {}).get("content")
        )


def test_scores_of_a_text_have_the_older_shape(client: httpx.Client) -> None:
    body = ask(client, completion(logprobs=2), COMPLETIONS)
    check_schema(body, "CreateCompletionResponse")
    lists = scores(body)
    assert lists.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in lists.values()} == {8}
    assert "".join(lists["tokens"]) == answer(body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (CHAT, chat(logprobs=False)),
        (CHAT, chat(logprobs=None, top_logprobs=None)),
        (CHAT, chat(logprobs=False, top_logprobs=0)),
        (COMPLETIONS, completion()),
        (COMPLETIONS, completion(logprobs=None, echo=True)),
    ],
)
def test_scores_not_asked_for_are_null(client: httpx.Client, path: str, body: Body) -> None:
    assert scores(ask(client, body, path)) is None
    chunks = stream(client, body, path).chunks
    assert all(choice["logprobs"] is None for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("top", [None, 0, 1, 5, 20])
def test_the_likeliest_tokens_of_a_chat(client: httpx.Client, top: int | None) -> None:
    body = ask(client, chat(logprobs=True, top_logprobs=top))
    for token in scores(body)["content"]:
        likeliest = [(each["token"], each["logprob"]) for each in token["top_logprobs"]]
        assert len(likeliest) == (top or 0)
        assert likeliest == sorted(likeliest, key=lambda each: -each[1])
        assert not top or likeliest[0] == (token["token"], token["logprob"])  # it is greedy
        assert sum(math.exp(logprob) for _, logprob in likeliest) <= 1 + NEAR


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_the_likeliest_tokens_of_a_text(client: httpx.Client, top: int) -> None:
    body = completion(logprobs=top, temperature=1.5, seed=4, max_tokens=24)
    lists = scores(ask(client, body, COMPLETIONS))
    unlikely = 0
    for token, logprob, likeliest in zip(
        lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True
    ):
        assert likeliest[token] == logprob
        others = sorted(likeliest.values(), reverse=True)
        assert [*likeliest.values()] == others
        unlikely += len(likeliest) == top + 1
        # Special tokens are written alike, as nothing.
        assert top + 1 >= len(likeliest) >= max(top - 2, 1)
    assert unlikely, "a token that was drawn is told though it is none of the likeliest"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_more_of_the_likeliest_than_openai_has_are_refused(client: httpx.Client, path: str) -> None:
    if path == CHAT:
        response = client.post(CHAT, json=chat(logprobs=True, top_logprobs=21))
        refused(response, 400, "invalid_value", param="top_logprobs")
        response = client.post(CHAT, json=chat(top_logprobs=2))
        refused(response, 400, "invalid_value", param="top_logprobs")
    else:
        response = client.post(COMPLETIONS, json=completion(logprobs=21))
        refused(response, 400, "invalid_value", param="logprobs")


# The numbers.


@pytest.fixture(scope="module")
def reference(folders: Folders) -> Any:
    model, _ = load_model(folders.plain)
    return model


def logits(model: Any, tokens: Sequence[int]) -> Array:
    """The logits after each of `tokens`, by mlx-lm alone; shape (tokens, vocabulary)."""
    values: Array = np.array(model(mx.array([[*tokens]]))[0].astype(mx.float32))
    return values


def log_softmax(values: Array) -> Array:
    high = values.max(axis=-1, keepdims=True)
    whole: Array = values - high - np.log(np.exp(values - high).sum(axis=-1, keepdims=True))
    return whole


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 2, "seed": 3},
        {"temperature": 0.7, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "seed": 3},
    ],
    ids=["greedy", "hot", "filtered"],
)
def test_scores_are_the_models_own_before_temperature_and_filters(
    client: httpx.Client, reference: Any, sampling: Body
) -> None:
    body = completion(ids(TEXT), logprobs=5, echo=True, max_tokens=24, **sampling)
    lists = scores(ask(client, body, COMPLETIONS))
    by_name = {named(id): id for id in range(512)}
    drawn = [by_name[token] for token in lists["tokens"]]
    assert drawn[: len(ids(TEXT))] == ids(TEXT)
    own = log_softmax(logits(reference, drawn))
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    for i, (logprob, likeliest) in enumerate(
        zip(lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=True)
    ):
        assert logprob == pytest.approx(own[i, drawn[i + 1]], abs=NEAR)
        best = np.sort(own[i])[::-1][:5]
        assert [*likeliest.values()][:5] == pytest.approx([*best], abs=NEAR)
        for id in np.argsort(-own[i])[:5]:
            assert likeliest[named(id)] == pytest.approx(own[i, id], abs=NEAR)


@cache
def named(id: int) -> str:
    """A token as text completions tell it: by its text or, where it has none, by its bytes."""
    spellings = {spell(bytes([byte])): byte for byte in range(256)}
    token = str(make_tokenizer().id_to_token(id))
    data = bytes(spellings[character] for character in token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def test_a_chat_has_the_scores_of_the_text_that_it_is(
    client: httpx.Client, folders: Folders
) -> None:
    body = chat(logprobs=True, max_tokens=12)
    content = scores(ask(client, body))["content"]
    prompt = load_tokenizer(folders.plain).apply_chat_template(
        body["messages"], add_generation_prompt=True
    )
    as_text = scores(ask(client, completion(prompt, logprobs=0, max_tokens=12), COMPLETIONS))
    assert [token["token"] for token in content] == as_text["tokens"]
    assert [token["logprob"] for token in content] == pytest.approx(
        as_text["token_logprobs"], abs=NEAR
    )


def test_a_prompt_is_scored_alike_in_any_company(client: httpx.Client) -> None:
    prompts = [TEXT, "Once", "a " * 700, "今日は 🚀"]
    body = completion(logprobs=2, echo=True, max_tokens=0)
    alone = [scores(ask(client, body | {"prompt": prompt}, COMPLETIONS)) for prompt in prompts]
    together = ask(client, body | {"prompt": prompts}, COMPLETIONS)["choices"]
    for one, other in zip(alone, together, strict=True):
        assert one["tokens"] == other["logprobs"]["tokens"]
        assert one["token_logprobs"][1:] == pytest.approx(
            other["logprobs"]["token_logprobs"][1:], abs=NEAR
        )
        assert len(one["tokens"]) == len(ids(prompts[alone.index(one)]))


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_an_echo_scores_the_prompt_and_then_the_answer(
    client: httpx.Client, max_tokens: int
) -> None:
    body = completion([TEXT, "Once"], logprobs=1, max_tokens=max_tokens, n=2)
    plain = ask(client, body | {"max_tokens": 6}, COMPLETIONS)["choices"]
    echoed = ask(client, body | {"echo": True}, COMPLETIONS)["choices"]
    for one, other in zip(plain, echoed, strict=True):
        prompt = [TEXT, "Once"][other["index"] // 2]
        lists, read = other["logprobs"], len(ids(prompt))
        assert "".join(lists["tokens"][:read]) == prompt
        assert lists["token_logprobs"].count(None) == lists["top_logprobs"].count(None) == 1
        assert lists["tokens"][read:] == one["logprobs"]["tokens"][:max_tokens]
        assert lists["token_logprobs"][read:] == pytest.approx(
            one["logprobs"]["token_logprobs"][:max_tokens], abs=NEAR
        )


# Streams.


@pytest.mark.parametrize(
    "body",
    [
        completion(TEXT, logprobs=3, max_tokens=20),
        completion(TEXT, logprobs=3, max_tokens=20, echo=True),
        completion("今日は 🚀", logprobs=0, max_tokens=20, echo=True, temperature=1, seed=2),
        completion(ids(TEXT), logprobs=3, max_tokens=0, echo=True),
        completion(TEXT, logprobs=1, max_tokens=30, stop="e"),
    ],
)
def test_a_stream_of_text_has_the_scores_of_the_whole(client: httpx.Client, body: Body) -> None:
    whole = scores(ask(client, body, COMPLETIONS))
    streamed = streamed_scores(client, body, COMPLETIONS)
    assert streamed.pop("token_logprobs") == pytest.approx(whole.pop("token_logprobs"), abs=NEAR)
    for one, other in zip(streamed.pop("top_logprobs"), whole.pop("top_logprobs"), strict=True):
        assert one == (other and pytest.approx(other, abs=NEAR))
    assert streamed == whole


@pytest.mark.parametrize("fields", [{}, {"temperature": 1, "seed": 8}, {"stop": ["a", "e"]}])
def test_a_stream_of_chat_has_the_scores_of_the_whole(client: httpx.Client, fields: Body) -> None:
    body = chat(logprobs=True, top_logprobs=2, max_tokens=30, **fields)
    whole = scores(ask(client, body))["content"]
    streamed = streamed_scores(client, body)["content"]
    assert [token["bytes"] for token in streamed] == [token["bytes"] for token in whole]
    assert [token["logprob"] for token in streamed] == pytest.approx(
        [token["logprob"] for token in whole], abs=NEAR
    )


def test_scores_come_with_their_text(client: httpx.Client) -> None:
    for chunk in stream(client, chat(logprobs=True, max_tokens=30)).chunks:
        choice = chunk["choices"][0]
        if text := choice["delta"].get("content"):
            assert written(choice["logprobs"]["content"]).decode() == text


def test_scores_of_each_choice_are_its_own(client: httpx.Client) -> None:
    body = chat(logprobs=True, n=3, temperature=1, seed=5, max_tokens=16)
    for choice in ask(client, body)["choices"]:
        assert written(choice["logprobs"]["content"]).decode() == choice["message"]["content"]


# Tokens and text.


def test_offsets_tell_where_a_token_is(client: httpx.Client) -> None:
    body = completion([TEXT, "def add("], logprobs=0, echo=True, max_tokens=24, n=2, seed=1)
    ascii = {str(id): -100 for id in range(512) if not spelled(id).isascii()}
    for choice in ask(client, body | {"logit_bias": ascii}, COMPLETIONS)["choices"]:
        text, lists = choice["text"], choice["logprobs"]
        assert text.isascii()
        for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
            assert text[offset : offset + len(token)] == token
        assert "".join(lists["tokens"]) == text


def test_special_tokens_of_an_echoed_prompt_are_in_its_text(client: httpx.Client) -> None:
    prompt = "a<|im_start|>user b<|im_end|> c"
    body = ask(client, completion(prompt, logprobs=0, echo=True, max_tokens=4), COMPLETIONS)
    lists = scores(body)
    assert answer(body).startswith(prompt)
    assert len(lists["tokens"]) == len(ids(prompt)) + 4, "one entry each: harnesses count on it"
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert answer(body)[offset : offset + len(token)] == token
    assert lists["text_offset"][len(ids(prompt))] == len(prompt)


@pytest.mark.parametrize(
    "model", often(["says", "coarse", "thinks", "runs on"], ["thinks", "runs on"])
)
def test_bytes_of_tokens_are_the_text(scripted: httpx.Client, model: str) -> None:
    body = chat(model=model, logprobs=True, top_logprobs=2, max_tokens=200)
    whole = ask(scripted, body)
    message = whole["choices"][0]["message"]
    assert message["content"] == SPOKEN
    assert message.get("reasoning_content", THOUGHTS) == THOUGHTS
    content = scores(whole)["content"]
    assert written(content) == SPOKEN.encode()
    assert any("\ufffd" in token["token"] for token in content), "characters are cut"
    assert written(streamed_scores(scripted, body)["content"]) == SPOKEN.encode()


@pytest.mark.parametrize("model", often(["says", "coarse", "thinks"], ["coarse"]))
@pytest.mark.parametrize("stop", ["世", "🚀", " is", "ck", ", größ", "never", "you.\0"])
def test_bytes_of_tokens_are_the_text_up_to_a_stop_string(
    scripted: httpx.Client, model: str, stop: str
) -> None:
    body = chat(model=model, logprobs=True, max_tokens=200, stop=["nowhere", stop])
    whole = ask(scripted, body)
    text = SPOKEN.partition(stop)[0].encode()
    assert answer(whole).encode() == text
    data = written(scores(whole)["content"])
    # The token that a stop string begins in cannot be told in part.
    assert text.startswith(data)
    assert len(text) - len(data) < 7
    assert written(streamed_scores(scripted, body)["content"]) == data


@pytest.mark.parametrize("model", ["calls", "calls at once"])
def test_bytes_of_tokens_are_the_text_before_a_call(scripted: httpx.Client, model: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    whole = ask(scripted, chat(model=model, tools=tools, logprobs=True, max_tokens=200))
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert written(scores(whole)["content"]).decode() == answer(whole) == "Look."


@pytest.mark.parametrize("model", ["says", "thinks", "thinks again"])
def test_thoughts_in_a_text_completion_are_text_where_they_stand(
    scripted: httpx.Client, model: str
) -> None:
    body = completion("\n", model=model, logprobs=0, max_tokens=200)
    whole = ask(scripted, body, COMPLETIONS)
    assert answer(whole) == stream(scripted, body, COMPLETIONS).content
    lists = scores(whole)
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|im_end|>")):
            assert answer(whole)[offset : offset + len(token)] == token
    ends = [*lists["text_offset"][1:], len(answer(whole))]
    assert max(end - offset for offset, end in zip(lists["text_offset"], ends, strict=True)) < 10


@pytest.mark.parametrize("seed", often(range(6), [0, 3]))
def test_bytes_of_random_tokens_are_the_text(client: httpx.Client, seed: int) -> None:
    # A marker between halves of a character leaves two broken ones in the text, not in the bytes.
    markers = {str(make_tokenizer().token_to_id(marker)): -100 for marker in MARKER_TOKENS}
    body = chat("🚀 世界", model="thinking", temperature=1.5, seed=seed, max_tokens=150)
    body |= {"logprobs": True, "logit_bias": markers}
    whole = ask(client, body)
    data = written(scores(whole)["content"])
    # What is told of a character that is incomplete at the end is not shown.
    shown = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    assert shown == answer(whole)
    assert written(streamed_scores(client, body)["content"]) == data


def test_the_demo_writes_characters_in_pieces(server: Server, client: httpx.Client) -> None:
    body = chat("Reply with emoji", model="demo", logprobs=True, max_tokens=60)
    content = scores(ask(client, body))["content"]
    assert written(content).decode() == answer(ask(client, body))
    assert any("\ufffd" in token["token"] for token in content)
    assert written(streamed_scores(client, body)["content"]) == written(content)


# Formats whose answers have headers or wrappers.

FRAMED = {
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>{}<|return|>",
    "kimi_k3": "<|open|>think<|sep|>Hm.<|close|>think<|sep|>"
    "<|open|>response<|sep|>{}<|close|>response<|sep|>",
    "muse": " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>{}<|eot|>",
    "command": "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>{}<|END_RESPONSE|>",
    "hunyuan": "<think>Hm.</think>\n<answer>\n{}\n</answer>",
    "response": "<think>Hm.</think><response>{}</response>",
}
"""Answers with their thoughts, by formats of thoughts."""


def test_neither_headers_nor_wrappers_have_scores(tmp_path: Path) -> None:
    options = ["--trust-remote-code"]
    formats = {each.name: each for each in FRAME_FORMATS}
    for name, form in FRAMED.items():
        turns = {"true": form.format(SPOKEN)}
        folder = write_turns(tmp_path / name, turns, template="x", markers=formats[name].marks)
        options += ["--model", f"{name}={folder}", "--thinking-format", f"{name}={name}"]
    with serving(tmp_path, *options) as server, server.client() as client:
        for name in FRAMED:
            body = chat(model=name, logprobs=True, max_tokens=500)
            content = scores(ask(client, body))["content"]
            assert written(content).decode() == SPOKEN, name
            assert streamed_scores(client, body)["content"] == content, name
