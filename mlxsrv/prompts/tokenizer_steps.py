"""The steps of a fast tokenizer before its model: normalizers, then splitters into words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

TokenizerStep = dict[str, Any]
"""One step, as `tokenizer.json` has it."""


class TokenizerSteps(msgspec.Struct, frozen=True):
    """All steps in order, with sequences unfolded."""

    normalizers: list[TokenizerStep]
    splitters: list[TokenizerStep]

    @property
    def byte_level(self) -> bool:
        """Whether a step spells the bytes of a text as characters, as GPT-2's tokenizer does."""
        return any(step["type"] == "ByteLevel" for step in (*self.normalizers, *self.splitters))


def read_steps(tokenizer: Any) -> TokenizerSteps | None:
    """Return the steps, or None if one of them is code that is not the library's.

    Args:
        tokenizer: of the tokenizers library.
    """
    try:
        return TokenizerSteps(
            _unfold(tokenizer.normalizer, "normalizers"),
            _unfold(tokenizer.pre_tokenizer, "pretokenizers"),
        )
    except Exception:  # the library raises a bare Exception for a step in Python
        return None


def _unfold(step: Any, members: str) -> list[TokenizerStep]:
    return [] if step is None else [*_leaves(json.loads(step.__getstate__()), members)]


def _leaves(step: TokenizerStep, members: str) -> Iterator[TokenizerStep]:
    if step["type"] != "Sequence":
        yield step
        return
    for member in step[members]:
        yield from _leaves(member, members)
