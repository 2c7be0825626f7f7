"""JSON schemas as clients write them, made ready for llguidance.

- Objects that list properties and do not say whether others may come are closed: a small model
  would make up names without end. Who lists the properties of an object is the schema, what it
  refers to, and all that `allOf`, `anyOf` and `oneOf` combine there: an `allOf` of two objects has
  the properties of both. `additionalProperties: true` in one of them leaves the object open.
- What nothing finite can satisfy, such as an object that must contain itself, is false.
- Numbers that llguidance would round are refused.
- `\\d`, `\\w` and `\\s` in patterns are ASCII.
- Annotations are left out.

References become references to definitions of ours, since what an object may have depends on what
it is combined with where it is referred to.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from decimal import Decimal
from typing import Any

import msgspec

from mlxsrv.prompts.grammars.regexes import ascii_classes

JSONSchema = dict[str, Any]
Node = Any  # a schema or true or false; or, where the client is wrong, anything

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "$comment", "deprecated"),
        *("readOnly", "writeOnly", "contentMediaType", "contentEncoding"),
    }
)
_ONE = frozenset(
    {
        *("items", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
_NAMED = frozenset({"dependentSchemas"})
_OBJECT = ("properties", "patternProperties", "additionalProperties")
_COMBINED = ("allOf", "anyOf", "oneOf")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_MOST_STEPS = 200_000  # schemas looked at, some over and over
_MOST_PASSES = 50  # over all definitions, to find those that nothing satisfies

_EXACT = 2**53
_INT64 = 2**63


class SchemaError(ValueError):
    """The schema cannot be used. The message is for the client."""


class ListedKeys(msgspec.Struct, frozen=True):
    """What schemas say of an object's keys.

    `names` are listed or required, `patterns` have a schema of their own, and `open` is whether
    some schema says what others are like.
    """

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    open: bool = False

    def __or__(self, other: ListedKeys) -> ListedKeys:
        return ListedKeys(
            self.names | other.names, self.patterns | other.patterns, self.open or other.open
        )


_NOTHING = ListedKeys()


def prepare(schema: JSONSchema, *, close: bool = True) -> JSONSchema:
    """The schema, ready; it describes no more than the one given. Without `close` objects stay as
    open as they are.

    Raises:
        SchemaError: it asks for what cannot be, or is too much.
    """
    return _without_endless(_Preparation(schema, close).result())


class _Preparation:
    """One schema being prepared. Definitions are made as references to them are met."""

    def __init__(self, schema: JSONSchema, close: bool) -> None:
        self._root = schema
        self._close = close
        self._steps = 0
        self._names: dict[tuple[str, ListedKeys], str] = {}  # by where they point, and beside what
        self._pending: list[tuple[str, Node, ListedKeys]] = []

    def result(self) -> JSONSchema:
        whole: JSONSchema = self._node(self._root, _NOTHING)
        definitions = {}
        while self._pending:
            name, node, beside = self._pending.pop()
            definitions[name] = self._node(node, beside)
        return whole | ({"$defs": definitions} if definitions else {})

    def _node(self, node: Node, beside: ListedKeys) -> Node:
        """A schema. `beside` is listed by the others that describe the same object."""
        self._step()
        if not isinstance(node, dict):
            return node
        for key in _BOUNDS:
            if key in node:
                _check_bound(key, node)
        for value in [node.get("const"), node.get("enum")]:
            _check_values(value)
        groups = list(_groups(node))
        others = self._others(node, groups, beside)
        ready = self._own(node, others[0])
        for (key, index, inner), listing in zip(groups, others[1:], strict=True):
            if key == "$ref":
                ready[key] = self._reference(inner, listing)
            elif key == "allOf":
                ready[key][index] = self._node(inner, listing)
            else:
                ready[key] = [self._node(option, listing) for option in inner]
        return ready

    def _own(self, node: JSONSchema, beside: ListedKeys) -> JSONSchema:
        """All but what is combined, which has its place already."""
        ready: JSONSchema = {}
        for key, value in node.items():
            if key in ANNOTATIONS or key in ("$defs", "definitions"):
                continue
            if key in _OBJECT:
                for name, part in self._object(node, beside).items():
                    ready.setdefault(name, part)
            elif key == "pattern" and isinstance(value, str):
                ready[key] = ascii_classes(value)
            elif key in _ONE and isinstance(value, dict):
                ready[key] = self._node(value, _NOTHING)
            elif key in _NAMED and isinstance(value, dict):
                ready[key] = {name: self._node(part, _NOTHING) for name, part in value.items()}
            elif key in ("items", "prefixItems") and isinstance(value, list):
                ready[key] = [self._node(item, _NOTHING) for item in value]
            elif key == "allOf" and isinstance(value, list):
                ready[key] = [*value]
            else:
                ready[key] = value
        return ready

    def _object(self, node: JSONSchema, beside: ListedKeys) -> JSONSchema:
        """The keywords that say which properties there are, together and in order: what is
        additional depends on the other two."""
        ready = {key: node[key] for key in _OBJECT if key in node}
        for key in ("properties", "patternProperties"):
            if isinstance(given := ready.get(key), dict):
                ready[key] = {
                    ascii_classes(name) if key == "patternProperties" else name: self._node(
                        part, _NOTHING
                    )
                    for name, part in given.items()
                }
        if "additionalProperties" in ready:
            ready["additionalProperties"] = self._node(ready["additionalProperties"], _NOTHING)
        elif self._close and isinstance(ready.get("properties"), dict) and not beside.open:
            names = _listing(node).names | beside.names
            least = node.get("minProperties")
            if "unevaluatedProperties" in node or (isinstance(least, int) and least > len(names)):
                return ready  # others may or must come
            self._step(len(names))
            wanted = [name for name in _texts(node.get("required")) if name in names]
            for name in [*wanted, *sorted(beside.names)]:
                ready["properties"].setdefault(name, True)
            if beside.patterns:
                patterns = ready.setdefault("patternProperties", {})
                for pattern in sorted(map(ascii_classes, beside.patterns)):
                    patterns.setdefault(pattern, True)
            ready["additionalProperties"] = False
        return {key: ready[key] for key in _OBJECT if key in ready}

    def _reference(self, target: Any, beside: ListedKeys) -> Any:
        node = self._resolve(target)
        if node is None and isinstance(target, str) and target.startswith("#/"):
            raise SchemaError(f"Pointer '{target[1:]}' does not exist")
        if node is None or (target == "#" and beside == _NOTHING):
            return target
        if (target, beside) not in self._names:
            base = re.sub(r"[^A-Za-z0-9_.-]", "_", target.rpartition("/")[2]) or "root"
            name, number = base, 1
            while name in self._names.values():
                number += 1
                name = f"{base}-{number}"
            self._names[target, beside] = name
            self._pending.append((name, node, beside))
        return f"#/$defs/{self._names[target, beside]}"

    def _resolve(self, target: Any) -> Node | None:
        """What a reference within the schema points to; None if it is another, or wrong."""
        if not isinstance(target, str) or not re.match(r"#(/|$)", target):
            return None
        node: Any = self._root
        for part in target.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, dict) and part in node:
                node = node[part]
            else:
                return None
        return node if isinstance(node, dict | bool) else None

    def _others(
        self, node: JSONSchema, groups: list[tuple[str, int, Any]], beside: ListedKeys
    ) -> list[ListedKeys]:
        """For the schema's own keywords, then for each group: what all others list."""
        if not groups:
            return [beside]
        if len(groups) == 1 and _listing(node) == _NOTHING:
            return [beside, beside]
        listings = [_listing(node), *(self._listed(inner) for _, _, inner in groups)]
        before, after = [beside], [_NOTHING]
        for listing in listings[:-1]:
            before.append(before[-1] | listing)
        for listing in reversed(listings[1:]):
            after.append(after[-1] | listing)
        for listing in before:
            self._step(len(listing.names))
        return [one | other for one, other in zip(before, reversed(after), strict=True)]

    def _listed(self, inner: Any) -> ListedKeys:
        """What a group lists: a schema, a list of them, or where one is."""
        listing, seen, pending = _NOTHING, set(), [inner]
        while pending:
            node = pending.pop()
            self._step()
            if isinstance(node, list):
                pending.extend(node)
            elif isinstance(node, str) and node not in seen:
                seen.add(node)
                pending.append(self._resolve(node))
            elif isinstance(node, dict):
                listing |= _listing(node)
                pending.extend(group for _, _, group in _groups(node))
        return listing

    def _step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > _MOST_STEPS:
            raise SchemaError("too much: it combines too many schemas")


