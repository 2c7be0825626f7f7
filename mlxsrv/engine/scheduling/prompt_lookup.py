"""Prompt lookup: proposals from the row's own text, without a draft model.

An answer that edits a file or quotes a document repeats long parts of its prompt. So the tokens
that followed the last few tokens the time before are likely to follow them again (Saxena 2023,
"prompt lookup decoding"; Hugging Face, vLLM and llama.cpp have it, too).

A match begins where the last `GRAM` tokens have occurred before, at the latest of these places. It
then stays with its place as long as each new token is the one that followed there. Others look for
the latest place at every token, and so jump from the file to the answer and back wherever a few
tokens occur in both.

A match of n tokens proposes n tokens at most: a repetition that has just begun is often a chance.

"""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 3  # tokens with which a match begins
AT_ONCE = 4096  # tokens to index between two steps at most: about a millisecond

_BITS = 21  # of a token id in a key. Larger ids would share keys, and be proposed wrongly at worst
_MASK = (1 << GRAM * _BITS) - 1


class PromptLookup:
    """The text of one row, and where each of its n-grams occurred last.

    A token costs constant time and about 120 bytes.

    Args:
        text: the row's text so far.
    """

    def __init__(self, text: Sequence[int] = ()) -> None:
        self._text: list[int] = []
        self._indexed = 0  # tokens of the text that are looked at
        self._behind: dict[int, int] = {}  # n-gram to the index of the token behind it
        self._key = _MASK  # the last `GRAM` tokens; no token has such an id
        self._place = 0  # index of the token that the match expects next
        self._matched = 0  # tokens of the match; 0: there is none
        self.extend(text)

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self._text)

    def extend(self, tokens: Sequence[int], limit: int = AT_ONCE) -> int:
        """Append `tokens` to the text. Returns how many tokens were looked at.

        A call looks at `limit` tokens at most, so that nobody waits for a long prompt. Nothing is
        proposed until later calls, which may bring no tokens, have looked at the rest.
        """
        self._text += tokens
        text, behind = self._text, self._behind
        key, place, matched = self._key, self._place, self._matched
        end = min(len(text), self._indexed + limit)
        for index in range(self._indexed, end):
            token = text[index]
            key = (key << _BITS | token) & _MASK
            if matched and text[place] == token:
                place, matched = place + 1, matched + 1
            elif found := behind.get(key):
                place, matched = found, GRAM
            else:
                matched = 0
            behind[key] = index + 1
        looked, self._indexed = end - self._indexed, end
        self._key, self._place, self._matched = key, place, matched
        return looked

    def propose(self, most: int) -> list[int]:
        """At most `most` tokens that are likely to follow the text; none where it repeats nothing.

        A text that repeats its own end goes on repeating it.
        """
        if self._indexed < len(self._text):
            return []
        count = min(self._matched, most)
        found = self._text[self._place : self._place + count]
        while 0 < len(found) < count:
            found += found[: count - len(found)]
        return found
