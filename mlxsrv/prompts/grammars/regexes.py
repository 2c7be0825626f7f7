"""Regexes as clients write them, in the words of the regex library that llguidance has."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": r"[ \t\n\r\f\v]",
    # ASCII alone would let a no-break space match, which is whitespace to JSON Schema.
    "S": r"[^\s\x1c-\x1f\x{feff}]",
}


def ascii_classes(regex: str) -> str:
    r"""The regex with `\d`, `\w` and `\s` for ASCII only, as JSON Schema's patterns have them.

    In a class of characters they become a class in it, which means the same.
    """
    return _ESCAPE.sub(lambda escape: _CLASSES.get(escape[1], escape[0]), regex)
