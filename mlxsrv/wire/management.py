"""Requests and answers under `/api`: SAEs, default steering, profiles, monitoring.

Every answer is an Envelope with `success`, and with `data` or `error`; the other is null. A field
that a request leaves out has its default; in an update it stays as it is. Features are numbers of
an SAE's rows; as keys of JSON objects they are strings.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from mlxsrv.errors import ServeError
from mlxsrv.generation.parameters import SteeringMode
from mlxsrv.generation.steering import Metric, ProfileContent
from mlxsrv.wire.dialect import ErrorShape
from mlxsrv.wire.schema_rules import NUMBERS_AS_KEYS, Schema
from mlxsrv.wire.steering import Features, NotEmpty

Layer = Annotated[int, Meta(ge=0, le=9999)]
Value = Annotated[float, Meta(ge=-200, le=200)]
ProfileName = Annotated[str, Meta(min_length=1, max_length=100)]
ProfileText = Annotated[str, Meta(max_length=500)]
HistorySize = Annotated[int, Meta(ge=1, le=1000)]
NumberList = Annotated[str, Meta(pattern=r"^[0-9]{1,9}(,[0-9]{1,9})*(?!\n)$", max_length=5000)]

# The envelope.


class Details(Struct, frozen=True):
    """`param` is the field, or the path to it, that is wrong."""

    param: str | UnsetType = UNSET


class Problem(Struct, frozen=True):
    code: str
    message: str
    details: Details


class Envelope(Struct, frozen=True, kw_only=True):
    success: bool
    data: Any = None
    error: Problem | None = None


def success(data: object) -> Envelope:
    return Envelope(success=True, data=data)


def failure(error: ServeError, request_id: str = "") -> Envelope:
    details = Details() if error.param is None else Details(error.param)
    return Envelope(success=False, error=Problem(error.code, error.message, details))


ERRORS = ErrorShape(Envelope, failure)


_STEERING: Schema = {"properties": {"steering": NUMBERS_AS_KEYS}}

# Requests. `model` names the model whose attachment is meant; null: the default model.


class ModelRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None


class RegisterRequest(Struct, frozen=True, kw_only=True):
    """An SAE to know from now on: in a repository of the hub, or below an `--sae-dir`.

    `file_path` is the SAE's folder, or its file, within the repository. The id is made of what is
    given where none is.
    """

    repository_id: NotEmpty | None = None
    path: NotEmpty | None = None
    revision: NotEmpty | None = None
    file_path: NotEmpty | None = None
    id: NotEmpty | None = None


class AttachRequest(ModelRequest, frozen=True, kw_only=True):
    """`layer` None: the one that the SAE was trained on."""

    layer: Layer | None = None


class FeatureRequest(ModelRequest, frozen=True, kw_only=True):
    """One feature of the default steering, set. `mode` None: as it is."""

    feature_idx: int
    value: Value
    mode: SteeringMode | None = None


class FeaturesRequest(ModelRequest, frozen=True, kw_only=True):
    """Several features of the default steering, all set or none; others stay."""

    schema_rules: ClassVar[Schema] = _STEERING

    steering: Features
    mode: SteeringMode | None = None


class ProfileRequest(Struct, frozen=True, kw_only=True):
    """A new profile: steering for one SAE at one layer of one model."""

    schema_rules: ClassVar[Schema] = _STEERING

    name: ProfileName
    description: ProfileText | None = None
    steering: Features
    mode: SteeringMode | None = None
    model_id: NotEmpty
    sae_id: NotEmpty
    layer: Layer

    @property
    def content(self) -> ProfileContent:
        return ProfileContent(
            name=self.name,
            description=self.description or "",
            steering=self.steering,
            mode=self.mode or "additive",
            model_id=self.model_id,
            sae_id=self.sae_id,
            layer=self.layer,
        )


class ProfileUpdate(Struct, frozen=True, kw_only=True):
    schema_rules: ClassVar[Schema] = _STEERING

    name: ProfileName | None = None
    description: ProfileText | None = None
    steering: Features | None = None
    mode: SteeringMode | None = None
    model_id: NotEmpty | None = None
    sae_id: NotEmpty | None = None
    layer: Layer | None = None


class ImportRequest(Struct, frozen=True, kw_only=True):
    """A profile to import, as an export gave it."""

    format: Literal["mlxsrv-profile"]
    version: Literal[1]
    profile: ProfileRequest


class MonitorRequest(ModelRequest, frozen=True, kw_only=True):
    """The features to watch from now on: `features`, and for each token the `top_k` highest.

    `top_k` is 10 if no features are named and no request gave it before.
    """

    enabled: bool | None = None
    features: Annotated[list[int], Meta(max_length=256)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=100)] | None = None
    history_size: HistorySize | None = None


class TopRequest(ModelRequest, frozen=True, kw_only=True):
    k: Annotated[int, Meta(ge=1, le=100)] = 10
    metric: Metric = "mean"


# Queries.


class ModelQuery(Struct, frozen=True, kw_only=True):
    model: str | None = None


class CompatibilityQuery(ModelQuery, frozen=True, kw_only=True):
    layer: Layer | None = None


class HistoryQuery(ModelQuery, frozen=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    request_id: str | None = None


class ForgetQuery(ModelQuery, frozen=True, kw_only=True):
    request_id: str | None = None


class StatisticsQuery(ModelQuery, frozen=True, kw_only=True):
    """`features` are numbers with commas between them; null: all."""

    features: NumberList | None = None

    @property
    def chosen(self) -> frozenset[int] | None:
        return None if self.features is None else frozenset(map(int, self.features.split(",")))


# Answers, beside those of `generation/steering.py`.


class ProfileExport(Struct, frozen=True, kw_only=True):
    format: Literal["mlxsrv-profile"] = "mlxsrv-profile"
    version: Literal[1] = 1
    profile: ProfileContent
