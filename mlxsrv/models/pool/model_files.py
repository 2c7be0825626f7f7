"""The files that a model is loaded from, and the order to load them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from mlxsrv.engine.orders import Load
from mlxsrv.formats.encoders import CrossEncoderConfig
from mlxsrv.formats.pooling import PoolingConfig
from mlxsrv.models.control_vectors import ControlVector
from mlxsrv.settings import Settings

SHORT_ROW = 256
"""Tokens of a short row, for which there must be room beside the weights of a model."""


class ModelFiles(msgspec.Struct, frozen=True):
    """The files that a model is loaded from, and the bytes that it will take."""

    folder: Path
    adapter: Path | None
    draft: Path | None
    base: int
    """Bytes of the weights; entries with the same folder share them."""
    own: int
    """Bytes that nothing shares: an adapter, a draft model."""
    short_row: int
    """Bytes that a row of SHORT_ROW tokens takes, as far as the files say."""
    context_length: int | None
    writes: bool
    """It is a decoder, which can write text."""
    pooling_config: PoolingConfig | str
    """The way from texts to vectors, or why there is none."""
    cross_encoder_config: CrossEncoderConfig | str
    """The way from pairs of texts to scores, or why there is none."""


def capped(context_length: int | None, settings: Settings) -> int | None:
    """A model's context in tokens, as far as `--max-context` allows it."""
    lengths = [context_length, settings.max_context]
    return min((length for length in lengths if length is not None), default=None)


def load_order(
    name: str,
    files: ModelFiles,
    settings: Settings,
    vectors: Iterable[ControlVector],
    *,
    lookup: bool = False,
) -> Load:
    """The order to load a model, for the device thread. `lookup`: tokens are looked up in its
    texts."""
    return Load(
        model=name,
        path=str(files.folder),
        adapter=None if files.adapter is None else str(files.adapter),
        draft=None if files.draft is None else str(files.draft),
        lookup=lookup,
        max_rows=settings.max_concurrency,
        prefill_chunk=settings.prefill_chunk,
        max_gap=settings.max_gap,
        prompt_cache_bytes=settings.prompt_cache_bytes,
        kv_bits=settings.kv_bits,
        quantized_kv_start=settings.quantized_kv_start,
        max_kv_size=settings.max_kv_size,
        trust_remote_code=settings.trust_remote_code,
        wire_memory=settings.wire_memory,
        mlx_cache_limit=settings.mlx_cache_limit,
        prompt_cache_dir=settings.prompt_cache_dir,
        prompt_cache_disk_bytes=settings.prompt_cache_disk_bytes,
        vectors=tuple((each.name, str(each.file.path)) for each in vectors),
    )
