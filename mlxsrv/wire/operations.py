"""The endpoints of the API, in one table: what each reads, answers and refuses.

The routes and `/openapi.json` are both made from it. Where two paths match a request, the one that
comes first is taken.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxsrv.generation.status import Health, ModelObject
from mlxsrv.wire.anthropic.models import AnthropicModel, AnthropicModelList
from mlxsrv.wire.anthropic.operations import ANTHROPIC
from mlxsrv.wire.management_operations import MANAGEMENT
from mlxsrv.wire.ollama.operations import OLLAMA
from mlxsrv.wire.openai import answers, embeddings, infill, requests, tokens
from mlxsrv.wire.operation import Operation
from mlxsrv.wire.responses import answers as responses
from mlxsrv.wire.responses.events import StreamedEvent
from mlxsrv.wire.responses.requests import RESPONSES_REQUESTS
from mlxsrv.wire.responses.storing import ItemQuery, ResponseQuery

INFERENCE = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "createChatCompletion",
        "Answer a chat",
        description="With `stream`, as server-sent events that end with `data: [DONE]`.",
        body=requests.CHAT_REQUESTS,
        answer=answers.ChatCompletion,
        chunk=answers.ChatChunk,
        fails=(507,),
    ),
    Operation(
        "POST",
        "/v1/completions",
        "createCompletion",
        "Go on with a text",
        description="With `stream`, as server-sent events that end with `data: [DONE]`.",
        body=requests.COMPLETION_REQUESTS,
        answer=answers.TextCompletion,
        chunk=answers.TextCompletion,
        fails=(507,),
    ),
    Operation(
        "POST",
        "/v1/responses",
        "createResponse",
        "Answer in a conversation of items",
        description="With `stream`, as server-sent events; the last has the whole response.",
        body=RESPONSES_REQUESTS,
        answer=responses.ResponseObject,
        chunk=StreamedEvent,
        fails=(507,),
    ),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        "countInputTokens",
        "How many tokens a prompt has",
        description="Asked as a response is. Nothing is generated.",
        body=RESPONSES_REQUESTS,
        answer=responses.InputTokens,
    ),
    Operation(
        "GET",
        "/v1/responses/{id}",
        "getResponse",
        "A response that is stored",
        query=ResponseQuery,
        answer=responses.ResponseObject,
        fails=(400, 404),
    ),
    Operation(
        "DELETE",
        "/v1/responses/{id}",
        "deleteResponse",
        "Forget a response",
        answer=responses.DeletedResponse,
        fails=(404,),
    ),
    Operation(
        "GET",
        "/v1/responses/{id}/input_items",
        "listInputItems",
        "What a stored response answers",
        description="The newest item first, unless `order` is `asc`.",
        query=ItemQuery,
        answer=responses.ItemList,
        fails=(400, 404),
    ),
    Operation(
        "POST",
        "/infill",
        "infill",
        "What is to be written between two texts",
        description="For models with fill-in-the-middle tokens; as llama.cpp's server has it. "
        "With `stream`, as server-sent events, of which the last has `stop: true`.",
        body=infill.INFILL_REQUESTS,
        answer=infill.LlamaCompletion,
        chunk=infill.LlamaCompletion,
        fails=(507,),
    ),
    Operation(
        "POST",
        "/completion",
        "llamaCompletion",
        "Go on with a text, as llama.cpp's server does",
        description="With `stream`, as server-sent events, of which the last has `stop: true`.",
        body=infill.LLAMA_REQUESTS,
        answer=infill.LlamaCompletion,
        chunk=infill.LlamaCompletion,
        fails=(507,),
    ),
    Operation(
        "POST",
        "/v1/fim/completions",
        "createFIMCompletion",
        "What is to be written between two texts, as Mistral's API has it",
        description="For models with fill-in-the-middle tokens, unless there is no `suffix`. With "
        "`stream`, as a chat's server-sent events, which end with `data: [DONE]`.",
        body=infill.FIM_REQUESTS,
        answer=answers.ChatCompletion,
        chunk=answers.ChatChunk,
        fails=(507,),
    ),
    Operation(
        "GET",
        "/v1/models",
        "listModels",
        "The models that can be asked",
        description="With the header `anthropic-version`, in Anthropic's dialect.",
        answer=answers.ModelList,
        other_answer=AnthropicModelList,
    ),
    Operation(
        "GET",
        "/v1/models/{id:path}",
        "getModel",
        "One model",
        description="Slashes in the id stand as they are. With the header `anthropic-version`, in "
        "Anthropic's dialect.",
        answer=ModelObject,
        other_answer=AnthropicModel,
        fails=(404,),
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "createEmbedding",
        "Vectors of texts",
        body=embeddings.EMBEDDING_REQUESTS,
        answer=embeddings.EmbeddingList,
        fails=(507,),
    ),
    Operation(
        "POST",
        "/v1/rerank",
        "rerank",
        "Documents by their relevance to a query",
        body=embeddings.RERANK_REQUESTS,
        answer=embeddings.RerankResponse,
        fails=(507,),
    ),
    Operation(
        "POST",
        "/v2/rerank",
        "rerankAsCohere",
        "Documents by their relevance to a query, as Cohere's clients ask",
        description="Documents that are too long are cut, unless `truncate` is `NONE`.",
        body=embeddings.COHERE_RERANK_REQUESTS,
        answer=embeddings.RerankResponse,
        fails=(507,),
    ),
    Operation(
        "POST",
        "/v1/score",
        "score",
        "How well the texts of pairs go together",
        description="By a cross-encoder's judgement, or how near an embedder's vectors are.",
        body=embeddings.SCORE_REQUESTS,
        answer=embeddings.ScoreList,
        fails=(507,),
    ),
    Operation(
        "POST",
        "/tokenize",
        "tokenize",
        "The tokens of a text",
        body=tokens.TOKENIZE_REQUESTS,
        answer=tokens.TokenizeResponse,
    ),
    Operation(
        "POST",
        "/detokenize",
        "detokenize",
        "The text of tokens",
        body=tokens.DETOKENIZE_REQUESTS,
        answer=tokens.DetokenizeResponse,
    ),
    Operation(
        "GET",
        "/tokenizer_info",
        "getTokenizerInfo",
        "What the tokenizer is",
        query=tokens.TokenizerQuery,
        answer=tokens.TokenizerInfo,
        fails=(404, 503, 504),
    ),
    Operation(
        "POST",
        "/apply-template",
        "applyTemplate",
        "A chat as the model's template writes it",
        description="Asked as a chat is. Nothing is generated.",
        body=requests.CHAT_REQUESTS,
        answer=tokens.AppliedTemplate,
    ),
    Operation(
        "GET",
        "/health",
        "getHealth",
        "Whether requests would be served",
        description="Readiness, for load balancers: 200 when requests would be served, else "
        "503 with the status `loading`, `draining`, `failed` or `stalled`. With the query "
        "`verbose=1` also what the server holds and does; that needs the key, where there is "
        "one.",
        answer=Health,
        fails=(401, 429),
    ),
    Operation(
        "GET",
        "/health/live",
        "getLiveness",
        "Whether the engine is alive",
        description="Liveness, for supervisors: 503 once the engine has `failed`, or is "
        "`stalled` in a step longer than `--step-timeout`; else 200, whatever the status.",
        answer=Health,
    ),
    Operation(
        "GET",
        "/metrics",
        "getMetrics",
        "Metrics for Prometheus",
        description="In its text format; with `--metrics` only.",
        answer=str,
        media="text/plain",
    ),
    Operation("GET", "/openapi.json", "getDescription", "This document"),
)

OPERATIONS = INFERENCE + ANTHROPIC + OLLAMA + MANAGEMENT
BY_ID: Mapping[str, Operation] = {operation.id: operation for operation in OPERATIONS}
