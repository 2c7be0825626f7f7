"""The formats in which a model thinks and calls tools, by name, as far as its files show them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec


class FormatNames(msgspec.Struct, frozen=True):
    """The names of the formats of one model.

    Attributes:
        calls: that of its tool calls; None if it is not known.
        thoughts: that of its thoughts; "none" if it has none.
    """

    calls: str | None = None
    thoughts: str = "none"


def detect(
    *,
    vocabulary: Container[str],
    templates: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    calls: str | None = None,
    thoughts: str | None = None,
) -> FormatNames:
    """Return the names of a model's formats.

    Args:
        vocabulary: the names of its tokens.
        templates: the texts of its chat templates.
        settings: `tokenizer_config.json`.
        config: `config.json`.
        calls: the operator's word for the format of calls, if any.
        thoughts: the operator's word for that of thoughts, if any.
    """
    thinks = "<think>" in vocabulary and "</think>" in vocabulary
    hermes = any("<tool_call>" in template for template in templates)
    return FormatNames(
        calls=(calls or ("hermes" if hermes else None)),
        thoughts=thoughts or ("think" if thinks else "none"),
    )
