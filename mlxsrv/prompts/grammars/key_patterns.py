"""Patterns of keys in JSON schemas, prepared for llguidance.

If a pattern matches only keys that have a schema of their own, llguidance has nothing to write
once it has written a comma. So such patterns are replaced by these keys.
"""

from __future__ import annotations

import msgspec

from mlxsrv.prompts.grammars.schema_nodes import OBJECT_KEYWORDS, JSONSchema, nodes, texts


class SchemaKeys(msgspec.Struct, frozen=True):
    """All patterns of keys and all names in a schema."""

    patterns: list[str]
    names: list[str]


class KeyMatches(msgspec.Struct, frozen=True):
    """The keys that the patterns of a schema match.

    Attributes:
        only: the patterns that match some of the names and nothing else, with these names.
        all: the patterns together match every key.
    """

    only: dict[str, list[str]]
    all: bool


def list_keys(schema: JSONSchema) -> SchemaKeys | None:
    """Return the patterns and names in a prepared schema; None if it has no patterns."""
    names: dict[str, None] = {}
    patterns: dict[str, None] = {}
    for node in nodes(schema):
        for found, given in zip((names, patterns), map(node.get, OBJECT_KEYWORDS), strict=False):
            found.update(dict.fromkeys(given if isinstance(given, dict) else ()))
        names.update(dict.fromkeys(texts(node.get("required"))))
    return SchemaKeys([*patterns], [*names]) if patterns else None


def spell_out(schema: JSONSchema, matches: KeyMatches) -> JSONSchema:
    """Put properties in the place of patterns that match only them, in the schema itself.

    Nothing may be additional to patterns that match every key. The schema describes the same values
    as before.
    """
    patterns = {pattern for node in nodes(schema) for pattern in node.get(OBJECT_KEYWORDS[1], ())}
    for node in nodes(schema):
        if not isinstance(given := node.get("patternProperties"), dict):
            continue
        if matches.all and patterns <= given.keys():
            node.setdefault("additionalProperties", False)
        for pattern in matches.only.keys() & given.keys():
            part = given.pop(pattern)
            properties = node.setdefault("properties", {})
            for name in matches.only[pattern]:
                own = properties.get(name, True)
                properties[name] = part if own is True else {"allOf": [own, part]}
        if not given:
            del node["patternProperties"]
    return schema
