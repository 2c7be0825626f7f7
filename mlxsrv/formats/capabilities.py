"""Capabilities of decoders, as far as their files show: what this server can do with them.

The rules for calls and thoughts are mlx-lm's, which reads both. Once a model's tokenizer is loaded,
it knows for sure.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import msgspec

from mlxsrv.formats.files import LONGEST_TEXT, JSONObject, read_start
from mlxsrv.formats.infill import find_family

OF_TOKENIZERS = ("tools", "thinking", "insert")
"""The capabilities that a loaded tokenizer knows better than its files: reading calls of tools,
separating thoughts from the answer, and filling in the middle."""

_TOOLS = re.compile(r"\btools\b")

_XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

_THOUGHTS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>", "<channel|>"),
    _XTML,
)
"""Tokens that separate thoughts from the answer: all of a line are in the vocabulary."""

_CALLS_IN_TEMPLATES = (
    ("<minimax:tool_call>",),
    ("<|tool_call>", "<tool_call|>"),
    ("<start_function_call>",),
    ("<longcat_tool_call>",),
    ("<arg_key>",),
    ("<|tool_list_start|>",),
    ("<|tool_call_start|>",),
    ("<tool_call>\\n<function=",),
    ("<tool_call>\n<function=",),
    ("<|tool_calls_section_begin|>",),
    ('<function name="', '<param name="'),
    ("[TOOL_CALLS]",),
    ("<atem:function_calls>",),
    ("<tool_call>", "tool_call.name"),
)
"""Texts in a template with which calls can be read: all of a line are there."""

_CALLS_IN_VOCABULARIES = (_XTML, ("<|tool_call_start|>", "<|tool_call_end|>"))


def decoder_capabilities(
    *, chats: bool, template: str, tokens: Container[str], settings: JSONObject
) -> tuple[str, ...]:
    """Return what a decoder that is no embedder can do.

    Args:
        chats: it has a chat template, or code in its place.
        template: the template's text; "" if it has none, or several.
        tokens: those that its tokenizer's files list.
        settings: `tokenizer_config.json`.
    """
    found = {
        "tools": bool(_TOOLS.search(template)) and reads_calls(template, tokens, settings),
        "thinking": chats and _any_whole(_THOUGHTS, tokens),
        "insert": find_family(tokens) is not None,
    }
    chat = ("chat",) if chats else ()
    return ("completion", *chat, *(name for name in OF_TOKENIZERS if found[name]))


def reads_calls(template: str, tokens: Container[str], settings: JSONObject) -> bool:
    """Return whether mlx-lm has a parser for the calls of a model with this template."""
    if settings.get("tool_parser_type") is not None:
        return True
    known = any(all(text in template for text in texts) for texts in _CALLS_IN_TEMPLATES)
    return known or _any_whole(_CALLS_IN_VOCABULARIES, tokens)


def _any_whole(groups: tuple[tuple[str, ...], ...], tokens: Container[str]) -> bool:
    return any(all(token in tokens for token in group) for group in groups)


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
