"""A chat over HTTP with a model whose KV caches cannot be cut back: each turn reads what is new."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.support.client import ask, chat
from tests.support.fixtures import ModelFolder
from tests.support.serving import serving

FAMILIES = ("mamba2", "gpt_oss")


def test_a_turn_reads_what_is_new(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The template opens a block of thoughts, which is not in the next turn's prompt."""
    models = [f"--model={family}={model_folder(family)}" for family in FAMILIES]
    with serving(tmp_path, *models) as server, server.client() as client:
        for family in FAMILIES:
            check_turns(client, family)


def check_turns(client: httpx.Client, model: str) -> None:
    messages = [
        {"role": "system", "content": "Be brief, and say what you know of the sea. " * 8},
        {"role": "user", "content": "Tell me of the sea. " * 8},
    ]
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    before = 0
    for turn in range(4):
        body = chat(model=model, messages=messages, max_tokens=12, **thinking)
        usage = ask(client, body)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if turn:
            # All but the two tokens that open the block.
            assert cached == before - 2
        before = usage["prompt_tokens"]
        messages += [
            {"role": "assistant", "content": "It is wide, and it is wet. " * 3},
            {"role": "user", "content": "And then? What else is there to know of it? " * 5},
        ]
