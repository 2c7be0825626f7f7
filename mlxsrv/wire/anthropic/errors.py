"""Errors in Anthropic's shape: its types, and its statuses where they are not OpenAI's."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from mlxsrv.errors import ContextLengthExceeded, Overloaded, ServeError, ShuttingDown
from mlxsrv.wire.dialect import ErrorShape

AnthropicErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "timeout_error",
    "overloaded_error",
]

_TYPES: dict[int, AnthropicErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class AnthropicErrorDetails(Struct, frozen=True):
    error_code: str


class AnthropicError(Struct, frozen=True):
    type: AnthropicErrorType
    message: str
    details: AnthropicErrorDetails


class AnthropicErrorBody(Struct, frozen=True, tag_field="type", tag="error"):
    """The body of an error, and the event that ends a stream with one."""

    error: AnthropicError
    request_id: str | UnsetType = UNSET


def error_body(error: ServeError, request_id: str = "") -> AnthropicErrorBody:
    return AnthropicErrorBody(
        AnthropicError(
            _TYPES.get(error_status(error), "invalid_request_error"),
            _message(error),
            AnthropicErrorDetails(error.code),
        ),
        request_id or UNSET,
    )


def error_status(error: ServeError) -> int:
    if isinstance(error, Overloaded | ShuttingDown):
        return 529
    return error.status if error.status < 500 or error.status == 504 else 500


def _message(error: ServeError) -> str:
    """The message. Agents know a prompt that is too long by Anthropic's words, and shorten it."""
    if isinstance(error, ContextLengthExceeded) and error.most is not None:
        return f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
    return error.message


REQUEST_ID = "request-id"

ERRORS = ErrorShape(AnthropicErrorBody, error_body, error_status, REQUEST_ID)
