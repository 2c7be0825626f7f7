"""JSON schemas as clients write them, prepared for llguidance.

- Objects that list properties and do not say whether others may come are closed: a small model
  would invent names without end. The properties of an object are listed by the schema, by the
  schemas it refers to, and by all that `allOf`, `anyOf` and `oneOf` combine there: an `allOf` of
  two objects has the properties of both. `additionalProperties: true` in one of them leaves the
  object open.
- A part that nothing finite can satisfy, such as an object that must contain itself, becomes false.
- Numbers that llguidance would round are refused.
- `\\d`, `\\w` and `\\s` in patterns are ASCII.
- Annotations are left out. A `format` for which llguidance has no grammar is one.

References become references to definitions of our own: what an object may have depends on what it
is combined with where it is referred to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from mlxsrv.prompts.grammars.regexes import ascii_classes
from mlxsrv.prompts.grammars.schema_nodes import (
    COMBINATORS,
    NAMED_SUBSCHEMAS,
    OBJECT_KEYWORDS,
    SUBSCHEMAS,
    JSONSchema,
    Node,
    SchemaError,
    located,
    places,
    texts,
)
from mlxsrv.prompts.grammars.schema_numbers import check_numbers
from mlxsrv.prompts.grammars.unsatisfiable import replace_unsatisfiable

_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "$comment", "deprecated"),
        *("readOnly", "writeOnly", "contentMediaType", "contentEncoding"),
    }
)
_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email"),
        *("hostname", "ipv4", "ipv6", "uuid", "uri"),
    }
)
"""Formats for which llguidance has a grammar."""
_MOST_STEPS = 200_000  # schemas looked at, some over and over


class ListedKeys(msgspec.Struct, frozen=True):
    """The keys that schemas list for an object.

    Attributes:
        names: keys that are listed or required.
        patterns: patterns of keys that have a schema of their own.
        open: some schema says what other keys hold.
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
    """Return the schema, prepared. It describes no other values than the one given.

    Args:
        close: objects that list properties are closed; else they stay open.

    Raises:
        SchemaError: it asks for what cannot be, or is too much.
    """
    return replace_unsatisfiable(_Preparation(schema, close).result())


class _Preparation:
    """Prepares one schema. Definitions are made when the first reference to them is met."""

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
        whole |= {"$defs": definitions} if definitions else {}
        for place, node in places(whole):
            try:
                check_numbers(node)
            except SchemaError as error:
                raise SchemaError(located(str(error), place)) from None
        return whole

    def _node(self, node: Node, beside: ListedKeys) -> Node:
        """Prepare a schema; `beside` are the keys that others list for the same object."""
        self._step()
        if not isinstance(node, dict):
            return node
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
        """Prepare all keywords but those that combine schemas. These only get their place."""
        ready: JSONSchema = {}
        for key, value in node.items():
            if key in _ANNOTATIONS or key in ("$defs", "definitions"):
                continue
            if key == "format" and isinstance(value, str) and value not in _FORMATS:
                continue
            if key in OBJECT_KEYWORDS:
                for name, part in self._object(node, beside).items():
                    ready.setdefault(name, part)
            elif key == "pattern" and isinstance(value, str):
                ready[key] = ascii_classes(value)
            elif key in SUBSCHEMAS and isinstance(value, dict):
                ready[key] = self._node(value, _NOTHING)
            elif key in NAMED_SUBSCHEMAS and isinstance(value, dict):
                ready[key] = {name: self._node(part, _NOTHING) for name, part in value.items()}
            elif key in ("items", "prefixItems") and isinstance(value, list):
                ready[key] = [self._node(item, _NOTHING) for item in value]
            elif key == "allOf" and isinstance(value, list):
                ready[key] = [*value]
            else:
                ready[key] = value
        return ready

    def _object(self, node: JSONSchema, beside: ListedKeys) -> JSONSchema:
        """Prepare the keywords for properties, in order: the third depends on the other two."""
        ready = {key: node[key] for key in OBJECT_KEYWORDS if key in node}
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
            wanted = [name for name in texts(node.get("required")) if name in names]
            for name in [*wanted, *sorted(beside.names)]:
                ready["properties"].setdefault(name, True)
            if beside.patterns:
                patterns = ready.setdefault("patternProperties", {})
                for pattern in sorted(map(ascii_classes, beside.patterns)):
                    patterns.setdefault(pattern, True)
            ready["additionalProperties"] = False
        return {key: ready[key] for key in OBJECT_KEYWORDS if key in ready}

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
        self, node: JSONSchema, groups: list[tuple[str, int, Any]], beside: ListedKeys
    ) -> list[ListedKeys]:
        """Return what all others list: for the schema's own keywords, then for each group."""
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
        if key == "$ref":
            yield key, 0, value
        elif key in COMBINATORS and isinstance(value, list):
            yield from (
                ((key, i, one) for i, one in enumerate(value))
                if key == "allOf"
                else ((key, 0, value),)
            )


def _listing(node: JSONSchema) -> ListedKeys:
    """Return the keys that the schema's own keywords list."""
    properties, patterns = (node.get(key) for key in OBJECT_KEYWORDS[:2])
    others = [node.get(key, False) for key in ("additionalProperties", "unevaluatedProperties")]
    return ListedKeys(
        frozenset(
            [*(properties if isinstance(properties, dict) else ()), *texts(node.get("required"))]
        ),
        frozenset(patterns if isinstance(patterns, dict) else ()),
        any(other is not False for other in others),
    )
