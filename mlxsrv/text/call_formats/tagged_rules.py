"""Grammars of tagged arguments: which keys may follow, and which values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxsrv.text.call_formats.calls import NotEnforceable, ToolSchema
from mlxsrv.text.call_formats.lark import Lark, listed_members, stand_alone, text_pattern
from mlxsrv.text.call_formats.values import Argument, ArgumentTypes

_MOST = 6  # required keys whose order is free: there is a rule for each set of them
_KEY = re.compile(r"[\w.$:/@ -]+")
_ANY_KEY = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"


class ArgumentRules:
    """Writes the rules for the arguments of one tool.

    Args:
        schema: that of the arguments.
        write: returns the body of one argument from its key in Lark, its schema and its type.
    """

    def __init__(
        self,
        lark: Lark,
        schema: ToolSchema,
        write: Callable[[str, Mapping[str, Any], Argument], str],
    ) -> None:
        self._lark = lark
        self._schema = schema
        self._write = write
        self._types = ArgumentTypes(schema)

    def all(self) -> str:
        """Add the rule for all arguments; return its name.

        Required keys stand once each, in any order if they are few. Optional ones may stand between
        them.
        """
        schema = self._schema
        members, required = listed_members(schema)
        for key in members:
            if not _KEY.fullmatch(key):
                raise NotEnforceable(f"the parameter {key!r} cannot stand in a call's tags")
        if not members and schema.get("additionalProperties", "properties" not in schema):
            return self._lark.rule(
                f"({self._write(f'/{_ANY_KEY}/', {}, self._types.argument(''))})*"
            )
        rules = {key: self._lark.rule(self._argument(key, each)) for key, each in members.items()}
        if len(required) > _MOST:
            return self._in_order(rules, required)
        if len(members) <= _MOST:
            return self._lark.any_order(rules, frozenset(required))
        optional = [rules[key] for key in members if key not in required]
        between = f"({' | '.join(optional)})*" if optional else ""
        again = {key: rules[key] for key in required}
        return self._lark.any_order(again, frozenset(required), between=between)

    def _in_order(self, rules: Mapping[str, str], required: Sequence[str]) -> str:
        return self._lark.rule(
            " ".join(rule + "?" * (key not in required) for key, rule in rules.items())
        )

    def _argument(self, key: str, schema: Mapping[str, Any]) -> str:
        alone = stand_alone(schema, self._schema)
        return self._write(json.dumps(key), alone, self._types.argument(key))


def gapped(lark: Lark, text: str) -> str:
    """Return the body of a text in which a newline may stand for each `{gap}`, and any number for
    `{number}`."""
    bodies = {"{gap}": '"\\n"?', "{number}": "/[0-9]{1,4}/"}
    parts = re.split(r"(\{gap\}|\{number\})", text)
    return " ".join(bodies.get(part) or lark.text(part) for part in parts)


def text_body(
    lark: Lark,
    schema: Mapping[str, Any],
    argument: Argument,
    closer: str,
    signs: str = "(?s:.)",
) -> str:
    """Return the body of a value as plain text, and the closer behind it.

    Args:
        closer: spelled; with gaps only at its end.
        signs: a regex for one character of free text.
    """
    closer, gap, rest = closer.partition("{gap}")
    return f"{_text_body(lark, schema, argument, closer, signs)} {gapped(lark, gap + rest)}"


def _text_body(
    lark: Lark, schema: Mapping[str, Any], argument: Argument, closer: str, signs: str
) -> str:
    if argument.kind == "other":
        return f"{lark.json(schema)} {lark.text(closer)}"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        texts = (each if isinstance(each, str) else json.dumps(each) for each in values)
        return f"({' | '.join(map(json.dumps, texts))}) {lark.text(closer)}"
    return lark.until(closer, text_pattern(schema if argument.kind == "text" else {}, signs))
