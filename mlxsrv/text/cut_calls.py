"""How far a call came that a limit cut, where its dialect is read by a parser.

A parser reads whole calls. From half a call some make arguments that look right and are not, a
path without its end say, so none is asked. The name stands before the arguments in every dialect,
so it is told once it is complete. Arguments are told where they are JSON text, as far as they came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

# What stands right before a name: `call:f{`, `functions.f:0`, `name="f"`, `<function=f>`, `[f(`.
_BEFORE = r'(?:^\s*(?:call:)?|functions\.|["=\[])'
_AFTER = r'(?=[\s{:"<\[(>])'
# Mistral's and Kimi's arguments.
_JSON_ARGUMENTS = re.compile(
    r"(?::\d+)?\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|<\|tool_call_argument_begin\|>)\s*(?={)"
)


def read_cut(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    """The name of the call that `text` begins, one of `names`, and its arguments as far as they
    can be told: perhaps none. None if the name is not complete."""
    if not names:
        return None
    any_name = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    found = re.search(f"{_BEFORE}({any_name}){_AFTER}", text)
    if found is None:
        return None
    arguments = _JSON_ARGUMENTS.match(text, found.end())
    return found[1], _object(text[arguments.end() :]) if arguments else ""


def _object(text: str) -> str:
    """The JSON object that `text` begins with, or all of it, where it has no end."""
    try:
        return text[: json.JSONDecoder().raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text
