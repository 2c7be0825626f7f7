"""Make scores from a model's outputs: the relevance of the texts of pairs to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from mlxsrv.formats.encoders import Activation
from mlxsrv.generation.outputs import Vectors
from mlxsrv.wire.openai.embeddings import Numbers, normalise


def judge(logits: Vectors, activation: Activation) -> Numbers:
    """The relevance of each pair, from a cross-encoder's logits of shape (pairs, labels).

    With two labels it is the probability of the second, as such models are trained.
    """
    if activation == "identity":
        return logits[:, 0]
    margin = logits[:, 1] - logits[:, 0] if activation == "softmax" else logits[:, 0]
    # exp overflows for a large negative margin; its limit gives the right result.
    with np.errstate(over="ignore"):
        return cast(Numbers, 1 / (1 + np.exp(-margin)))


def cosines(vectors: Vectors, others: Vectors, pairs: Sequence[tuple[int, int]]) -> Numbers:
    """The cosine similarity of each pair, from -1 to 1; 0 if one vector has no length."""
    one, other = normalise(vectors), normalise(others)
    left, right = (np.array(column) for column in zip(*pairs, strict=True))
    return cast(Numbers, (one[left] * other[right]).sum(axis=1))
