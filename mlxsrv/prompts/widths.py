"""How many bytes of text one token can stand for at most, if that can be known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import ceil
from typing import Any

# The bytes of a text and of its NFC: a Kelvin sign is a K then.
_MOST_NFC_SHRINKS = 3
_LONGEST_CHARACTER = 4  # bytes of UTF-8

# What splits a text and loses nothing of it.
_LOSSLESS = frozenset(("ByteLevel", "Digits", "Metaspace"))

Spec = dict[str, Any]


def widest_token(tokenizer: Any) -> int | None:
    """The most bytes of text that a token can stand for; None if there may be more than any.

    There may where the tokenizer leaves text out (it strips, collapses or drops it), or has one
    token for whatever it does not know.

    Args:
        tokenizer: of the tokenizers library.
    """
    parts = read_parts(tokenizer)
    if parts is None:
        return None
    shrinks = _shrinks(parts.normalizers)
    if shrinks is None or not all(map(_is_lossless, parts.splitters)):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # these swallow spaces
        return None
    widest = _widest_in_model(tokenizer.model, tokenizer.get_vocab(), parts.byte_level)
    if widest is None:
        return None
    return shrinks * max(widest, *(len(token.content.encode()) for token in added), 1)


class Parts:
    """The steps of a tokenizer before its model, as its file has them."""

    def __init__(self, normalizers: list[Spec], splitters: list[Spec]) -> None:
        self.normalizers = normalizers
        self.splitters = splitters
        steps = [*normalizers, *splitters]
        self.byte_level = any(step["type"] == "ByteLevel" for step in steps)


def read_parts(tokenizer: Any) -> Parts | None:
    """None where a step is code that is not the library's."""
    try:
        return Parts(
            _flatten(tokenizer.normalizer, "normalizers"),
            _flatten(tokenizer.pre_tokenizer, "pretokenizers"),
        )
    except Exception:  # of the library, whose own class that is
        return None


def _flatten(step: Any, members: str) -> list[Spec]:
    if step is None:
        return []
    spec: Spec = json.loads(step.__getstate__())
    return [*_leaves(spec, members)]


def _leaves(spec: Spec, members: str) -> Iterable[Spec]:
    if spec["type"] != "Sequence":
        yield spec
        return
    for member in spec[members]:
        yield from _leaves(member, members)


def _shrinks(normalizers: Iterable[Spec]) -> int | None:
    """How many times fewer bytes a text may have after these; None: any."""
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


def _is_lossless(splitter: Spec) -> bool:
    if splitter["type"] in ("Split", "Punctuation"):
        return bool(splitter.get("behavior") != "Removed")
    return splitter["type"] in _LOSSLESS


def _widest_in_model(model: Any, vocabulary: dict[str, int], byte_level: bool) -> int | None:
    """None if the model may have one token for any number of unknown characters, or none."""
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
