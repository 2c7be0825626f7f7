"""One endpoint: what it reads, answers and refuses; `openapi.py` describes it."""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct

from mlxsrv.errors import Overloaded
from mlxsrv.wire import management
from mlxsrv.wire.decoding import RequestDecoder
from mlxsrv.wire.dialect import ErrorShape
from mlxsrv.wire.openai.answers import ERRORS


class Operation(Struct, frozen=True):
    """One endpoint.

    Attributes:
        path: as it is routed, with converters such as `{id:path}`.
        id: its name, which no other has.
        query: what its URL may hold; None: nothing.
        body: decodes its body; None: it has none.
        answer: the type of its answer; None: any object.
        other_answer: the type of its answer in another dialect.
        chunk: the types of the events, or lines, that it streams, if it can.
        stream_media: the media type of the stream.
        media: the media type of its answer.
        status: the status of its answer.
        fails: the statuses of its refusals, beside those that all of its kind have.
        refuses: how it writes errors.
        open: whether it needs no key. With a query it may say more, which needs one.
    """

    method: str
    path: str
    id: str
    summary: str
    description: str = ""
    query: type[Struct] | None = None
    body: RequestDecoder[Any] | None = None
    answer: Any = None
    other_answer: Any = None
    chunk: Any = None
    stream_media: str = "text/event-stream"
    media: str = "application/json"
    status: int = 200
    fails: tuple[int, ...] = ()
    refuses: ErrorShape = ERRORS
    open: bool = False

    @property
    def described_path(self) -> str:
        """The path without converters."""
        return re.sub(r":\w+}", "}", self.path)

    @property
    def asks(self) -> type[Struct] | None:
        """The type of its body."""
        return None if self.body is None else self.body.kind

    @property
    def errors(self) -> tuple[int, ...]:
        """The statuses of its refusals."""
        if self.enveloped:
            usual: tuple[int, ...] = (400, 404, 405, 500, 503)
        elif self.body is not None:
            busy = self.refuses.status(Overloaded(""))
            usual = (400, 404, 405, 500, busy, 504)
        else:
            usual = (405, 500)
        too_large = () if self.body is None else (413,)
        return (*usual, *too_large, *self.fails)

    @property
    def enveloped(self) -> bool:
        """Whether its answers and refusals are in the envelope of the management."""
        return self.refuses is management.ERRORS
