"""Scores of pairs, from logits and from vectors; vectors made shorter."""

from __future__ import annotations

import numpy as np
import pytest

from mlxsrv.errors import InvalidRequest
from mlxsrv.service.embedding import cosines, judge, narrow


def test_a_score_is_a_probability_or_the_logit_itself() -> None:
    one = np.array([[-200.0], [3.0]], dtype=np.float32)
    assert judge(one, "sigmoid") == pytest.approx([0, 1 / (1 + np.exp(-3))], abs=1e-6)
    assert judge(one, "identity") == pytest.approx([-200, 3])
    two = np.array([[1.0, 3.0]], dtype=np.float32)
    assert judge(two, "softmax") == pytest.approx([1 / (1 + np.exp(-2))], abs=1e-6)


def test_nearness_does_not_depend_on_lengths() -> None:
    ones = np.array([[2.0, 0.0]], dtype=np.float32)
    others = np.array([[5.0, 0.0], [0.0, 1.0], [-3.0, 0.0], [0.0, 0.0]], dtype=np.float32)
    pairs = [(0, i) for i in range(4)]
    assert cosines(ones, others, pairs) == pytest.approx([1, 0, -1, 0])


def test_dimensions_cut_and_bring_to_length_one() -> None:
    vectors = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    expected = vectors[:, :3] / np.linalg.norm(vectors[:, :3], axis=1, keepdims=True)
    assert np.allclose(narrow(vectors, 3), expected, atol=1e-6)
    assert np.allclose(narrow(vectors, 8), vectors), "all of them change nothing"
    with pytest.raises(InvalidRequest, match="9 are asked for; this model's vectors have 8"):
        narrow(vectors, 9)
    assert narrow(np.zeros((1, 4), np.float32), 2).tolist() == [[0, 0]]
