"""Grammars as requests ask for them: a kind and a text, and the refusal of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Kind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf", "tool", "call"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """A grammar that a text must follow.

    Attributes:
        kind: how `text` is read.
        text: for json_object nothing (any JSON object will do); for json_schema the schema as
            JSON; for regex a regex that the whole text matches; for choice a JSON array of strings;
            for lark a grammar in llguidance's variant of Lark; for gbnf a grammar of llama.cpp's;
            for tool and call the `ToolGrammar` as JSON.
        compact: JSON that is an answer has no whitespace.
    """

    kind: Kind
    text: str = ""
    compact: bool = False


class ToolGrammar(msgspec.Struct, frozen=True):
    """The text of a spec of kind "tool" or "call"; see `tool_grammar` and `each_call`."""

    tools: list[tuple[str, Mapping[str, Any]]]
    start: str
    end: str
    many: bool = False
    otherwise: Mapping[str, Any] | None = None


class GrammarRefused(ValueError):
    """A grammar cannot be used. The message is for the client."""


def tool_grammar(
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    start: str,
    end: str,
    *,
    many: bool,
    otherwise: Mapping[str, Any] | None = None,
    compact: bool = False,
) -> GrammarSpec:
    """Return a spec for calls of `tools`, written as Qwen and Hermes models write them.

    A call is a line of `{"name": ..., "arguments": {...}}` between a line with `start` and one
    with `end`.

    Args:
        tools: each tool's name and the JSON schema of its arguments, which are an object
            whatever the schema says. At least one.
        many: more than one call may come, with a newline between two.
        otherwise: the JSON schema of an answer that may come in place of calls, if any may.
        compact: that answer has no whitespace.
    """
    if not tools:
        raise ValueError("a call needs a tool to call")
    calls = ToolGrammar([*tools], start, end, many, otherwise)
    return GrammarSpec("tool", msgspec.json.encode(calls).decode(), compact)


def each_call(tools: Sequence[tuple[str, Mapping[str, Any]]], start: str, end: str) -> GrammarSpec:
    """Return a spec for one call of one of the `tools`, from behind `start` to the end of `end`.

    It leaves more room than `tool_grammar`, since the model decides to make the call: there may be
    whitespace wherever JSON allows it.
    """
    calls = ToolGrammar([*tools], start, end)
    return GrammarSpec("call", msgspec.json.encode(calls).decode())
