"""How relevant the texts of pairs are to each other, from what a model has made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from mlxsrv.formats.encoders import Activation
from mlxsrv.generation import Vectors
from mlxsrv.wire.embeddings import Numbers, normalise


def judge(logits: Vectors, activation: Activation) -> Numbers:
    """How relevant each pair is by a cross-encoder's logits `(pairs, labels)`.

    Of two labels it is the probability of the second, as such models are trained.
    """
    if activation == "identity":
        return logits[:, 0]
    margin = logits[:, 1] - logits[:, 0] if activation == "softmax" else logits[:, 0]
    # exp would overflow for a large negative margin, and its limit is then right anyway.
    with np.errstate(over="ignore"):
        return cast(Numbers, 1 / (1 + np.exp(-margin)))


def cosines(vectors: Vectors, others: Vectors, pairs: Sequence[tuple[int, int]]) -> Numbers:
    """How near the vectors of each pair are, from -1 to 1; 0 where one has no length."""
    one, other = normalise(vectors), normalise(others)
    left, right = (np.array(column) for column in zip(*pairs, strict=True))
    return cast(Numbers, (one[left] * other[right]).sum(axis=1))
