"""The three endpoints of OpenAI's API that generate text: chat, text completion and infill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from mlxsrv.generation.outputs import Answer, Identity, Usage
from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.wire.dialect import Dialect
from mlxsrv.wire.openai.answers import (
    ChatCompletion,
    TextCompletion,
    chat_completion,
    text_completion,
)
from mlxsrv.wire.openai.generation_request import GenerationRequest
from mlxsrv.wire.openai.infill import (
    INFILL_REQUESTS,
    InfillCompletion,
    InfillRequest,
    InfillStream,
    infill_completion,
)
from mlxsrv.wire.openai.requests import (
    CHAT_REQUESTS,
    COMPLETION_REQUESTS,
    ChatRequest,
    CompletionRequest,
)
from mlxsrv.wire.openai.streams import ChatStream, CompletionStream, OpenAIStream, usage_mode

S = TypeVar("S", bound=OpenAIStream)


def _make_stream(kind: type[S], request: GenerationRequest, identity: Identity) -> S:
    return kind(
        identity,
        usage_mode(request.stream_options),
        choices=request.all_choices,
        scored=request.likeliest is not None,
        timed=bool(request.timings_per_token),
    )


class ChatDialect(Dialect[ChatRequest]):
    requests = CHAT_REQUESTS
    id_prefix = "chatcmpl-"

    def spec(self, request: ChatRequest) -> GenerationSpec:
        return request.spec()

    def stream(self, request: ChatRequest, identity: Identity) -> ChatStream:
        return _make_stream(ChatStream, request, identity)

    def fold(
        self, request: Any, identity: Identity, answers: Sequence[Answer], usage: Usage
    ) -> ChatCompletion:
        return chat_completion(identity, answers, usage)


class CompletionDialect(Dialect[CompletionRequest]):
    requests = COMPLETION_REQUESTS
    id_prefix = "cmpl-"

    def spec(self, request: CompletionRequest) -> GenerationSpec:
        return request.spec()

    def stream(self, request: CompletionRequest, identity: Identity) -> CompletionStream:
        return _make_stream(CompletionStream, request, identity)

    def fold(
        self, request: Any, identity: Identity, answers: Sequence[Answer], usage: Usage
    ) -> TextCompletion:
        return text_completion(identity, answers, usage)


class InfillDialect(Dialect[InfillRequest]):
    requests = INFILL_REQUESTS
    id_prefix = "cmpl-"

    def spec(self, request: InfillRequest) -> GenerationSpec:
        return request.spec()

    def stream(self, request: InfillRequest, identity: Identity) -> InfillStream:
        return _make_stream(InfillStream, request, identity)

    def fold(
        self, request: Any, identity: Identity, answers: Sequence[Answer], usage: Usage
    ) -> InfillCompletion:
        return infill_completion(identity, answers, usage)
