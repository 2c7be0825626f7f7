"""Formats of calls that are JSON objects, with the name of the tool among their keys."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from mlxsrv.text.calls import CallFormat, CallReader, CallRules, Tools, ToolSchema, WrittenCall
from mlxsrv.text.json_objects import JsonCall
from mlxsrv.text.json_reader import JsonReader
from mlxsrv.text.lark import Lark
from mlxsrv.text.marks import Marks

_SPACE = " \t\r\n"
# Dropped behind an object. Small models write too many brackets.
_LEFTOVERS = _SPACE + ",;}"

_ARGUMENTS = "ARGUMENTS"
_ID = "ID"


class JsonLayout(msgspec.Struct, frozen=True):
    """The way in which a model writes calls as JSON objects.

    Attributes:
        start: the marker before a block.
        end: the marker after it; empty if there is none.
        inner: whitespace between a marker and what it encloses.
        between: text between two blocks.
        listed: the calls of an answer are a list in one block; else each is a block.
        keys: those of an object, in their order: the keys of the name, of the arguments and, if it
            has one, of the id. A call of `f` is `{"f": {...}}` if there are none.
        id: a regex for the id.
    """

    start: str
    end: str = ""
    inner: str = ""
    between: str = "\n"
    listed: bool = False
    keys: tuple[str, ...] = ("name", "arguments")
    id: str = "[0-9]+"

    @property
    def open(self) -> str:
        return self.start + self.inner

    @property
    def close(self) -> str:
        return self.inner + self.end if self.end else ""

    def spell_one(self, call: WrittenCall, number: int) -> str:
        """Return one call as the model writes it."""
        values = {
            _ARGUMENTS: json.dumps(call.arguments, ensure_ascii=False),
            _ID: json.dumps(call.id or str(number)),
        }
        return "".join(values.get(sign, sign) for sign in self._signs(call.name, " "))

    def rule_body(self, name: str, arguments: str, space: str = "") -> str:
        """Return the body in Lark of a call.

        Args:
            arguments: the body of its arguments.
            space: a rule for whitespace wherever JSON allows it; without one it stands only where
                the model writes it.
        """
        bodies = {_ARGUMENTS: arguments, _ID: rf'"\"" /{self.id}/ "\""'}
        signs = self._signs(name, "" if space else " ")
        return f" {space} ".join(bodies.get(sign) or json.dumps(sign) for sign in signs)

    def _signs(self, name: str, space: str) -> list[str]:
        """Return the signs of a call in JSON, with placeholders, and `space` behind some."""
        quoted = json.dumps(name, ensure_ascii=False)
        pairs = [(quoted, _ARGUMENTS)]
        if self.keys:
            values = {"name": quoted, "tool_name": quoted, "arguments": _ARGUMENTS}
            values["parameters"] = _ARGUMENTS
            pairs = [(json.dumps(key), values.get(key, _ID)) for key in self.keys]
        signs = ["{"]
        for key, value in pairs:
            signs += [key, ":" + space, value, "," + space]
        return [*signs[:-1], "}"]


class JsonCalls(CallFormat):
    """Calls that are JSON objects: one between a pair of markers, or a list of them.

    All of these are read: one object, several, with or without a list around them. The end marker
    may be missing.

    Args:
        name: as the operator names it.
        layout: how the model writes its calls.
        openers: other ways to open a block, which are read.
    """

    def __init__(self, name: str, layout: JsonLayout, *, openers: Sequence[str] = ()) -> None:
        ends = [layout.end] if layout.end else []
        self.name = name
        self.marks = (layout.start, *openers, *ends)
        self.openers = (layout.start, *openers)
        self.dropped = tuple(ends)
        self._layout = layout

    def reader(self, opener: str, tools: Tools, marks: Marks) -> CallReader:
        return _ObjectsReader(self._layout, marks)

    def spell(self, calls: Sequence[WrittenCall]) -> str:
        layout = self._layout
        blocks = [layout.spell_one(call, number) for number, call in enumerate(calls)]
        if layout.listed:
            blocks = [f"[{', '.join(blocks)}]"]
        return layout.between.join(layout.open + block + layout.close for block in blocks)

    def rules(self, tools: Sequence[tuple[str, ToolSchema]], lark: Lark) -> CallRules:
        layout = self._layout
        schemas = [(name, lark.json({**schema, "type": "object"})) for name, schema in tools]
        call = lark.choice(layout.rule_body(name, schema) for name, schema in schemas)
        opened, closed = lark.text(layout.open), lark.text(layout.close)
        if layout.listed:
            one = lark.rule(f'{opened} "[" {call} "]" {closed}')
            many = lark.rule(f'{opened} "[" {call} (", " {call})* "]" {closed}')
        else:
            one = lark.rule(f"{opened} {call} {closed}")
            many = lark.rule(f"{one} ({json.dumps(layout.between)} {one})*")
        return CallRules(one, many, dict.fromkeys(self.openers, self._behind(schemas, lark)))

    def _behind(self, schemas: Sequence[tuple[str, str]], lark: Lark) -> str:
        """Add a rule for objects and lists of them, with whitespace wherever JSON allows it."""
        space = lark.rule(r"/[ \t\r\n]{1,2}/?")
        call = lark.choice(self._layout.rule_body(name, schema, space) for name, schema in schemas)
        body = lark.rule(f'"[" {space} {call} {space} ("," {space} {call} {space})* "]"')
        if not self._layout.listed:
            body = lark.choice([call, body])
        return lark.rule(f"{space} {body} {space} {lark.text(self._layout.end)}")


class _ObjectsReader(JsonReader):
    """Reads objects between markers."""

    def __init__(self, layout: JsonLayout, marks: Marks) -> None:
        super().__init__([layout.end] if layout.end else [], marks)
        self._end_marker = marks.show(layout.end)
        self._single = not layout.keys
        self._listed = False  # inside a list

    def _between(self) -> bool:
        self._text = text = self._text.lstrip(_LEFTOVERS if self.closed else _SPACE)
        end = self._end_marker
        if not text:
            return False
        if end and text.startswith(end):
            self._take(len(end))
            self.over = self.closed > 0
            self.refused = not self.over
        elif end.startswith(text):
            return False
        elif text[0] == "{":
            self._call = JsonCall(single=self._single)
        elif text[0] == "[" and not self._listed and not self.closed:
            self._listed = True
            self._take(1)
        elif text[0] == "]" and self.closed:
            self.over = not end and self._listed
            self._listed = False
            self._take(1)
        else:
            self.over = self.closed > 0 and not self._listed
            self.refused = not self.over
        return True

    def _end_between(self) -> None:
        self._text = ""
        self.refused = self.closed == 0


HERMES = JsonCalls("hermes", JsonLayout("<tool_call>", "</tool_call>", inner="\n"))
EXAONE4 = JsonCalls("exaone4", JsonLayout("<tool_call>", "</tool_call>", between=""))
ERNIE45 = JsonCalls("ernie45", JsonLayout("<tool_call>", "</tool_call>", inner="\n"))
