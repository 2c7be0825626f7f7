"""The endpoint of Anthropic's API that generates text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxsrv.generation.outputs import Answer, Identity, Usage
from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.wire.anthropic.answers import AnthropicMessage, message
from mlxsrv.wire.anthropic.requests import MESSAGES_REQUESTS, MessagesRequest
from mlxsrv.wire.anthropic.streams import MessageStream
from mlxsrv.wire.dialect import Dialect


class MessagesDialect(Dialect[MessagesRequest]):
    requests = MESSAGES_REQUESTS
    id_prefix = "msg_"

    def spec(self, request: MessagesRequest) -> GenerationSpec:
        return request.spec()

    def stream(self, request: Any, identity: Identity) -> MessageStream:
        return MessageStream(identity)

    def fold(
        self, request: Any, identity: Identity, answers: Sequence[Answer], usage: Usage
    ) -> AnthropicMessage:
        [answer] = answers
        return message(identity, answer, usage)