def _groups(node: JSONSchema) -> Iterator[tuple[str, int, Any]]:
    """What describes the same value as the schema's own keywords: each schema of `allOf`, and as
    one group each the options of `anyOf` and `oneOf` and the target of a reference."""
    for key, value in node.items():
        if key == "$ref":
            yield key, 0, value
        elif key in _COMBINED and isinstance(value, list):
            yield from (
                ((key, i, one) for i, one in enumerate(value))
                if key == "allOf"
                else ((key, 0, value),)
            )


def _listing(node: JSONSchema) -> ListedKeys:
    """What the schema's own keywords list."""
    properties, patterns = (node.get(key) for key in _OBJECT[:2])
    others = [node.get(key, False) for key in ("additionalProperties", "unevaluatedProperties")]
    return ListedKeys(
        frozenset(
            [*(properties if isinstance(properties, dict) else ()), *_texts(node.get("required"))]
        ),
        frozenset(patterns if isinstance(patterns, dict) else ()),
        any(other is not False for other in others),
    )


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


# Numbers.


def _check_bound(key: str, node: JSONSchema) -> None:
    value = node[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) <= _EXACT:
        return
    if key.startswith("exclusive"):
        exact = False
    elif node.get("type") == "integer":
        exact = _fits_int64(value)
    else:
        exact = _decimal_is_exact(value)
    if not exact:
        raise SchemaError(f"{key}: {value} cannot be kept exactly; numbers up to 2**53 can")


