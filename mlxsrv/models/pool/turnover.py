"""The pace at which what is bounded (places at a model, bytes of bodies) comes back, so that who is
refused can be told when to try again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_LATEST = 16
_LONGEST = 60  # seconds; OpenAI's and Anthropic's SDKs take no longer advice


class Turnover:
    """Counts what is taken and given back.

    Args:
        clock: seconds; tests have their own.

    Attributes:
        held: how much is taken and was not given back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.held = 0
        self._clock = clock
        self._begun = 0.0
        self._returns: deque[tuple[float, int]] = deque(maxlen=_LATEST)  # when, and how much

    def take(self, amount: int) -> None:
        if not self.held:  # what came back before tells nothing of those who come now
            self._begun = self._clock()
            self._returns.clear()
        self.held += amount

    def give_back(self, amount: int) -> None:
        self.held -= amount
        if len(self._returns) == _LATEST:
            self._begun = self._returns[0][0]
        self._returns.append((self._clock(), amount))

    def seconds(self, amount: int) -> int:
        """Return in about how many seconds so much has come back, at the pace of the latest
        returns. The time since the last of them counts too; where there was none, it takes as long
        again."""
        passed = self._clock() - self._begun
        returned = sum(back for _, back in self._returns) or amount
        return min(max(math.ceil(passed * amount / returned), 1), _LONGEST)
