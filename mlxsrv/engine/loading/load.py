"""Loading a model with its adapter and draft model, in slices between the steps of others.

A model is warmed up before its client is told that it is there.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from mlxsrv.engine.cache.kv_caches import KVCacheFactory, choose_kv_caches
from mlxsrv.engine.cache.prompt_cache import PromptCache
from mlxsrv.engine.embedding.embedder import Embedder
from mlxsrv.engine.embedding.runners import DecoderRunner, EncoderRunner
from mlxsrv.engine.events import Loaded
from mlxsrv.engine.execution.batch import Batch
from mlxsrv.engine.execution.speculation import check_draft, find_obstacle
from mlxsrv.engine.loading.device_memory import working_memory
from mlxsrv.engine.loading.resident import ResidentModel, TextGeneration
from mlxsrv.engine.loading.warm_up import warm_up, warm_up_encoder
from mlxsrv.engine.loading.weights import FileArrays, WeightReader
from mlxsrv.engine.orders import Load
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.steering.control_vectors import fit_vectors
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.formats.encoders import is_encoder
from mlxsrv.formats.json_files import read_object

Residents = Callable[[], Sequence[ResidentModel]]
"""Gives the models that are in memory at the moment."""


def load(order: Load, residents: Residents) -> Generator[None, None, ResidentModel]:
    """Load a model, yielding between slices.

    Args:
        order: what to load.
        residents: the models in memory; those of the same files share their arrays.

    Raises what mlx-lm raises on files that it cannot use.
    """
    # With nothing under way: the limit must not change during an asynchronous evaluation.
    mx.synchronize()
    maybe_set_recommended_wired_limit()

    def resident_files() -> Iterable[FileArrays]:
        return (files for model in residents() for files in model.files)

    reader = WeightReader(
        order.max_gap / 2, resident_files, trust_remote_code=order.trust_remote_code
    )
    if is_encoder(read_object(Path(order.path) / "config.json")):
        return (yield from _load_encoder(order, reader))
    return (yield from _load_decoder(order, reader))


def _load_decoder(order: Load, reader: WeightReader) -> Generator[None, None, ResidentModel]:
    mapped = yield from reader.map(order.path, order.adapter)
    yield from reader.read(mapped)
    model = mapped.model
    caches = yield from choose_kv_caches(model, order.max_kv_size, order.kv_bits)
    yield from warm_up(model, caches)
    draft, draft_notes = yield from _load_draft(order, reader, model, caches)
    vectors, vector_notes = fit_vectors(model, order.vectors)
    steerer = Steerer(model, vectors)
    prompt_cache = PromptCache(_prompt_cache_bytes(order))
    pace = Pace(order.prefill_chunk, order.max_gap)
    batch = Batch(
        model,
        max_rows=order.max_rows,
        pace=pace,
        cached=prompt_cache,
        caches=caches,
        draft=draft,
        steerer=steerer,
    )
    loaded = Loaded(
        order.model,
        batch.batched,
        batch.cuts,
        bytes=reader.bytes,
        shared=reader.shared,
        notes=caches.notes + draft_notes + vector_notes,
        vectors=tuple(vectors),
    )
    runner = DecoderRunner(model)
    embedder = Embedder(
        runner, Path(order.path), order.model, pace, decoding=lambda: batch.streaming
    )
    generation = TextGeneration(batch, prompt_cache, steerer)
    return ResidentModel(loaded, reader.files, embedder, generation)


def _load_encoder(order: Load, reader: WeightReader) -> Generator[None, None, ResidentModel]:
    """Raises ValueError for an encoder that cannot run here, or that is to have an adapter."""
    if order.adapter is not None:
        raise ValueError("its adapter cannot be used: it is an encoder")
    mapped = yield from reader.map(order.path, encoder=True)
    yield from reader.read(mapped)
    runner = EncoderRunner(mapped.model)
    yield from warm_up_encoder(runner)
    notes = ("draft_model: not with an encoder, so it is not used",) if order.draft else ()
    loaded = Loaded(order.model, True, True, bytes=reader.bytes, shared=reader.shared, notes=notes)
    pace = Pace(order.prefill_chunk, order.max_gap)
    embedder = Embedder(runner, Path(order.path), order.model, pace)
    return ResidentModel(loaded, reader.files, embedder)


def _load_draft(
    order: Load, reader: WeightReader, model: Any, caches: KVCacheFactory
) -> Generator[None, None, tuple[Any, tuple[str, ...]]]:
    """The draft model and no notes; or None and a note that says why it cannot be used.

    Raises ValueError if its vocabulary is not the model's.
    """
    if order.draft is None:
        return None, ()
    if caches.quantized or caches.bounded:
        setting = "kv_bits" if caches.quantized else "max_kv_size"
        return None, (f"draft_model: not with {setting}, so it is not used",)
    mapped = yield from reader.map(order.draft)
    check_draft(model, mapped.model)
    if (obstacle := find_obstacle(model, mapped.model)) is not None:
        return None, (f"draft_model: {obstacle}",)
    yield from reader.read(mapped)
    yield from warm_up(mapped.model, KVCacheFactory(mapped.model))
    return mapped.model, ()


def _prompt_cache_bytes(order: Load) -> int:
    """As ordered, else an eighth of the memory that the device works in."""
    ordered = order.prompt_cache_bytes
    return working_memory() // 8 if ordered is None else ordered
