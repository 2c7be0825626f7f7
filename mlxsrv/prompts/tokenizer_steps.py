"""The steps of a fast tokenizer around its model: normalizers, splitters into words, decoders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

TokenizerStep = dict[str, Any]
"""One step, as `tokenizer.json` has it."""


class TokenizerSteps(msgspec.Struct, frozen=True):
    """All steps in order, with sequences unfolded."""

    normalizers: list[TokenizerStep]
    splitters: list[TokenizerStep]
    decoders: list[TokenizerStep]

    @property
    def byte_level(self) -> bool:
        """Whether a step spells the bytes of a text as characters, as GPT-2's tokenizer does."""
        return _has_byte_level((*self.normalizers, *self.splitters))


def read_steps(tokenizer: Any) -> TokenizerSteps | None:
    """Return the steps, or None if one of them is code that is not the library's.

    Args:
        tokenizer: of the tokenizers library.
    """
    try:
        return TokenizerSteps(
            _unfold(tokenizer.normalizer, "normalizers"),
            _unfold(tokenizer.pre_tokenizer, "pretokenizers"),
            _unfold(tokenizer.decoder, "decoders"),
        )
    except Exception:  # the library raises a bare Exception for a step in Python
        return None


def mend_decoder(tokenizer: Any) -> bool:
    """Give a byte-level vocabulary the byte-level decoder, where its files name another.

    With sentencepiece's, which some conversions leave there, each space would be written as Ġ.

    Args:
        tokenizer: of the tokenizers library.

    Returns:
        Whether it was mended.
    """
    steps = read_steps(tokenizer)
    if steps is None or not steps.byte_level or _has_byte_level(steps.decoders):
        return False
    from tokenizers.decoders import ByteLevel

    tokenizer.decoder = ByteLevel()
    return True


def _has_byte_level(steps: Iterable[TokenizerStep]) -> bool:
    return any(step["type"] == "ByteLevel" for step in steps)


def _unfold(step: Any, members: str) -> list[TokenizerStep]:
    return [] if step is None else [*_leaves(json.loads(step.__getstate__()), members)]


def _leaves(step: TokenizerStep, members: str) -> Iterator[TokenizerStep]:
    if step["type"] != "Sequence":
        yield step
        return
    for member in step[members]:
        yield from _leaves(member, members)
