"""Regexes as clients write them, for the regex library in llguidance."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": r"[ \t\n\r\f\v]",
    # With ASCII alone a no-break space would match, which is whitespace in JSON Schema.
    "S": r"[^\s\x1c-\x1f\x{feff}]",
}


def ascii_classes(regex: str) -> str:
    r"""Return the regex with `\d`, `\w` and `\s` for ASCII only, as in JSON Schema's patterns.

    Inside a class of characters they become a nested class, which means the same.
    """
    return _ESCAPE.sub(lambda escape: _CLASSES.get(escape[1], escape[0]), regex)
