"""Encoders and cross-encoders: which of them this server runs, by their JSON files alone.

An encoder that would not be computed exactly is refused with the reason: a vector or score that is
nearly right is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from mlxsrv.formats.files import (
    JSONObject,
    UnusableFile,
    architecture_names,
    read_object,
    read_optional_object,
)

Activation = Literal["sigmoid", "identity", "softmax"]
"""The function that makes a score of a cross-encoder's logits: the sigmoid of one logit, one logit
as it is, or of two logits the probability of the second."""

ROBERTA = frozenset({"roberta", "xlm-roberta", "camembert"})
"""Families like RoBERTa: BERT whose positions start behind the padding token's id."""
_ENCODERS = frozenset({"bert", "modernbert"}) | ROBERTA
_CLASSIFIER = re.compile(r"\w+ForSequenceClassification")

_MOST_LABELS = 10**7
TORCH_ACTIVATION = re.compile(r"torch\.nn\.(?:modules\.(?:activation|linear)\.)?(\w+)")
"""The name of an activation function, as sentence-transformers saves it."""


class CrossEncoderConfig(Struct, frozen=True):
    """The way from the logits of a pair of texts to one score."""

    activation: Activation


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether this server runs encoders of this family; `check_encoder` knows about one model."""
    family = config.get("model_type")
    return isinstance(family, str) and family in _ENCODERS


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether this is a cross-encoder: an encoder with a head that scores a pair of texts."""
    return is_encoder(config) and any(map(_CLASSIFIER.fullmatch, architecture_names(config)))


def check_encoder(config: JSONObject) -> None:
    """Raise UnusableFile if this encoder would not be computed exactly."""
    position = config.get("position_embedding_type")
    if position not in (None, "absolute"):
        raise UnusableFile(
            f"its position embeddings are {position!r}; only 'absolute' ones are supported"
        )
    if config.get("is_decoder"):
        raise UnusableFile("it is used as a decoder (is_decoder), which is not supported")
    if config.get("lora_adaptations"):
        raise UnusableFile("it has adapters inside (lora_adaptations), which are not supported")
    if config.get("quantization") or config.get("quantization_config"):
        raise UnusableFile("it is a quantized encoder, which is not supported")
    if config.get("model_type") == "modernbert":
        _check_rope(config)


def check_no_adapter(folder: Path) -> None:
    """Raise UnusableFile if an adapter comes with the encoder in `folder`."""
    if (folder / "adapter_config.json").exists():
        raise UnusableFile("it comes with an adapter, which is not supported for encoders")


def _check_rope(config: JSONObject) -> None:
    """Raise UnusableFile if positions are scaled."""
    kinds = config.get("rope_parameters")
    for place in (config.get("rope_scaling"), *(kinds.values() if isinstance(kinds, dict) else ())):
        found = place.get("rope_type", place.get("type")) if isinstance(place, dict) else None
        if found not in (None, "default"):
            raise UnusableFile(f"its positions are scaled ({found!r}), which is not supported")


def read_cross_encoder_config(folder: Path) -> CrossEncoderConfig:
    """Return how the cross-encoder in `folder` makes a score of its logits.

    Raises:
        UnusableFile: it is no cross-encoder, or this server cannot make its scores.
    """
    config = read_object(folder / "config.json")
    if not is_classifier(config):
        raise UnusableFile("it is not a cross-encoder with a classification head")
    labels = label_count(config)
    if labels > 2:
        raise UnusableFile(
            f"its head has {labels} labels; only heads of one or two labels tell relevance"
        )
    saved = _saved_activation(folder, config)
    if labels == 2 and saved in (None, "Identity"):  # saved if no function was chosen
        return CrossEncoderConfig("softmax")
    if labels == 1 and saved in (None, "Sigmoid"):
        return CrossEncoderConfig("sigmoid")
    if labels == 1 and saved == "Identity":
        return CrossEncoderConfig("identity")
    raise UnusableFile(f"its scores of {labels} labels are made by {saved}, which is not supported")


def label_count(config: Mapping[str, Any]) -> int:
    """Return how many logits a classification head gives, as transformers counts them.

    Raises:
        UnusableFile: the config has no sensible number.
    """
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        return len(names)
    count = config.get("num_labels", 2)
    if type(count) is not int or not 0 < count < _MOST_LABELS:
        raise UnusableFile(f"'config.json' has {count!r} for num_labels")
    return count


def _saved_activation(folder: Path, config: JSONObject) -> str | None:
    """Return the class in PyTorch's `nn`, where any version of sentence-transformers saved one.

    Raises:
        UnusableFile: the activation function is not PyTorch's.
    """
    saved = read_optional_object(folder / "config_sentence_transformers.json").get("activation_fn")
    if saved is None:
        nested = config.get("sentence_transformers")
        saved = nested.get("activation_fn") if isinstance(nested, dict) else None
    if saved is None:
        saved = config.get("sbert_ce_default_activation_function")
    if saved is None:
        return None
    found = TORCH_ACTIVATION.fullmatch(saved) if isinstance(saved, str) else None
    if found is None:
        raise UnusableFile(f"its scores are made by {str(saved)[:100]!r}, which is not supported")
    return found[1]
