"""The activations of one SAE's features: the last tokens one by one, and statistics of all tokens.

Memory is bounded: the history has a size, and the statistics have one entry a feature. While
somebody watches, `record` runs on the event loop for each token of each row, so it only notes. The
answers of the API are made when somebody asks for them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from mlxsrv.engine.events import Activations
from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.steering import FeatureStatistics, HistoryEntry, Metric, MonitorObject

_USUAL_TOP = 10
_USUAL_HISTORY = 100


class _Seen(NamedTuple):
    time: float
    request: str
    event: Activations


class RunningStatistics:
    """Mean and deviation of numbers that come one by one. Welford's method does not lose the small
    differences of large numbers (Knuth, TAOCP 2, 4.2.2)."""

    __slots__ = ("active", "count", "max", "mean", "min", "squares")

    def __init__(self) -> None:
        self.count = 0
        self.active = 0
        self.mean = 0.0
        self.squares = 0.0  # the sum of the squared differences from the mean
        self.min = math.inf
        self.max = -math.inf

    def note(self, value: float) -> None:
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
        """The sample standard deviation; None for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else None

    @property
    def active_ratio(self) -> float:
        return self.active / self.count if self.count else 0.0


_METRICS: Mapping[Metric, Callable[[RunningStatistics], float]] = {
    "mean": lambda statistics: statistics.mean,
    "max": lambda statistics: statistics.max,
    "active_ratio": lambda statistics: statistics.active_ratio,
    "count": lambda statistics: statistics.count,
}


class Monitor:
    """The monitor of one attachment. It watches nothing until it is configured."""

    def __init__(self) -> None:
        self.enabled = False
        self.features: tuple[int, ...] = ()
        self._top: int | None = None
        self._history: deque[_Seen] = deque(maxlen=_USUAL_HISTORY)
        self._statistics: dict[int, RunningStatistics] = {}

    @property
    def top(self) -> int:
        """The number of highest activations to report for each token."""
        if self._top is not None:
            return self._top
        return 0 if self.features else _USUAL_TOP

    @property
    def report(self) -> MonitorObject:
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
        """Change what is given. Statistics start again when the features or `top` change: the mean
        over all tokens, and the mean over those where a feature was among the highest, do not mix.

        Raises:
            InvalidRequest: it is enabled, but would watch nothing. Nothing is changed then.
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
            raise InvalidRequest(
                "top_k: with 0 and without features, nothing would be watched", param="top_k"
            )
        if history_size is not None:
            self._history = deque(self._history, maxlen=history_size)
        if (self.features, self.top) != (before[1], before[3]):
            self._statistics.clear()

    def record(self, completion: str, event: Activations) -> None:
        """Note one token. Tokens that arrive after the monitor was disabled are ignored."""
        if not self.enabled:
            return
        self._history.append(_Seen(time.time(), completion, event))
        for feature, value in event.values:
            statistics = self._statistics.get(feature)
            if statistics is None:
                statistics = self._statistics[feature] = RunningStatistics()
            statistics.note(value)

    # The history.

    def history(self, limit: int, completion: str | None = None) -> list[HistoryEntry]:
        """The last tokens, the newest first; only those of `completion`, if it is given."""
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
        """The statistics of `features`, or of all that were reported, sorted by feature."""
        chosen = self._statistics if features is None else self._statistics.keys() & features
        return [_as_object(feature, self._statistics[feature]) for feature in sorted(chosen)]

    def clear_statistics(self, features: Collection[int] | None = None) -> None:
        for feature in list(self._statistics) if features is None else features:
            self._statistics.pop(feature, None)

    def highest(self, k: int, metric: Metric) -> list[FeatureStatistics]:
        """The `k` features with the highest values; equal ones are sorted by feature."""
        value = _METRICS[metric]
        ranked = sorted(self._statistics.items(), key=lambda item: (-value(item[1]), item[0]))
        return [_as_object(feature, statistics) for feature, statistics in ranked[:k]]


def _as_object(feature: int, statistics: RunningStatistics) -> FeatureStatistics:
    return FeatureStatistics(
        feature_idx=feature,
        count=statistics.count,
        mean=statistics.mean,
        std=statistics.deviation,
        min=statistics.min,
        max=statistics.max,
        active_ratio=statistics.active_ratio,
    )
