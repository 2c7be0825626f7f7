"""Tokens that a tokenizer's files add to its vocabulary, read without loading it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from mlxsrv.formats.files import LONGEST_TEXT, read_start
from mlxsrv.formats.json_files import JSONObject


class _Added(msgspec.Struct):
    content: Any = None


class _File(msgspec.Struct):
    """The part of a `tokenizer.json` that is read. Megabytes of vocabulary are skipped."""

    added_tokens: list[_Added] = []


_decode = msgspec.json.Decoder(_File).decode


def added_tokens(folder: Path, files: Iterable[str], settings: JSONObject) -> set[str]:
    """Return the tokens that the tokenizer's files list beside its vocabulary.

    Where `tokenizer_config.json` lists them, it lists all: transformers writes them there too. Only
    elsewhere is a `tokenizer.json` read, which may have 30 MB.

    Args:
        files: the names in `folder`.
        settings: `tokenizer_config.json`.
    """
    return _listed(settings) or _added(folder, files)


def _listed(settings: JSONObject) -> set[str]:
    listed = settings.get("added_tokens_decoder")
    tokens = listed.values() if isinstance(listed, dict) else ()
    return {_text(token.get("content")) for token in tokens if isinstance(token, dict)}


def _added(folder: Path, files: Iterable[str]) -> set[str]:
    text = read_start(folder / "tokenizer.json", files, LONGEST_TEXT)
    try:
        return {_text(token.content) for token in _decode(text or "{}").added_tokens}
    except (msgspec.DecodeError, RecursionError):
        return set()  # loading the tokenizer will tell what is wrong


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
