"""Grammars of arguments that are literals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlxsrv.text.calls import NotEnforceable, ToolSchema
from mlxsrv.text.lark import Lark

_KEY = re.compile(r"[\w.$/@-]+")
_ANY_KEY = r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_DEFINITIONS = ("$defs", "definitions")
_MOST = 6  # keys that may stand in any order: there is a rule for each set of them
_DEPTH = 3  # levels of values without a schema
_QUOTED = (
    r"""/'([^'\\\n\r]|\\[\\'"nrt])*'/ | /"([^"\\\n\r]|\\[\\'"nrt])*"/"""  # strings as Python's
)


class LiteralRules:
    """Writes the rules for the arguments of one tool.

    Args:
        schema: that of the arguments.
        quote: the marker at both sides of a string, spelled; empty if strings are Python's.
        words: how true, false and null are written.
    """

    def __init__(
        self, lark: Lark, schema: ToolSchema, quote: str, words: Mapping[object, str]
    ) -> None:
        self._lark = lark
        self._schema = schema
        self._quote = quote
        self._words = words
        self._open: list[str] = []  # pointers that are followed
        self._referred: dict[str, str] = {}  # rules for the values at pointers
        self._anything: list[str] = []  # rules for values without a schema, by depth

    def arguments(self, equals: str, comma: str) -> str:
        """Add the rule for all arguments; return its name.

        Args:
            equals: what stands behind a key.
            comma: what stands between two arguments.
        """
        return self._members(self._schema, equals, comma, _bare_key)

    def _members(
        self, schema: Mapping[str, Any], equals: str, comma: str, write: Callable[[str], str]
    ) -> str:
        """Add the rule for the members of an object, in the order that templates write."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = [key for key in _listed(schema.get("required")) if isinstance(key, str)]
        keys = list(dict.fromkeys([*properties, *required]))
        if self._quote:
            keys.sort(key=str.lower)
        if not keys:
            if schema.get("additionalProperties", "properties" not in schema) is False:
                return self._lark.rule('""')
            member = f"{_ANY_KEY} {json.dumps(equals)} {self._any(_DEPTH)}"
            return self._lark.rule(f"({member} ({json.dumps(comma)} {member})*)?")
        members = {
            key: self._lark.rule(
                f"{json.dumps(write(key) + equals)} {self._value(properties.get(key, {}))}"
            )
            for key in keys
        }
        if self._quote or len(keys) > _MOST:
            return self._in_order(members, required, comma)
        return self._in_any_order(members, frozenset(required), comma)

    def _in_order(self, members: Mapping[str, str], required: Sequence[str], comma: str) -> str:
        first, later = '""', '""'
        for key, member in reversed([*members.items()]):
            begun = f"{member} {later}"
            first = self._lark.rule(begun if key in required else f"{begun} | {first}")
            further = f"{json.dumps(comma)} {member}"
            further = further if key in required else f"({further})?"
            later = self._lark.rule(f"{further} {later}")
        return first

    def _in_any_order(
        self, members: Mapping[str, str], required: frozenset[str], comma: str
    ) -> str:
        """Add a rule for each set of keys that may be left, and the one with which all begin."""
        states: dict[frozenset[str], str] = {}

        def state(left: frozenset[str], before: str) -> str:
            bodies = [
                f"{before} {members[key]} {later(left - {key})}" for key in members if key in left
            ]
            return self._lark.rule(" | ".join(bodies if left & required else [*bodies, '""']))

        def later(left: frozenset[str]) -> str:
            if left not in states:
                states[left] = state(left, json.dumps(comma))
            return states[left]

        return state(frozenset(members), "")

    def _value(self, schema: Any) -> str:
        """Return the body of a value."""
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
            case "string":
                return self._string(schema)
            case "boolean":
                return f"{json.dumps(self._words[True])} | {json.dumps(self._words[False])}"
            case "null":
                return '("null" | "None")' if self._quote else json.dumps(self._words[None])
            case "object" if self._quote:
                return f'"{{" {self._members(schema, ":", ",", _bare_key)} "}}"'
            case "array" if self._quote or self._words[None] != "null":
                return self._list(schema)
            case "":
                return self._any(_DEPTH)
        return self._lark.json({**self._defined(schema), "type": type})

    def _string(self, schema: Mapping[str, Any]) -> str:
        if not self._quote:
            return f"({_QUOTED})"
        return f"{self._lark.text(self._quote)} {self._lark.until(self._quote, pattern(schema))}"

    def _list(self, schema: Mapping[str, Any]) -> str:
        item = self._lark.rule(self._value(schema.get("items", {})))
        least, most = _count(schema.get("minItems")) or 0, _count(schema.get("maxItems"))
        if most == 0:
            return '"[" "]"'
        body, comma = item, json.dumps("," if self._quote else ", ")
        if most != 1:
            bounds = f"{max(0, least - 1)},{'' if most is None else most - 1}"
            body += f" ({comma} {item}){{{bounds}}}"
        return f'"[" {body} "]"' if least else f'"[" ({body})? "]"'

    def _literal(self, value: Any) -> str:
        """Return the body of a value that stands in the schema."""
        match value:
            case None:
                return self._typed({}, "null")
            case bool():
                return json.dumps(self._words[value])
            case str() if self._quote:
                return self._lark.text(f"{self._quote}{value}{self._quote}")
            case str():
                return f"({json.dumps(quoted(value))} | {json.dumps(json.dumps(value))})"
            case list() if self._quote:
                return f'"[" {_joined(map(self._literal, value))} "]"'
            case dict() if self._quote:
                pairs = sorted(value.items(), key=lambda pair: str(pair[0]).lower())
                members = (f"{json.dumps(f'{key}:')} {self._literal(v)}" for key, v in pairs)
                return f'"{{" {_joined(members)} "}}"'
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
        if not self._anything:
            scalars = [self._typed({}, type) for type in _TYPES[:5]]
            if not self._quote:
                scalars += [self._lark.json({"type": type}) for type in _TYPES[5:]]
            self._anything.append(self._lark.choice(scalars))
        while len(self._anything) <= depth:
            inner = self._anything[-1]
            member = f'{_ANY_KEY} ":" {inner}'
            containers = [
                f'"{{" ({member} ("," {member})*)? "}}"',
                f'"[" ({inner} ("," {inner})*)? "]"',
            ]
            self._anything.append(self._lark.choice([inner, *containers]) if self._quote else inner)
        return self._anything[depth]

    def _defined(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return a part of the tool's schema with the definitions to which it refers."""
        found = dict(schema)
        if "$ref" in json.dumps(found):
            for name in _DEFINITIONS:
                if name in self._schema:
                    found.setdefault(name, self._schema[name])
        return found


def quoted(text: str) -> str:
    """Return a string as Python has it, between single quotes."""
    for sign, escaped in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(sign, escaped)
    return f"'{text}'"


def pattern(schema: Mapping[str, Any]) -> str:
    """Return the regex for a string of a schema."""
    found = schema.get("pattern")
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(found, str) and least is None and most is None:
        before = "" if found.startswith("^") else "(?s:.*)"
        ends = found.endswith("$") and not found.endswith("\\$")
        body = found.removeprefix("^")
        body = body[:-1] if ends else body
        return f"{before}(?:{body}){'' if ends else '(?s:.*)'}".replace("/", r"\/")
    if isinstance(least, int) or isinstance(most, int):
        return f"(?s:.{{{least or 0},{'' if most is None else most}}})"
    return "(?s:.*)"


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