def _check_values(value: Any) -> None:
    """Each number in a constant."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, int | float) and abs(item) > _EXACT:
            fits = isinstance(item, int) and _fits_int64(item)
            if not fits and not _decimal_is_exact(item):
                raise SchemaError(f"{item} cannot be kept exactly; numbers up to 2**53 can")


def _fits_int64(value: float) -> bool:
    """Whether llguidance, which reads a double and makes an int64 of it, has the same integer."""
    return value == _INT64 - 1 or (abs(value) < _INT64 and float(value) == value)


def _decimal_is_exact(value: float) -> bool:
    """Whether a double, written with as few digits as tell it from others, is the value."""
    try:
        return Decimal(repr(float(value))) == Decimal(value)
    except OverflowError:
        return False


# What nothing finite satisfies.


def _without_endless(schema: JSONSchema) -> JSONSchema:
    definitions = {f"#/$defs/{name}": node for name, node in schema.get("$defs", {}).items()}
    endless = {"#": schema} | definitions
    for _ in range(_MOST_PASSES):
        left = len(endless)
        for name in [*reversed(endless)]:
            if _ends(endless[name], endless):
                del endless[name]
        if len(endless) == left:
            break
    else:
        return schema  # too deep to tell
    if "#" in endless:
        raise SchemaError("nothing can satisfy it")
    whole: JSONSchema = _without({key: schema[key] for key in schema if key != "$defs"}, endless)
    kept = {name: _without(node, endless) for name, node in schema.get("$defs", {}).items()}
    return whole | ({"$defs": kept} if kept else {})


def _ends(node: Node, endless: Collection[str]) -> bool:
    """Whether some finite value may satisfy the schema, as far as its structure says. `endless`
    are the references of which that is not known to be so."""
    if not isinstance(node, dict):
        return node is not False
    if isinstance(target := node.get("$ref"), str) and target in endless:
        return False
    for key in _COMBINED:
        if isinstance(options := node.get(key), list) and options:
            each = [_ends(option, endless) for option in options]
            if not (all(each) if key == "allOf" else any(each)):
                return False
    kinds = node.get("type")
    kinds = {kinds} if isinstance(kinds, str) else {*_texts(kinds)}
    may_be = {"object": _object_ends, "array": _array_ends}
    return not kinds or any(kind not in may_be or may_be[kind](node, endless) for kind in kinds)


def _object_ends(node: JSONSchema, endless: Collection[str]) -> bool:
    properties = node.get("properties")
    if not isinstance(properties, dict):
        return True
    return all(_ends(properties.get(name, True), endless) for name in _texts(node.get("required")))


def _array_ends(node: JSONSchema, endless: Collection[str]) -> bool:
    least = node.get("minItems", 0)
    first = node.get("prefixItems", [])
    if not isinstance(least, int) or not isinstance(first, list):
        return True
    rest = [node.get("items", True)] if least > len(first) else []
    return all(_ends(item, endless) for item in [*first[:least], *rest])


def _without(node: Node, endless: Collection[str]) -> Node:
    """The schema with false in the place of what does not end, wherever in it."""
    if not isinstance(node, dict):
        return node
    if not _ends(node, endless):
        return False
    ready = dict(node)
    for key, value in node.items():
        if key in (*_NAMED, *_OBJECT[:2]) and isinstance(value, dict):
            ready[key] = {name: _without(part, endless) for name, part in value.items()}
        elif (key in _ONE or key == _OBJECT[2]) and isinstance(value, dict):
            ready[key] = _without(value, endless)
        elif key in (*_COMBINED, "items", "prefixItems") and isinstance(value, list):
            ready[key] = [_without(item, endless) for item in value]
    return ready


# Keys. If a pattern matches only keys that have a schema of their own, llguidance has nothing to
# write once it has written a comma.


class SchemaKeys(msgspec.Struct, frozen=True):
    """All patterns of keys and all names in a schema."""

    patterns: list[str]
    names: list[str]


class KeyMatches(msgspec.Struct, frozen=True):
    """`only`: each pattern that matches none but some of the names, with them. `all`: whether
    the patterns together match every key."""

    only: dict[str, list[str]]
    all: bool


def list_keys(schema: JSONSchema) -> SchemaKeys | None:
    """What there is to ask about the keys of a prepared schema; None: nothing."""
    names: dict[str, None] = {}
    patterns: dict[str, None] = {}
    for node in _nodes(schema):
        for found, given in zip((names, patterns), map(node.get, _OBJECT), strict=False):
            found.update(dict.fromkeys(given if isinstance(given, dict) else ()))
        names.update(dict.fromkeys(_texts(node.get("required"))))
    return SchemaKeys([*patterns], [*names]) if patterns else None


def spell_out(schema: JSONSchema, found: KeyMatches) -> JSONSchema:
    """The schema with properties in the place of patterns that match only these, and without what
    could be additional to patterns that match every key. It describes the same."""
    patterns = {pattern for node in _nodes(schema) for pattern in node.get(_OBJECT[1], ())}
    for node in _nodes(schema):
        if not isinstance(given := node.get("patternProperties"), dict):
            continue
        if found.all and patterns <= given.keys():
            node.setdefault("additionalProperties", False)
        for pattern in found.only.keys() & given.keys():
            part = given.pop(pattern)
            properties = node.setdefault("properties", {})
            for name in found.only[pattern]:
                own = properties.get(name, True)
                properties[name] = part if own is True else {"allOf": [own, part]}
        if not given:
            del node["patternProperties"]
    return schema


def _nodes(schema: JSONSchema) -> Iterator[JSONSchema]:
    """Every schema in a prepared schema that is an object, itself first."""
    pending: list[Node] = [schema]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for key, value in node.items():
            if key in (*_NAMED, *_OBJECT[:2], "$defs") and isinstance(value, dict):
                pending.extend(value.values())
            elif key in _ONE or key == _OBJECT[2]:
                pending.append(value)
            if key in (*_COMBINED, "items", "prefixItems") and isinstance(value, list):
                pending.extend(value)
