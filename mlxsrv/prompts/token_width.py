"""The most bytes of text that one token can stand for.

With it a text that cannot fit a token budget is refused by its size, before it is tokenized.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any

from mlxsrv.prompts.tokenizer_steps import TokenizerStep, read_steps

# A text has at most three times the bytes of its NFC: a Kelvin sign, three bytes, becomes a K.
_MOST_NFC_SHRINKS = 3
_LONGEST_CHARACTER = 4  # bytes of UTF-8

# Splitters that keep all of a text.
_LOSSLESS = frozenset(("ByteLevel", "Digits", "Metaspace"))


def max_token_bytes(tokenizer: Any) -> int | None:
    """Return the most bytes of text that a token can stand for, or None if there is no bound.

    There is no bound if the tokenizer leaves text out (it strips, collapses or drops some), or has
    one token for all that it does not know.

    Args:
        tokenizer: of the tokenizers library.
    """
    steps = read_steps(tokenizer)
    if steps is None:
        return None
    shrinkage = _max_shrinkage(steps.normalizers)
    if shrinkage is None or not all(map(_is_lossless, steps.splitters)):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # these swallow spaces
        return None
    longest = _longest_in_model(tokenizer.model, tokenizer.get_vocab(), steps.byte_level)
    if longest is None:
        return None
    return shrinkage * max(longest, *(len(token.content.encode()) for token in added), 1)


def _max_shrinkage(normalizers: Iterable[TokenizerStep]) -> int | None:
    """Return how many times fewer bytes a text may have after these; None: no bound."""
    times = 1
    for step in normalizers:
        match step:
            case {"type": "ByteLevel"} | {"type": "Prepend"}:
                pass
            case {"type": "NFC"}:
                times *= _MOST_NFC_SHRINKS
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if new:
                times *= max(ceil(len(old.encode()) / len(new.encode())), 1)
            case _:
                return None
    return times


def _is_lossless(splitter: TokenizerStep) -> bool:
    if splitter["type"] in ("Split", "Punctuation"):
        return bool(splitter.get("behavior") != "Removed")
    return splitter["type"] in _LOSSLESS


def _longest_in_model(model: Any, vocabulary: dict[str, int], byte_level: bool) -> int | None:
    """Return the bytes of the longest token in the model's vocabulary.

    None if the model may have one token for any number of unknown characters, or none for them.
    """
    if type(model).__name__ != "BPE":
        return None
    if byte_level:
        from tokenizers.pre_tokenizers import ByteLevel

        if not vocabulary.keys() >= {*ByteLevel.alphabet()}:
            return None
        return max(map(len, vocabulary))  # each character is a byte
    spelled = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not (model.byte_fallback and spelled) and (
        model.fuse_unk or model.unk_token not in vocabulary
    ):
        return None
    return max(_LONGEST_CHARACTER, *(len(token.encode()) for token in vocabulary))
