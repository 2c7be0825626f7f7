"""Formats of calls that are JSON objects, with the name of the tool among their keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import msgspec

from mlxsrv.text.call_formats.call_ids import NUMBERED, RANDOM, SHORT, CallIds
from mlxsrv.text.call_formats.calls import (
    CallFormat,
    CallReader,
    CallRules,
    Tools,
    ToolSchema,
    WrittenCall,
)
from mlxsrv.text.call_formats.json_reader import EitherReader, FinalReader, ObjectsReader
from mlxsrv.text.call_formats.lark import Lark
from mlxsrv.text.call_formats.tagged_calls import QWEN_XML
from mlxsrv.text.marks import Marks

_ARGUMENTS = "ARGUMENTS"
_ID = "ID"

_JSON = re.compile(r"(```.*|\{.*|\[)$")


class JsonLayout(msgspec.Struct, frozen=True):
    """The way in which a model writes calls as JSON objects.

    Attributes:
        start: the marker before a block.
        end: the marker after it; empty if there is none.
        inner: whitespace between a marker and what it encloses.
        between: text between two blocks.
        listed: the calls of an answer are a list in one block; else each is a block.
        brackets: the beginning of such a list, what stands between its objects, and its end.
        keys: those of an object, in their order: the keys of the name, of the arguments and, if it
            has one, of the id. A call of `f` is `{"f": {...}}` if there are none.
        ids: the form of the calls' ids.
    """

    start: str
    end: str = ""
    inner: str = ""
    between: str = "\n"
    listed: bool = False
    brackets: tuple[str, str, str] = ("[", ", ", "]")
    keys: tuple[str, ...] = ("name", "arguments")
    ids: CallIds = RANDOM

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
            _ID: json.dumps(self.ids.written(call.id, number)),
        }
        return "".join(values.get(sign, sign) for sign in self._signs(call.name, " "))

    def rule_body(self, name: str, arguments: str, space: str = "") -> str:
        """Return the body in Lark of a call.

        Args:
            arguments: the body of its arguments.
            space: a rule for whitespace wherever JSON allows it; without one it stands only where
                the model writes it.
        """
        bodies = {_ARGUMENTS: arguments, _ID: rf'"\"" /{self.ids.pattern}/ "\""'}
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
        known: openers behind which a call is one of the request's tools; "" is the beginning of
            the content.
        final: openers that other text has too. A call behind these is one of the request's tools,
            and only if nothing follows it.
        other: a format in which models write calls between the same markers.
        sign: the text with which those begin.
    """

    def __init__(
        self,
        name: str,
        layout: JsonLayout,
        *,
        openers: Sequence[str] = (),
        known: Sequence[str] = (),
        final: Sequence[str] = (),
        other: CallFormat | None = None,
        sign: str = "",
    ) -> None:
        markers = tuple(filter(None, [layout.start, *openers, *known]))
        self.name = name
        self.openers = (*markers, *final)
        self.dropped = tuple(filter(None, [layout.end]))
        self.marks = (*markers, *self.dropped)
        self.leading = "" in known
        self.ids = layout.ids
        self.bare = tuple(final)
        self._layout = layout
        self._known = known
        self._other = other
        self._sign = sign

    def reader(self, opener: str, tools: Tools, marks: Marks) -> CallReader:
        layout = self._layout
        begun = _begun(opener)
        if opener in self.bare:
            return FinalReader(marks, tools, begun)
        if self._other is not None and opener == layout.start:
            other = self._other.reader(opener, tools, marks)
            return EitherReader(self.dropped, marks, tools, other, self._sign)
        return ObjectsReader(
            self.dropped,
            marks,
            tools,
            single=not layout.keys,
            bare=opener in self._known,
            begun=begun,
        )

    def spell(self, calls: Sequence[WrittenCall]) -> str:
        layout = self._layout
        blocks = [layout.spell_one(call, number) for number, call in enumerate(calls)]
        if layout.listed:
            first, comma, last = layout.brackets
            blocks = [first + comma.join(blocks) + last]
        return layout.between.join(layout.open + block + layout.close for block in blocks)

    def rules(self, tools: Sequence[tuple[str, ToolSchema]], lark: Lark) -> CallRules:
        layout = self._layout
        schemas = [(name, lark.json({**schema, "type": "object"})) for name, schema in tools]
        call = lark.choice(layout.rule_body(name, schema) for name, schema in schemas)
        opened, closed = lark.text(layout.open), lark.text(layout.close)
        if layout.listed:
            first, comma, last = map(json.dumps, layout.brackets)
            one = lark.rule(f"{opened} {first} {call} {last} {closed}")
            many = lark.rule(f"{opened} {first} {call} ({comma} {call})* {last} {closed}")
        else:
            one = lark.rule(f"{opened} {call} {closed}")
            many = lark.rule(f"{one} ({json.dumps(layout.between)} {one})*")
        return CallRules(one, many, self._behind(schemas, lark))

    def _behind(self, schemas: Sequence[tuple[str, str]], lark: Lark) -> Mapping[str, str]:
        """Add rules for objects and lists of them, with whitespace wherever JSON allows it."""
        space = lark.rule(r"/[ \t\r\n]{1,8}/?")
        call = lark.choice(self._layout.rule_body(name, schema, space) for name, schema in schemas)
        rest = lark.rule(f'{space} {call} {space} ("," {space} {call} {space})* "]"')
        body = f'"[" {rest}' if self._layout.listed else lark.choice([call, f'"[" {rest}'])
        closed = f"{space} {lark.text(self._layout.end)}" if self._layout.end else ""
        behind = {"": lark.rule(f"{space} {body} {closed}"), "[": lark.rule(f"{rest} {closed}")}
        return {
            opener: behind[_begun(opener)] for opener in self.openers if opener not in self.bare
        }


