"""Models as the API describes them: in the list of models, and in the health."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

import msgspec

from mlxsrv.engine.events import KVCost, Report
from mlxsrv.formats.capabilities import OF_TOKENIZERS
from mlxsrv.formats.files import UnusableFile
from mlxsrv.formats.model_folder import read_chat_template
from mlxsrv.generation.status import (
    KVCacheCost,
    MemoryState,
    ModelDetails,
    ModelFacts,
    ModelObject,
    ModelState,
    ModelStatus,
)
from mlxsrv.models.catalogue.catalogue import ModelEntry
from mlxsrv.models.pool.model import Model
from mlxsrv.models.pool.model_files import capped
from mlxsrv.models.pool.pool import Pool
from mlxsrv.prompts.model_defaults import read_config, sampling_defaults
from mlxsrv.settings import Settings


def model_object(
    entry: ModelEntry, model: Model | None, settings: Settings, reason: str | None
) -> ModelObject:
    """An entry of the catalogue, with `model` if it is loaded or wanted.

    Args:
        reason: why its last load failed, if it did.
    """
    loaded = None if model is None else model.loaded
    state: ModelStatus = "unused" if model is None else model.status
    reason = (reason or entry.problem) if state == "unused" else None
    described = ModelObject(
        id=entry.name,
        created=entry.created,
        owned_by=entry.name.rpartition("/")[0] or "mlxsrv",
        loaded=loaded is not None,
        state="failed" if reason is not None else state,
        reason=reason,
        download=None if model is None else model.arrived,
        load=None if model is None else model.weights_read,
        aliases=entry.aliases,
        kv_cache=None if loaded is None else _kv_cache(loaded.kv_costs, loaded.draft_costs),
    )
    files = entry.description
    if files is None:
        return described
    return msgspec.structs.replace(
        described,
        type=files.type,
        context_length=capped(files.context_length, settings),
        details=ModelDetails(
            files.family, files.parameter_size, files.quantization_level, files.format
        ),
        size=files.size,
        modified_at=datetime.fromtimestamp(files.modified_at, UTC),
        capabilities=_capabilities(files.capabilities, model),
    )


def read_facts(entry: ModelEntry) -> ModelFacts:
    """Return what the files of a model say beside its description. Blocks."""
    folder, known = entry.source.folder(), entry.description
    if folder is None or known is None:
        return ModelFacts()
    try:
        template = read_chat_template(folder)
    except UnusableFile:  # changed since it was described
        template = None
    defaults = sampling_defaults(read_config(folder / "generation_config.json"))
    given = {name: getattr(defaults, name) for name in defaults.__struct_fields__}
    return ModelFacts(
        template=template,
        defaults={name: value for name, value in given.items() if value is not None},
        parameters=known.parameters,
        hidden_size=known.hidden_size,
        layers=known.layers,
    )


def _capabilities(of_files: tuple[str, ...], model: Model | None) -> tuple[str, ...]:
    """The capabilities that the files show; a loaded tokenizer knows some of them better."""
    tokenizer = None if model is None else model.tokenizer
    if tokenizer is None or "completion" not in of_files:
        return of_files
    kept = (name for name in of_files if name not in OF_TOKENIZERS)
    return (*kept, *tokenizer.capabilities)


def _kv_cache(costs: Iterable[KVCost], drafts: Iterable[KVCost]) -> list[KVCacheCost]:
    per_draft = sum(cost.per_token for cost in drafts)
    draft = [KVCacheCost(kind="draft", bytes_per_token=per_draft)] if per_draft else []
    return [*map(_kv_cache_cost, costs), *draft]


def _kv_cache_cost(cost: KVCost) -> KVCacheCost:
    if cost.fixed:
        return KVCacheCost(kind="state", bytes=cost.fixed)
    if cost.first:
        return KVCacheCost(kind="first", bytes_per_token=cost.per_token, window=cost.first)
    kind: Literal["full", "window"] = "window" if cost.window else "full"
    return KVCacheCost(kind=kind, bytes_per_token=cost.per_token, window=cost.window or None)


def model_states(pool: Pool, report: Report) -> tuple[list[ModelState], MemoryState]:
    """The states of all models and of the memory.

    Args:
        report: the device thread's part.
    """
    models = [
        _model_state(model, report.models.get(model.name, {}), pinned=pool.stays(model))
        for model in pool
    ]
    memory = pool.statistics()
    state = MemoryState(
        limit=memory.limit,
        weights=memory.used,
        budget=memory.left,
        rows=_sum(report, "row_bytes"),
        reading=_sum(report, "reading_bytes"),
        kept=_sum(report, "prompt_cache_bytes") + _sum(report, "draft_bytes"),
        active=report.active_bytes,
        cached=report.cache_bytes,
        peak=report.peak_bytes,
    )
    return models, state


def _sum(report: Report, number: str) -> int:
    """A number of the engine's, of all models together."""
    return sum(model.get(number, 0) for model in report.models.values())


def _model_state(model: Model, engine: dict[str, int], *, pinned: bool) -> ModelState:
    loaded = model.loaded
    return ModelState(
        id=model.name,
        state=model.status,
        download=model.arrived,
        load=model.weights_read,
        pinned=pinned,
        requests=model.requests,
        rows=len(model.running),
        max_rows=model.max_rows,
        waiting_for_load=model.waiting_for_load,
        waiting_for_row=len(model.queued),
        waiting_clients=model.waiting_clients,
        bytes=None if loaded is None else loaded.bytes,
        idle_seconds=model.idle_seconds,
        kv_cache=None if loaded is None else _kv_cache(loaded.kv_costs, loaded.draft_costs),
        engine=engine,
    )
