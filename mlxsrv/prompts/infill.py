"""Fill-in-the-middle prompts: the text before and after a gap, with the model's own markers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from mlxsrv.formats.infill import InfillText, find_family, lay_out, to_tokens
from mlxsrv.generation.spec import ProjectFile
from mlxsrv.prompts.encoding import TokenBudget

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Prompt, Tokenizer

_SIGN = "\u263a"  # no vocabulary merges it with what follows


def infill(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    files: Sequence[ProjectFile] = (),
    budget: TokenBudget | None = None,
) -> Prompt | None:
    """Return the prompt for the text between two others, or None if the model has no markers.

    Args:
        files: others of the project, which come first.

    Raises:
        ContextLengthExceeded: a text is so far over the budget that its tokens were not counted.
    """
    ids = tokenizer.ids_by_name
    family = find_family(ids)
    if family is None:
        return None
    parts = lay_out(family, prefix, suffix, files)
    tokens = to_tokens(parts, ids, partial(_encode, tokenizer, budget))
    start = tokenizer.token_ids("", special=True)[:1]
    if start and start[0] == ids.get(tokenizer.special_tokens["bos_token"] or ""):
        tokens = start + tokens
    ends = frozenset(ids[name] for name in family.ends if name in ids)
    return structs.replace(tokenizer.prompt_of(tokens), ends=ends)


def _encode(tokenizer: Tokenizer, budget: TokenBudget | None, part: InfillText) -> list[int]:
    """Return the tokens of a text inside a prompt.

    If the tokenizer writes a space before each text, it is made to write it before a sign that is
    taken off again.
    """
    if not (part.joined and tokenizer.strips_first_space):
        return tokenizer.token_ids(part.text, special=False, budget=budget)
    sign = tokenizer.token_ids(_SIGN, special=False)
    return tokenizer.token_ids(_SIGN + part.text, special=False, budget=budget)[len(sign) :]
