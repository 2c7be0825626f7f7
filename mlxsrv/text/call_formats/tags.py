"""Tags of formats of calls, as they are found in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, Literal

WAIT: Final = "wait"

Found = tuple[int, str]
"""The place behind a tag, and the text that stands in it."""

_MARKS = "\ufdd0-\ufdef"
_SIGNS = {
    " ": r"\s{0,32}",
    "\n?": r"\n?",
    ">?": rf"(?:>|(?=[<\n{_MARKS}]))",
    "{text}": rf"([^<>\n{_MARKS}]{{0,256}})",
    "{word}": rf"([^\s<>{{}}{_MARKS}]{{1,256}})",
    "{end}": rf"(?=[\s<{{{_MARKS}])",
}
_PART = re.compile(r"\n\?|>\?|\{\w+\}|.", re.DOTALL)


class Tag:
    """A tag.

    Args:
        pattern: the tag as it is shown, with " " for any whitespace or none, "{text}" for a text in
            one line without angle brackets, "{word}" for one without whitespace, "{end}" before
            whatever ends a word, "\\n?" for a newline or none, and ">?" for a bracket that may be
            missing in front of another tag or a line's end.

    Attributes:
        firsts: the characters with which it may begin.
    """

    __slots__ = ("_part", "_whole", "firsts")

    def __init__(self, pattern: str) -> None:
        self._whole, self._part = _compile(pattern)
        self.firsts = frozenset(_firsts(pattern))

    def match(self, text: str, at: int = 0) -> Found | Literal["wait"] | None:
        """Return what is found at this place; `WAIT` if the text ends before that is certain."""
        if found := self._whole.match(text, at):
            return found.end(), found[1] if found.re.groups else ""
        return WAIT if self._part.match(text, at) else None


@lru_cache(maxsize=1024)  # each call makes the tags of its format
def _compile(pattern: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the expressions of a whole tag, and of the beginning of one at the end of a text."""
    atoms = [_SIGNS.get(part) or re.escape(part) for part in _PART.findall(pattern)]
    part = ""
    for atom in reversed(atoms):
        part = f"(?:{atom}{part})?"
    return re.compile("".join(atoms)), re.compile(part + r"\Z")


def _firsts(pattern: str) -> Iterator[str]:
    if pattern.startswith("\n?"):
        yield "\n"
        pattern = pattern[2:]
    yield pattern[0]
