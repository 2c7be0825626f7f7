"""JSON schemas as clients write them, prepared for llguidance.

- Objects that list properties and do not say whether others may come are closed: a small model
  would invent names without end. The properties of an object are listed by the schema, by the
  schemas it refers to, and by all that `allOf`, `anyOf` and `oneOf` combine there: an `allOf` of
  two objects has the properties of both. `additionalProperties: true` in one of them leaves the
  object open.
- A part that nothing finite can satisfy, such as an object that must contain itself, becomes false.
- A pattern such as `^(a|b)$` of keys that are listed anyway is replaced by these keys: llguidance
  would write a comma behind the last of them and then have no key left.
- Numbers that llguidance would round are refused.
- `\\d`, `\\w` and `\\s` in patterns are ASCII.
- A `format` for which llguidance has no grammar is an annotation, and left out.

References become references to definitions of our own: what an object may have depends on what it
is combined with where it is referred to. Keywords that llguidance does not have are left to it: it
refuses them, so nothing in them matters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from decimal import Decimal
from itertools import accumulate
from operator import or_
from typing import Any, TypeGuard

import msgspec

JSONSchema = dict[str, Any]
Node = Any  # a schema or true or false; or, where the client is wrong, anything

_SINGLE = ("items", "additionalItems", "additionalProperties")
"""Keywords whose value is a schema."""
_OBJECT = ("properties", "patternProperties", "additionalProperties")
"""Keywords for the properties of an object."""
_NAMED = ("properties", "patternProperties", "$defs")
"""Keywords whose value is an object of schemas."""
_COMBINED = ("allOf", "anyOf", "oneOf")
"""Keywords whose value is a list of schemas for the same value."""
_LISTS = ("items", "prefixItems", *_COMBINED)

_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email"),
        *("hostname", "ipv4", "ipv6", "uuid", "uri"),
    }
)
"""Formats for which llguidance has a grammar."""
_MOST_STEPS = 200_000  # schemas looked at, some over and over
_MOST_PASSES = 50  # over all definitions, to find those that nothing satisfies
_A_FEW_KEYS = re.compile(r"\^(?:([\w -]+)|\((?:\?:)?([\w |-]+)\))\$")
"""A pattern that matches one key, or some."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_EXACT = 2**53
_INT64 = 2**63

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": r"[ \t\n\r\f\v]",
    # With ASCII alone a no-break space would match, which is whitespace in JSON Schema.
    "S": r"[^\s\x1c-\x1f\x{feff}]",
}


class SchemaError(ValueError):
    """The schema cannot be used. The message is for the client."""


def prepare(schema: JSONSchema, *, close: bool = True) -> JSONSchema:
    """Return the schema, prepared. It describes no other values than the one given.

    Args:
        close: objects that list properties are closed; else they stay open.

    Raises:
        SchemaError: it asks for what cannot be, or is too much.
    """
    ready = _Preparation(schema, close).result()
    for place, node in places(ready):
        try:
            _check_numbers(node)
        except SchemaError as error:
            raise SchemaError(located(str(error), place)) from None
    _remove_endless(ready)
    if close:
        _spell_out_keys(ready)
    return ready


def places(schema: JSONSchema) -> Iterator[tuple[str, JSONSchema]]:
    """Yield every schema inside a prepared one that is an object, itself first, with a JSON pointer
    to each."""
    pending: list[tuple[str, Node]] = [("#", schema)]
    while pending:
        place, node = pending.pop()
        if not isinstance(node, dict):
            continue
        yield place, node
        parts: list[tuple[str, Node]] = []
        for key, value in node.items():
            if key in _NAMED and isinstance(value, dict):
                parts += ((f"{key}/{_escaped(name)}", part) for name, part in value.items())
            elif key in _LISTS and isinstance(value, list):
                parts += ((f"{key}/{i}", part) for i, part in enumerate(value))
            elif key in _SINGLE:
                parts.append((key, value))
        pending += ((f"{place}/{below}", part) for below, part in reversed(parts))


def located(reason: str, place: str) -> str:
    """Add to a reason where in the schema it is, unless that is the whole schema."""
    return reason if place == "#" else f"{reason}, at {place}"


