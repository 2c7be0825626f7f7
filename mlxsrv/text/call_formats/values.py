"""Values of arguments that a model writes as plain text, typed by the tool's schema.

- Where the schema allows only a string, the text is the value as it is, also `007` and `null`.
- Where it allows a string among others, JSON of one of the others is that value; so are Python's
  `True`, `False` and `None`. All else is text.
- Where it allows no string, JSON is the value, then a literal of Python's, which templates write
  and models copy. Text that is neither is given as a string: the client's check then says what is
  wrong with it.
- Where it says nothing, JSON objects and lists are values and all else is text: a file may be named
  `5`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, Literal

import msgspec

ValueKind = Literal["text", "other", "mixed"]

_ANYTHING = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_UNTYPED = frozenset({"string", "object", "array"})
_STRINGS = ("pattern", "minLength", "maxLength")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = "\n\\'\"abfnrtv01234567xNuU"
_NAMES = {"true": True, "false": False, "null": None}  # JSON's in a literal of Python's

_quote = json.JSONEncoder(ensure_ascii=False).encode


def escape(text: str) -> str:
    """Return what stands for a text in a JSON string. Escapes of parts may be joined."""
    return _quote(text)[1:-1]


class Argument:
    """The type of one value, as its schema and the schemas that it refers to have it.

    Attributes:
        kind: "text" (a string and nothing else), "other" (no string) or "mixed".
        types: the JSON types that are read; one that is no integer is a "number" only.
        members: the schemas of an object's members that are listed, by key.
        required: keys of those that an object must have.
        items: the schema of a list's items; None if there is none.
    """

    __slots__ = ("_extra", "_types", "items", "kind", "members", "required", "types")

    def __init__(self, facts: _Facts, types: ArgumentTypes) -> None:
        self._types = types
        self._extra = facts.extra
        self.members = facts.members
        self.required = facts.required
        self.items = facts.items
        self.types = _UNTYPED if facts.types is None else facts.types
        self.kind: ValueKind = "other"
        if "string" in self.types:
            self.kind = "text" if self.types == {"string"} else "mixed"

    def json(self, text: str) -> str:
        """Return the JSON of a whole value from its text as the model wrote it."""
        if self.kind == "text":
            return _quote(text)
        body = text.strip()
        found = self._read_among_strings(body) if self.kind == "mixed" else _read(body)
        return _quote(text) if found is None else found

    def member(self, key: str) -> Argument:
        """Return the type of a member of the object that the value is."""
        return self._types.typed(self.members.get(key, self._extra))

    def item(self) -> Argument:
        """Return the type of the items of the list that the value is."""
        return self._types.typed(self.items)

    def _read_among_strings(self, body: str) -> str | None:
        body = _WORDS.get(body, body)
        try:
            value = msgspec.json.decode(body)
        except (ValueError, RecursionError):
            return None
        return body if _types_of(value) & self.types - {"string"} else None


class ArgumentTypes:
    """The types of a tool's arguments.

    Args:
        schema: that of the tool's arguments.

    Attributes:
        whole: the type of the object that they are together.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._known: dict[str, Argument] = {}
        self._referred: dict[str, _Facts] = {}
        self.whole = self.typed(schema)

    def argument(self, key: str) -> Argument:
        """Return the type of the argument of this name."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.whole.member(key)
        return found

    def typed(self, schema: Any) -> Argument:
        """Return the type that a part of the tool's schema has, or a combination of parts."""
        return Argument(self._facts(schema), self)

    def _facts(self, schema: Any) -> _Facts:
        if not isinstance(schema, dict):
            return _NOTHING
        parts = [_own_facts(schema)]
        if isinstance(pointer := schema.get("$ref"), str):
            parts.append(self._refer(pointer))
        parts += (self._facts(each) for each in _list(schema.get("allOf")))
        for keyword in ("anyOf", "oneOf"):
            if choices := _list(schema.get(keyword)):
                parts.append(reduce(_either, map(self._facts, choices)))
        return _infer(schema, reduce(_both, parts))

    def _refer(self, pointer: str) -> _Facts:
        """Return what the schema at a JSON pointer says. One that is made of itself says nothing
        there."""
        found = self._referred.get(pointer)
        if found is None:
            self._referred[pointer] = _NOTHING
            found = self._referred[pointer] = self._facts(self._find(pointer))
        return found

    def _find(self, pointer: str) -> Any:
        node: Any = self._schema
        for part in pointer.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                node = node.get(key) if isinstance(node, dict) else None
        return node if pointer.startswith("#") else None


