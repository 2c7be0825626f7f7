"""How often each client may ask.

A bucket holds `limit` requests and fills evenly, one every 60 / `limit` seconds, so a client may
ask for `limit` at once and for as many in every minute after. All that is kept of a bucket is the
time when it will be full: one that is full is as good as one that was never there.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

import msgspec

_MINUTE = 60.0  # seconds
_MOST_CLIENTS = 10_000


class Allowance(msgspec.Struct, frozen=True):
    """What a client has left after a request. Times are in seconds from then; `wait` is until the
    next one would be granted, None if this one was."""

    limit: int
    remaining: int
    reset: float
    wait: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        """In the words of OpenAI's API; whole seconds, rounded up, where HTTP wants them."""
        told = {
            "X-RateLimit-Limit-Requests": str(self.limit),
            "X-RateLimit-Remaining-Requests": str(self.remaining),
            "X-RateLimit-Reset-Requests": _duration(self.reset),
        }
        return told if self.wait is None else {**told, "Retry-After": str(math.ceil(self.wait))}


class RateLimit:
    """The buckets of all clients that asked of late; the longest idle make room for new ones."""

    def __init__(
        self,
        limit: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        most: int = _MOST_CLIENTS,
    ) -> None:
        self._limit = limit
        self._interval = _MINUTE / limit
        self._clock = clock
        self._most = most
        self._full_at: OrderedDict[Hashable, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, client: Hashable) -> Allowance:
        """Take one request from the client's bucket, if it has one. A refusal takes nothing."""
        now = self._clock()
        full_at = max(self._full_at.pop(client, now), now)
        over = full_at + self._interval - now - _MINUTE
        # What sums of fractions are off by must not cost the last request of a full bucket.
        if over > 1e-6:
            self._full_at[client] = full_at
            return Allowance(self._limit, 0, full_at - now, wait=over)
        full_at = self._full_at[client] = full_at + self._interval
        if len(self._full_at) > self._most:
            self._full_at.popitem(last=False)
        left = max(_MINUTE - (full_at - now), 0)
        return Allowance(self._limit, int(left / self._interval + 1e-6), full_at - now)


def _duration(seconds: float) -> str:
    """As Go writes durations, and OpenAI with it: 20ms, 8.64s, 1m30s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, _MINUTE)
    return f"{f'{minutes:.0f}m' if minutes else ''}{round(rest, 3):g}s"
