"""A model that is mostly KV cache, and more work for it than fits into a small memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.support.client import CHAT, Body, answer, chat
from tests.support.tiny import write_model

_LAYERS = 4
_HEADS, _WIDTH = 4, 64
PER_LAYER = 2 * _HEADS * _WIDTH * 4
"""Bytes of a layer's KV cache for each token: keys and values in float32."""

PER_TOKEN = _LAYERS * PER_LAYER
"""Bytes of a row's KV cache for each token, in a model of the usual number of layers."""

_WORDS = ("sea", "ship", "sail", "wind", "wave", "rope", "deck", "mast", "crew", "port", "star")
_PATIENCE = 300.0


def write_heavy(
    folder: Path, *, seed: int = 0, layers: int = _LAYERS, family: str = "qwen3"
) -> Path:
    """Write a model whose weights are as large as the KV cache of 200 tokens. It says whole words
    for ever."""
    return write_model(
        folder,
        family,
        seed=seed,
        plain=True,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        head_dim=_WIDTH,
    )


def make_work(requests: int, *, model: str, answer: int, seed: int = 0) -> list[Body]:
    """Greedy chats, each with its own prompt. The answers have at most `answer` tokens, and at
    least half as many; the prompts are shorter."""
    dice = random.Random(seed)
    bodies = []
    for number in range(requests):
        words = dice.choices(_WORDS, k=dice.randrange(answer // 32, answer // 8))
        limit = dice.randrange(answer // 2, answer)
        bodies.append(chat(" ".join([f"{number}.", *words]), model=model, max_tokens=limit))
    return bodies


async def ask_all(url: str, bodies: Sequence[Body]) -> list[str]:
    """The texts of the answers to these requests, asked all at once. Fails if one is refused."""
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE, limits=httpx.Limits()) as client:

        async def ask(body: Body) -> str:
            response = await client.post(CHAT, json=body)
            assert response.status_code == 200, response.text
            return answer(response.json())

        return await asyncio.gather(*(ask(body) for body in bodies))
