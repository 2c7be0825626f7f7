"""The state of the models and of the server. Lists of models and the health have it as it is."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

# Models.


class ModelDetails(Struct, frozen=True):
    """As Ollama has them."""

    family: str
    parameter_size: str
    quantization_level: str
    format: str


class KVCacheCost(Struct, frozen=True, kw_only=True):
    """The bytes that the layers of one kind take in the KV cache of a row: those with `full`
    attention for each token, those with a `window` for each of the last ones, those that are
    quantized so many more for each of the `first` ones (`window` is their number), and those with a
    `state` whatever its length. A `draft` model takes its bytes for each token of one row only."""

    kind: Literal["full", "window", "first", "state", "draft"]
    bytes_per_token: int = 0
    window: int | None = None
    bytes: int = 0


ModelStatus = Literal["loaded", "downloading", "loading", "waiting for room", "unused", "failed"]


class ByteProgress(Struct, frozen=True):
    """Bytes of a model that is downloaded or loaded: those that are here, and all."""

    completed: int
    total: int


class ModelObject(Struct, frozen=True, kw_only=True):
    """OpenAI's fields, then what else is known. Nulls: the model's files are not here yet.
    `kv_cache` is known while the model is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    loaded: bool
    state: ModelStatus
    reason: str | None = None
    """Why its last load failed; the next request tries again."""
    download: ByteProgress | None = None
    """The progress of its download, while it is downloaded."""
    load: ByteProgress | None = None
    """The progress of its load, while its weights are read."""
    aliases: tuple[str, ...]
    type: Literal["chat", "base", "embedding"] | None = None
    context_length: int | None = None
    details: ModelDetails | None = None
    size: int | None = None
    """Bytes of its weights' files."""
    modified_at: datetime | None = None
    capabilities: tuple[str, ...] = ()
    kv_cache: list[KVCacheCost] | None = None


class LoadedModel(Struct, frozen=True):
    """A loaded model: its weights in bytes, and in how many seconds it may be unloaded, if ever."""

    described: ModelObject
    bytes: int
    seconds_left: float | None


class ModelFacts(Struct, frozen=True, kw_only=True):
    """The facts about a model that are read from its files when somebody asks.

    Attributes:
        template: its chat template, if it has one.
        defaults: its own sampling parameters, by OpenAI's names.
    """

    template: str | None = None
    defaults: Mapping[str, float] = {}
    parameters: int | None = None
    hidden_size: int | None = None
    layers: int | None = None


# The server itself.

HealthStatus = Literal["ok", "loading", "draining", "failed", "stalled"]


class ModelState(Struct, frozen=True, kw_only=True):
    """A model that is loaded or wanted. `engine` is the device thread's part, once it is loaded:
    rows that decode, prompts that are read or wait, the prompt cache."""

    id: str
    state: ModelStatus
    download: ByteProgress | None
    load: ByteProgress | None
    pinned: bool
    requests: int
    rows: int
    """Answers that are being generated; others of the requests wait."""
    max_rows: int
    waiting_for_load: int
    """Requests that wait for the model's files, tokenizer or weights."""
    waiting_for_row: int
    """Answers that stand in the line of the model."""
    waiting_clients: int
    """Clients whose requests wait for a row."""
    bytes: int | None
    idle_seconds: float | None
    kv_cache: list[KVCacheCost] | None
    engine: dict[str, int]


class MemoryState(Struct, frozen=True, kw_only=True):
    """In bytes: the limit; what weights and SAEs take of it, and the budget that they leave for
    KV caches; what of this rows have, prompts that are being read, and what can go at any time:
    cached prompts, and what draft models have read. Then what MLX has in use, keeps for reuse, and
    has had at most."""

    limit: int
    weights: int
    budget: int
    rows: int
    reading: int
    kept: int
    active: int
    cached: int
    peak: int


class EngineState(Struct, frozen=True, kw_only=True):
    """`stalled_seconds`: how long a step has taken that is still under way, if that is more than
    `--step-timeout`; else 0."""

    stalled_seconds: float


class FirstTokenTimes(Struct, frozen=True, kw_only=True):
    """Seconds from a request to the first text of its answer, for the last `replies`: at most 100.
    95 % of them took `p95` or less."""

    replies: int
    median: float
    p95: float


class RequestTotals(Struct, frozen=True, kw_only=True):
    """Requests to models since the server started: for text, vectors or scores. Those that ended,
    and those of them that failed; tokens of their prompts, those of them that came from the prompt
    cache, and tokens of answers. A request that runs counts when it ends."""

    ended: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft: FirstTokenTimes | None


class RecentError(Struct, frozen=True, kw_only=True):
    """A request that ended with an error. `route` is its path with the names of parameters, or
    empty if there is no such route; `model` is empty if there is none of the name that it asks for.
    With a `status` below 400 the stream had begun when it failed; with 0 nothing was answered."""

    time: datetime
    method: str
    route: str
    status: int
    code: str
    model: str
    request_id: str


class Health(Struct, frozen=True, kw_only=True):
    """`reason`, `download` and `load` are of the default model, where it could not be loaded, or is
    downloaded or loaded. `replica` answers, where there are several."""

    status: HealthStatus
    replica: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    download: ByteProgress | UnsetType = UNSET
    load: ByteProgress | UnsetType = UNSET
    engine: EngineState | UnsetType = UNSET
    models: list[ModelState] | UnsetType = UNSET
    memory: MemoryState | UnsetType = UNSET
    requests: RequestTotals | UnsetType = UNSET
    errors: list[RecentError] | UnsetType = UNSET
    """The last 20, the latest first."""
