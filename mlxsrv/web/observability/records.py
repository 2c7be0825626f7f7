"""The record of one request, filled in while it is answered and given to the observers at its end.

The middleware opens a record in the ASGI scope; whoever learns more about the request writes it
there.
"""

from __future__ import annotations

from time import monotonic, time_ns

from msgspec import Struct, field
from starlette.datastructures import Headers
from starlette.types import Scope

from mlxsrv.service.observing import AskedOfModel, OperationName, RequestEnded
from mlxsrv.service.reply import Reply
from mlxsrv.web.paths import find_operation

_KEY = "mlxsrv.record"


class RequestRecord(Struct):
    """Everything that is known about one request so far.

    Attributes:
        time: when it came, in nanoseconds since 1970.
        begun: the same on the monotonic clock, in seconds.
        quiet: whether only who debugs wants to read of it: a probe, a file.
    """

    time: int = field(default_factory=time_ns)
    begun: float = field(default_factory=monotonic)
    operation: OperationName | None = None
    asked: AskedOfModel | None = None
    model: str = ""
    reply: Reply | None = None
    tokens: int | None = None
    quiet: bool = False
    error: str | None = None

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
            ended=monotonic(),
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
