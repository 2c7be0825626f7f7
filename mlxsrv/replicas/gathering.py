"""Requests that one replica cannot answer alone, and the answers that are gathered for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final
from urllib.parse import urlencode

import anyio.to_thread
import msgspec
from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxsrv.replicas.body_tap import BodyTap
from mlxsrv.replicas.merging import (
    Merge,
    ReplicaAnswer,
    merge_health,
    merge_history,
    merge_metrics,
    merge_models,
    merge_running,
    merge_statistics,
    pick_highest,
)
from mlxsrv.web.paths import is_verbose, path_below_mount
from mlxsrv.web.security.guard import INTERNAL
from mlxsrv.wire.decoding import RequestDecoder, read_query
from mlxsrv.wire.management import HistoryQuery, TopRequest

_HEALTH: Final = "/health"
_HISTORY: Final = "/api/monitoring/history"
_STATISTICS: Final = "/api/monitoring/statistics"
_TOP: Final = "/api/monitoring/statistics/top"

_MERGES: Final[Mapping[str, Merge]] = {
    _HEALTH: merge_health,
    "/metrics": merge_metrics,
    "/v1/models": merge_models,
    "/models": merge_models,
    "/api/ps": merge_running,
    _STATISTICS: merge_statistics,
}
"""The merge of answers by the path of a GET, where it does not depend on the query."""

_STATUSES: Final[Mapping[tuple[str, str], tuple[int, ...]]] = {
    **{("GET", path): (200,) for path in (*_MERGES, _HISTORY)},
    ("GET", _HEALTH): (200, 503),  # a replica that is not well says so with a 503
    ("POST", _TOP): (200,),
}


class ReplicaQuestion(msgspec.Struct, frozen=True):
    """A GET that all replicas answer, and how one body is made of their answers."""

    path: str
    query: bytes
    merge: Merge


AskOthers = Callable[[str, bytes], Awaitable[Sequence[ReplicaAnswer]]]
"""Ask all other replicas for a path, with a query. Those are left out that do not answer."""


class GatherAnswers:
    """Middleware behind the guard: answers for all replicas where one cannot answer alone.

    Args:
        app: answers for this replica.
        id: of this replica.
        ask: asks this replica for a path, with a query.
        ask_others: asks all others.
    """

    def __init__(
        self,
        app: ASGIApp,
        id: str,
        ask: Callable[[str, bytes], Awaitable[ReplicaAnswer]],
        ask_others: AskOthers,
    ) -> None:
        self._app = app
        self._id = id
        self._ask = ask
        self._ask_others = ask_others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        statuses = merged_statuses(scope)
        if not statuses:
            await self._app(scope, receive, send)
            return
        tap = BodyTap(receive, bytes)
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        await self._app(scope, tap.receive, keep)
        if messages and messages[0]["status"] in statuses:
            messages = await self._merge(messages, question_of(scope, tap.finish()), scope)
        for message in messages:
            await send(message)

    async def _merge(
        self, messages: Sequence[Message], question: ReplicaQuestion, scope: Scope
    ) -> list[Message]:
        """The own answer with the body of all replicas."""
        start, *parts = messages
        if question.path == path_below_mount(scope):
            body = b"".join(part.get("body", b"") for part in parts)
            own = ReplicaAnswer(self._id, start["status"], body)
        else:
            own = await self._ask(question.path, question.query)
        others = await self._ask_others(question.path, question.query)
        merged = await anyio.to_thread.run_sync(question.merge, own, others)
        headers = [each for each in start["headers"] if each[0] != b"content-length"]
        headers.append((b"content-length", str(len(merged)).encode()))
        return [{**start, "headers": headers}, {"type": "http.response.body", "body": merged}]


def merged_statuses(scope: Scope) -> tuple[int, ...]:
    """Return the statuses of a replica's own answer with which the others are asked as well; none
    if it can answer alone."""
    if scope["type"] != "http" or scope.get(INTERNAL):
        return ()
    path = path_below_mount(scope)
    if path == _HEALTH and not is_verbose(scope):
        return ()
    return _STATUSES.get((scope["method"], path), ())


def question_of(scope: Scope, body: bytes) -> ReplicaQuestion:
    """Return what all replicas are asked for a request, which this one has accepted.

    Args:
        body: of the request.
    """
    path, query = path_below_mount(scope), scope["query_string"]
    if path == _TOP:
        asked, _ = RequestDecoder(TopRequest).decode(body or b"{}")
        model = "" if asked.model is None else urlencode({"model": asked.model})
        return ReplicaQuestion(_STATISTICS, model.encode(), partial(pick_highest, asked=asked))
    if path == _HISTORY:
        limit = read_query(HistoryQuery, QueryParams(query)).limit
        return ReplicaQuestion(path, query, partial(merge_history, limit=limit))
    return ReplicaQuestion(path, query, _MERGES[path])
