"""Loading a model with its adapter and draft model, in slices between the steps of others.

A model is warmed up before its client gets the event Loaded.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mlxsrv.engine.cache.kv_caches import KVCacheFactory, choose_kv_caches
from mlxsrv.engine.embedding.embedder import Embedder
from mlxsrv.engine.embedding.embedding_models import EmbeddingDecoder, EmbeddingEncoder
from mlxsrv.engine.events import Loaded
from mlxsrv.engine.execution.speculation import check_draft, find_obstacle
from mlxsrv.engine.execution.stored import open_stored
from mlxsrv.engine.execution.text_runner import TextRunner
from mlxsrv.engine.loading.device_memory import set_limits, working_memory
from mlxsrv.engine.loading.warm_up import warm_up, warm_up_encoder
from mlxsrv.engine.loading.weights import ByteBudget, FileArrays, WeightReader
from mlxsrv.engine.orders import Job, Load
from mlxsrv.engine.outcomes import Admitted, Kept
from mlxsrv.engine.patches.attention import patch_attention
from mlxsrv.engine.plans import FreedRow
from mlxsrv.engine.ranks.in_step import Meet
from mlxsrv.engine.ranks.rank_group import RankGroup
from mlxsrv.engine.steering.steerer import Steerer, fit_vectors
from mlxsrv.engine.storage.storage import Storage
from mlxsrv.formats.encoders import is_encoder
from mlxsrv.formats.files import read_object
from mlxsrv.generation.parameters import Constraint


@dataclass(frozen=True)
class ResidentModel:
    """A model in memory.

    Attributes:
        loaded: the answer to its client's order.
        files: the arrays of its files; models that are loaded later from the same files share them.
        embedder: makes vectors of texts.
        text: generates text; None for an encoder.
        steerer: of `text`.
    """

    loaded: Loaded
    files: Sequence[FileArrays]
    embedder: Embedder
    text: TextRunner | None = None
    steerer: Steerer | None = None

    def admit(
        self, jobs: Sequence[Job], make_constraint: Callable[[Job], Constraint | None]
    ) -> Admitted:
        """Take these jobs, with the constraint that is made for each that generates text."""
        failures = self.embedder.admit([job for job in jobs if job.texts])
        if self.text is None:
            return Admitted(failures)
        admitted = self.text.admit([job for job in jobs if not job.texts], make_constraint)
        return msgspec.structs.replace(admitted, failures=failures + admitted.failures)

    def free_rows(self, rows: Sequence[FreedRow]) -> Kept:
        """Free these rows, at whatever stage they are. Raises what TextRunner's does."""
        self.embedder.release([freed.row for freed in rows])
        return Kept() if self.text is None else self.text.release(rows)

    def rewind(self, rows: Collection[int]) -> None:
        """Drop the KV caches of these rows, which stay. Raises what TextRunner's does."""
        self.embedder.rewind(rows)
        if self.text is not None:
            self.text.rewind(rows)

    def reset(self) -> None:
        """Forget all rows, texts and cached prompts."""
        self.embedder.reset()
        if self.text is not None:
            self.text.reset()


Residents = Callable[[], Iterable[ResidentModel]]
"""Gives the models that are in memory at the moment."""


def load(
    order: Load,
    budget: ByteBudget,
    residents: Residents,
    storage: Storage | None,
    number: int,
    ranks: RankGroup | None = None,
) -> Generator[Meet | None, None, ResidentModel]:
    """Load a model, yielding between slices.

    Args:
        order: what to load.
        budget: how much of the weights a slice reads.
        residents: the models in memory; those of the same files share their arrays.
        storage: prompts on disk; None: none are stored.
        number: the model's.
        ranks: those that each load their part; None: this process is alone.

    Raises what mlx-lm raises on files that it cannot use.
    """
    set_limits(wire=order.wire_memory, cached=order.mlx_cache_limit)

    def resident_files() -> Iterable[FileArrays]:
        return (files for model in residents() for files in model.files)

    reader = WeightReader(
        budget, resident_files, trust_remote_code=order.trust_remote_code, ranks=ranks
    )
    if is_encoder(read_object(Path(order.path) / "config.json")):
        if ranks is not None:
            raise ValueError("an encoder cannot be divided among ranks (--parallel)")
        return (yield from _load_encoder(order, reader))
    return (yield from _load_decoder(order, reader, storage, number, ranks))


