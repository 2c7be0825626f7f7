"""Reads calls with tagged arguments while they are written, and gives the arguments as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from mlxsrv.text.call_formats.calls import CallReader, Tools
from mlxsrv.text.call_formats.json_values import JsonValue
from mlxsrv.text.call_formats.tagged_layout import CDATA, OTHER, TEXT, TagLayout
from mlxsrv.text.call_formats.tags import WAIT, Found, Tag
from mlxsrv.text.call_formats.values import Argument, ArgumentTypes, escape
from mlxsrv.text.marks import Marks

_MOST_SPACE = 256  # characters of whitespace between tags that are waited for

_Place = Literal["calls", "call", "value", "object"]


class _Ender(msgspec.Struct, frozen=True):
    """A tag that may end a value.

    Attributes:
        follows: tags of which one must follow it, if the answer goes on. None: anything may.
        taken: the tag belongs to the value; else it is read again.
        key: it has the key of another argument.
        known: that must be one of the tool's.
    """

    tag: Tag
    follows: Sequence[Tag] | None = None
    taken: bool = False
    key: bool = False
    known: bool = False


class TagReader(CallReader):
    """Reads a block of calls with tagged arguments, and gives these as JSON.

    Args:
        openers: texts before a block, spelled.
        begun: text that was read before, with which the block begins.
        bare: the text looks like other text, so calls are only those of `tools`.
    """

    def __init__(
        self,
        layout: TagLayout,
        openers: Sequence[str],
        tools: Tools,
        marks: Marks,
        *,
        begun: str = "",
        bare: bool = False,
    ) -> None:
        super().__init__()

        def tags(patterns: Iterable[str]) -> list[Tag]:
            return [Tag(marks.show(pattern)) for pattern in patterns]

        self._layout = layout
        self._tools = tools
        self._marks = marks
        self._known = bare
        self._text = marks.show(begun)
        self._heads = tags(layout.heads)
        self._keys = tags(layout.keys)
        self._tails = tags(layout.tails)
        self._ends = tags(layout.ends)
        self._openers = tags(openers)
        self._skipped = tags(layout.skipped)
        self._glued = tags([layout.glued] if layout.glued else [])
        self._stops = [*self._ends, *self._openers, *([] if layout.loose else self._heads)]
        self._value_enders = self._make_enders()
        close = tags([f"{CDATA[1]} {closer}" for closer in layout.closers])
        self._data_enders = [_Ender(tag, taken=True) for tag in close]
        self._enders: Sequence[_Ender] = ()
        self._candidate = re.compile("(?!)")  # finds where a value may end
        self._place: _Place = "calls"
        self._finishing = False  # the answer has ended, and no limit has cut it off
        self._name: str | None = None  # of the call that is read
        self._types = ArgumentTypes({})  # of its arguments
        self._given: set[str] = set()  # the keys of its arguments
        self._object: JsonValue | None = None  # all its arguments
        self._written: list[str] = []  # text of these
        self._argument: Argument | None = None  # the type of the value; None: it is dropped
        self._wrapped = False  # the value has all arguments
        self._fresh = False  # the value has not begun
        self._value: list[str] = []  # a value that is given once it is complete

    def _make_enders(self) -> Sequence[_Ender]:
        """Return what ends a value, in the order in which it is tried."""
        layout, show = self._layout, self._marks.show
        follows = [*self._keys, *self._tails, *self._stops, *self._skipped]
        enders = []
        for closer in map(show, layout.closers):
            tag = Tag("\n?" * layout.lines + closer)
            enders.append(_Ender(tag, None if _is_marked(closer) else follows, taken=True))
        siblings = [show(key) for key in layout.keys if not key.startswith("{")]
        enders += [
            _Ender(Tag("\n?" + key), key=True, known=not _is_marked(key)) for key in siblings
        ]
        enders += [_Ender(Tag("\n?" + show(tail)), self._ends) for tail in layout.tails]
        enders += [_Ender(Tag("\n?" + show(end)), self._openers) for end in layout.ends]
        return enders

    def _step(self) -> bool:
        match self._place:
            case "calls":
                return self._read_between()
            case "call":
                return self._read_call()
            case "object":
                return self._read_object()
            case "value":
                return self._read_value()

    def _end(self, cut: bool) -> None:
        self._finishing = not cut
        while not cut and not self.over and not self.refused and self._step():
            pass
        if self.over or self.refused:
            return
        if self._place == "calls":
            self._end_between()
            return
        held, self._text = self._text, ""
        if cut:
            self.refused = not self.is_open
        elif self._place == "call":
            self._end_call(held)
        elif self._place == "value":
            self._put(held)
            if self._value:
                self._give_value()

    # Between calls.

    def _read_between(self) -> bool:
        """Begin a call, or end the block."""
        self._text = text = self._text.lstrip()
        if not text:
            return False
        if not (self._layout.loose and self.closed):
            found = self._match(self._heads)
            if found == WAIT:
                return False
            if found is not None and (name := self._find_name(found[1])) is not None:
                return self._begin_call(name, found[0])
        found = self._match([*self._ends, *([] if self.closed else self._openers)])
        if found == WAIT:
            return False
        if found is None or self.closed or self._match(self._ends) is not None:
            self._take(found[0] if found else 0)
            return self._leave_block()
        self._take(found[0])
        return True

    def _begin_call(self, name: str, end: int) -> bool:
        if self._known and name not in self._tools:
            return self._leave_block()
        self._take(end)
        self._place = "call"
        self._name = name
        self._given.clear()
        self._object = None
        return True

    def _end_between(self) -> None:
        word = self._text.strip()
        if self._layout.loose and self._finishing and not self.closed and word in self._tools:
            self._name = word
            self._text = ""
            self._close_whole()
        elif self.closed and self._match([*self._ends, *self._tails]) == WAIT:
            self._text = ""
        self._leave_block()

    # Inside a call, in front of an argument.

    def _read_call(self) -> bool:
        self._text = text = self._text.lstrip()
        if not text:
            return False
        for tags, act in (
            (self._keys, self._begin_value),
            (self._tails, self._end_tail),
            (self._skipped, self._skip),
            (self._glued, self._split_name),
            (self._stops, self._stop),
        ):
            found = self._match(tags)
            if found == WAIT:
                return False
            if found is not None and act(*found):
                return True
        if text[0] == "{" and self._object is None and not self._given:
            self._object = JsonValue("{", self._written)
            self._place = "object"
            self._open_call()
            return True
        if not self.is_open:
            self.refused = True
        else:  # what follows is no part of it
            self._close_whole()
            self.over = True
        return False

    def _begin_value(self, end: int, text: str) -> bool:
        key = self._attribute(text, "key")
        if key is None or self._object is not None:
            return False
        self._open_call()
        self._take(end)
        self._place = "value"
        self._fresh = True
        self._set_enders(self._value_enders)
        wrapper = key in self._layout.wrappers and not self._given and not self._takes(key)
        self._wrapped = wrapper
        if key in self._given:
            self._argument = None
        elif wrapper:
            self._argument = OTHER
        else:
            self._argument = self._type_argument(key, text)
            self._give_key(key)
        self._given.add(key)
        return True

    def _end_tail(self, end: int, text: str) -> bool:
        self._take(end)
        self._close_whole()
        return True

    def _skip(self, end: int, text: str) -> bool:
        self._take(end)
        return True

    def _split_name(self, end: int, text: str) -> bool:
        """Divide a word that is a tool's name and the key of an argument."""
        word = self._name
        if word is None or self.is_open:
            return False
        for name in self._tools.schemas:
            key = word[len(name) :]
            if word.startswith(name) and self._takes(key, name):
                self._name = name
                self._text = key + self._text
                return True
        return False

    def _stop(self, end: int, text: str) -> bool:
        """End a call in front of what cannot stand in it."""
        self._close_whole()
        return True

    def _end_call(self, held: str) -> None:
        """End a call with the answer: it is complete unless an argument has begun."""

        def may_be(tags: Sequence[Tag]) -> bool:
            return any(tag.match(held) == WAIT for tag in tags if held)

        if may_be(self._keys) and not may_be([*self._tails, *self._ends]):
            self._open_call()
        else:
            self._close_whole()

    def _open_call(self) -> None:
        """Give the name of the call that is read, if it was not."""
        if not self.is_open and self._name is not None:
            self._types = ArgumentTypes(self._tools.schema(self._name))
            self._open(self._name)

    def _close_whole(self) -> None:
        self._open_call()
        if self._object is None:
            self._give("}" if self._given else "{}")
        self._place = "calls"
        self._close()

    # An object in the place of arguments.

    def _read_object(self) -> bool:
        value = self._object
        assert value is not None
        self._take(value.advance(self._text, 0))
        self._give(self._marks.spell("".join(self._written)))
        self._written.clear()
        if value.complete:
            self._place = "call"
        return value.complete

    # A value.

    def _read_value(self) -> bool:
        if self._fresh and not self._enter_value():
            return False
        text, at = self._text, 0
        while candidate := self._candidate.search(text, at):
            at = candidate.start()
            end = self._find_end(text, at)
            if end == WAIT:
                break
            if end is not None:
                self._put(text[:at])
                self._text = text[end:]
                self._end_value()
                return True
            at += 1
        else:
            at = len(text)
        self._put(text[:at])
        self._text = text[at:]
        return False

    def _enter_value(self) -> bool:
        """Take markup in front of a value; return whether the value begins."""
        text = self._text
        if self._layout.cdata and not self._finishing:
            body = text.lstrip()
            short = len(body) < len(CDATA[0]) and len(text) < _MOST_SPACE
            if short and CDATA[0].startswith(body):
                return False
        if not text and not self._finishing:
            return False
        self._fresh = False
        if self._layout.lines and text.startswith("\n"):
            self._take(1)
        elif self._layout.cdata and text.lstrip().startswith(CDATA[0]):
            self._text = text.lstrip()[len(CDATA[0]) :]
            self._set_enders(self._data_enders)
        if self._argument is not None and self._argument.kind == "text":
            self._give('"')
        return True

    def _set_enders(self, enders: Sequence[_Ender]) -> None:
        if enders is self._enders:
            return
        self._enders = enders
        firsts = frozenset[str]().union(*(ender.tag.firsts for ender in enders))
        signs = "".join(map(re.escape, sorted(firsts - {"\n"})))
        newline = rf"\n(?=[{signs}]|\Z)|" if "\n" in firsts else ""
        self._candidate = re.compile(f"{newline}[{signs}]")

    def _find_end(self, text: str, at: int) -> int | Literal["wait"] | None:
        """Return the place behind a value's end, if it ends at this place."""
        for ender in self._enders:
            found = ender.tag.match(text, at)
            if found == WAIT and not self._finishing:
                return WAIT
            if found is None or found == WAIT:
                continue
            followed = self._is_followed(ender, text, found[0])
            if followed == WAIT:
                return WAIT
            if followed and self._is_sibling(ender, found[1]):
                return found[0] if ender.taken else at + (text[at] == "\n")
        return None

    def _is_followed(self, ender: _Ender, text: str, at: int) -> bool | Literal["wait"]:
        if ender.follows is None:
            return True
        limit = at + _MOST_SPACE
        while at < min(len(text), limit) and text[at].isspace():
            at += 1
        if at == len(text):
            return self._finishing or WAIT
        for tag in ender.follows:
            found = tag.match(text, at)
            if found == WAIT:
                return self._finishing or WAIT
            if found is not None:
                return True
        return False

    def _is_sibling(self, ender: _Ender, text: str) -> bool:
        if not ender.key:
            return True
        key = self._attribute(text, "key")
        return key is not None and (
            self._takes(key) and key not in self._given if ender.known else True
        )

    def _put(self, text: str) -> None:
        """Take text of a value."""
        if not text or self._argument is None:
            return
        if not text.isascii():
            text = self._marks.spell(text)
        if self._argument.kind == "text":
            self._give(escape(text))
        else:
            self._value.append(text)

    def _end_value(self) -> None:
        self._place = "call"
        if self._argument is None:
            return
        if self._argument.kind == "text":
            self._give('"')
        else:
            self._give_value()

    def _give_value(self) -> None:
        assert self._argument is not None
        text = self._argument.json("".join(self._value))
        self._value.clear()
        if not self._wrapped:
            self._give(text)
        elif members := _members(text):
            self._give(text.strip()[:-1])
            self._given = set(members)
        elif members is None:
            [key] = self._given
            self._give_key(key, first=True)
            self._give(text)
        else:
            self._given.clear()

    def _give_key(self, key: str, *, first: bool = False) -> None:
        before = ", " if self._given and not first else "{"
        self._give(f"{before}{json.dumps(key, ensure_ascii=False)}: ")

    # Names, keys and types.

    def _match(self, tags: Sequence[Tag]) -> Found | Literal["wait"] | None:
        """Return the first of these tags at the front of the text."""
        for tag in tags:
            found = tag.match(self._text)
            if found is not None:
                return found
        return None

    def _find_name(self, text: str) -> str | None:
        """Return the name of a tool in a tag."""
        name = self._attribute(text, "name") or ""
        return self._tools.meant(name) or name or None

    def _attribute(self, text: str, role: Literal["name", "key"]) -> str | None:
        """Return the name of the tool, or the key, in the text of a tag."""
        named = self._layout.named
        text = self._marks.spell(text).strip()
        if not named:
            return text or None
        if text.startswith("="):
            return text[1:].strip().strip("\"'") or None
        return next(filter(None, (self._read_attribute(text, each) for each in named)), None)

    def _read_attribute(self, text: str, attribute: str) -> str | None:
        pattern = rf"""\b{attribute}\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))"""
        found = re.search(pattern, text)
        if found is None:
            return None
        value = next(each for each in found.groups() if each is not None)
        if self._layout.escaped:
            value = value.replace("&quot;", '"').replace("&amp;", "&")
        return value

    def _type_argument(self, key: str, text: str) -> Argument:
        attribute = self._layout.typed
        written = self._read_attribute(self._marks.spell(text), attribute) if attribute else None
        if written is None:
            return self._types.argument(key)
        return TEXT if written.lower() in ("true", "string") else OTHER

    def _takes(self, key: str, name: str | None = None) -> bool:
        """Whether the tool has an argument of this name."""
        schema = self._tools.schema(name or self._name or "")
        properties = schema.get("properties")
        return isinstance(properties, Mapping) and key in properties


def _is_marked(text: str) -> bool:
    """Whether a marker in a shown text is a token."""
    return re.search("[\ufdd0-\ufdef]", text) is not None


def _members(text: str) -> Sequence[str] | None:
    """Return the keys of a JSON object; None if it is none."""
    try:
        return list(msgspec.json.decode(text, type=dict[str, Any]))
    except (ValueError, RecursionError):
        return None
