"""Formats of calls whose arguments are literals: Gemma's, and those that look like Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from mlxsrv.text.call_formats.calls import (
    CallFormat,
    CallReader,
    CallRules,
    Tools,
    ToolSchema,
    WrittenCall,
)
from mlxsrv.text.call_formats.lark import Lark
from mlxsrv.text.call_formats.literal_reader import LiteralReader
from mlxsrv.text.call_formats.literal_rules import LiteralRules, quoted
from mlxsrv.text.call_formats.literal_strings import LiteralSyntax
from mlxsrv.text.marks import Marks


class GemmaCalls(CallFormat):
    """Calls such as `<|tool_call>call:f{k:<|"|>v<|"|>,n:3}<tool_call|>`.

    Args:
        name: as the operator names it.
        start: the marker before a call.
        end: the marker after it.
        quote: the marker at both sides of a string.
    """

    def __init__(self, name: str, start: str, end: str, quote: str) -> None:
        self.name = name
        self.marks = (start, end, quote)
        self.openers = (start, "call:")
        self.dropped = (end,)
        self._start = start
        self._end = end
        self._quote = quote
        self._syntax = LiteralSyntax(end=end, quote=quote, colons=True)

    def reader(self, opener: str, tools: Tools, marks: Marks) -> CallReader:
        return LiteralReader(self._syntax, tools, marks, bare=opener != self._start)

    def spell(self, calls: Sequence[WrittenCall]) -> str:
        return "".join(
            f"{self._start}call:{call.name}{self._spell_value(call.arguments)}{self._end}"
            for call in calls
        )

    def rules(self, tools: Sequence[tuple[str, ToolSchema]], lark: Lark) -> CallRules:
        bodies = [
            (name, LiteralRules(lark, schema, self._quote).arguments(":", ","))
            for name, schema in tools
        ]
        end = lark.text(self._end)
        call = lark.choice(f'{json.dumps(name + "{")} {body} "}}"' for name, body in bodies)
        one = lark.rule(f"{lark.text(self._start)} {json.dumps('call:')} {call} {end}")
        many = lark.rule(f"{one} {one}*")
        behind = {
            self._start: lark.rule(f'"call:" {call} {end}'),
            "call:": lark.rule(f"{call} ({end})?"),
        }
        return CallRules(one, many, behind)

    def _spell_value(self, value: Any) -> str:
        match value:
            case str():
                return f"{self._quote}{value}{self._quote}"
            case dict():
                members = sorted(value.items(), key=lambda each: str(each[0]).lower())
                return f"{{{','.join(f'{key}:{self._spell_value(v)}' for key, v in members)}}}"
            case list():
                return f"[{','.join(map(self._spell_value, value))}]"
            case None:
                return "None"
        return json.dumps(value)


class PythonicLayout(msgspec.Struct, frozen=True):
    """The way in which a model writes calls that look like Python.

    Attributes:
        start: the marker before a block; empty if an answer may begin with the block.
        end: the marker after it.
        brackets: the beginning of a list of calls, what stands between two, and its end.
        json: all values are JSON; else strings are Python's, objects JSON and the rest Python's.
        double: strings have double quotes.
        echoed: the model may repeat its calls behind the end marker.
    """

    start: str = ""
    end: str = ""
    brackets: tuple[str, str, str] = ("[", ", ", "]")
    json: bool = False
    double: bool = False
    echoed: bool = False


class PythonicCalls(CallFormat):
    """Calls such as `[f(k='v', n=3), g()]`.

    Args:
        name: as the operator names it.
        layout: how the model writes its calls.
        openers: other markers before a block, which are read.
        closers: other markers that vanish outside a block.
    """

    def __init__(
        self,
        name: str,
        layout: PythonicLayout,
        *,
        openers: Sequence[str] = (),
        closers: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.openers = tuple(filter(None, [layout.start, *openers]))
        self.dropped = tuple(filter(None, [layout.end, *closers]))
        self.marks = (*self.openers, *self.dropped)
        self.leading = not layout.start
        self._layout = layout
        ends = [*self.dropped, ""]
        self._syntax = LiteralSyntax(end=ends[0], echoed=layout.echoed)

    def reader(self, opener: str, tools: Tools, marks: Marks) -> CallReader:
        return LiteralReader(self._syntax, tools, marks, bare=not opener, listed=not opener)

    def spell(self, calls: Sequence[WrittenCall]) -> str:
        layout = self._layout
        first, comma, last = layout.brackets
        body = comma.join(f"{call.name}({self._spell_arguments(call)})" for call in calls)
        return f"{layout.start}{first}{body}{last}{layout.end}"

    def rules(self, tools: Sequence[tuple[str, ToolSchema]], lark: Lark) -> CallRules:
        layout = self._layout
        quote = "" if layout.json else "'"
        bodies = [
            (name, LiteralRules(lark, schema, quote).arguments("=", ", ")) for name, schema in tools
        ]
        call = lark.choice(f'{json.dumps(name + "(")} {body} ")"' for name, body in bodies)
        first, comma, last = map(json.dumps, layout.brackets)
        start, end = lark.text(layout.start), lark.text(layout.end)
        one = lark.rule(f"{start} {first} {call} {last} {end}")
        calls = lark.rule(f"{first} {call} ({comma} {call})* {last} {end}")
        return CallRules(one, lark.rule(f"{start} {calls}"), dict.fromkeys(self.openers, calls))

    def _spell_arguments(self, call: WrittenCall) -> str:
        return ", ".join(f"{key}={self._spell_value(v)}" for key, v in call.arguments.items())

    def _spell_value(self, value: Any) -> str:
        if self._layout.json or isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, str):
            return json.dumps(value, ensure_ascii=False) if self._layout.double else quoted(value)
        return repr(value)


GEMMA4 = GemmaCalls("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTIONGEMMA = GemmaCalls(
    "functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"
)
LFM2 = PythonicCalls(
    "lfm2", PythonicLayout("<|tool_call_start|>", "<|tool_call_end|>", echoed=True)
)
PYTHONIC = PythonicCalls("pythonic", PythonicLayout())
LLAMA4_PYTHONIC = PythonicCalls(
    "llama4_pythonic",
    PythonicLayout(double=True),
    openers=("<|python_start|>",),
    closers=("<|python_end|>",),
)
OLMO3 = PythonicCalls(
    "olmo3",
    PythonicLayout("<function_calls>", "</function_calls>", ("\n", "\n", "\n"), json=True),
)

LITERAL_FORMATS: Sequence[CallFormat] = (
    *(FUNCTIONGEMMA, GEMMA4, LFM2, LLAMA4_PYTHONIC, OLMO3, PYTHONIC),
)
"""All formats whose arguments are literals."""