def ascii_classes(regex: str) -> str:
    r"""Return a regex with `\d`, `\w` and `\s` for ASCII only, as in JSON Schema's patterns.

    Inside a class of characters they become a nested class, which means the same.
    """
    return _ESCAPE.sub(lambda escape: _CLASSES.get(escape[1], escape[0]), regex)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _texts(value: Any) -> list[str]:
    """Return the strings in a list; none if it is no list."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


# Closing objects.


class _ListedKeys(msgspec.Struct, frozen=True):
    """The keys that schemas list for an object.

    Attributes:
        names: keys that are listed or required.
        patterns: patterns of keys that have a schema of their own.
        open: some schema says what other keys hold.
    """

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    open: bool = False

    def __or__(self, other: _ListedKeys) -> _ListedKeys:
        return _ListedKeys(
            self.names | other.names, self.patterns | other.patterns, self.open or other.open
        )


_NOTHING = _ListedKeys()


class _Preparation:
    """Prepares one schema. Definitions are made when the first reference to them is met."""

    def __init__(self, schema: JSONSchema, close: bool) -> None:
        self._root = schema
        self._close = close
        self._steps = 0
        self._names: dict[tuple[str, _ListedKeys], str] = {}  # by where they point, and beside what
        self._pending: list[tuple[str, Node, _ListedKeys]] = []

    def result(self) -> JSONSchema:
        whole: JSONSchema = self._node(self._root, _NOTHING)
        definitions = {}
        while self._pending:
            name, node, beside = self._pending.pop()
            definitions[name] = self._node(node, beside)
        return whole | ({"$defs": definitions} if definitions else {})

    def _node(self, node: Node, beside: _ListedKeys) -> Node:
        """Prepare a schema; `beside` are the keys that others list for the same object."""
        self._step()
        if not isinstance(node, dict):
            return node
        groups = list(_groups(node))
        own, *others = self._others(node, groups, beside)
        ready: JSONSchema = {}
        for key, value in node.items():
            if key in _OBJECT:
                # All three where the first one stands: llguidance applies keywords in their order,
                # and would not see these together if an allOf came between them.
                ready |= self._object(node, own)
            elif key == "format" and isinstance(value, str) and value not in _FORMATS:
                continue
            elif key not in ("$defs", "definitions"):
                ready[key] = self._part(key, value)
        for (key, index, inner), listing in zip(groups, others, strict=True):
            if key == "$ref":
                ready[key] = self._reference(inner, listing)
            elif key == "allOf":
                ready[key][index] = self._node(inner, listing)
            else:
                ready[key] = [self._node(option, listing) for option in inner]
        return ready

    def _part(self, key: str, value: Any) -> Any:
        """Prepare what a keyword holds: schemas of other values. Combined ones get a place."""
        if key == "pattern" and isinstance(value, str):
            return ascii_classes(value)
        if key in _NAMED and isinstance(value, dict):
            named = ascii_classes if key == "patternProperties" else str
            return {named(name): self._node(part, _NOTHING) for name, part in value.items()}
        if key in _COMBINED:
            return list(value) if isinstance(value, list) else value
        if key in _LISTS and isinstance(value, list):
            return [self._node(item, _NOTHING) for item in value]
        return self._node(value, _NOTHING) if key in _SINGLE else value

    def _object(self, node: JSONSchema, beside: _ListedKeys) -> JSONSchema:
        """Prepare the keywords for properties. If the object is to be closed, they have the keys
        that others list, too."""
        ready = {key: self._part(key, node[key]) for key in _OBJECT if key in node}
        if self._close and not beside.open and self._must_close(node, beside):
            for name in [*_texts(node.get("required")), *sorted(beside.names)]:
                ready["properties"].setdefault(name, True)
            if beside.patterns and isinstance(ready.setdefault("patternProperties", {}), dict):
                for pattern in sorted(map(ascii_classes, beside.patterns)):
                    ready["patternProperties"].setdefault(pattern, True)
            ready["additionalProperties"] = False
        return ready

    def _must_close(self, node: JSONSchema, beside: _ListedKeys) -> bool:
        if "additionalProperties" in node or not isinstance(node.get("properties"), dict):
            return False
        names, least = _listing(node).names | beside.names, node.get("minProperties")
        self._step(len(names))
        return not (isinstance(least, int) and least > len(names))  # else more must come

    def _reference(self, target: Any, beside: _ListedKeys) -> Any:
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
        """Return what a reference into the schema points to; None if it leads elsewhere."""
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
        self, node: JSONSchema, groups: list[tuple[str, int, Any]], beside: _ListedKeys
    ) -> list[_ListedKeys]:
        """Return what all others list: for the schema's own keywords, then for each group."""
        if not groups or (len(groups) == 1 and _listing(node) == _NOTHING):
            return [beside] * (len(groups) + 1)
        listings = [_listing(node), *(self._listed(inner) for _, _, inner in groups)]
        before = [*accumulate(listings[:-1], or_, initial=beside)]
        after = [*accumulate(reversed(listings[1:]), or_, initial=_NOTHING)]
        self._step(sum(len(listing.names) for listing in before))
        return [one | other for one, other in zip(before, reversed(after), strict=True)]

    def _listed(self, inner: Any) -> _ListedKeys:
        """Return what a group lists; it is a schema, a list of schemas, or a reference."""
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
    """Yield groups of schemas for the same value as the schema's own keywords.

    Each schema of `allOf` is a group. So are the options of `anyOf` together, those of `oneOf`, and
    the target of a reference.
    """
    for key, value in node.items():
        if key == "allOf" and isinstance(value, list):
            yield from ((key, i, one) for i, one in enumerate(value))
        elif key == "$ref" or (key in _COMBINED and isinstance(value, list)):
            yield key, 0, value


