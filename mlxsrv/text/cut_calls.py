"""The name and arguments of a tool call that a limit cut off, in dialects with a parser.

A parser reads whole calls. From half a call some parsers make arguments that look right and are
wrong, such as a path without its end, so none is asked. In every dialect the name stands before
the arguments, so it is sent once it is complete. Arguments are sent as far as they were written, if
they are JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

# Right before a name stands one of: `call:f{`, `functions.f:0`, `name="f"`, `<function=f>`, `[f(`.
_BEFORE = r'(?:^\s*(?:call:)?|functions\.|["=\[])'
_AFTER = r'(?=[\s{:"<\[(>])'
# Mistral's and Kimi's arguments.
_JSON_ARGUMENTS = re.compile(
    r"(?::\d+)?\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|<\|tool_call_argument_begin\|>)\s*(?={)"
)


def read_cut(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the name of the call that `text` begins, and its arguments as far as they are known.

    Args:
        names: of the tools that may be called.

    Returns:
        None if the name is not complete. The arguments may be empty.
    """
    if not names:
        return None
    any_name = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    found = re.search(f"{_BEFORE}({any_name}){_AFTER}", text)
    if found is None:
        return None
    arguments = _JSON_ARGUMENTS.match(text, found.end())
    return found[1], _object(text[arguments.end() :]) if arguments else ""


def _object(text: str) -> str:
    """Return the JSON object that `text` begins with, or all of `text` if the object has no end."""
    try:
        return text[: json.JSONDecoder().raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text
