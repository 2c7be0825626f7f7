"""The steps of a fast tokenizer around its model, and how many bytes of text a token stands for.

With these bytes a text that cannot fit a token budget is refused by its size, before it is
tokenized.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import ceil
from typing import Any

_Step = dict[str, Any]  # as `tokenizer.json` has it

# A text has at most three times the bytes of its NFC: a Kelvin sign, three bytes, becomes a K.
_MOST_NFC_SHRINKS = 3
_LONGEST_CHARACTER = 4  # bytes of UTF-8

# Splitters that keep all of a text.
_LOSSLESS = frozenset(("ByteLevel", "Digits", "Metaspace"))


def mend_decoder(tokenizer: Any) -> bool:
    """Give a byte-level vocabulary the byte-level decoder, where its files name another.

    With sentencepiece's, which some conversions leave there, each space would be written as Ġ.

    Args:
        tokenizer: of the tokenizers library.

    Returns:
        Whether it was mended.
    """
    try:
        steps = [*_read(tokenizer.normalizer), *_read(tokenizer.pre_tokenizer)]
        decoders = _read(tokenizer.decoder)
    except Exception:  # the library raises a bare Exception for a step in Python
        return False
    if not _has_byte_level(steps) or _has_byte_level(decoders):
        return False
    from tokenizers.decoders import ByteLevel

    tokenizer.decoder = ByteLevel()
    return True


def max_token_bytes(tokenizer: Any) -> int | None:
    """Return the most bytes of text that a token can stand for, or None if there is no bound.

    There is no bound if the tokenizer leaves text out (it strips, collapses or drops some), or has
    one token for all that it does not know.

    Args:
        tokenizer: of the tokenizers library.
    """
    try:
        normalizers, splitters = _read(tokenizer.normalizer), _read(tokenizer.pre_tokenizer)
    except Exception:  # as above
        return None
    shrinkage = _max_shrinkage(normalizers)
    if shrinkage is None or not all(map(_is_lossless, splitters)):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # these swallow spaces
        return None
    byte_level = _has_byte_level(normalizers + splitters)
    longest = _longest_in_model(tokenizer.model, tokenizer.get_vocab(), byte_level)
    if longest is None:
        return None
    return shrinkage * max(longest, *(len(token.content.encode()) for token in added), 1)


def _read(part: Any) -> list[_Step]:
    """Return the steps of one part of a tokenizer, with sequences unfolded."""
    return [] if part is None else [*_leaves(json.loads(part.__getstate__()))]


def _leaves(step: _Step) -> Iterator[_Step]:
    if step["type"] != "Sequence":
        yield step
        return
    [members] = (value for name, value in step.items() if name != "type")
    for member in members:
        yield from _leaves(member)


def _has_byte_level(steps: Iterable[_Step]) -> bool:
    """Return whether a step spells the bytes of a text as characters, as GPT-2's tokenizer does."""
    return any(step["type"] == "ByteLevel" for step in steps)


def _max_shrinkage(normalizers: Iterable[_Step]) -> int | None:
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


def _is_lossless(splitter: _Step) -> bool:
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