class _Facts(msgspec.Struct, frozen=True):
    """The part of a schema that the reading of a value needs.

    Attributes:
        types: that are allowed; None if it does not say.
        members: schemas of an object's members by key.
        required: keys of those that must be there.
        extra: the schema of its other members.
        items: the schema of a list's items.
    """

    types: frozenset[str] | None = None
    members: Mapping[str, Any] = {}
    required: frozenset[str] = frozenset()
    extra: Any = None
    items: Any = None


_NOTHING = _Facts()


def _own_facts(schema: Mapping[str, Any]) -> _Facts:
    """Return what a schema says itself."""
    types: frozenset[str] | None = None
    named = schema.get("type")
    if names := [each for each in _list(named) or [named] if each in _ANYTHING]:
        types = frozenset(names) | ({"integer"} if "number" in names else set())
    values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    if values:
        listed = frozenset[str]().union(*map(_types_of, values))
        types = listed if types is None else types & listed or types
    if types is not None and schema.get("nullable") is True:
        types |= {"null"}
    members = schema.get("properties")
    return _Facts(
        types,
        members if isinstance(members, dict) else {},
        frozenset(each for each in _list(schema.get("required")) if isinstance(each, str)),
        schema.get("additionalProperties"),
        _joined("anyOf", [*_list(schema.get("prefixItems")), schema.get("items")]),
    )


def _infer(schema: Mapping[str, Any], facts: _Facts) -> _Facts:
    """Add the type that a schema without one must mean."""
    if facts.types is not None:
        return facts
    inferred: frozenset[str] | None = None
    if facts.members or isinstance(facts.extra, dict):
        inferred = frozenset({"object"})
    elif facts.items is not None:
        inferred = frozenset({"array"})
    elif any(key in schema for key in _STRINGS):
        inferred = frozenset({"string"})
    elif any(key in schema for key in _NUMBERS):
        inferred = frozenset({"number", "integer"})
    return msgspec.structs.replace(facts, types=inferred)


def _both(one: _Facts, other: _Facts) -> _Facts:
    """Return what two schemas say of a value that both describe."""
    if one.types is None or other.types is None:
        types = one.types or other.types
    else:
        types = one.types & other.types or None
    return _combined("allOf", one, other, types)


def _either(one: _Facts, other: _Facts) -> _Facts:
    """Return what two schemas say of a value that one of them describes."""
    types = None if one.types is None or other.types is None else one.types | other.types
    return _combined("anyOf", one, other, types)


def _combined(how: str, one: _Facts, other: _Facts, types: frozenset[str] | None) -> _Facts:
    members = {
        key: _joined(how, [one.members.get(key), other.members.get(key)])
        for key in {**one.members, **other.members}
    }
    needed = one.required | other.required if how == "allOf" else one.required & other.required
    extra, items = (
        _joined(how, pair) for pair in ((one.extra, other.extra), (one.items, other.items))
    )
    return _Facts(types, members, needed, extra, items)


def _joined(how: str, schemas: Iterable[Any]) -> Any:
    """Return the combination of those that are schemas and say something."""
    given = [each for each in schemas if isinstance(each, dict)]
    return {how: given} if len(given) > 1 else given[0] if given else None


def _types_of(value: object) -> frozenset[str]:
    """Return the names that the type of a JSON value has."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
        case dict():
            return frozenset({"object"})
        case float() if not value.is_integer():
            return frozenset({"number"})
    return frozenset({"number", "integer"})


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read(body: str) -> str | None:
    """Return JSON of JSON, or of a literal of Python's, or None."""
    try:
        msgspec.json.decode(body)
        return body
    except (ValueError, RecursionError):
        pass
    for parse in (_parse_json, _parse_python):
        try:
            found = json.dumps(parse(body), ensure_ascii=False, allow_nan=False)
            msgspec.json.decode(found)
            return found
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            pass
    return None


def _parse_json(body: str) -> Any:
    """Parse JSON that may have line ends in its strings."""
    return json.loads(body, strict=False)


def _parse_python(body: str) -> Any:
    """Parse a literal of Python's, in which JSON's words may stand too."""
    return _value(ast.parse(_ESCAPED.sub(_keep_backslash, body), mode="eval").body)


def _keep_backslash(found: re.Match[str]) -> str:
    r"""Return an escape, or two backslashes for one such as `\d`, about which Python warns."""
    return found[0] if found[1] in _ESCAPES else "\\" + found[0]


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=number)):
            if isinstance(number, int | float) and not isinstance(number, bool):
                return -number if isinstance(sign, ast.USub) else number
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if node is None:
        raise ValueError("no literal")
    value = _value(node)
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)
