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


def texts(value: Any) -> list[str]:
    """Return the strings in a list; none if it is no list."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def nodes(schema: JSONSchema) -> Iterator[JSONSchema]:
    """Yield every schema inside a prepared schema that is an object, itself first."""
    pending: list[Node] = [schema]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for key, value in node.items():
            if key in (*NAMED_SUBSCHEMAS, *OBJECT_KEYWORDS[:2], "$defs") and isinstance(
                value, dict
            ):
                pending.extend(value.values())
            elif key in SUBSCHEMAS or key == OBJECT_KEYWORDS[2]:
                pending.append(value)
            if key in (*COMBINATORS, "items", "prefixItems") and isinstance(value, list):
                pending.extend(value)