def _load_decoder(
    order: Load,
    reader: WeightReader,
    storage: Storage | None,
    number: int,
    ranks: RankGroup | None,
) -> Generator[Meet | None, None, ResidentModel]:
    mapped = yield from reader.map(order.path, order.adapter)
    yield from reader.read(mapped)
    model = mapped.model
    yield Meet.HERE  # from here on passes of the model run, which need all ranks
    if order.kv_bits is not None:
        patch_attention()
    caches = yield from choose_kv_caches(
        model, order.max_kv_size, order.kv_bits, order.quantized_kv_start
    )
    if ranks is not None:
        kinds = {type(layer).__name__ for layer in caches.make().layers}
        what = "kinds of KV caches: use another number of ranks"
        ranks.require_alike(what, " ".join(sorted(kinds)))
    yield from warm_up(model, caches, ranks)
    draft, lookup, proposer_notes = yield from _load_proposer(order, reader, model, caches)
    vectors, vector_notes = fit_vectors(model, order.vectors)
    if ranks is not None:
        what = "control vectors: each needs the files at the same paths"
        ranks.require_alike(what, " ".join(vectors))
    steerer = Steerer(model, vectors)
    stored, stored_notes = yield from open_stored(storage, number, order, caches)
    text = TextRunner(
        model,
        caches=caches,
        steerer=steerer,
        prompt_cache_bytes=_prompt_cache_bytes(order),
        draft=draft,
        lookup=lookup,
        stored=stored,
        ranks=ranks,
    )
    loaded = Loaded(
        order.model,
        text.facts.batched,
        text.facts.cuts,
        # The budget is kept on every rank, so it counts with the rank that has the largest share.
        bytes=reader.bytes if ranks is None else max(ranks.exchange_number(reader.bytes)),
        shared=reader.shared,
        notes=caches.notes + proposer_notes + vector_notes + stored_notes,
        vectors=tuple(vectors),
        kv_costs=text.facts.kv_costs,
        draft_costs=text.facts.draft_costs,
    )
    embedder = Embedder(EmbeddingDecoder(model), Path(order.path), order.model, ranks)
    return ResidentModel(loaded, reader.files, embedder, text, steerer)


def _load_encoder(order: Load, reader: WeightReader) -> Generator[None, None, ResidentModel]:
    """Raises ValueError for an encoder that cannot run here, or that is to have an adapter."""
    if order.adapter is not None:
        raise ValueError("its adapter cannot be used: it is an encoder")
    mapped = yield from reader.map(order.path, encoder=True)
    yield from reader.read(mapped)
    encoder = EmbeddingEncoder(mapped.model)
    yield from warm_up_encoder(encoder)
    drafts = order.draft is not None or order.lookup
    notes = ("draft_model: not with an encoder, so it is not used",) if drafts else ()
    loaded = Loaded(order.model, True, True, bytes=reader.bytes, shared=reader.shared, notes=notes)
    embedder = Embedder(encoder, Path(order.path), order.model)
    return ResidentModel(loaded, reader.files, embedder)


def _load_proposer(
    order: Load, reader: WeightReader, model: Any, caches: KVCacheFactory
) -> Generator[None, None, tuple[Any, bool, tuple[str, ...]]]:
    """The draft model, if there is one; whether tokens are looked up; and a note, if either should
    propose tokens and cannot.

    Raises ValueError if the draft's vocabulary is not the model's.
    """
    if order.draft is None and not order.lookup:
        return None, False, ()
    if (obstacle := find_obstacle(caches)) is not None:  # before anything of the draft is read
        return None, False, (f"draft_model: {obstacle}",)
    if order.draft is None:
        return None, True, ()
    mapped = yield from reader.map(order.draft)
    check_draft(model, mapped.model)
    if (obstacle := find_obstacle(caches, mapped.model)) is not None:
        return None, order.lookup, (f"draft_model: {obstacle}",)
    yield from reader.read(mapped)
    yield from warm_up(mapped.model, KVCacheFactory(mapped.model))
    return mapped.model, order.lookup, ()


def _prompt_cache_bytes(order: Load) -> int:
    """As ordered, else an eighth of the memory of the device."""
    ordered = order.prompt_cache_bytes
    return working_memory() // 8 if ordered is None else ordered
