"""Finds fields that a body has and its Struct does not have, at any depth, with their paths.

Only objects that are Structs are searched, alone or in lists. Objects that are the client's own,
such as a JSON schema, have no unknown fields.

A body may have 30 MB. So values are not decoded but cut out, only a limited number of objects is
searched, and of the fields at one place in lists, such as `messages[].foo`, the first is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct
from msgspec.inspect import (
    CollectionType,
    Metadata,
    StructType,
    Type,
    UnionType,
    type_info,
)

from mlxsrv.errors import InvalidRequest

_MOST_OBJECTS = 10_000
_MOST_NAMES = 100
_MOST_FIELDS = 10_000

_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_items = msgspec.json.Decoder(list[Raw]).decode
_text = msgspec.json.Decoder(str).decode


class Search:
    """The unknown fields that one search has found: one path for each place."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}
        self._objects = 0

    @property
    def paths(self) -> list[str]:
        return list(self._paths.values())

    def goes_on(self) -> bool:
        """Count one more object. Returns whether to search it."""
        self._objects += 1
        return self._objects <= _MOST_OBJECTS and len(self._paths) < _MOST_NAMES

    def note(self, place: str, path: str) -> None:
        if len(self._paths) < _MOST_NAMES:
            self._paths.setdefault(place, path)


class Fields:
    """The fields of a Struct, which must not contain itself. Made once.

    Args:
        place: the path of its objects without the indices of lists, with a dot at the end.
    """

    def __init__(self, kind: type[Struct] | StructType, place: str = "") -> None:
        info = kind if isinstance(kind, StructType) else type_info(kind)
        assert isinstance(info, StructType)
        self._place = place
        self._known = {field.encode_name for field in info.fields}
        if info.tag_field is not None:
            self._known.add(info.tag_field)
        values = {
            field.encode_name: _Value(field.type, f"{place}{field.encode_name}")
            for field in info.fields
        }
        self._nested = {name: value for name, value in values.items() if value.matters}

    def unknown_in(self, body: bytes) -> tuple[dict[str, Raw], list[str]]:
        """Return the unknown fields of a body, and the paths of those in objects inside it.

        Raises:
            UnicodeDecodeError: an unknown field is not UTF-8.
            InvalidRequest: the body has too many fields.
        """
        fields, search = _fields(body), Search()
        if len(fields) > _MOST_FIELDS:
            raise InvalidRequest(f"a body has at most {_MOST_FIELDS} fields, not {len(fields)}")
        self._go_into(fields, "", search)
        return self._unknown(fields), search.paths

    def look_at(self, raw: Raw, path: str, search: Search) -> None:
        """Note the unknown fields of an object and inside it. `path` is its path, with a dot."""
        if search.goes_on():
            fields = _fields(raw)
            for name in self._unknown(fields):
                search.note(self._place + name, path + name)
            self._go_into(fields, path, search)

    def _unknown(self, fields: Mapping[str, Raw]) -> dict[str, Raw]:
        """The unknown fields whose value is not null. All are read as text, because a field that is
        ignored must be valid UTF-8 too."""
        unknown = {name: fields[name] for name in fields.keys() - self._known}
        return {name: raw for name, raw in unknown.items() if str(raw, "utf-8") != "null"}

    def _go_into(self, fields: Mapping[str, Raw], path: str, search: Search) -> None:
        for name in self._nested.keys() & fields.keys():
            self._nested[name].look_at(fields[name], f"{path}{name}", search)


class _Value:
    """A value that may hold a Struct, one of several tagged Structs, or a list of them."""

    def __init__(self, kind: Type, place: str) -> None:
        self._objects: dict[Any, Fields] = {}  # by tag; None if there is only one kind
        self._tag: str | None = None
        self._items: _Value | None = None
        for one in _alternatives(kind):
            if isinstance(one, StructType):
                self._tag = one.tag_field
                self._objects[one.tag] = Fields(one, f"{place}.")
            elif isinstance(one, CollectionType):
                items = _Value(one.item_type, f"{place}[]")
                self._items = items if items.matters else self._items

    @property
    def matters(self) -> bool:
        return bool(self._objects) or self._items is not None

    def look_at(self, raw: Raw, path: str, search: Search) -> None:
        begin = bytes(memoryview(raw)[:1])
        if begin == b"{" and self._objects:
            if (fields := self._choose(raw)) is not None:
                fields.look_at(raw, f"{path}.", search)
        elif begin == b"[" and self._items is not None:
            for i, item in enumerate(_items(raw)):
                self._items.look_at(item, f"{path}[{i}]", search)

    def _choose(self, raw: Raw) -> Fields | None:
        if self._tag is None:
            return self._objects.get(None)
        return self._objects.get(_text(_fields(raw)[self._tag]))


def _alternatives(kind: Type) -> list[Type]:
    while isinstance(kind, Metadata):
        kind = kind.type
    if not isinstance(kind, UnionType):
        return [kind]
    return [each for one in kind.types for each in _alternatives(one)]
