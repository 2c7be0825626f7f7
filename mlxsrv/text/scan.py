"""Search for fixed strings in text that arrives in pieces.

A streaming search asks two questions: where is the first match, and how much of the end must wait
because it may become a match?
"""

import re
from collections.abc import Collection


class Scanner:
    """Searches for a fixed set of patterns. It holds no text, so it may serve many streams.

    The first match is the one that is complete first. If two end together, it is the longer one. So
    the result does not depend on how the text was split: a pattern is found as soon as its last
    character is there, and what follows changes nothing.

    Attributes:
        start: finds the first character that may begin a match.
    """

    __slots__ = ("_patterns", "_reach", "start")

    def __init__(self, patterns: Collection[str]) -> None:
        if "" in patterns:
            raise ValueError("an empty pattern is found everywhere")
        self._patterns = tuple(dict.fromkeys(patterns))
        self._reach = max(map(len, self._patterns), default=1) - 1
        firsts = "".join(re.escape(first) for first in sorted({p[0] for p in self._patterns}))
        # Nearly all text has no such character, so callers ask this first: one search in C.
        self.start = re.compile(f"[{firsts}]" if firsts else "(?!)").search

    def search(self, text: str) -> tuple[int, int] | None:
        """Return the start and end of the first match."""
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
        """Return how many characters at the end of `text`, which has no match, may begin one."""
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
