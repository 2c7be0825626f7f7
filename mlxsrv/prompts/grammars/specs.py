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
        thoughts: the name of the format of thoughts that the model may write before; else the text
            is the whole answer.
    """

    kind: Kind
    text: str = ""
    compact: bool = False
    thoughts: str = ""


class ToolGrammar(msgspec.Struct, frozen=True):
    """The text of a spec of kind "tool" or "call"; see `tool_grammar` and `each_call`."""

    tools: list[tuple[str, Mapping[str, Any]]]
    calls: str
    many: bool = False
    otherwise: Mapping[str, Any] | None = None


class GrammarRefused(ValueError):
    """A grammar cannot be used. The message is for the client."""


def tool_grammar(
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    calls: str,
    *,
    many: bool,
    otherwise: Mapping[str, Any] | None = None,
    compact: bool = False,
    thoughts: str = "",
) -> GrammarSpec:
    """Return a spec for calls of `tools`.

    Args:
        tools: each tool's name and the JSON schema of its arguments, which are an object
            whatever the schema says. At least one.
        calls: the name of the format in which the model writes them.
        many: more than one call may come.
        otherwise: the JSON schema of an answer that may come in place of calls, if any may.
        compact: that answer has no whitespace.
        thoughts: the name of the format of thoughts that the model may write before, if it may.
    """
    if not tools:
        raise ValueError("a call needs a tool to call")
    grammar = ToolGrammar([*tools], calls, many, otherwise)
    return GrammarSpec("tool", msgspec.json.encode(grammar).decode(), compact, thoughts)


def each_call(
    tools: Sequence[tuple[str, Mapping[str, Any]]], calls: str, thoughts: str = ""
) -> GrammarSpec:
    """Return a spec for the calls of `tools` that a model may make, each from its opener on.

    It leaves more room than `tool_grammar`, since the model decides to make the call: there may be
    whitespace wherever the format allows it.
    """
    grammar = ToolGrammar([*tools], calls)
    return GrammarSpec("call", msgspec.json.encode(grammar).decode(), thoughts=thoughts)
