"""The endpoints, one by one: what `/openapi.json` says of each."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from mlxsrv.wire import embeddings, infill, management, openai, requests, tokens


class Operation(Struct, frozen=True, kw_only=True):
    """One endpoint. `query` is what its URL may say, `chunk` what it streams, `status` that of its
    answer, `media` the type of that; `errors` are the statuses of refusals."""

    method: str
    path: str
    id: str
    summary: str
    description: str = ""
    query: type[Struct] | None = None
    asks: type[Struct] | None = None
    media: str = "application/json"
    answer: Any = None
    chunk: type[Struct] | None = None
    status: int = 200
    errors: tuple[int, ...] = ()

    @property
    def open(self) -> bool:
        """Whether it needs no key. What it tells on more words may."""
        return self.path in ("/health", "/health/live")

    @property
    def enveloped(self) -> bool:
        """Whether its answers and refusals are those of the management."""
        return self.path.startswith("/api/")


_ASKED = (400, 404, 405, 413, 500, 503, 504)
_GENERATED = (*_ASKED, 507)
_READ = (405, 500)
_MANAGED = (400, 404, 405, 500, 503)
_CHANGED = (*_MANAGED, 409)

_INFERENCE = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        id="createChatCompletion",
        summary="Answer a chat",
        description="With `stream`, as server-sent events that end with `data: [DONE]`.",
        asks=requests.ChatRequest,
        answer=openai.ChatCompletion,
        chunk=openai.ChatChunk,
        errors=_GENERATED,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        id="createCompletion",
        summary="Go on with a text",
        description="With `stream`, as server-sent events that end with `data: [DONE]`.",
        asks=requests.CompletionRequest,
        answer=openai.TextCompletion,
        chunk=openai.TextCompletion,
        errors=_GENERATED,
    ),
    Operation(
        method="POST",
        path="/infill",
        id="infill",
        summary="What is to be written between two texts",
        description="For models with fill-in-the-middle tokens; as llama.cpp's server has it. With "
        "`stream`, as server-sent events, of which the last has `stop: true`.",
        asks=infill.InfillRequest,
        answer=infill.InfillCompletion,
        chunk=infill.InfillCompletion,
        errors=_GENERATED,
    ),
    Operation(
        method="GET",
        path="/v1/models",
        id="listModels",
        summary="The models that can be asked",
        answer=openai.ModelList,
        errors=_READ,
    ),
    Operation(
        method="GET",
        path="/v1/models/{id}",
        id="getModel",
        summary="One model",
        description="Slashes in the id stand as they are.",
        answer=openai.ModelObject,
        errors=(404, *_READ),
    ),
    Operation(
        method="POST",
        path="/v1/embeddings",
        id="createEmbedding",
        summary="Vectors of texts",
        asks=embeddings.EmbeddingRequest,
        answer=embeddings.EmbeddingList,
        errors=_GENERATED,
    ),
    Operation(
        method="POST",
        path="/v1/rerank",
        id="rerank",
        summary="Documents by their relevance to a query",
        asks=embeddings.RerankRequest,
        answer=embeddings.RerankResponse,
        errors=_GENERATED,
    ),
    Operation(
        method="POST",
        path="/v1/score",
        id="score",
        summary="How well the texts of pairs go together",
        description="By a cross-encoder's judgement, or how near an embedder's vectors are.",
        asks=embeddings.ScoreRequest,
        answer=embeddings.ScoreList,
        errors=_GENERATED,
    ),
    Operation(
        method="POST",
        path="/tokenize",
        id="tokenize",
        summary="The tokens of a text",
        asks=tokens.TokenizeRequest,
        answer=tokens.TokenizeResponse,
        errors=_ASKED,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        id="detokenize",
        summary="The text of tokens",
        asks=tokens.DetokenizeRequest,
        answer=tokens.DetokenizeResponse,
        errors=_ASKED,
    ),
    Operation(
        method="GET",
        path="/tokenizer_info",
        id="getTokenizerInfo",
        summary="What the tokenizer is",
        query=tokens.TokenizerQuery,
        answer=tokens.TokenizerInfo,
        errors=(404, *_READ, 503, 504),
    ),
    Operation(
        method="POST",
        path="/apply-template",
        id="applyTemplate",
        summary="A chat as the model's template writes it",
        description="Asked as a chat is. Nothing is generated.",
        asks=requests.ChatRequest,
        answer=tokens.AppliedTemplate,
        errors=_ASKED,
    ),
    Operation(
        method="GET",
        path="/health",
        id="getHealth",
        summary="Whether requests would be served",
        description="Readiness, for load balancers: 200 when requests would be served, else 503 "
        "with the status `loading`, `draining`, `failed` or `stalled`. With the query `verbose=1` "
        "also what the server holds and does; that needs the key, where there is one.",
        answer=openai.Health,
        errors=(401, 429, *_READ),
    ),
    Operation(
        method="GET",
        path="/health/live",
        id="getLiveness",
        summary="Whether the engine is alive",
        description="Liveness, for supervisors: 503 once the engine has `failed`, or is `stalled` "
        "in a step longer than `--step-timeout`; else 200, whatever the status.",
        answer=openai.Health,
        errors=_READ,
    ),
    Operation(
        method="GET",
        path="/metrics",
        id="getMetrics",
        summary="Metrics for Prometheus",
        description="In its text format; with `--metrics` only.",
        answer=str,
        media="text/plain",
        errors=_READ,
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        id="getDescription",
        summary="This document",
        errors=_READ,
    ),
)

_MANAGEMENT = (
    Operation(
        method="GET",
        path="/api/saes",
        id="listSAEs",
        summary="The SAEs that can be attached",
        answer=list[management.SAEObject],
        errors=_MANAGED,
    ),
    Operation(
        method="POST",
        path="/api/saes",
        id="registerSAE",
        summary="Know another SAE",
        description="From a repository, which is downloaded, or below an `--sae-dir`.",
        asks=management.RegisterRequest,
        answer=management.SAEObject,
        status=202,
        errors=(*_CHANGED, 413),
    ),
    Operation(
        method="GET",
        path="/api/saes/attachment",
        id="getAttachment",
        summary="The SAE that a model has",
        query=management.ModelQuery,
        answer=management.AttachmentObject,
        errors=_MANAGED,
    ),
    Operation(
        method="GET",
        path="/api/saes/{id}",
        id="getSAE",
        summary="One SAE",
        answer=management.SAEObject,
        errors=_MANAGED,
    ),
    Operation(
        method="DELETE",
        path="/api/saes/{id}",
        id="forgetSAE",
        summary="Know an SAE no more",
        description="Its files stay. Not while it is attached.",
        answer=type(None),
        errors=_CHANGED,
    ),
    Operation(
        method="GET",
        path="/api/saes/{id}/compatibility",
        id="getCompatibility",
        summary="Whether an SAE fits a model",
        description="Known from their files; nothing is loaded.",
        query=management.CompatibilityQuery,
        answer=management.Compatibility,
        errors=_MANAGED,
    ),
    Operation(
        method="POST",
        path="/api/saes/{id}/attach",
        id="attachSAE",
        summary="Put an SAE on a model",
        description="Loads the model, which then stays loaded.",
        asks=management.AttachRequest,
        answer=management.AttachmentObject,
        errors=(*_CHANGED, 413, 507),
    ),
    Operation(
        method="POST",
        path="/api/saes/{id}/detach",
        id="detachSAE",
        summary="Take an SAE off a model",
        description="Its default steering and monitoring end; requests that run go on as they are.",
        asks=management.ModelRequest,
        answer=management.AttachmentObject,
        errors=(*_MANAGED, 413),
    ),
    Operation(
        method="GET",
        path="/api/saes/steering",
        id="getSteering",
        summary="The default steering",
        query=management.ModelQuery,
        answer=management.SteeringObject,
        errors=_MANAGED,
    ),
    Operation(
        method="POST",
        path="/api/saes/steering",
        id="setFeature",
        summary="Steer one feature by default",
        asks=management.FeatureRequest,
        answer=management.SteeringObject,
        errors=(*_MANAGED, 413),
    ),
    Operation(
        method="DELETE",
        path="/api/saes/steering",
        id="clearSteering",
        summary="Steer nothing by default",
        query=management.ModelQuery,
        answer=management.SteeringObject,
        errors=_MANAGED,
    ),
    Operation(
        method="POST",
        path="/api/saes/steering/batch",
        id="setFeatures",
        summary="Steer several features by default",
        description="All or none; others stay as they are.",
        asks=management.FeaturesRequest,
        answer=management.SteeringObject,
        errors=(*_MANAGED, 413),
    ),
    Operation(
        method="POST",
        path="/api/saes/steering/enable",
        id="enableSteering",
        summary="Use the default steering",
        asks=management.ModelRequest,
        answer=management.SteeringObject,
        errors=(*_MANAGED, 413),
    ),
    Operation(
        method="POST",
        path="/api/saes/steering/disable",
        id="disableSteering",
        summary="Keep the default steering, but do not use it",
        asks=management.ModelRequest,
        answer=management.SteeringObject,
        errors=(*_MANAGED, 413),
    ),
    Operation(
        method="DELETE",
        path="/api/saes/steering/{idx}",
        id="removeFeature",
        summary="Steer one feature no more by default",
        query=management.ModelQuery,
        answer=management.SteeringObject,
        errors=_MANAGED,
    ),
    Operation(
        method="GET",
        path="/api/profiles",
        id="listProfiles",
        summary="All profiles",
        answer=list[management.ProfileObject],
        errors=_MANAGED,
    ),
    Operation(
        method="POST",
        path="/api/profiles",
        id="createProfile",
        summary="A new profile",
        asks=management.ProfileRequest,
        answer=management.ProfileObject,
        status=201,
        errors=(*_CHANGED, 413),
    ),
    Operation(
        method="GET",
        path="/api/profiles/active",
        id="getActiveProfile",
        summary="The profile that is a model's default steering",
        query=management.ModelQuery,
        answer=management.ProfileObject | None,
        errors=_MANAGED,
    ),
    Operation(
        method="POST",
        path="/api/profiles/import",
        id="importProfile",
        summary="A new profile from a file",
        asks=management.ImportRequest,
        answer=management.ProfileObject,
        status=201,
        errors=(*_CHANGED, 413),
    ),
    Operation(
        method="POST",
        path="/api/profiles/deactivate",
        id="deactivateProfiles",
        summary="End a model's active profile",
        asks=management.ModelRequest,
        answer=management.SteeringObject,
        errors=(*_MANAGED, 413),
    ),
    Operation(
        method="GET",
        path="/api/profiles/{id}",
        id="getProfile",
        summary="One profile",
        answer=management.ProfileObject,
        errors=_MANAGED,
    ),
    Operation(
        method="PATCH",
        path="/api/profiles/{id}",
        id="updateProfile",
        summary="Change a profile",
        description="The default steering changes with it where it is the active one.",
        asks=management.ProfileUpdate,
        answer=management.ProfileObject,
        errors=(*_CHANGED, 413),
    ),
    Operation(
        method="DELETE",
        path="/api/profiles/{id}",
        id="deleteProfile",
        summary="Forget a profile",
        answer=type(None),
        errors=_MANAGED,
    ),
    Operation(
        method="POST",
        path="/api/profiles/{id}/activate",
        id="activateProfile",
        summary="Make a profile the default steering of its model",
        answer=management.SteeringObject,
        errors=_MANAGED,
    ),
    Operation(
        method="POST",
        path="/api/profiles/{id}/deactivate",
        id="deactivateProfile",
        summary="End a profile where it is active",
        answer=management.SteeringObject,
        errors=_MANAGED,
    ),
    Operation(
        method="GET",
        path="/api/profiles/{id}/export",
        id="exportProfile",
        summary="A profile as a file",
        description="What `import` takes is the value of `data`.",
        answer=management.ProfileExport,
        errors=_MANAGED,
    ),
    Operation(
        method="GET",
        path="/api/monitoring",
        id="getMonitor",
        summary="What is watched",
        query=management.ModelQuery,
        answer=management.MonitorObject,
        errors=_MANAGED,
    ),
    Operation(
        method="POST",
        path="/api/monitoring/configure",
        id="configureMonitor",
        summary="Watch features",
        asks=management.MonitorRequest,
        answer=management.MonitorObject,
        errors=(*_MANAGED, 413),
    ),
    Operation(
        method="GET",
        path="/api/monitoring/history",
        id="getHistory",
        summary="Activations of the last tokens, the newest first",
        query=management.HistoryQuery,
        answer=list[management.HistoryEntry],
        errors=_MANAGED,
    ),
    Operation(
        method="DELETE",
        path="/api/monitoring/history",
        id="clearHistory",
        summary="Forget the history",
        query=management.ForgetQuery,
        answer=management.MonitorObject,
        errors=_MANAGED,
    ),
    Operation(
        method="GET",
        path="/api/monitoring/statistics",
        id="getStatistics",
        summary="Features in numbers",
        query=management.StatisticsQuery,
        answer=list[management.FeatureStatistics],
        errors=_MANAGED,
    ),
    Operation(
        method="DELETE",
        path="/api/monitoring/statistics",
        id="clearStatistics",
        summary="Begin the numbers anew",
        query=management.StatisticsQuery,
        answer=management.MonitorObject,
        errors=_MANAGED,
    ),
    Operation(
        method="POST",
        path="/api/monitoring/statistics/top",
        id="getHighest",
        summary="The features that were highest",
        asks=management.TopRequest,
        answer=list[management.FeatureStatistics],
        errors=(*_MANAGED, 413),
    ),
)

OPERATIONS = _INFERENCE + _MANAGEMENT
