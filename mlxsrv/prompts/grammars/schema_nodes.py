"""JSON schemas as trees: the keywords that hold other schemas, and a walk over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

JSONSchema = dict[str, Any]
Node = Any  # a schema or true or false; or, where the client is wrong, anything

SUBSCHEMAS = frozenset(
    {
        *("items", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
"""Keywords whose value is a schema."""
NAMED_SUBSCHEMAS = frozenset({"dependentSchemas"})
"""Keywords whose value is an object of schemas."""
OBJECT_KEYWORDS = ("properties", "patternProperties", "additionalProperties")
"""Keywords for the properties of an object; two objects of schemas, and a schema."""
COMBINATORS = ("allOf", "anyOf", "oneOf")
"""Keywords whose value is a list of schemas for the same value."""


class SchemaError(ValueError):
    """The schema cannot be used. The message is for the client."""


def located(reason: str, place: str) -> str:
    """Add to a reason where in the schema it is, unless that is the whole schema."""
    return reason if place == "#" else f"{reason}, at {place}"


def texts(value: Any) -> list[str]:
    """Return the strings in a list; none if it is no list."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def nodes(schema: JSONSchema) -> Iterator[JSONSchema]:
    """Yield every schema inside a prepared schema that is an object, itself first."""
    return (node for _, node in places(schema))


def places(schema: JSONSchema) -> Iterator[tuple[str, JSONSchema]]:
    """Yield the `nodes`, in their order, with a JSON pointer to each."""
    pending: list[tuple[str, Node]] = [("#", schema)]
    while pending:
        place, node = pending.pop()
        if not isinstance(node, dict):
            continue
        yield place, node
        parts: list[tuple[str, Node]] = []
        for key, value in node.items():
            if key in (*NAMED_SUBSCHEMAS, *OBJECT_KEYWORDS[:2], "$defs") and isinstance(
                value, dict
            ):
                parts += ((f"{key}/{_escaped(name)}", part) for name, part in value.items())
            elif key in SUBSCHEMAS or key == OBJECT_KEYWORDS[2]:
                parts.append((key, value))
            if key in (*COMBINATORS, "items", "prefixItems") and isinstance(value, list):
                parts += ((f"{key}/{i}", part) for i, part in enumerate(value))
        pending += ((f"{place}/{below}", part) for below, part in reversed(parts))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
