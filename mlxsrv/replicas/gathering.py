"""Requests that one replica cannot answer alone, and the answers that are gathered for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from mlxsrv.replicas.merging import (
    Merge,
    merge_health,
    merge_history,
    merge_metrics,
    merge_models,
    merge_running,
    merge_statistics,
    pick_highest,
)
from mlxsrv.web.paths import is_verbose
from mlxsrv.wire.management import TopRequest

_HISTORY: Final = "/api/monitoring/history"
_STATISTICS: Final = "/api/monitoring/statistics"
_TOP: Final = "/api/monitoring/statistics/top"

_MERGERS: Final[Mapping[str, Merge]] = {
    "/health": merge_health,
    "/metrics": merge_metrics,
    "/v1/models": merge_models,
    "/models": merge_models,
    "/api/ps": merge_running,
    _HISTORY: merge_history,
    _STATISTICS: merge_statistics,
}
"""The merger of each path whose answer differs from replica to replica."""


class Gathering(msgspec.Struct, frozen=True):
    """A GET that all replicas answer.

    Attributes:
        merge: makes one body of the answers.
        statuses: of the own answer, with which the others are asked at all.
    """

    path: str
    query: bytes
    merge: Merge
    statuses: tuple[int, ...] = (200,)


def gathering_of(scope: MutableMapping[str, Any], path: str) -> Callable[[bytes], Gathering] | None:
    """Return what makes, from a request's body, the gathering that answers it; None if one replica
    can answer it alone."""
    query: bytes = scope["query_string"]
    if scope["method"] == "POST" and path == _TOP:
        return lambda body: Gathering(_STATISTICS, _model_query(body), pick_highest(body))
    merge = _MERGERS.get(path) if scope["method"] == "GET" else None
    if merge is None or (merge is merge_health and not is_verbose(scope)):
        return None
    # A replica that is not well says so with a 503.
    statuses = (200, 503) if merge is merge_health else (200,)
    return lambda _: Gathering(path, query, merge, statuses)


def _model_query(body: bytes) -> bytes:
    model = msgspec.json.decode(body or b"{}", type=TopRequest).model
    return b"" if model is None else urlencode({"model": model}).encode()
