"""Checks clients' grammars in the sandbox; `check_process.py` is the other end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec

from mlxsrv.prompts.grammars.schemas import JSONSchema, located, places
from mlxsrv.prompts.grammars.specs import GrammarRefused
from mlxsrv.prompts.sandbox import TooMuch, run_apart

_MOST_PARTS = 500  # of a schema, that are checked to find where it fails
_MOST_TEXT = 8 << 20  # characters of them, each with the definitions that it may refer to

_SCRIPT = Path(__file__).with_name("check_process.py")


def find_failures(grammars: Sequence[str]) -> dict[int, str]:
    """Compile grammars of llguidance's and write a few texts of each. Return by index why some
    cannot be used: they do not compile, or lead to where nothing may follow.

    All are checked together, since each process of the sandbox takes a while.

    Raises:
        GrammarRefused: they take too long together, or one crashes the compiler.
    """
    crash = "too much for the compiler: references may be nested too deeply"
    try:
        found = run_apart(
            _SCRIPT, grammars, type=list[tuple[int, str]], library="llguidance", crash=crash
        )
    except TooMuch as error:
        raise GrammarRefused(str(error)) from None
    return {i: one_line(reason) for i, reason in found}


def locate(schema: str, reason: str) -> str:
    """Add where in a schema the reason is why it cannot be used, if that can be found: the deepest
    part that alone cannot be used for the same reason."""
    from llguidance import LLMatcher

    whole = msgspec.json.decode(schema, type=JSONSchema)
    definitions = {"$defs": whole["$defs"]} if "$defs" in whole else {}
    parts: dict[str, str] = {}
    size = 0
    for place, node in islice(places(whole), _MOST_PARTS):
        if "$ref" in node:  # what it refers to is a part as well
            continue
        text = msgspec.json.encode(node).decode()
        if '"$ref"' in text:
            text = msgspec.json.encode(node | definitions).decode()
        size += len(text)
        if size > _MOST_TEXT:
            break
        parts[place] = LLMatcher.grammar_from_json_schema(text)
    try:
        failed = find_failures([*parts.values()])
    except GrammarRefused:  # all together take too long
        return reason
    same = [place for i, place in enumerate(parts) if failed.get(i) == reason]
    inner = [place for place in same if not any(each.startswith(f"{place}/") for each in same)]
    return located(reason, inner[0]) if inner else reason


def one_line(reason: str) -> str:
    """Shorten an error of llguidance's to one line, without excerpts of the grammar."""
    first, *rest = reason.splitlines() or ["no reason given"]
    if first.startswith("NoExtension"):
        return "nothing can satisfy it"
    for line in rest:  # for a regex the first line says where, this one what
        if line.startswith("error: "):
            first += line.removeprefix("error:")
    return first if len(first) <= 400 else f"{first[:200]} ... {first[-200:]}"
