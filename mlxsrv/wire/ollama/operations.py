"""The endpoints of Ollama's API."""

from __future__ import annotations

from msgspec.structs import replace

from mlxsrv.wire.ndjson import MEDIA_TYPE
from mlxsrv.wire.ollama import answers, models, requests
from mlxsrv.wire.operation import Operation

_OLLAMA = (
    Operation(
        "POST",
        "/api/chat",
        "ollamaChat",
        "Answer a chat",
        description="Streamed as lines of JSON, unless `stream` is false.",
        body=requests.OLLAMA_CHATS,
        answer=answers.OllamaChatAnswer,
        chunk=answers.OllamaChatAnswer,
        fails=(507,),
    ),
    Operation(
        "POST",
        "/api/generate",
        "ollamaGenerate",
        "Answer a prompt, or go on with a text",
        description="Streamed as lines of JSON, unless `stream` is false.",
        body=requests.OLLAMA_TEXTS,
        answer=answers.OllamaTextAnswer,
        chunk=answers.OllamaTextAnswer,
        fails=(507,),
    ),
    Operation(
        "GET", "/api/tags", "ollamaTags", "The models that can be asked", answer=models.OllamaModels
    ),
    Operation(
        "GET",
        "/api/version",
        "ollamaVersion",
        "The version of Ollama whose API this is",
        answer=models.OllamaVersion,
    ),
)

OLLAMA = tuple(
    replace(operation, refuses=answers.ERRORS, stream_media=MEDIA_TYPE) for operation in _OLLAMA
)
