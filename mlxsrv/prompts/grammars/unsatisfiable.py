"""Unsatisfiable parts of a JSON schema, such as an object that must contain itself."""

from __future__ import annotations

from collections.abc import Collection

from mlxsrv.prompts.grammars.schema_nodes import (
    COMBINATORS,
    NAMED_SUBSCHEMAS,
    OBJECT_KEYWORDS,
    SUBSCHEMAS,
    JSONSchema,
    Node,
    SchemaError,
    texts,
)

_MOST_PASSES = 50  # over all definitions, to find those that nothing satisfies


def replace_unsatisfiable(schema: JSONSchema) -> JSONSchema:
    """Return the schema with false in the place of parts that nothing finite satisfies.

    Raises:
        SchemaError: nothing satisfies the schema itself.
    """
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
    whole: JSONSchema = _replace({key: schema[key] for key in schema if key != "$defs"}, endless)
    kept = {name: _replace(node, endless) for name, node in schema.get("$defs", {}).items()}
    return whole | ({"$defs": kept} if kept else {})


def _ends(node: Node, endless: Collection[str]) -> bool:
    """Whether some finite value may satisfy the schema, as far as its structure tells.

    Args:
        endless: references to schemas for which that is not known.
    """
    if not isinstance(node, dict):
        return node is not False
    if isinstance(target := node.get("$ref"), str) and target in endless:
        return False
    for key in COMBINATORS:
        if isinstance(options := node.get(key), list) and options:
            each = [_ends(option, endless) for option in options]
            if not (all(each) if key == "allOf" else any(each)):
                return False
    kinds = node.get("type")
    kinds = {kinds} if isinstance(kinds, str) else {*texts(kinds)}
    may_be = {"object": _object_ends, "array": _array_ends}
    return not kinds or any(kind not in may_be or may_be[kind](node, endless) for kind in kinds)


def _object_ends(node: JSONSchema, endless: Collection[str]) -> bool:
    properties = node.get("properties")
    if not isinstance(properties, dict):
        return True
    return all(_ends(properties.get(name, True), endless) for name in texts(node.get("required")))


def _array_ends(node: JSONSchema, endless: Collection[str]) -> bool:
    least = node.get("minItems", 0)
    first = node.get("prefixItems", [])
    if not isinstance(least, int) or not isinstance(first, list):
        return True
    rest = [node.get("items", True)] if least > len(first) else []
    return all(_ends(item, endless) for item in [*first[:least], *rest])


def _replace(node: Node, endless: Collection[str]) -> Node:
    """Return a schema with false in the place of each part that does not end."""
    if not isinstance(node, dict):
        return node
    if not _ends(node, endless):
        return False
    ready = dict(node)
    for key, value in node.items():
        if key in (*NAMED_SUBSCHEMAS, *OBJECT_KEYWORDS[:2]) and isinstance(value, dict):
            ready[key] = {name: _replace(part, endless) for name, part in value.items()}
        elif (key in SUBSCHEMAS or key == OBJECT_KEYWORDS[2]) and isinstance(value, dict):
            ready[key] = _replace(value, endless)
        elif key in (*COMBINATORS, "items", "prefixItems") and isinstance(value, list):
            ready[key] = [_replace(item, endless) for item in value]
    return ready
