"""Greedy text, checked against mlx-lm's model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


def assert_greedy(model: Any, prompt: Sequence[int], drawn: Sequence[int], count: int) -> None:
    """Fails unless `drawn` is the model's greedy text of `count` tokens, end tokens taken for any
    other.

    One pass over prompt and text, without a KV cache, tells the likeliest token after each of its
    beginnings. Greedy text has just these, so nothing is to be generated to compare with.
    """
    assert len(drawn) == count
    tokens = mx.array([*prompt, *drawn[:-1]])[None]
    assert list(drawn) == model(tokens)[0, len(prompt) - 1 :].argmax(-1).tolist()
