"""Types in plain words, for the errors about settings and requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec import inspect

_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "int": "a whole number",
        "float": "a number",
        "str": "a text",
        "bool": "true or false",
        "array": "a list",
        "object": "an object",
    }
)
_PARTS: Final[Mapping[str, str]] = MappingProxyType(
    {"str": "character", "array": "item", "object": "key"}
)
"""Units of the length of a value."""

_BOUNDS: Final[Mapping[str, str]] = MappingProxyType(
    {"<=": "of at most", ">=": "of at least", "<": "below", ">": "above"}
)
_EXPECTED = re.compile(
    r"Expected `(?P<types>[^`]+)`(?: (?P<rule>.+?))?"
    r"(?:, got (?:`(?P<type>[^`]+)`|(?P<count>\d+)))?",
    re.DOTALL,
)
_BOUND = re.compile(r"(?P<sign>[<>]=?) (?P<number>\S+)")
_LENGTH = re.compile(
    r"of (?:length (?:(?P<sign>[<>]=) )?|at (?P<least>least|most) length )(?P<size>.+)"
)
_VALUE = re.compile(r"Invalid (?:enum )?value (?P<value>.+)", re.DOTALL)
_OTHERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Integer value out of range": "the number is too large",
        "Number out of range": "the number is too large",
        "Invalid base64 encoded string": "it is not valid base64",
    }
)


def error_in_words(text: str, values: Sequence[object] = ()) -> str:
    """msgspec's sentence about a wrong value, without its path: `expected a number, got a text`.

    A sentence that is about no type stays as it is.

    Args:
        values: those that are possible, where they are listed.
    """
    if match := _EXPECTED.fullmatch(text):
        got = match["count"] or (match["type"] and _types(match["type"]))
        rule = match["rule"] and _rule(match["rule"], match["types"])
        wanted = " ".join(filter(None, (_types(match["types"]), rule)))
        return f"expected {wanted}, got {got}" if got else f"expected {wanted}"
    if match := _VALUE.fullmatch(text):
        only = f", only {_listed([*map(repr, values)])}" if values else ""
        return f"it cannot be {match['value']}{only}"
    return _OTHERS.get(text, text[:1].lower() + text[1:])


def _types(text: str) -> str:
    """Words for types such as `int | str | null`. Where others are possible, null is the same as
    nothing, so it is not told."""
    names = text.split(" | ")
    names = [name for name in names if name != "null"] or names
    return _listed([_TYPES.get(name, name) for name in names])


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _rule(rule: str, types: str) -> str:
    if match := _BOUND.fullmatch(rule):
        return f"{_BOUNDS[match['sign']]} {match['number'].removesuffix('.0')}"
    if match := _LENGTH.fullmatch(rule):
        part = next((_PARTS[name] for name in types.split(" | ") if name in _PARTS), "byte")
        least = _BOUNDS.get(match["sign"]) or (match["least"] and f"of at {match['least']}") or "of"
        return f"{least} {match['size']} {part}{'' if match['size'] == '1' else 's'}"
    return rule.replace("matching regex", "that matches").replace("that's", "that is")


def values_at(kind: inspect.Type, steps: Sequence[str]) -> Iterator[object]:
    """The values that a field may have, if its type lists them.

    Args:
        kind: of the whole.
        steps: from there to the field: names, and `[...]` for what is in a list or a dictionary.
    """
    match kind:
        case inspect.Metadata(type=inner):
            yield from values_at(inner, steps)
        case inspect.UnionType(types=types):
            for each in types:
                yield from values_at(each, steps)
        case inspect.LiteralType(values=values) if not steps:
            yield from values
        case inspect.StructType(fields=fields) if steps:
            for field in fields:
                if field.encode_name == steps[0]:
                    yield from values_at(field.type, steps[1:])
            if [kind.tag_field] == [*steps]:
                yield kind.tag
        case (
            inspect.ListType(item_type=inner)
            | inspect.VarTupleType(item_type=inner)
            | inspect.DictType(value_type=inner)
        ) if steps and steps[0].startswith("["):
            yield from values_at(inner, steps[1:])


def type_in_words(kind: inspect.Type) -> str:
    """The type of a setting, with all its bounds: `a whole number from 0 to 65535`."""
    match kind:
        case inspect.Metadata(extra_json_schema={"title": title}):
            return str(title)
        case inspect.Metadata(type=inner):
            return type_in_words(inner)
        case inspect.UnionType(types=types):
            return type_in_words(next(e for e in types if not isinstance(e, inspect.NoneType)))
        case inspect.StrType():
            return "a name"
        case inspect.IntType():
            return f"{_TYPES['int']}{_range(kind)}"
        case inspect.FloatType():
            return f"{_TYPES['float']}{_range(kind)}"
    return "right"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    if kind.gt is not None:
        return f" {_BOUNDS['>']} {kind.gt:g}"
    return "" if kind.ge is None else f" {_BOUNDS['>=']} {kind.ge}"
