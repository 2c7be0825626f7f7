"""The record of one request, filled in while it is answered and given to the observers at its end.

The middleware opens a record in the ASGI scope; whoever learns more about the request writes it
there.
"""

from __future__ import annotations

import time

from starlette.datastructures import Headers
from starlette.types import Scope

from mlxsrv.service.observing import AskedOfModel, OperationName, RequestEnded
from mlxsrv.service.reply import Reply
from mlxsrv.web.paths import find_operation

_KEY = "mlxsrv.record"


class RequestRecord:
    """Everything that is known about one request so far."""

    __slots__ = (
        "asked",
        "begun",
        "error",
        "model",
        "operation",
        "quiet",
        "reply",
        "time",
        "tokens",
    )

    def __init__(self) -> None:
        self.time = time.time_ns()
        self.begun = time.monotonic()
        self.operation: OperationName | None = None
        self.asked: AskedOfModel | None = None
        self.model = ""
        self.reply: Reply | None = None
        self.tokens: int | None = None
        self.quiet = False  # whether only who debugs wants to read of it: a probe, a file
        self.error: str | None = None

    def end(self, scope: Scope, status: int, request_id: str) -> RequestEnded:
        """Return the event for the observers. The request is over."""
        generated = None if self.reply is None else self.reply.generated
        model, error = self.model, self.error
        if generated is not None:
            error = error or generated.error
            if generated.ttft is not None:
                model = generated.model  # a model that was downloaded was unknown before
        operation = find_operation(scope)
        return RequestEnded(
            method=scope["method"],
            route="" if operation is None else operation.path,
            status=status,
            headers=Headers(scope=scope),
            id=request_id,
            time=self.time,
            begun=self.begun,
            ended=time.monotonic(),
            operation=self.operation,
            model=model,
            asked=self.asked,
            generated=generated,
            tokens=self.tokens,
            error=error,
        )


def open_record(scope: Scope) -> RequestRecord:
    record = scope[_KEY] = RequestRecord()
    return record


def record_of(scope: Scope) -> RequestRecord:
    """The request's record, which the middleware has opened."""
    record: RequestRecord = scope[_KEY]
    return record
