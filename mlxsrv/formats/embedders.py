"""Tells embedding models from models that generate text, by files, name and architecture."""

from __future__ import annotations

import re
from pathlib import Path

from mlxsrv.formats.files import read_start
from mlxsrv.formats.json_files import JSONObject, architecture_names, text_config

_FILES = ("modules.json", "config_sentence_transformers.json", "1_Pooling")
_NAME = re.compile(
    r"(?:^|[-_./ ])(?:embed(?:der|ding|dings)?(?:$|[-_. ])|(?:bge|e5|gte)[-_])", re.IGNORECASE
)
_GEMMA_NAME = re.compile(r"(?:^|[-_./ ])embed(?:der|ding|dings)?gemma", re.IGNORECASE)
# A model saved without its output head, as Qwen3Model is; QWenLMHeadModel has one.
_HEADLESS = re.compile(r"\w+(?<!LMHead)(?<!Chat)Model")
# LlamaBidirectionalModel, BidirLMModel, MistralBiModel, LlamaEncoderModel
_BOTH_WAYS = re.compile(r"[Bb]idir|Bi(?:Model|For[A-Z])|EncoderModel")
_TAG = re.compile(
    r"^pipeline_tag:\s*['\"]?(?:feature-extraction|sentence-similarity)\b", re.MULTILINE
)
_CARD_BYTES = 65536


def is_embedder(folder: Path, files: frozenset[str], config: JSONObject, name: str) -> bool:
    """Whether a model is made for embeddings, by its files, name, architecture or model card.

    Args:
        files: the names in `folder`.
        config: `config.json`.
        name: what the model is called.
    """
    if not files.isdisjoint(_FILES) or is_embedder_name(name) or _GEMMA_NAME.search(name):
        return True
    if is_headless(config):
        return True
    card = read_start(folder / "README.md", files, _CARD_BYTES).replace("\r\n", "\n")
    front = card.partition("\n---")[0] if card.startswith("---\n") else ""
    return _TAG.search(front) is not None


def is_embedder_name(name: str) -> bool:
    """Whether a name has a word for embeddings, or the name of a family that only makes those."""
    return _NAME.search(name) is not None


def is_headless(config: JSONObject) -> bool:
    """Whether a model was saved without its output head."""
    return any(map(_HEADLESS.fullmatch, architecture_names(config)))


def looks_both_ways(config: JSONObject) -> bool:
    """Whether the tokens of a decoder attend to those behind them as well, by the config's flags or
    by the names of its classes: some models have no flag."""
    code = config.get("auto_map")
    named = code.values() if isinstance(code, dict) else ()
    names = [*architecture_names(config), config.get("model_type"), *named]
    if any(isinstance(name, str) and _BOTH_WAYS.search(name) for name in names):
        return True
    return any(
        place.get("use_bidirectional_attention") or place.get("is_causal") is False
        for place in (config, text_config(config))
    )
