"""Finding fixed strings in text that arrives in pieces.

Two questions answer every need of a streaming search: where is the first match, and how much of
the end must wait because it may still become one.
"""

import re
from collections.abc import Collection


class Scanner:
    """Searches for a fixed set of patterns; holds no text itself, so one may serve many streams.

    The first match is the one that is complete first, and of two that end together the longer.
    Judging by the end, not by the start, is what makes the result the same however the text was
    cut: a pattern is found as soon as its last character is there, never revised by what follows.
    """

    __slots__ = ("_patterns", "_reach", "start")

    def __init__(self, patterns: Collection[str]) -> None:
        if "" in patterns:
            raise ValueError("an empty pattern is found everywhere")
        self._patterns = tuple(dict.fromkeys(patterns))
        self._reach = max(map(len, self._patterns), default=1) - 1
        firsts = "".join(re.escape(first) for first in sorted({p[0] for p in self._patterns}))
        # Finds a character that a pattern begins with. Nearly all text has none, so callers ask
        # this first: one search in C.
        self.start = re.compile(f"[{firsts}]" if firsts else "(?!)").search

    def find(self, text: str) -> tuple[int, int] | None:
        """The start and end of the first match."""
        match = None
        limit = len(text)
        for pattern in self._patterns:
            start = text.find(pattern, 0, limit)
            if start < 0:
                continue
            end = start + len(pattern)
            if match is None or end < limit or start < match[0]:
                match = start, end
                limit = end
        return match

    def held(self, text: str) -> int:
        """How many characters at the end of `text`, which has no match, may begin one."""
        size = len(text)
        candidate = self.start(text, max(0, size - self._reach))
        while candidate:
            start = candidate.start()
            tail = text[start:]
            for pattern in self._patterns:
                if pattern.startswith(tail):
                    return size - start
            candidate = self.start(text, start + 1)
        return 0
