"""Calls whose arguments are elements, which nest as the values do, as MiniMax M3 writes them:

    NS<tool_call>
    NS<invoke name="f">NS<city>Paris NS</city>NS<tags>NS<item>a NS</item>NS</tags>NS</invoke>
    NS</tool_call>

without the spaces. NS is a token that stands before every tag, so no text is mistaken for a tag.

- A string is given as it comes, if the schema allows nothing else. Other values are given when they
  are complete, and those that may be lists at the call's end: an element that is repeated is one.
- The block's tags may be missing, and so may NS before a tag where no value stands. A value ends
  with its own end tag, with or without NS, with that of what it is in, or where the next known
  element begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlxsrv.text.call_formats.calls import (
    CallFormat,
    CallReader,
    CallRules,
    NotEnforceable,
    Tools,
    ToolSchema,
    WrittenCall,
)
from mlxsrv.text.call_formats.lark import Lark, stand_alone
from mlxsrv.text.call_formats.tagged_rules import text_body
from mlxsrv.text.call_formats.values import Argument, ArgumentTypes, escape
from mlxsrv.text.marks import Marks

_SIGN = "]<]minimax[>["
_BLOCK, _INVOKE, _ITEM = "tool_call", "invoke", "item"
_TAG = re.compile(r"<(/?)([^<>]{1,200})>")
_TAG_SO_FAR = re.compile(r"<[^<>]{0,201}")
_NAME = re.compile(r"""invoke\s+name\s*=\s*(["']?)(.+?)\1\s*""", re.DOTALL)
_BETWEEN = ("<tool_call>", "</tool_call>", "<invoke", "</invoke>")
_DEEPEST = 64
_DEEPEST_RULES = 6


class NestedCalls(CallFormat):
    """Calls of MiniMax M3."""

    name = "minimax_m3"
    marks = (_SIGN,)
    openers = (_SIGN,)

    def reader(self, opener: str, tools: Tools, marks: Marks) -> CallReader:
        return _NestedReader(tools, marks)

    def spell(self, calls: Sequence[WrittenCall]) -> str:
        written = [
            f'{_SIGN}<invoke name="{call.name}">{_spell_members(call.arguments)}{_SIGN}</invoke>\n'
            for call in calls
        ]
        return f"{_SIGN}<tool_call>\n{''.join(written)}{_SIGN}</tool_call>"

    def rules(self, tools: Sequence[tuple[str, ToolSchema]], lark: Lark) -> CallRules:
        calls = [_CallRules(schema, lark).call(name) for name, schema in tools]
        call, sign = lark.choice(calls), lark.text(_SIGN)
        end = f'{sign} "</{_BLOCK}>"'
        start = f'"<{_BLOCK}>\\n"'
        space = lark.rule(r"/[ \r\n]{1,2}/?")
        loose = lark.rule(f'"<{_BLOCK}>" {space} ({sign} {call} {space})+ {end}')
        return CallRules(
            lark.rule(f"{sign} {start} {sign} {call} {end}"),
            lark.rule(f"{sign} {start} ({sign} {call})+ {end}"),
            {_SIGN: lark.choice([loose, call])},
        )


class _CallRules:
    """Writes the rules of calls of one tool. Elements come in the schema's order."""

    def __init__(self, schema: ToolSchema, lark: Lark) -> None:
        self._schema = schema
        self._types = ArgumentTypes(schema)
        self._lark = lark
        self._sign = lark.text(_SIGN)
        self._values: dict[tuple[str, int], str] = {}  # rules by schema and depth

    def call(self, name: str) -> str:
        """Return the body of a call, without the sign before it."""
        start = self._lark.text(f'<invoke name="{name}">')
        members = self._members(self._types.whole, 0)
        return f'{start} {members} {self._sign} "</{_INVOKE}>\\n"'

    def _members(self, type: Argument, depth: int) -> str:
        elements = []
        for name, schema in type.members.items():
            optional = "" if name in type.required else "?"
            elements.append(f"{self._element(name, schema, depth)}{optional}")
        return " ".join(elements)

    def _element(self, name: str, schema: Any, depth: int) -> str:
        value = self._value(schema, depth)
        body = (
            f"{self._sign} {self._lark.text(f'<{name}>')} {value} {self._lark.text(f'</{name}>')}"
        )
        return self._lark.rule(body)

    def _value(self, schema: Any, depth: int) -> str:
        """Return the rule for a value and the sign behind it: one for each schema, or those that
        refer to others double level by level."""
        known = json.dumps(schema), depth
        if known not in self._values:
            self._values[known] = self._lark.rule(self._body(schema, depth))
        return self._values[known]

    def _body(self, schema: Any, depth: int) -> str:
        type = self._types.typed(schema)
        if type.types == {"object"} and type.members and depth < _DEEPEST_RULES:
            return f"{self._members(type, depth + 1)} {self._sign}"
        if type.types == {"array"} and type.items is not None and depth < _DEEPEST_RULES:
            item = self._element(_ITEM, type.items, depth + 1)
            return f"({item}){_times(schema)} {self._sign}"
        part = schema if isinstance(schema, dict) else {}
        return text_body(self._lark, stand_alone(part, self._schema), type, _SIGN)


def _times(schema: Mapping[str, Any]) -> str:
    """Return how often an item of a list may come, in Lark.

    Raises:
        NotEnforceable: no list has so many.
    """
    least, most = schema.get("minItems"), schema.get("maxItems")
    low = least if type(least) is int else 0
    if type(most) is not int:
        return f"{{{low},}}" if low else "*"
    if low > most:
        raise NotEnforceable(f"a list of at least {low} and at most {most} items")
    return f"{{{low},{most}}}"


class _Element:
    """A value while it is written.

    Attributes:
        end: its end tag.
        text: what was written of it beside elements, spelled.
        given: its text is given as it comes, and not kept.
    """

    __slots__ = ("elements", "end", "given", "name", "text", "type")

    def __init__(self, name: str, type: Argument) -> None:
        self.name = name
        self.end = f"</{name}>"
        self.type = type
        self.text: list[str] = []
        self.elements: list[_Element] = []
        self.given = False

    @property
    def written(self) -> bool:
        """Whether it has text that is no whitespace."""
        return any(not each.isspace() for each in self.text)

    def nested(self, name: str) -> _Element:
        """Return an element of this name that begins in this one."""
        of = self.type
        listed = name == _ITEM and "array" in of.types and name not in of.members
        return _Element(name, of.item() if listed else of.member(name))

    def json(self, type: Argument) -> str:
        """Return its value in JSON, by the type that it has where it stands."""
        if not self.elements:
            return self._leaf(type)
        items = all(each.name == _ITEM for each in self.elements)
        if (
            "array" in type.types
            and items
            and not ("object" in type.types and _ITEM in type.members)
        ):
            return f"[{', '.join(each.json(type.item()) for each in self.elements)}]"
        members: dict[str, list[_Element]] = {}
        for each in self.elements:
            members.setdefault(each.name, []).append(each)
        pairs = (
            f"{json.dumps(name, ensure_ascii=False)}: {_join(type.member(name), found)}"
            for name, found in members.items()
        )
        return f"{{{', '.join(pairs)}}}"

    def _leaf(self, type: Argument) -> str:
        text = "".join(self.text)
        if not text.strip() and type.kind == "other":
            if "object" in type.types:
                return "{}"
            if "array" in type.types:
                return "[]"
        return type.json(text)


class _NestedReader(CallReader):
    """Reads elements behind their sign."""

    def __init__(self, tools: Tools, marks: Marks) -> None:
        super().__init__()
        self._tools = tools
        self._spell = marks.spell
        self._sign = marks.show(_SIGN)
        self._signed = True  # the sign was read, and its tag was not
        self._block = False  # the block's tag was read
        self._path: list[_Element] = []  # the arguments, then the values that are open
        self._count = 0  # arguments given
        self._waiting: dict[str, list[_Element]] = {}  # arguments by name, unless they are given
        self._tail = ""  # text of a value that may be its end tag without the sign

    def _step(self) -> bool:
        if not self.is_open:
            return self._step_between()
        return self._step_tag() if self._signed else self._step_text()

    # Between calls.

    def _step_between(self) -> bool:
        text = self._text.lstrip()
        if not self._signed and text.startswith(self._sign):
            self._text = text[len(self._sign) :]
            return self._sign_read()
        if found := _TAG.match(text):
            return self._cross(found, text)
        waits = any(each.startswith(text[: len(each)]) for each in _BETWEEN)
        waits = waits or (not self._signed and self._sign.startswith(text))
        if waits and len(text) < 300:  # a name that is longer is none
            return False
        self._fail()
        return False

    def _sign_read(self) -> bool:
        self._signed = True
        return True

    def _cross(self, found: re.Match[str], text: str) -> bool:
        """Read a tag between calls."""
        closing, tag = found[1] == "/", found[2].strip()
        named = _NAME.fullmatch(tag)
        if closing and tag in (_BLOCK, _INVOKE):
            self._text = text[found.end() :]
            self.over = tag == _BLOCK or not self._block
        elif closing or (tag != _BLOCK and named is None) or (self.closed and not self._block):
            self._fail()
            return False
        else:
            self._text = text[found.end() :]
            if named is None:
                self._block = True
            else:
                self._begin(named[2])
        self._signed = False
        return True

    def _fail(self) -> None:
        self.over = self.closed > 0 and not self._signed
        self.refused = not self.over

    def _begin(self, name: str) -> None:
        name = self._spell(name)
        self._path = [_Element("", ArgumentTypes(self._tools.schema(name)).whole)]
        self._count = 0
        self._waiting = {}
        self._open(name)

    # In a call.

    def _step_text(self) -> bool:
        """Read text up to a sign."""
        at = self._text.find(self._sign)
        if at >= 0:
            self._put(self._spell(self._take(at)))
            self._take(len(self._sign))
            return self._sign_read()
        held = _may_begin(self._sign, self._text)
        text = self._take(len(self._text) - held)
        self._put(text if text.isascii() else self._spell(text))
        return False

    def _put(self, text: str) -> None:
        """Add text to the value that is open. Between values there is none but whitespace."""
        if text and len(self._path) > 1:
            element = self._path[-1]
            if not self._tail and "<" not in text:
                self._add(element, text)
                return
            text = self._tail + text
            held = _may_begin(element.end, text)
            self._add(element, text[: len(text) - held])
            self._tail = text[len(text) - held :]

    def _add(self, element: _Element, text: str) -> None:
        if element.given:
            self._give(escape(text))
        elif text:
            element.text.append(text)

    def _step_tag(self) -> bool:
        """Read what follows a sign."""
        found = _TAG.match(self._text)
        if found is None and (not self._text or _TAG_SO_FAR.fullmatch(self._text)):
            return False
        self._signed = False
        if found is None:
            self._put(_SIGN)
            return True
        self._take(found.end())
        tag, name = self._spell(found[0]), self._spell(found[2])
        if found[1]:
            self._read_end(tag, name)
        else:
            self._read_start(tag, name)
        return True

    def _read_end(self, tag: str, name: str) -> None:
        path = self._path
        if path[-1].end == tag:
            self._leave()
        elif any(each.end == tag for each in path[1:]):
            while path[-1].end != tag:
                self._leave_unended()
            self._leave()
        elif name in (_BLOCK, _INVOKE):
            self._finish()
            self.over = name == _BLOCK or not self._block
        else:
            self._put(_SIGN + tag)

    def _read_start(self, tag: str, name: str) -> None:
        if named := _NAME.fullmatch(name):
            self._finish()
            self._begin(named[2])
            return
        while self._ends_before(name):
            self._leave_unended()
        element = self._path[-1]
        if element.type.kind == "text" or len(self._path) > _DEEPEST:
            self._put(_SIGN + tag)
        else:
            self._enter(element.nested(name))

    def _ends_before(self, name: str) -> bool:
        """Tell whether the value that is open ends where an element begins, without an end tag."""
        if len(self._path) == 1:
            return False
        element, around = self._path[-1], self._path[-2]
        if self._tail == element.end:
            return True
        if element.type.kind == "text":
            return name in around.type.members
        return element.written or not element.type.types & {"object", "array"}

    def _enter(self, element: _Element) -> None:
        name = element.name
        if len(self._path) == 1 and element.type.kind == "text" and name not in self._waiting:
            element.given = True
            self._give(self._key(name) + '"')
            self._waiting[name] = []  # it does not wait, but is there
        self._path.append(element)
        self._tail = ""

    def _leave_unended(self) -> None:
        """Leave a value without its end tag, or with one that has no sign."""
        if self._tail == self._path[-1].end:
            self._tail = ""
        self._leave()

    def _leave(self) -> None:
        element = self._path.pop()
        tail, self._tail = self._tail, ""
        self._add(element, tail)
        if len(self._path) > 1:
            self._path[-1].elements.append(element)
        elif element.given:
            self._give('"')
        elif "array" in element.type.types:
            self._waiting.setdefault(element.name, []).append(element)
        elif element.name not in self._waiting:
            self._waiting[element.name] = []
            self._give(self._key(element.name) + element.json(element.type))

    def _finish(self) -> None:
        """End the call."""
        while len(self._path) > 1:
            self._leave_unended()
        self._give_waiting()
        self._give("}" if self._count else "{}")
        self._close()

    def _give_waiting(self) -> None:
        for name, elements in self._waiting.items():
            if elements:
                self._give(self._key(name) + _join(elements[0].type, elements))
        self._waiting = {}

    def _key(self, name: str) -> str:
        """Return what stands before an argument."""
        self._count += 1
        return f"{', ' if self._count > 1 else '{'}{json.dumps(name, ensure_ascii=False)}: "

    # The end of the answer.

    def _end(self, cut: bool) -> None:
        left, self._text = self._text, ""
        if not self.is_open:
            self.refused = self.closed == 0
        elif not cut:
            if self._signed:
                left = "" if any(each.startswith(left) for each in self._ends()) else _SIGN + left
            self._put(self._spell(left))
            if len(self._path) > 1 and self._tail == self._path[-1].end:
                self._leave_unended()
            if len(self._path) == 1:
                self._finish()
            else:
                self._give_open()

    def _ends(self) -> list[str]:
        return [*(each.end for each in self._path), f"</{_INVOKE}>", f"</{_BLOCK}>"]

    def _give_open(self) -> None:
        """Give all of a call whose last value was never ended."""
        while len(self._path) > 2:
            self._leave()
        element = self._path[-1]
        if element.given:
            self._add(element, self._tail)
        else:
            self._leave()
            self._give_waiting()


def _may_begin(sign: str, text: str) -> int:
    """Return how many characters at the end of a text may begin a sign, or are it."""
    at = text.find(sign[0], max(0, len(text) - len(sign)))
    while at >= 0 and not sign.startswith(text[at:]):
        at = text.find(sign[0], at + 1)
    return len(text) - at if at >= 0 else 0


def _join(type: Argument, elements: Sequence[_Element]) -> str:
    """Return the JSON of the elements of one name: a list, if there are several and it may be."""
    if len(elements) == 1 or "array" not in type.types:
        return elements[0].json(type)
    return f"[{', '.join(each.json(type.item()) for each in elements)}]"


def _spell_members(members: Mapping[str, Any]) -> str:
    return "".join(_spell_element(name, value) for name, value in members.items())


def _spell_element(name: str, value: Any) -> str:
    match value:
        case str():
            text = value
        case dict():
            text = _spell_members(value)
        case list():
            text = "".join(_spell_element(_ITEM, item) for item in value)
        case _:
            text = json.dumps(value)
    return f"{_SIGN}<{name}>{text}{_SIGN}</{name}>"


MINIMAX_M3 = NestedCalls()
