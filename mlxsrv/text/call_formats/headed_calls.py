"""Formats of calls whose arguments are JSON behind a header that has the name of the tool."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from mlxsrv.text.call_formats.call_ids import NAMED, RANDOM, SHORT, CallIds
from mlxsrv.text.call_formats.calls import (
    CallFormat,
    CallReader,
    CallRules,
    Tools,
    ToolSchema,
    WrittenCall,
)
from mlxsrv.text.call_formats.json_objects import JsonCall
from mlxsrv.text.call_formats.json_reader import LEFTOVERS, SPACE, ObjectsReader
from mlxsrv.text.call_formats.lark import Lark
from mlxsrv.text.call_formats.values import ArgumentTypes
from mlxsrv.text.marks import Marks
from mlxsrv.text.scan import Scanner

_LONGEST = 256  # characters of a header
_NAME = re.compile(r"[\w.:/@$-]+")
_SLOTS = re.compile(r"(\{name\}|\{id\}|\{arguments\})")
_AFTER_ID = re.compile(r"\W")
_WHOLE_ID = re.compile(r"functions\.[^:]+:\d+")

_Place = Literal["between", "header", "id", "gap", "objects"]


class HeadLayout(msgspec.Struct, frozen=True):
    """The way in which a model writes calls with a header.

    Attributes:
        call: a call, with {name}, {arguments} and perhaps {id} in their places.
        start: the marker that begins a call.
        section: markers around all calls of an answer, if there are any.
        between: text between two calls.
        kind: a word that may stand in the place of the name, with the name behind the next head.
        heads: texts that end a name.
        gaps: texts that may stand between a name and its arguments.
        id_mark: one of the heads, behind which an id stands.
        ends: markers that end a call. The model's end of turn may stand for them.
        ids: the form of the calls' ids.
    """

    call: str
    start: str
    heads: tuple[str, ...]
    section: tuple[str, ...] = ()
    between: str = ""
    kind: str = ""
    gaps: tuple[str, ...] = ()
    id_mark: str = ""
    ends: tuple[str, ...] = ()
    ids: CallIds = RANDOM

    @property
    def markers(self) -> Sequence[str]:
        """All markers, spelled."""
        texts = (*self.section, self.start, *self.heads, *self.gaps, *self.ends)
        return tuple(text for text in dict.fromkeys(texts) if text.strip("`json{\n"))


class HeadedCalls(CallFormat):
    """Calls with a header. Objects that have the name among their keys are read too.

    Args:
        name: as the operator names it.
        layout: how the model writes its calls.
        loose: the header is an id that may not have the name as the tools have it.
    """

    def __init__(self, name: str, layout: HeadLayout, *, loose: bool = False) -> None:
        self.name = name
        self.marks = layout.markers
        self.openers = (*layout.section[:1], layout.start)
        self.dropped = (*layout.section[1:], *layout.ends)
        self.ids = layout.ids
        self._layout = layout
        self._loose = loose

    def reader(self, opener: str, tools: Tools, marks: Marks) -> CallReader:
        place: _Place = "header" if opener == self._layout.start else "between"
        return _HeadReader(self._layout, tools, marks, place, loose=self._loose)

    def spell(self, calls: Sequence[WrittenCall]) -> str:
        layout = self._layout
        written = [
            _fill(
                layout.call,
                {
                    "{name}": call.name,
                    "{id}": layout.ids.written(call.id, number),
                    "{arguments}": json.dumps(call.arguments, ensure_ascii=False),
                },
            )
            for number, call in enumerate(calls)
        ]
        before, after = layout.section or ("", "")
        return before + layout.between.join(written) + after

    def rules(self, tools: Sequence[tuple[str, ToolSchema]], lark: Lark) -> CallRules:
        layout = self._layout
        schemas = [(name, lark.json({**schema, "type": "object"})) for name, schema in tools]
        behind = lark.choice(
            " ".join(_bodies(layout, layout.call.removeprefix(layout.start), name, schema, lark))
            for name, schema in schemas
        )
        call = lark.rule(f"{lark.text(layout.start)} {behind}")
        between = f"{lark.text(layout.between)} {call}"
        if not layout.section:
            many = lark.rule(f"{call} ({between})*")
            return CallRules(call, many, {layout.start: behind})
        before, after = map(lark.text, layout.section)
        calls = lark.rule(f"{call} ({between})* {after}")
        one = lark.rule(f"{before} {call} {after}")
        many = lark.rule(f"{before} {calls}")
        return CallRules(one, many, {layout.section[0]: calls, layout.start: behind})


class HarmonyCalls(CallFormat):
    """Calls of which the frame reads the header, as that of a message to the tool."""

    name = "harmony"
    marks = (
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
        *("<|call|>", "<|end|>", "<|return|>"),
    )

    def reader(self, opener: str, tools: Tools, marks: Marks) -> CallReader:
        layout = HeadLayout("", "", heads=(), ends=self.marks)
        reader = _HeadReader(layout, tools, marks, "gap")
        reader.begin(opener)
        return reader

    def spell(self, calls: Sequence[WrittenCall]) -> str:
        """Return the messages behind the beginning of the assistant's first."""
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
            f"{json.dumps(call.arguments, ensure_ascii=False)}<|call|>"
            for call in calls
        )

    def rules(self, tools: Sequence[tuple[str, ToolSchema]], lark: Lark) -> CallRules:
        text = lark.text
        kind = lark.choice([f'" "? {text("<|constrain|>")} "json"', '" json"'])
        type = f"({kind})? {text('<|message|>')}"
        behind, direct = [], []
        for name, schema in tools:
            body = f"{lark.json({**schema, 'type': 'object'})} {text('<|call|>')}"
            quoted = json.dumps(name)
            behind.append(lark.rule(f"{quoted} {type} {body}"))
            direct.append(lark.rule(f'{quoted} {text("<|channel|>")} "commentary" {type} {body}'))
        later, sooner = lark.choice(behind), lark.choice(direct)
        one = lark.choice(
            [
                f'{text("<|channel|>")} "commentary to=functions." {later}',
                f'" to=functions." {sooner}',
            ]
        )
        return CallRules(one, one, {"to=functions.": lark.choice([later, sooner])})


