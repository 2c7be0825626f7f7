"""Every error that a client can get; docs/errors.md says when.

A class has the status, the type, the code and, where waiting helps, the seconds after which to try
again. An instance adds the message and the field that it concerns (`param`).
"""

from __future__ import annotations

from typing import ClassVar


class ServeError(Exception):
    """An error with a place in the API. Any floor raises it; `web/` sends it to the client.

    Args:
        message: one sentence for the client. It begins with the field, where there is one.
        param: the path of the field, such as `messages[0].role`.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retry_after: int | None = None  # seconds, where waiting helps

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ServeError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class InvalidHTTP(InvalidRequest):
    code = "invalid_http"


class InvalidJSON(InvalidRequest):
    code = "invalid_json"


class MissingParameter(InvalidRequest):
    code = "missing_required_parameter"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """A text has more tokens than the model reads.

    Args:
        tokens: how many the text has; at least so many, if they were not all counted.
        most: how many the model reads.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        tokens: int | None = None,
        most: int | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.most = most


class ModelNotFound(InvalidRequest):
    status = 404
    code = "model_not_found"


class ThreadNotFound(InvalidRequest):
    """The server keeps no conversations of Anthropic's threads."""

    status = 404
    code = "thread_not_found"


class SAENotAttached(InvalidRequest):
    code = "sae_not_attached"


class SAEIncompatible(InvalidRequest):
    code = "sae_incompatible"


class InvalidFeatureIndex(InvalidRequest):
    code = "invalid_feature_index"


class SAENotFound(InvalidRequest):
    status = 404
    code = "sae_not_found"


class ProfileNotFound(InvalidRequest):
    status = 404
    code = "profile_not_found"


class ResponseNotFound(InvalidRequest):
    status = 404
    code = "response_not_found"


class PreviousResponseNotFound(InvalidRequest):
    status = 404
    code = "previous_response_not_found"


class StoredItemNotFound(InvalidRequest):
    status = 404
    code = "item_not_found"


class SAEAttached(InvalidRequest):
    status = 409
    code = "sae_attached"


class SAEExists(InvalidRequest):
    status = 409
    code = "sae_exists"


class ProfileExists(InvalidRequest):
    status = 409
    code = "profile_exists"


class SetAtStart(InvalidRequest):
    """A change that only one of several replicas would make."""

    status = 409
    code = "set_at_start"


class RouteNotFound(InvalidRequest):
    status = 404
    code = "not_found"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class RequestTimeout(InvalidRequest):
    """The body of the request did not arrive in time."""

    status = 408
    code = "request_timeout"


class RequestTooLarge(InvalidRequest):
    status = 413
    code = "request_too_large"


class HeadersTooLarge(InvalidRequest):
    status = 431
    code = "headers_too_large"


class InvalidAPIKey(ServeError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class OriginNotAllowed(ServeError):
    status = 403
    type = "permission_error"
    code = "origin_not_allowed"


class HostNotAllowed(ServeError):
    status = 403
    type = "permission_error"
    code = "host_not_allowed"


class ActionNotAllowed(ServeError):
    """The server never does this, or its operator must allow it; the message says which."""

    status = 403
    type = "permission_error"
    code = "action_not_allowed"


class RateLimited(ServeError):
    """The guard adds Retry-After, which depends on the client's earlier requests."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Overloaded(ServeError):
    """The server has too much to do.

    Args:
        retry_after: seconds after which there is room, as far as that is known.
    """

    status = 503
    retry_after = 1
    code = "overloaded"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        if retry_after is not None:
            self.retry_after = retry_after


class ModelNotLoaded(ServeError):
    status = 503
    retry_after = 5
    code = "model_not_loaded"


class BackendMissing(ModelNotLoaded):
    """MLX has no back end for this machine."""


class InsufficientMemory(ServeError):
    status = 507
    code = "insufficient_memory"


class EngineFailed(ServeError):
    status = 503
    code = "engine_failed"


class StoreFailed(ServeError):
    """A file under `--data-dir`, or the counter of several replicas, cannot be used; the message
    says why and what helps."""

    status = 503
    code = "store_failed"


class ShuttingDown(ServeError):
    status = 503
    retry_after = 5
    code = "shutting_down"


class DeadlineExceeded(ServeError):
    status = 504
    code = "timeout"
