"""The endpoints of Ollama's API."""

from __future__ import annotations

from msgspec.structs import replace

from mlxsrv.wire.ndjson import MEDIA_TYPE
from mlxsrv.wire.ollama import answers, models, pulls, requests
from mlxsrv.wire.operation import Operation

_REFUSED = "This server does not change the models that its operator gives it."

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
        "POST",
        "/api/embed",
        "ollamaEmbed",
        "Vectors of texts",
        body=requests.OLLAMA_EMBEDS,
        answer=answers.OllamaEmbeddings,
        fails=(507,),
    ),
    Operation(
        "POST",
        "/api/embeddings",
        "ollamaEmbeddings",
        "The vector of a text, as older clients ask for it",
        body=requests.OLLAMA_OLD_EMBEDS,
        answer=answers.OllamaEmbedding,
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
    Operation(
        "POST",
        "/api/show",
        "ollamaShow",
        "One model",
        body=requests.OLLAMA_SHOWS,
        answer=models.OllamaShown,
    ),
    Operation(
        "GET",
        "/api/ps",
        "ollamaPs",
        "The models in memory",
        answer=models.OllamaRunning,
    ),
    Operation(
        "POST",
        "/api/pull",
        "ollamaPull",
        "Download a model",
        description="From the Hugging Face hub, with `--allow-download` only. The progress is "
        "streamed as lines of JSON, unless `stream` is false. A model that is here is not "
        "downloaded again.",
        body=requests.OLLAMA_PULLS,
        answer=pulls.OllamaProgress,
        chunk=pulls.OllamaProgress,
        fails=(403,),
    ),
    Operation("DELETE", "/api/delete", "ollamaDelete", "Refused", description=_REFUSED, status=403),
    Operation(
        "POST",
        "/api/copy",
        "ollamaCopy",
        "Refused",
        description=_REFUSED,
        body=requests.OLLAMA_COPIES,
        status=403,
    ),
    Operation(
        "POST",
        "/api/create",
        "ollamaCreate",
        "Refused",
        description=_REFUSED,
        body=requests.OLLAMA_CREATES,
        status=403,
    ),
    Operation(
        "POST",
        "/api/push",
        "ollamaPush",
        "Refused",
        description=_REFUSED,
        body=requests.OLLAMA_NAMES,
        status=403,
    ),
    Operation(
        "GET",
        "/",
        "ollamaRoot",
        "Whether Ollama is running",
        description="With `--ollama-root` only.",
        answer=str,
        media="text/plain",
    ),
)

OLLAMA = tuple(
    replace(operation, refuses=answers.ERRORS, stream_media=MEDIA_TYPE) for operation in _OLLAMA
)
