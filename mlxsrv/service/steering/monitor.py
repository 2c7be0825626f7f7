"""What the features of one SAE did: the last tokens one by one, all of them in statistics.

Memory is bounded: the history has a size, and the statistics one entry for each feature that there
is. `record` runs on the event loop once for each token of each row while somebody watches, so it
only notes; what is told is made when it is asked for.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from mlxsrv.engine.events import Activations
from mlxsrv.errors import InvalidRequest
from mlxsrv.wire.management import FeatureStatistics, HistoryEntry, Metric, MonitorObject

_USUAL_TOP = 10
_USUAL_HISTORY = 100


class _Seen(NamedTuple):
    time: float
    request: str
    event: Activations


class RunningStatistics:
    """Mean and deviation of numbers that come one by one, by Welford's method, which does not lose
    the small differences of large numbers (Knuth, TAOCP 2, 4.2.2)."""

    __slots__ = ("active", "count", "max", "mean", "min", "squares")

    def __init__(self) -> None:
        self.count = 0
        self.active = 0
        self.mean = 0.0
        self.squares = 0.0  # of the differences from the mean, summed
        self.min = math.inf
        self.max = -math.inf

    def add(self, value: float) -> None:
        self.count += 1
        self.active += value > 0
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)
        if value < self.min:
            self.min = value
        if value > self.max:
            self.max = value

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation; None of fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else None

    @property
    def active_ratio(self) -> float:
        return self.active / self.count if self.count else 0.0


_METRICS: Mapping[Metric, Callable[[RunningStatistics], float]] = {
    "mean": lambda running: running.mean,
    "max": lambda running: running.max,
    "active_ratio": lambda running: running.active_ratio,
    "count": lambda running: running.count,
}


class Monitor:
    """Watches nothing until it is configured."""

    def __init__(self) -> None:
        self.enabled = False
        self.features: tuple[int, ...] = ()
        self._top: int | None = None
        self._history: deque[_Seen] = deque(maxlen=_USUAL_HISTORY)
        self._statistics: dict[int, RunningStatistics] = {}

    @property
    def top(self) -> int:
        """How many of the highest to report of each token."""
        if self._top is not None:
            return self._top
        return 0 if self.features else _USUAL_TOP

    @property
    def state(self) -> MonitorObject:
        assert self._history.maxlen is not None
        return MonitorObject(
            enabled=self.enabled,
            features=self.features,
            top_k=self.top,
            history_size=self._history.maxlen,
            history_entries=len(self._history),
            features_seen=len(self._statistics),
        )

    def configure(
        self,
        *,
        enabled: bool | None = None,
        features: Collection[int] | None = None,
        top: int | None = None,
        history_size: int | None = None,
    ) -> None:
        """Change what is given. Statistics begin anew with other features: the mean of a feature
        over all tokens and that over those where it was among the highest do not mix.

        Raises:
            InvalidRequest: it is to watch, but nothing; then all is as it was.
        """
        before = self.enabled, self.features, self._top, self.top
        if enabled is not None:
            self.enabled = enabled
        if features is not None:
            self.features = tuple(sorted(set(features)))
        if top is not None:
            self._top = top
        if self.enabled and not self.features and not self.top:
            self.enabled, self.features, self._top, _ = before
            raise InvalidRequest("top_k: 0, and no features: that is nothing", param="top_k")
        if history_size is not None:
            self._history = deque(self._history, maxlen=history_size)
        if (self.features, self.top) != (before[1], before[3]):
            self._statistics.clear()

    def record(self, completion: str, event: Activations) -> None:
        """Note one token. What is on its way when the monitor is switched off is let go."""
        if not self.enabled:
            return
        self._history.append(_Seen(time.time(), completion, event))
        for feature, value in event.values:
            running = self._statistics.get(feature)
            if running is None:
                running = self._statistics[feature] = RunningStatistics()
            running.add(value)

    # The history.

    def history(self, limit: int, completion: str | None = None) -> list[HistoryEntry]:
        """The newest first; of one completion, if it is named."""
        return [
            HistoryEntry(
                timestamp=seen.time,
                request_id=seen.request,
                token_position=seen.event.position,
                activations=dict(seen.event.values),
            )
            for seen, _ in zip(self._newest(completion), range(limit), strict=False)
        ]

    def _newest(self, completion: str | None) -> Iterator[_Seen]:
        return (s for s in reversed(self._history) if completion in (None, s.request))

    def clear_history(self, completion: str | None = None) -> None:
        kept = [s for s in self._history if completion not in (None, s.request)]
        self._history = deque(kept, maxlen=self._history.maxlen)

    # Statistics.

    def statistics(self, features: Collection[int] | None = None) -> list[FeatureStatistics]:
        """By feature: of these, or of all that were reported."""
        chosen = self._statistics if features is None else self._statistics.keys() & features
        return [_told(feature, self._statistics[feature]) for feature in sorted(chosen)]

    def clear_statistics(self, features: Collection[int] | None = None) -> None:
        for feature in list(self._statistics) if features is None else features:
            self._statistics.pop(feature, None)

    def highest(self, k: int, metric: Metric) -> list[FeatureStatistics]:
        """The `k` features with the highest values, equal ones by their numbers."""
        value = _METRICS[metric]
        ranked = sorted(self._statistics.items(), key=lambda item: (-value(item[1]), item[0]))
        return [_told(feature, running) for feature, running in ranked[:k]]


def _told(feature: int, running: RunningStatistics) -> FeatureStatistics:
    return FeatureStatistics(
        feature_idx=feature,
        count=running.count,
        mean=running.mean,
        std=running.deviation,
        min=running.min,
        max=running.max,
        active_ratio=running.active_ratio,
    )
