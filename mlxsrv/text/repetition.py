"""A guard against answers that repeat themselves without end."""

from __future__ import annotations

import numpy as np

from mlxsrv.generation.parameters import RepetitionLimit


class RepetitionGuard:
    """Looks at the tokens of one answer.

    For each period it counts how many tokens in a row are the same as the one a period before. A
    sequence of p tokens has come k times once that is p * (k - 1). A token costs two operations on
    as many numbers as there are periods.

    Attributes:
        found: the answer repeats itself.
    """

    def __init__(self, limit: RepetitionLimit) -> None:
        periods = np.arange(1, limit.longest + 1)
        self._needed = np.where(periods < limit.shortest, 1 << 30, periods * (limit.count - 1))
        self._runs = np.zeros(limit.longest, dtype=np.int64)
        self._tokens = np.full(4 * limit.longest + 4, -1, dtype=np.int64)
        self._size = limit.longest  # before the first there are none
        self._longest = limit.longest
        self.found = False

    def feed(self, token: int) -> None:
        """Look at the next token."""
        size, longest = self._size, self._longest
        if size == len(self._tokens):
            self._tokens[:longest] = self._tokens[size - longest :]
            size = longest
        earlier = self._tokens[size - longest : size][::-1]  # the one before, the one before that
        self._runs = (self._runs + 1) * (earlier == token)
        self._tokens[size] = token
        self._size = size + 1
        self.found = self.found or bool((self._runs >= self._needed).any())
