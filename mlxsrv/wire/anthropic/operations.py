"""The endpoints of Anthropic's API, but for the list of models, whose path is OpenAI's too."""

from __future__ import annotations

from mlxsrv.wire.anthropic.answers import AnthropicMessage, MessageEvent, TokenCount
from mlxsrv.wire.anthropic.errors import ERRORS
from mlxsrv.wire.anthropic.requests import MESSAGES_REQUESTS
from mlxsrv.wire.operation import Operation

ANTHROPIC = (
    Operation(
        "POST",
        "/v1/messages",
        "createMessage",
        "Answer a chat, in Anthropic's dialect",
        description="With `stream`, as server-sent events that end with `message_stop`.",
        body=MESSAGES_REQUESTS,
        answer=AnthropicMessage,
        chunk=MessageEvent,
        refuses=ERRORS,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "countMessageTokens",
        "The tokens of a chat's prompt, in Anthropic's dialect",
        description="Asked as a message is. Nothing is generated.",
        body=MESSAGES_REQUESTS,
        answer=TokenCount,
        refuses=ERRORS,
    ),
)
