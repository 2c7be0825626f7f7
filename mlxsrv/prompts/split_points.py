"""Places where a text may be split so that the tokens of the pieces are exactly those of the whole.

The places are between an ASCII letter or digit and a space or line break, if for this tokenizer:

- its normalizers change each character by itself, or with marks that follow it;
- of its added tokens, none matches text on both sides, looks ahead or behind over it, or removes
  whitespace next to it;
- its own splitting of a text into words splits there, whatever stands around. This is tried with
  all short surroundings of characters of all kinds; patterns that look back are not trusted. Or the
  place is inside a word, and no token of its BPE model, so no merge, spans it.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, product
from typing import Any

from mlxsrv.prompts.tokenizer_steps import TokenizerStep, read_steps

_WORD = string.ascii_letters + string.digits
_BREAKS = " \n"

_LOCAL = frozenset(
    ("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents")
)
# Some vocabularies have ▁ for a space.
_SPANNING = re.compile(r"[^\s▁][\s▁]")
# Lookbehind, references to what was matched, and anchors there.
_LOOKS_BACK = re.compile(r"\(\?<[=!]|\\[1-9GKk]")

# A character of each kind that patterns tell apart, and letters of contractions.
_KINDS = "aS1 \n\t.'_-中é\u0301"
_ENDS = "asS1"

SplitWords = Callable[[str], list[str]]


def find_split_points(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern that matches the character after each place; None if there are none.

    Args:
        tokenizer: of the tokenizers library.
    """
    steps = read_steps(tokenizer)
    if steps is None or getattr(tokenizer.model, "dropout", None):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if not all(map(_is_local, steps.normalizers)) or any(map(_spans, added)):
        return None
    if any(map(_looks_back, steps.splitters)):
        return None
    breaks = [after for after in _BREAKS if _splits_before(tokenizer, after)]
    return re.compile(f"(?<=[a-zA-Z0-9])[{''.join(breaks)}]") if breaks else None


def _is_local(normalizer: TokenizerStep) -> bool:
    match normalizer:
        case {"type": "Replace", "pattern": {"String": str(old)}}:
            return not _SPANNING.search(old)
        case _:
            return normalizer["type"] in _LOCAL


def _spans(added: Any) -> bool:
    content = added.content
    swallows = added.rstrip and content[-1:].isalnum()
    return bool(added.single_word or swallows or _SPANNING.search(content))


def _looks_back(splitter: TokenizerStep) -> bool:
    pattern = splitter.get("pattern")
    return isinstance(pattern, dict) and bool(_LOOKS_BACK.search(pattern.get("Regex", "")))


def _splits_before(tokenizer: Any, after: str) -> bool:
    """Whether a text may be split before the break `after`."""
    split, joins = _word_splitter(tokenizer), False
    for left, right in _surroundings():
        whole, first, second = split(left + after + right), split(left), split(after + right)
        if whole == first + second:
            continue
        if not first or not second:
            return False
        if whole != [*first[:-1], first[-1] + second[0], *second[1:]]:
            return False
        joins = True
    return not joins or _never_merges(tokenizer, split(f"a{after}a")[-1])


def _word_splitter(tokenizer: Any) -> SplitWords:
    """Return the tokenizer's own steps before its model: from a text to its normalized words."""
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer

    @cache
    def split(text: str) -> list[str]:
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        if splitter is None:
            return [text]
        return [word for word, _ in splitter.pre_tokenize_str(text)]

    return split


def _surroundings() -> Iterator[tuple[str, str]]:
    """Yield texts before and after the place, of up to three and up to two characters."""

    def up_to(length: int) -> list[str]:
        return ["".join(few) for n in range(length + 1) for few in product(_KINDS, repeat=n)]

    few, many = up_to(1), up_to(2)
    for before, right in chain(product(few, many), product(many, few)):
        for end in _ENDS:
            yield before + end, right


def _never_merges(tokenizer: Any, joined: str) -> bool:
    """Whether no token of the model spans the place before a break.

    Args:
        joined: one word of the tokenizer's, which ends in a letter, the break and a letter.
    """
    model, vocabulary = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
    if type(model).__name__ != "BPE" or len(joined) < 3 or joined[-3] != "a":
        return False
    if model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    known = vocabulary.keys() >= {*_WORD, joined[-2]}  # or unknown ones could be fused
    across = re.compile(f"[a-zA-Z0-9]{re.escape(joined[-2])}")
    return known and not any(map(across.search, vocabulary))
