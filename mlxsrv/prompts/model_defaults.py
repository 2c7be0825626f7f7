"""A model's own defaults for generation: sampling parameters, end tokens, vocabulary size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from mlxsrv.formats.files import JSONObject, UnusableFile, read_object, text_config


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Sampling parameters that a model's `generation_config.json` gives, if any."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_config(path: Path) -> JSONObject:
    """Return the object in a file, or an empty one if it is missing or broken, as mlx-lm does."""
    try:
        return read_object(path)
    except UnusableFile:
        return {}


def sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Return what `generation_config.json` gives, if all its values are numbers."""
    try:
        return msgspec.convert(
            {key: generation.get(key) for key in SamplingDefaults.__struct_fields__},
            SamplingDefaults,
        )
    except msgspec.ValidationError:
        return SamplingDefaults()


def vocabulary_size(config: JSONObject) -> int | None:
    """Return the width of the model's logits, or None if the config does not tell."""
    for place in (config, text_config(config)):
        if isinstance(size := place.get("vocab_size"), int):
            return size
    return None


def find_end_tokens(own: Iterable[int], *configs: Mapping[str, Any]) -> frozenset[int]:
    """Return every token that ends a text: the tokenizer's `own`, and those of the configs."""
    ends = set(own)
    for config in configs:
        listed = config.get("eos_token_id")
        ends.update([listed] if isinstance(listed, int) else listed or [])
    return frozenset(ends)
