"""The state of SAEs, steering, profiles and monitors. The answers under `/api` have it as it is.

Features are numbers of an SAE's rows. Times are Unix seconds.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from mlxsrv.generation.parameters import SteeringMode

Metric = Literal["mean", "max", "active_ratio", "count"]


class SAEObject(Struct, frozen=True, kw_only=True):
    """Nulls: what its files do not say, or all of it while they are not here."""

    id: str
    state: Literal["downloading", "ready", "attached", "failed"]
    origin: str
    architecture: str | None = None
    d_in: int | None = None
    d_sae: int | None = None
    layer: int | None = None
    hook_name: str | None = None
    model_name: str | None = None
    bytes: int | None = None
    warnings: tuple[str, ...] = ()
    problem: str | None
    attached_to: tuple[str, ...]


class Compatibility(Struct, frozen=True, kw_only=True):
    """`reasons` say why it cannot be attached, `warnings` why it may not do what it should."""

    compatible: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


class AttachmentObject(Struct, frozen=True, kw_only=True):
    """The SAE that a model has, or that it has none. `bytes` is what its arrays take."""

    attached: bool
    model: str
    sae_id: str | None = None
    layer: int | None = None
    hook: Literal["resid_pre", "resid_post"] | None = None
    d_in: int | None = None
    d_sae: int | None = None
    architecture: str | None = None
    bytes: int | None = None
    since: float | None = None


class SteeringObject(Struct, frozen=True, kw_only=True):
    """The default steering, for requests that name none."""

    enabled: bool
    mode: SteeringMode
    values: dict[int, float]


class ProfileObject(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    description: str
    steering: dict[int, float]
    mode: SteeringMode
    model_id: str
    sae_id: str
    layer: int
    created_at: float
    updated_at: float


class ProfileContent(Struct, frozen=True, kw_only=True):
    name: str
    description: str
    steering: dict[int, float]
    mode: SteeringMode
    model_id: str
    sae_id: str
    layer: int


class MonitorObject(Struct, frozen=True, kw_only=True):
    """The features that are watched, and how much is kept: tokens in the history, features in the
    statistics. While the monitor is enabled, prompts are read from their first token and not from
    the prompt cache, so that every token is seen."""

    enabled: bool
    features: tuple[int, ...]
    top_k: int
    history_size: int
    history_entries: int
    features_seen: int


class HistoryEntry(Struct, frozen=True, kw_only=True):
    """One token. `request_id` is the id of the completion; positions count from its prompt's first
    token."""

    timestamp: float
    request_id: str
    token_position: int
    activations: dict[int, float]


class FeatureStatistics(Struct, frozen=True, kw_only=True):
    """Statistics of one feature over the `count` tokens in which it was reported: every token if
    it was named, else those in which it was among the highest. It is active where it is above 0.
    `std` is the sample standard deviation; null for a single token."""

    feature_idx: int
    count: int
    mean: float
    std: float | None
    min: float
    max: float
    active_ratio: float
