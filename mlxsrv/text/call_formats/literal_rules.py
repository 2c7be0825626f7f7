"""Grammars of arguments that are literals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlxsrv.text.call_formats.calls import NotEnforceable, ToolSchema
from mlxsrv.text.call_formats.lark import (
    Lark,
    listed_members,
    stand_alone,
    text_bounds,
    text_pattern,
)

_KEY = re.compile(r"[\w.$/@-]+")
_ANY_KEY = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"
_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_MOST = 6  # keys that may stand in any order: there is a rule for each set of them
_DEPTH = 3  # levels of values without a schema
_SIGNS = {"'": r"""[^'\\\n\r]|\\[\\'"nrt]""", '"': r"""[^"\\\n\r]|\\[\\'"nrt]"""}
"""Signs of a string of Python's, by its quotes."""


class LiteralRules:
    """Writes the rules for the arguments of one tool.

    Args:
        schema: that of the arguments.
        quote: the marker at both sides of a string, spelled; `'` if values are as Python's `str`
            writes them, but for objects outside of lists, which are JSON; empty if all are JSON.
        listed: the values stand in a list.
    """

    def __init__(self, lark: Lark, schema: ToolSchema, quote: str, *, listed: bool = False) -> None:
        self._lark = lark
        self._schema = schema
        self._quote = quote
        self._python = quote == "'"
        self._listed = listed
        self._null = '"None"' if self._python else '("null" | "None")'
        self._words = ('"True"', '"False"') if self._python else ('"true"', '"false"')
        self._comma = ", " if self._python else ","
        # Rules for values in lists: they are the same, but for Python's objects.
        self._items = LiteralRules(lark, schema, quote, listed=True) if not listed else self
        self._open: list[str] = []  # pointers that are followed
        self._referred: dict[str, str] = {}  # rules for the values at pointers
        self._anything: dict[int, str] = {}  # rules for values without a schema, by depth

    def arguments(self, equals: str, comma: str) -> str:
        """Add the rule for all arguments; return its name.

        Args:
            equals: what stands behind a key.
            comma: what stands between two arguments.
        """
        return self._members(self._schema, equals, comma)

    def _members(self, schema: Mapping[str, Any], equals: str, comma: str, quote: str = "") -> str:
        """Add the rule for the members of an object, in the order that templates write.

        Args:
            quote: what stands at both sides of a key.
        """
        listed, required = listed_members(schema)
        sorted_keys = self._quote not in ("", "'")
        if not listed:
            if schema.get("additionalProperties", "properties" not in schema) is False:
                return self._lark.rule('""')
            member = f"/{quote}{_ANY_KEY}{quote}/ {json.dumps(equals)} {self._any(_DEPTH)}"
            return self._lark.rule(f"({member} ({json.dumps(comma)} {member})*)?")
        members = {
            key: self._lark.rule(
                f"{json.dumps((repr(key) if quote else _bare_key(key)) + equals)} "
                f"{self._value(listed[key])}"
            )
            for key in (sorted(listed, key=str.lower) if sorted_keys else listed)
        }
        if sorted_keys or len(listed) > _MOST:
            return self._in_order(members, required, comma)
        return self._lark.any_order(members, frozenset(required), json.dumps(comma))

    def _in_order(self, members: Mapping[str, str], required: Sequence[str], comma: str) -> str:
        first, later = '""', '""'
        for key, member in reversed([*members.items()]):
            begun = f"{member} {later}"
            first = self._lark.rule(begun if key in required else f"{begun} | {first}")
            further = f"{json.dumps(comma)} {member}"
            further = further if key in required else f"({further})?"
            later = self._lark.rule(f"{further} {later}")
        return first

    def _value(self, schema: Any) -> str:
        """Return the body of a value."""
        if not self._quote:
            found = schema if isinstance(schema, Mapping) else {}
            return self._lark.json(stand_alone(found, self._schema))
        if not isinstance(schema, Mapping):
            return self._any(_DEPTH)
        if isinstance(pointer := schema.get("$ref"), str):
            return self._refer(pointer)
        values = [schema["const"]] if "const" in schema else _listed(schema.get("enum"))
        if values:
            return self._lark.choice(map(self._literal, values))
        for keyword in ("anyOf", "oneOf"):
            if choices := _listed(schema.get(keyword)):
                return self._lark.choice(map(self._value, choices))
        return self._lark.choice(self._typed(schema, each) for each in _types(schema))

    def _typed(self, schema: Mapping[str, Any], type: str) -> str:
        match type:
            case "string" if self._python:
                return self._string(schema)
            case "string":
                text = self._lark.until(self._quote, text_pattern(schema))
                return f"{self._lark.text(self._quote)} {text}"
            case "boolean":
                return " | ".join(self._words)
            case "null":
                return self._null
            case "object" if not self._python:
                return f'"{{" {self._members(schema, ":", ",")} "}}"'
            case "object" if self._listed:
                return f'"{{" {self._members(schema, ": ", ", ", self._quote)} "}}"'
            case "array":
                return self._list(schema)
            case "":
                return self._any(_DEPTH)
        return self._lark.json({**stand_alone(schema, self._schema), "type": type})

    def _string(self, schema: Mapping[str, Any]) -> str:
        """Return the body of a string of Python's. One of a pattern or a format is JSON, as which
        it is read, too."""
        if "pattern" in schema or "format" in schema:
            return self._lark.json({**schema, "type": "string"})
        times = text_bounds(schema)
        return " | ".join(f"/{quote}({signs}){times}{quote}/" for quote, signs in _SIGNS.items())

    def _list(self, schema: Mapping[str, Any]) -> str:
        item = self._lark.rule(self._items._value(schema.get("items", {})))
        least, most = _count(schema.get("minItems")) or 0, _count(schema.get("maxItems"))
        if most == 0:
            return '"[" "]"'
        body = item
        if most != 1:
            bounds = f"{max(0, least - 1)},{'' if most is None else most - 1}"
            body += f" ({json.dumps(self._comma)} {item}){{{bounds}}}"
        return f'"[" {body} "]"' if least else f'"[" ({body})? "]"'

    def _literal(self, value: Any) -> str:
        """Return the body of a value that stands in the schema."""
        match value:
            case None:
                return self._null
            case bool():
                return self._words[not value]
            case str() if self._python:
                return f"({json.dumps(quoted(value))} | {json.dumps(json.dumps(value))})"
            case str():
                return self._lark.text(f"{self._quote}{value}{self._quote}")
            case list() if not self._python:
                return f'"[" {_joined(map(self._literal, value))} "]"'
            case dict() if not self._python:
                pairs = sorted(value.items(), key=lambda pair: str(pair[0]).lower())
                members = (f"{json.dumps(f'{key}:')} {self._literal(v)}" for key, v in pairs)
                return f'"{{" {_joined(members)} "}}"'
            case list() | dict():
                return f"({json.dumps(repr(value))} | {self._lark.json({'const': value})})"
        return self._lark.json({"const": value})

    def _refer(self, pointer: str) -> str:
        """Return the rule for the value at a pointer: one for each, or they double level by level.
        One that is made of itself is any value there."""
        if pointer in self._open:
            return self._any(_DEPTH)
        if pointer in self._referred:
            return self._referred[pointer]
        node: Any = self._schema
        for part in pointer.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            node = node.get(key, {}) if isinstance(node, Mapping) else {}
        self._open.append(pointer)
        found = self._referred[pointer] = self._lark.rule(self._value(node))
        self._open.pop()
        return found

    def _any(self, depth: int) -> str:
        """Return the rule for a value without a schema."""
        if depth not in self._anything:
            bodies = [self._typed({}, type) for type in _TYPES[:5]]
            if self._python and not self._listed:
                bodies.append(self._lark.json({"type": "object"}))
            elif depth:
                quote, colon = ("'", ": ") if self._python else ("", ":")
                member = f'/{quote}{_ANY_KEY}{quote}/ "{colon}" {self._any(depth - 1)}'
                bodies.append(f'"{{" ({member} ("{self._comma}" {member})*)? "}}"')
            if depth:
                item = self._items._any(depth - 1)
                bodies.append(f'"[" ({item} ("{self._comma}" {item})*)? "]"')
            self._anything[depth] = self._lark.choice(bodies)
        return self._anything[depth]


def quoted(text: str) -> str:
    """Return a string as Python has it, between single quotes."""
    for sign, escaped in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(sign, escaped)
    return f"'{text}'"


def _bare_key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise NotEnforceable(f"the parameter {key!r} cannot stand in a call without quotes")
    return key


def _types(schema: Mapping[str, Any]) -> Iterable[str]:
    """Return the types that a schema allows; the empty one stands for any."""
    named = schema.get("type")
    types = [each for each in _listed(named) or [named] if each in _TYPES]
    if not types and "properties" in schema:
        types = ["object"]
    elif not types and "items" in schema:
        types = ["array"]
    if types and schema.get("nullable") is True and "null" not in types:
        types.append("null")
    return types or [""]


def _joined(bodies: Iterable[str]) -> str:
    return ' "," '.join(bodies) or '""'


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
