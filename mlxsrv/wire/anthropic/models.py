"""The list of models as Anthropic's clients read it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct

from mlxsrv.generation.status import ModelObject


class AnthropicModel(Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModelList(Struct, frozen=True, kw_only=True):
    data: list[AnthropicModel]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


def anthropic_model(known: ModelObject) -> AnthropicModel:
    return AnthropicModel(
        id=known.id,
        display_name=known.id,
        created_at=datetime.fromtimestamp(known.created, UTC),
        max_input_tokens=known.context_length,
        max_tokens=known.context_length,
    )


def anthropic_models(known: Sequence[ModelObject]) -> AnthropicModelList:
    """All models, on one page."""
    models = [anthropic_model(one) for one in known]
    ids = [model.id for model in models]
    return AnthropicModelList(
        data=models, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None
    )
