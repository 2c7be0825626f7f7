"""The effort of a test run: `make quick`, `make test` and `make test-long` differ in this.

The environment variable `MLXSRV_TESTS` is `quick`, `usual` (without it) or `long`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import pytest

EFFORT = os.environ.get("MLXSRV_TESTS", "usual")
T = TypeVar("T")

_SHARES = {"quick": 0.1, "usual": 0.25, "long": 4.0}

_REPEATED = frozenset(
    ("llama", "gemma3_text", "olmo3", "qwen3_moe", "lfm2", "granitemoehybrid", "mamba")
)
"""Families of tests.support.tiny whose kinds of KV cache another family has too."""


def examples(count: int, usual: int | None = None) -> int:
    """Return how many examples hypothesis tries where `count` would be thorough. In the usual run
    they are `usual`, where so few find what is wrong for many inputs."""
    if usual is not None and EFFORT == "usual":
        return usual
    return max(1, round(count * _SHARES[EFFORT]))


def often(values: Iterable[T], usual: Collection[T]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: those of `usual` in every run, the others in long
    ones only, because a shorter test or one of `usual` shows the same. A tuple is one value for
    each of several names."""
    given = list(values)
    unknown = [value for value in usual if value not in given]
    assert not unknown, f"{unknown} is none of the values"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in usual else pytest.mark.long,
        )
        for value in given
    ]


def per_cache(families: Iterable[str]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: one family of each kind of KV cache in every run,
    the others in long ones only."""
    given = list(families)
    return often(given, [family for family in given if family not in _REPEATED])
