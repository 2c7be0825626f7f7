"""The times of speculative rounds, by how many tokens they propose to each row: a line, for a pass
takes some time for the weights and some for each token."""

from __future__ import annotations

from collections import deque
from statistics import median_low

_KEPT = 32  # rounds
_HELD_UP = 2.0  # times what is expected: what takes longer was held up by other work
_OUTLIER = 3.0  # times the median: so the first round may have been, of which nothing was expected


class RoundTimes:
    """The times of the last rounds, and what one of another size would take."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_KEPT)  # proposals, seconds
        self._base = 0.0  # seconds of a round without proposals
        self._slope = 0.0  # seconds of a proposal to each row
        self._least = 0.0  # seconds: no estimate is less
        self.widest = 0
        """Proposals of the longest of these rounds; 0: none is known."""

    def clear(self) -> None:
        self._seen.clear()
        self.widest = 0

    def add(self, proposed: int, seconds: float) -> float:
        """Learn from a round. Returns its seconds; fewer where other work held it up, which says
        nothing of the next."""
        if self._seen:
            seconds = min(seconds, _HELD_UP * self.estimate(proposed))
        self._seen.append((proposed, seconds))
        self.widest = max(size for size, _ in self._seen)
        self._fit(_OUTLIER * median_low(seconds for _, seconds in self._seen))
        return seconds

    def estimate(self, proposed: int) -> float:
        """Seconds of a round with so many proposals to each row. Where only one size is known, more
        proposals are thought to cost nothing: so longer ones are tried."""
        return max(self._base + self._slope * proposed, self._least)

    def _fit(self, most: float) -> None:
        """Least squares, of `most` seconds where a round took more. A proposal never takes less
        than nothing."""
        times = [(size, min(seconds, most)) for size, seconds in self._seen]
        count = len(times)
        size = sum(size for size, _ in times) / count
        mean = sum(seconds for _, seconds in times) / count
        spread = sum((each - size) ** 2 for each, _ in times)
        product = sum((each - size) * (seconds - mean) for each, seconds in times)
        self._slope = max(product / spread, 0.0) if spread else 0.0
        self._base = mean - self._slope * size
        self._least = min(seconds for _, seconds in times) / 2
