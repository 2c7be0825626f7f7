"""The fields that steer one request. Every dialect has them, as an extension."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.parameters import SteeringMode
from mlxsrv.generation.spec import SteeringWishes
from mlxsrv.wire.schema_rules import NUMBERS_AS_KEYS, Schema

NotEmpty = Annotated[str, Meta(min_length=1)]
# Which features exist depends on the SAE. 1,000 directions are some megabytes a request.
Features = Annotated[dict[int, Annotated[float, Meta(ge=-200, le=200)]], Meta(max_length=1000)]
Scale = Annotated[float, Meta(ge=-100, le=100)]


class SteeringFields(Struct, frozen=True, kw_only=True):
    """None: the model's default steering is used."""

    schema_rules: ClassVar[Schema] = {"properties": {"steering": NUMBERS_AS_KEYS}}

    profile: NotEmpty | None = None
    steering: Features | None = None
    steering_mode: SteeringMode | None = None
    control_vector: NotEmpty | Annotated[dict[NotEmpty, Scale], Meta(max_length=100)] | None = None

    @property
    def steering_wishes(self) -> SteeringWishes:
        return SteeringWishes(
            profile=self.profile,
            features=self.steering,
            mode=self.steering_mode,
            control_vector=self.control_vector,
        )


def check_steering(request: SteeringFields) -> None:
    """Raises InvalidRequest if the fields do not go together."""
    if request.profile is not None and request.steering is not None:
        raise InvalidRequest(
            "steering: cannot be combined with profile, which has its own steering",
            param="steering",
        )
    if request.steering_mode is not None and request.steering is None:
        raise InvalidRequest(
            "steering_mode: needs steering, whose mode it is",
            param="steering_mode",
        )