def _fill(pattern: str, values: Mapping[str, str]) -> str:
    return "".join(values.get(part, part) for part in _SLOTS.split(pattern))


def _bodies(layout: HeadLayout, pattern: str, name: str, schema: str, lark: Lark) -> list[str]:
    """Return the bodies in Lark of the parts of a call's pattern."""
    slots = {"{name}": json.dumps(name), "{id}": f"/{layout.ids.pattern}/", "{arguments}": schema}
    return [slots.get(part) or lark.text(part) for part in _SLOTS.split(pattern) if part]


class _HeadReader(ObjectsReader):
    """Reads calls with a header.

    Args:
        place: where the text begins: between calls, in a header, or behind one.
        loose: a header is an id that may not have the name as the tools have it.
    """

    def __init__(
        self, layout: HeadLayout, tools: Tools, marks: Marks, place: _Place, *, loose: bool = False
    ) -> None:
        starts = [layout.start] if layout.start else []
        ends = [*layout.section[1:], *layout.ends]
        super().__init__([*ends, *starts], marks, tools)
        self._layout = layout
        self._loose = loose
        self._starts = [marks.show(each) for each in (*starts, *layout.section[:1])]
        self._section_ends = [marks.show(each) for each in layout.section[1:]]
        self._call_ends = [marks.show(each) for each in layout.ends]
        self._closers = [marks.show(each) for each in ends]
        self._heads = Scanner([marks.show(each) for each in layout.heads])
        self._gaps = [marks.show(each) for each in layout.gaps]
        self._kind = marks.show(layout.kind)
        self._id_mark = marks.show(layout.id_mark)
        self._place = place
        self._header = ""  # of the call that is read, if its name takes the arguments

    def begin(self, header: str) -> None:
        """Begin a call behind its header."""
        self._place = "gap"
        name = _find_name(header, self._tools, loose=self._loose)
        self._header = header if name is None else ""
        if name is not None:
            self._open(name)

    def _between(self) -> bool:
        match self._place:
            case "objects":
                return super()._between()
            case "header":
                return self._read_header()
            case "id":
                return self._skip_id()
            case "gap":
                return self._cross_gap()
            case _:
                return self._look_for_call()

    def _end_between(self, cut: bool) -> None:
        header = self._text.strip(SPACE)
        if self._place == "header" and header in self._tools and not cut:
            self.begin(header)
        if self._place not in ("gap", "id"):
            super()._end_between(cut)
            return
        self._text = ""
        if not cut:
            self._close_empty()
        elif not self.is_open:
            self.refused = True

    def _look_for_call(self) -> bool:
        """Take what stands between two calls."""
        self._text = text = self._text.lstrip(LEFTOVERS if self.closed else SPACE)
        fence = ["```"] if self.closed and self._layout.section else []
        taken = [*self._starts, *fence, *(self._call_ends if self._starts else [])]
        if not text or self._waits([*self._section_ends, *taken]):
            return False
        if self._take_one(self._section_ends):
            self._leave_block()
        elif self._take_one(self._starts[:1]):
            self._place = "header"
        elif not self._take_one(taken):
            self.over = self.closed > 0
            self._place = "header"
        return True

    def _read_header(self) -> bool:
        """Read a header, up to a text that ends it."""
        self._text = text = self._text.lstrip(SPACE)
        if not text or self._waits(self._starts):
            return False
        if self._take_one(self._starts):
            return True
        if text[0] in "[{":
            self._place = "objects"
            return True
        found = self._heads.search(text)
        end = found[0] if found else len(text) - self._heads.held(text)
        header = text[:end].rstrip(SPACE)
        if not self._may_be_header(header, whole=found is not None):
            self.refused = True
        elif found is not None and header == self._kind:
            self._take(found[1])
        elif found is not None:
            self._take(found[0])
            self.begin(self._marks.spell(header))
        return found is not None

    def _may_be_header(self, header: str, *, whole: bool) -> bool:
        if not header:
            return not whole
        return len(header) <= _LONGEST and (
            _NAME.fullmatch(header) is not None
            or any(name.startswith(header) for name in self._tools.schemas)
        )

    def _skip_id(self) -> bool:
        self._text = text = self._text.lstrip(SPACE)
        found = _AFTER_ID.search(text)
        self._take(found.start() if found else len(text))
        if found:
            self._place = "gap"
        return found is not None

    def _cross_gap(self) -> bool:
        """Take what stands between a header and its arguments."""
        self._text = text = self._text.lstrip(SPACE)
        marks = [*self._gaps, *self._closers, *self._starts, self._id_mark]
        if not text or self._waits(marks):
            return False
        if self._id_mark and text.startswith(self._id_mark):
            self._take(len(self._id_mark))
            self._place = "id"
        elif not self._take_one(self._gaps):
            if any(map(text.startswith, (*self._closers, *self._starts))):
                self._close_empty()
            else:
                self._place = "between"
                self._call = JsonCall("")
        return True

    def _close_empty(self) -> None:
        """Close a call that has no arguments."""
        self._place = "between"
        if not self.is_open:
            self._open(_fitting_name(self._header, "{}", self._tools))
        self._give("{}")
        self._close()

    def _tell(self, call: JsonCall) -> None:
        if self._place == "objects":
            super()._tell(call)
        elif self.is_open:
            self._give_spelled(call.pop_arguments())
        elif call.settled:
            arguments = self._marks.spell(call.pop_arguments())
            self._open(_fitting_name(self._header, arguments, self._tools))
            self._give(arguments)


