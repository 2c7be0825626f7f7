"""The two endpoints of Ollama's API that generate text."""

from __future__ import annotations

from collections.abc import Sequence

from mlxsrv.generation.outputs import Answer, Identity, Usage
from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.wire.dialect import Dialect
from mlxsrv.wire.ollama.answers import (
    OllamaChatAnswer,
    OllamaTextAnswer,
    chat_answer,
    text_answer,
)
from mlxsrv.wire.ollama.requests import (
    OLLAMA_CHATS,
    OLLAMA_TEXTS,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from mlxsrv.wire.ollama.streams import OllamaChatStream, OllamaTextStream


class OllamaChatDialect(Dialect[OllamaChatRequest]):
    requests = OLLAMA_CHATS
    id_prefix = "ollama-"

    def spec(self, request: OllamaChatRequest) -> GenerationSpec:
        return request.spec()

    def stream(self, request: OllamaChatRequest, identity: Identity) -> OllamaChatStream:
        return OllamaChatStream(request.model)

    def fold(
        self,
        request: OllamaChatRequest,
        identity: Identity,
        answers: Sequence[Answer],
        usage: Usage,
    ) -> OllamaChatAnswer:
        return chat_answer(request.model, answers[0], usage)


class OllamaGenerateDialect(Dialect[OllamaGenerateRequest]):
    requests = OLLAMA_TEXTS
    id_prefix = "ollama-"

    def spec(self, request: OllamaGenerateRequest) -> GenerationSpec:
        return request.spec()

    def stream(self, request: OllamaGenerateRequest, identity: Identity) -> OllamaTextStream:
        return OllamaTextStream(request.model)

    def fold(
        self,
        request: OllamaGenerateRequest,
        identity: Identity,
        answers: Sequence[Answer],
        usage: Usage,
    ) -> OllamaTextAnswer:
        return text_answer(request.model, answers[0], usage)
