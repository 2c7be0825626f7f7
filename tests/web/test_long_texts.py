"""Texts that are far too long: refused before anything is spent on them, or given up in time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.client import (
    CHAT,
    COMPLETIONS,
    HangUp,
    RawClient,
    ask,
    chat,
    completion,
    refused,
)
from tests.support.crowds import states
from tests.support.effort import often
from tests.support.fixtures import CONTEXT, Folders
from tests.support.serving import Server, serving, wait_for
from tests.support.tiny import write_model

WIDEST = 13  # bytes of <|endoftext|>
MEGABYTE = "The quick brown fox jumps over the lazy dog. " * 23_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, completion(MEGABYTE), "prompt"),
        (COMPLETIONS, completion(["a", MEGABYTE]), "prompt[1]"),
        (COMPLETIONS, completion(MEGABYTE, stream=True), "prompt"),
        (CHAT, chat(MEGABYTE), "messages"),
        (CHAT, chat(MEGABYTE, stream=True), "messages"),
    ],
    ids=["text", "texts", "streamed text", "chat", "streamed chat"],
)
def test_a_text_that_cannot_fit_is_refused_by_its_bytes(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    error = refused(client.post(path, json=body), 400, "context_length_exceeded", param=param)
    assert f"{CONTEXT} tokens, which are at most {CONTEXT * WIDEST} bytes" in error["message"]


def test_ids_that_cannot_fit_are_refused_by_their_number(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json=completion([1] * 1_000_000))
    error = refused(response, 400, "context_length_exceeded", param="prompt")
    assert "1000000" in error["message"]


def test_what_is_told_in_tokens_is_bounded(client: httpx.Client) -> None:
    response = client.post("/tokenize", json={"content": "a" * (8 * 1024 * 1024)})
    refused(response, 413, "request_too_large")
    response = client.post("/tokenize", json={"content": "1 " * (2**20)})
    error = refused(response, 413, "request_too_large", param="content")
    assert str(2**20) in error["message"]
    response = client.post("/detokenize", json={"tokens": [1234567] * (2 * 2**20)})
    refused(response, 413, "request_too_large")
    assert ask(client, {"content": "a" * 100_000}, "/tokenize")["count"] > 0


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model whose context no body exceeds."""
    folder = tmp_path_factory.mktemp("roomy")
    model = write_model(folder / "m", "qwen3", plain=True, max_position_embeddings=10**7)
    with serving(folder, "--model", f"t={model}") as server, server.client() as client:
        client.post("/tokenize", json={"content": MEGABYTE})  # learns where it may cut
        yield server


LONG = MEGABYTE * 16
"""Takes seconds to tokenize."""


@pytest.mark.parametrize("how", often(["fin", "rst"], ["fin"]))
def test_a_short_prompt_does_not_wait_for_a_long_one_and_who_leaves_ends_it(
    roomy: Server, how: HangUp
) -> None:
    with roomy.client() as client, RawClient(roomy, completion(LONG), COMPLETIONS) as long:
        wait_for(lambda: states(roomy)["t"]["requests"] == 1, why="it is tokenized")
        for _ in range(3):
            ask(client, completion("a", max_tokens=1), COMPLETIONS)
        assert not roomy.log("request", request=long.request), roomy.log_text()[-1500:]
        long.hang_up(how)
        line = roomy.logged("request", request=long.request)
        assert "status" not in line, "it had no answer"
        assert not roomy.log("stream start", request=long.request)


def test_the_deadline_ends_it(folders: Folders, tmp_path: Path) -> None:
    options = ["--model", f"t={folders.endless}", "--request-timeout", "0.1"]
    with serving(tmp_path, *options) as server, server.client() as client:
        client.post("/tokenize", json={"content": "a"})
        response = client.post("/tokenize", json={"content": MEGABYTE * 6})
        refused(response, 504, "timeout")