def _listing(node: JSONSchema) -> _ListedKeys:
    """Return the keys that the schema's own keywords list."""
    properties, patterns = node.get("properties"), node.get("patternProperties")
    return _ListedKeys(
        frozenset(
            [*(properties if isinstance(properties, dict) else ()), *_texts(node.get("required"))]
        ),
        frozenset(patterns if isinstance(patterns, dict) else ()),
        node.get("additionalProperties", False) is not False,
    )


# Numbers.


def _check_numbers(node: JSONSchema) -> None:
    """Raise SchemaError if llguidance would not keep a number of the schema's own exactly.

    It reads bounds as doubles, and makes int64s of those of integers.
    """
    exact = _fits_int64 if node.get("type") == "integer" else _is_exact_decimal
    for key in _BOUNDS:
        value = node.get(key)
        if _is_large(value) and (key.startswith("exclusive") or not exact(value)):
            raise SchemaError(f"{key}: {value} cannot be kept exactly; numbers up to 2**53 can")
    pending = [node.get("const"), node.get("enum")]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif _is_large(item) and not (
            (isinstance(item, int) and _fits_int64(item)) or _is_exact_decimal(item)
        ):
            raise SchemaError(f"{item} cannot be kept exactly; numbers up to 2**53 can")


def _is_large(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) > _EXACT


def _fits_int64(value: float) -> bool:
    return value == _INT64 - 1 or (abs(value) < _INT64 and float(value) == value)


def _is_exact_decimal(value: float) -> bool:
    """Whether the shortest decimal of the nearest double is the value."""
    try:
        return Decimal(repr(float(value))) == Decimal(value)
    except OverflowError:
        return False


# What nothing satisfies.


def _remove_endless(schema: JSONSchema) -> None:
    """Make false, in a prepared schema, of each part that nothing finite satisfies.

    Raises:
        SchemaError: nothing satisfies the schema itself.
    """
    definitions = schema.get("$defs", {})
    endless = {"#": schema} | {f"#/$defs/{name}": node for name, node in definitions.items()}
    for _ in range(_MOST_PASSES):
        left = len(endless)
        for target in [*reversed(endless)]:
            if _ends(endless[target], endless):
                del endless[target]
        if len(endless) == left:
            break
    else:
        return  # too deep to decide
    if "#" in endless:
        raise SchemaError("nothing can satisfy it")
    for target in endless:
        del definitions[target.removeprefix("#/$defs/")]
    for _, node in places(schema):
        if not _ends(node, endless):
            node.clear()
            node["enum"] = []


def _ends(node: Node, endless: Collection[str]) -> bool:
    """Whether some finite value may satisfy the schema, as far as its structure says.

    Args:
        endless: references to schemas for which that is not known.
    """
    if not isinstance(node, dict):
        return node is not False
    if isinstance(target := node.get("$ref"), str) and target in endless:
        return False
    for key in _COMBINED:
        if isinstance(options := node.get(key), list) and options:
            each = [_ends(option, endless) for option in options]
            if not (all(each) if key == "allOf" else any(each)):
                return False
    parts: dict[str, list[Node]] = {}  # that a value of a type must have
    properties, first = node.get("properties"), node.get("prefixItems", [])
    if isinstance(properties, dict):
        parts["object"] = [properties.get(name, True) for name in _texts(node.get("required"))]
    if isinstance(least := node.get("minItems"), int) and isinstance(first, list):
        parts["array"] = [*first, node.get("items", True)][:least]
    kinds = [kind] if isinstance(kind := node.get("type"), str) else _texts(kind)
    needed = [parts.get(kind, []) for kind in kinds]
    return not kinds or any(all(_ends(part, endless) for part in each) for each in needed)


# Patterns of keys.


def _spell_out_keys(schema: JSONSchema) -> None:
    """Put properties in the place of patterns that match only keys that the schema lists."""
    nodes = [node for _, node in places(schema)]
    listed = {name for node in nodes for name in _listing(node).names}
    for node in nodes:
        if not isinstance(patterns := node.get("patternProperties"), dict):
            continue
        for pattern in [*patterns]:
            found = _A_FEW_KEYS.fullmatch(pattern)
            keys = (found[1] or found[2]).split("|") if found else []
            if not found or not listed.issuperset(keys):
                continue
            part, properties = patterns.pop(pattern), node.setdefault("properties", {})
            for key in keys:
                own = properties.get(key, True)
                properties[key] = part if own is True else {"allOf": [own, part]}
        if not patterns:
            del node["patternProperties"]