def _find_name(header: str, tools: Tools, *, loose: bool) -> str | None:
    """Return the name in a header; None if it may be that of another tool."""
    bare = re.sub(r"^functions\.?" if loose else r"^functions\.", "", header)
    numbered = re.sub(r":\d+$", "", bare)
    candidates = [header, bare, numbered]
    if loose:
        candidates.append(re.sub(r"\d+$", "", bare))
    if found := next(filter(None, map(tools.meant, candidates)), None):
        return found
    return None if loose and not _WHOLE_ID.fullmatch(header) else numbered


def _fitting_name(header: str, arguments: str, tools: Tools) -> str:
    """Return the name of the one tool that takes these arguments, or the header."""
    keys = _keys(arguments)
    types = {name: ArgumentTypes(schema).whole for name, schema in tools.schemas.items()}
    fitting = [
        name
        for name, type in types.items()
        if keys is not None and type.required <= keys <= type.members.keys()
    ]
    return fitting[0] if len(fitting) == 1 else header


def _keys(arguments: str) -> set[str] | None:
    try:
        return {*msgspec.json.decode(arguments, type=dict[str, Any])}
    except (ValueError, RecursionError):
        return None


_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK = HeadLayout(
    call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
    start="<｜tool▁call▁begin｜>",
    heads=("<｜tool▁sep｜>", "\n", "```", "{"),
    section=_SECTION,
    kind="function",
    gaps=("<｜tool▁sep｜>", "```json", "```"),
    ends=("<｜tool▁call▁end｜>",),
)

DEEPSEEK_V31 = HeadedCalls("deepseek_v31", _DEEPSEEK)
DEEPSEEK_V3 = HeadedCalls(
    "deepseek_v3",
    msgspec.structs.replace(
        _DEEPSEEK,
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>",
        between="\n",
    ),
)
KIMI_K2 = HeadedCalls(
    "kimi_k2",
    HeadLayout(
        call="<|tool_call_begin|>functions.{name}:{id}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>",
        start="<|tool_call_begin|>",
        heads=("<|tool_call_argument_begin|>", "{"),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        gaps=("<|tool_call_argument_begin|>", "```json", "```"),
        ends=("<|tool_call_end|>",),
        ids=NAMED,
    ),
    loose=True,
)
_MISTRAL = HeadLayout(
    call="[TOOL_CALLS]{name}[ARGS]{arguments}",
    start="[TOOL_CALLS]",
    heads=("[ARGS]", "[CALL_ID]", "{"),
    gaps=("[ARGS]",),
    id_mark="[CALL_ID]",
    ids=SHORT,
)
MISTRAL_ARGS = HeadedCalls("mistral_args", _MISTRAL)
MISTRAL_IDS = HeadedCalls(
    "mistral_ids",
    msgspec.structs.replace(_MISTRAL, call="[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}"),
)
HARMONY = HarmonyCalls()

HEADED_FORMATS: Sequence[CallFormat] = (
    *(DEEPSEEK_V3, DEEPSEEK_V31, HARMONY, KIMI_K2, MISTRAL_ARGS, MISTRAL_IDS),
)
"""All formats whose calls have a header."""
