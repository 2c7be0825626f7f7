"""Rules in the JSON Schema of a Struct beside its types, such as which fields go together.

A Struct has such rules in `schema_rules`, and so do its bases; `/openapi.json` has them. They allow
what the server understands, and refuse what it refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
TEXT: Schema = {"type": "string", "minLength": 1}
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TOKEN_IDS: Schema = {"type": "array", "items": TOKEN_ID, "minItems": 1}
GIVEN: Schema = {"not": {"type": "null"}}
NUMBERS_AS_KEYS: Schema = {"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}
NO_LIMIT: Schema = {"description": "-1: none is given."}

_WHOLE = ("$ref", "anyOf", "const", "enum", "type")


def add_rules(kind: type[Struct], schema: Schema) -> None:
    """Add the rules of a Struct to its schema. A rule of a field that says all of its form takes
    the place of what its type says; others are added to that."""
    properties = schema["properties"]
    for base in reversed(kind.__mro__):
        rules: Schema = vars(base).get("schema_rules", {})
        for name, rule in rules.get("properties", {}).items():
            own = {} if any(each in rule for each in _WHOLE) else properties[name]
            properties[name] = own | rule
        schema |= {name: rule for name, rule in rules.items() if name != "properties"}


def unsupported(values: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas of fields that are not supported, with the values that ask for nothing."""
    for name, neutral in values.items():
        yield name, {"enum": [*neutral], "description": "No other is supported."}


def having(name: str, value: Schema = GIVEN) -> Schema:
    """The schema of objects whose field `name` has such a value."""
    return {"properties": {name: value}, "required": [name]}


def at_most_one(schemas: Sequence[Schema]) -> list[Schema]:
    """Alternatives of which one holds where at most one of `schemas` does."""
    return [*schemas, {"not": {"anyOf": [*schemas]}}]


def needs(one: Schema, other: Schema) -> Schema:
    return {"if": one, "then": other}


def any_of(kinds: Sequence[type[Struct]]) -> Schema:
    return {"anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]}
