"""Greedy answers of a server, checked against one pass of mlx-lm's model over the same text."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import mlx.core as mx

Body = dict[str, Any]
_SUMS = {"bfloat16": 2.0**-6}
"""Relative to the largest logit: two of the format's steps, which is what sums in other orders may
differ by. In the others, float32 decides, and ties do not occur."""


def ask(client: httpx.Client, model: str, prompt: str, tokens: int, **more: Any) -> Body:
    """A completion's only choice, with the ids of its prompt and answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    response = client.post("/v1/completions", json={**body, "return_token_ids": True, **more})
    assert response.status_code == 200, response.text
    answer = response.json()
    choice: Body = answer["choices"][0]
    return choice | {"usage": answer["usage"]}


def ask_together(
    client: httpx.Client, model: str, prompts: Sequence[str], tokens: int
) -> list[Body]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        return [*threads.map(lambda prompt: ask(client, model, prompt, tokens), prompts)]


def assert_likeliest(model: Any, choice: Body, kind: str = "float32") -> None:
    """Fails unless each token of the answer is the likeliest to mlx-lm's model, or as likely within
    the rounding of the number format."""
    prompt, drawn = choice["prompt_token_ids"], choice["token_ids"]
    logits = model(mx.array([*prompt, *drawn])[None])[0, len(prompt) - 1 : -1].astype(mx.float32)
    best = logits.max(-1)
    found = mx.take_along_axis(logits, mx.array(drawn)[:, None], 1)[:, 0]
    slack = mx.abs(logits).max(-1) * _SUMS.get(kind, 0.0)
    short = (best - found - slack).tolist()
    assert max(short) <= 0, (kind, choice["text"], short)
