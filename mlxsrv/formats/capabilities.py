"""Capabilities of decoders, as far as their files show: what this server can do with them.

Once a model's tokenizer is loaded, it knows for sure: it has the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from mlxsrv.formats.answer_formats import Evidence, FormatWords, detect
from mlxsrv.formats.files import LONGEST_TEXT, JSONObject, read_start
from mlxsrv.formats.format_names import NONE
from mlxsrv.formats.infill import find_family

OF_TOKENIZERS = ("tools", "thinking", "insert")
"""The capabilities that a loaded tokenizer knows better than its files: reading calls of tools,
separating thoughts from the answer, and filling in the middle."""


def decoder_capabilities(*, chats: bool, evidence: Evidence, words: FormatWords) -> tuple[str, ...]:
    """Return what a decoder that is no embedder can do.

    Args:
        chats: it has a chat template, or code in its place.
        evidence: for its formats of calls and thoughts.
        words: the operator's, for these.
    """
    formats = detect(evidence, words)
    found = {
        "tools": chats and formats.calls != NONE,
        "thinking": chats and formats.thoughts != NONE,
        "insert": find_family(evidence.vocabulary) is not None,
    }
    chat = ("chat",) if chats else ()
    return ("completion", *chat, *(name for name in OF_TOKENIZERS if found[name]))


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
        return set()  # loading the tokenizer will show what is wrong


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
