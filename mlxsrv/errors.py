"""Everything that can go wrong and be told to a client.

ServeError                    500 server_error            internal_error
├─ InvalidRequest             400 invalid_request_error   invalid_value
│  ├─ InvalidJSON             400                         invalid_json
│  ├─ MissingParameter        400                         missing_required_parameter
│  ├─ UnsupportedParameter    400                         unsupported_parameter
│  ├─ ContextLengthExceeded   400                         context_length_exceeded
│  ├─ ModelNotFound           404                         model_not_found
│  ├─ RouteNotFound           404                         not_found
│  ├─ MethodNotAllowed        405                         method_not_allowed
│  └─ RequestTooLarge         413                         request_too_large
├─ Overloaded                 503 server_error            overloaded
├─ ModelNotLoaded             503 server_error            model_not_loaded
│  └─ BackendMissing
├─ InsufficientMemory         507 server_error            insufficient_memory
├─ EngineFailed               503 server_error            engine_failed
├─ ShuttingDown               503 server_error            shutting_down
└─ DeadlineExceeded           504 server_error            timeout

Each class knows its status, type and code and, where waiting helps, after how many seconds to try
again; an instance adds the message and the field it concerns (`param`).
"""

from __future__ import annotations

from typing import ClassVar


class ServeError(Exception):
    """An error with a place in the API. Raised anywhere, told by the web floor."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retry_after: ClassVar[int | None] = None  # seconds, where waiting helps

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ServeError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class InvalidJSON(InvalidRequest):
    code = "invalid_json"


class MissingParameter(InvalidRequest):
    code = "missing_required_parameter"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    status = 404
    code = "model_not_found"


class RouteNotFound(InvalidRequest):
    status = 404
    code = "not_found"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class RequestTooLarge(InvalidRequest):
    status = 413
    code = "request_too_large"


class Overloaded(ServeError):
    status = 503
    retry_after = 1
    code = "overloaded"


class ModelNotLoaded(ServeError):
    status = 503
    retry_after = 5
    code = "model_not_loaded"


class BackendMissing(ModelNotLoaded):
    """MLX is installed without a back end for this machine."""


class InsufficientMemory(ServeError):
    status = 507
    code = "insufficient_memory"


class EngineFailed(ServeError):
    status = 503
    code = "engine_failed"


class ShuttingDown(ServeError):
    status = 503
    retry_after = 5
    code = "shutting_down"


class DeadlineExceeded(ServeError):
    status = 504
    code = "timeout"
