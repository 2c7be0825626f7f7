"""Numbers in JSON schemas that llguidance would round: they are refused."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from mlxsrv.prompts.grammars.schema_nodes import JSONSchema, SchemaError

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_EXACT = 2**53
_INT64 = 2**63


def check_numbers(node: JSONSchema) -> None:
    """Raise SchemaError if llguidance would not keep a number of the schema's own exactly."""
    for key in _BOUNDS:
        if key in node:
            _check_bound(key, node)
    for value in (node.get("const"), node.get("enum")):
        _check_constant(value)


def _check_bound(key: str, node: JSONSchema) -> None:
    """Raise SchemaError if llguidance would not keep a bound exactly."""
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


def _check_constant(value: Any) -> None:
    """Raise SchemaError if llguidance would not keep each number in a constant exactly."""
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
    """Whether an integer survives in llguidance, which reads a double and makes an int64 of it."""
    return value == _INT64 - 1 or (abs(value) < _INT64 and float(value) == value)


def _decimal_is_exact(value: float) -> bool:
    """Whether the shortest decimal of the nearest double is the value."""
    try:
        return Decimal(repr(float(value))) == Decimal(value)
    except OverflowError:
        return False
