"""Totals of an app's requests, and its last errors: what `GET /health?verbose=1` has of them.

There is no option for them, unlike metrics and traces. Nothing is called for a token.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from math import ceil
from statistics import median
from typing import ClassVar

from mlxsrv.generation.status import FirstTokenTimes, RecentError, RequestTotals
from mlxsrv.service.observing import Observer, RequestEnded

_REPLIES = 100
_ERRORS = 20


class Totals(Observer):
    """The totals and the last errors of one app."""

    timed: ClassVar[bool] = False

    def __init__(self) -> None:
        self._ended = 0
        self._failed = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._ttfts: deque[float] = deque(maxlen=_REPLIES)
        self._errors: deque[RecentError] = deque(maxlen=_ERRORS)

    def ended(self, request: RequestEnded) -> None:
        if request.error is not None:
            self._errors.append(_recent_error(request, request.error))
        if request.operation is None:
            return
        self._ended += 1
        self._failed += request.error is not None
        self._prompt_tokens += request.tokens or 0
        one = request.generated
        if one is not None and one.ttft is not None:
            self._ttfts.append(one.ttft)
            self._prompt_tokens += one.usage.prompt_tokens
            self._cached_tokens += one.usage.cached_tokens
            self._completion_tokens += one.usage.completion_tokens

    @property
    def requests(self) -> RequestTotals:
        return RequestTotals(
            ended=self._ended,
            failed=self._failed,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            ttft=self._first_token_times(),
        )

    def _first_token_times(self) -> FirstTokenTimes | None:
        if not self._ttfts:
            return None
        times = sorted(self._ttfts)
        return FirstTokenTimes(
            replies=len(times), median=median(times), p95=times[ceil(0.95 * len(times)) - 1]
        )

    @property
    def errors(self) -> list[RecentError]:
        """The last ones, the latest first."""
        return [*reversed(self._errors)]


def _recent_error(request: RequestEnded, code: str) -> RecentError:
    seconds = request.time / 1e9 + request.ended - request.begun
    return RecentError(
        time=datetime.fromtimestamp(seconds, UTC),
        method=request.method,
        route=request.route,
        status=request.status,
        code=code,
        model=request.model,
        request_id=request.id,
    )