def _begun(opener: str) -> str:
    """Return the part of an opener that is not a marker but the beginning of JSON."""
    found = _JSON.search(opener)
    return found[0] if found else ""


_FINAL = ("```json", '\n{"name"', '\n{"type": "function"', '\n{"function"')

HERMES = JsonCalls(
    "hermes",
    JsonLayout("<tool_call>", "</tool_call>", inner="\n"),
    other=QWEN_XML,
    sign="<function=",
)
EXAONE4 = JsonCalls("exaone4", JsonLayout("<tool_call>", "</tool_call>", between=""))
ERNIE45 = JsonCalls("ernie45", JsonLayout("<tool_call>", "</tool_call>", inner="\n"))
PROMPTED = JsonCalls(
    "prompted",
    JsonLayout("<tool_call>", "</tool_call>", inner="\n"),
    known=("",),
    final=_FINAL,
    other=QWEN_XML,
    sign="<function=",
)
LLAMA_JSON = JsonCalls(
    "llama_json",
    JsonLayout("", between="; ", keys=("name", "parameters")),
    known=("", "<|python_tag|>"),
    final=(*_FINAL, ' {"name"', ' {"type": "function"'),
)
MISTRAL_LIST = JsonCalls(
    "mistral_list",
    JsonLayout("[TOOL_CALLS]", listed=True, keys=("name", "arguments", "id"), ids=SHORT),
)
GRANITE = JsonCalls("granite", JsonLayout("<|tool_call|>", listed=True), openers=("<tool_call>",))
PHI4 = JsonCalls(
    "phi4", JsonLayout("<|tool_call|>", "<|/tool_call|>", listed=True), openers=("functools[",)
)
APERTUS = JsonCalls(
    "apertus", JsonLayout("<|tools_prefix|>", "<|tools_suffix|>", listed=True, keys=())
)
COMMAND = JsonCalls(
    "command",
    JsonLayout(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        listed=True,
        brackets=("[\n    ", ",\n    ", "\n]"),
        keys=("tool_call_id", "tool_name", "parameters"),
        ids=NUMBERED,
    ),
)
HUNYUAN = JsonCalls("hunyuan", JsonLayout("<tool_calls>", "</tool_calls>", listed=True))
JAMBA = JsonCalls("jamba", JsonLayout("<tool_calls>", "</tool_calls>", listed=True))
NEMOTRON_V2 = JsonCalls("nemotron_v2", JsonLayout("<TOOLCALL>", "</TOOLCALL>", listed=True))
GIGACHAT = JsonCalls("gigachat", JsonLayout("<|function_call|>", "<|message_sep|>", between=""))
FUNCTOOLS = JsonCalls(
    "functools",
    JsonLayout("", listed=True, brackets=("functools[", ", ", "]")),
    openers=("functools[",),
)
XLAM = JsonCalls(
    "xlam", JsonLayout("", listed=True), openers=("[TOOL_CALLS]",), known=("",), final=_FINAL
)

JSON_FORMATS: Sequence[CallFormat] = (
    *(APERTUS, COMMAND, ERNIE45, EXAONE4, FUNCTOOLS, GIGACHAT, GRANITE, HERMES, HUNYUAN, JAMBA),
    *(LLAMA_JSON, MISTRAL_LIST, NEMOTRON_V2, PHI4, PROMPTED, XLAM),
)
"""All formats whose calls are JSON objects."""
