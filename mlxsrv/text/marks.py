"""Markers that are tokens, shown as characters that no text has.

Formats of thoughts and calls have markers. Most are tokens of their own. The detokenizer shows such
a token as one noncharacter of Unicode. So it is never confused with a text that only spells the
marker, as code or a JSON string may, and nothing waits for the rest of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_FIRST = 0xFDD0
_MOST = 32  # U+FDD0 to U+FDEF, which Unicode keeps for uses such as this


class Marks:
    """The markers of one model's formats.

    Args:
        names: markers as the formats spell them.
        vocabulary: token ids by the names of tokens.

    Attributes:
        tokens: the characters of those markers that are tokens, by their ids.

    Raises:
        ValueError: more than 32 markers are tokens.
    """

    def __init__(self, names: Iterable[str], vocabulary: Mapping[str, int]) -> None:
        found = [name for name in dict.fromkeys(names) if name in vocabulary]
        if len(found) > _MOST:
            raise ValueError(f"{len(found)} markers are tokens, more than {_MOST}")
        self._shown = {name: chr(_FIRST + number) for number, name in enumerate(found)}
        self._names = str.maketrans({sign: name for name, sign in self._shown.items()})
        longest_first = sorted(map(re.escape, found), key=len, reverse=True)
        self._spelled = re.compile("|".join(longest_first) or "(?!)")
        self.ids: Mapping[str, int] = {name: vocabulary[name] for name in found}
        self.tokens: Mapping[int, str] = {
            token: self._shown[name] for name, token in self.ids.items()
        }

    def show(self, text: str) -> str:
        """Return a text of a format's with its markers as they are shown."""
        return self._spelled.sub(lambda found: self._shown[found[0]], text)

    def spell(self, text: str) -> str:
        """Return a shown text with all markers spelled."""
        return text.translate(self._names)


SPELLED = Marks((), {})
"""No marker is a token: all are spelled."""
