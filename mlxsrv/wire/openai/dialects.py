"""The endpoints that answer as OpenAI's API or llama.cpp's server does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from mlxsrv.generation.outputs import Answer, Identity, Usage
from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.wire.decoding import RequestDecoder
from mlxsrv.wire.dialect import Dialect
from mlxsrv.wire.openai.answers import (
    ChatCompletion,
    TextCompletion,
    chat_completion,
    text_completion,
)
from mlxsrv.wire.openai.generation_request import GenerationRequest
from mlxsrv.wire.openai.infill import (
    FIM_REQUESTS,
    INFILL_REQUESTS,
    LLAMA_REQUESTS,
    FIMRequest,
    InfillRequest,
    LlamaCompletion,
    LlamaCompletionRequest,
    LlamaStream,
    llama_completion,
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


class ChatDialect(Dialect[ChatRequest | FIMRequest]):
    requests: ClassVar[RequestDecoder[Any]] = CHAT_REQUESTS
    id_prefix = "chatcmpl-"

    def spec(self, request: ChatRequest | FIMRequest) -> GenerationSpec:
        return request.spec()

    def stream(self, request: ChatRequest | FIMRequest, identity: Identity) -> ChatStream:
        return _make_stream(ChatStream, request, identity)

    def fold(
        self, request: Any, identity: Identity, answers: Sequence[Answer], usage: Usage
    ) -> ChatCompletion:
        return chat_completion(identity, answers, usage)


class FIMDialect(ChatDialect):
    """Mistral's, which answers with a chat's messages and chunks."""

    requests = FIM_REQUESTS


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


class InfillDialect(Dialect[InfillRequest | LlamaCompletionRequest]):
    requests: ClassVar[RequestDecoder[Any]] = INFILL_REQUESTS
    id_prefix = "cmpl-"

    def spec(self, request: InfillRequest | LlamaCompletionRequest) -> GenerationSpec:
        return request.spec()

    def stream(
        self, request: InfillRequest | LlamaCompletionRequest, identity: Identity
    ) -> LlamaStream:
        return _make_stream(LlamaStream, request, identity)

    def fold(
        self, request: Any, identity: Identity, answers: Sequence[Answer], usage: Usage
    ) -> LlamaCompletion:
        return llama_completion(identity, answers, usage)


class LlamaCompletionDialect(InfillDialect):
    """llama.cpp's own way to ask for a text."""

    requests = LLAMA_REQUESTS
