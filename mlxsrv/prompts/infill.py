"""Prompts of texts with a gap, for models that fill in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from mlxsrv.prompts.encoding import TokenBudget
from mlxsrv.text.infill import InfillText, ProjectFile, find_family, lay_out, to_tokens

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Prompt, Tokenizer

_SIGN = "\u263a"  # no vocabulary merges it with what follows


def infill(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    files: Sequence[ProjectFile] = (),
    limit: TokenBudget | None = None,
) -> Prompt | None:
    """What is to be written between two texts; None: the model has no tokens for that.

    Raises:
        ContextLengthExceeded: one is so long over the limit that its tokens were not counted.
    """
    numbers = tokenizer.numbers
    family = find_family(numbers)
    if family is None:
        return None
    parts = lay_out(family, prefix, suffix, files)
    tokens = to_tokens(parts, numbers, partial(_split, tokenizer, limit))
    start = tokenizer.split("", special=True)[:1]
    if start and start[0] == numbers.get(tokenizer.special_names["bos_token"] or ""):
        tokens = start + tokens
    ends = frozenset(numbers[name] for name in family.ends if name in numbers)
    return structs.replace(tokenizer.given(tokens), ends=ends)


def _split(tokenizer: Tokenizer, limit: TokenBudget | None, part: InfillText) -> list[int]:
    """A text within a prompt. Where the tokenizer writes a space before each text, it is cut off
    behind a sign."""
    if not (part.joined and tokenizer.strips_first_space):
        return tokenizer.split(part.text, special=False, limit=limit)
    sign = tokenizer.split(_SIGN, special=False)
    return tokenizer.split(_SIGN + part.text, special=False, limit=limit)[len(sign) :]
