"""Reads calls whose arguments are literals, and turns them into JSON while they are written."""

from __future__ import annotations

import re

from mlxsrv.text.call_formats.calls import CallFault, Tools
from mlxsrv.text.call_formats.literal_strings import Level, LiteralSyntax, StringReader
from mlxsrv.text.call_formats.literal_texts import KEY_END, Lookahead, Scalars, unescape
from mlxsrv.text.call_formats.values import ArgumentTypes, escape
from mlxsrv.text.marks import Marks
from mlxsrv.text.scan import Scanner

_SPACE = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_QUOTES = "\"'"
_AFTER = ",\"'"  # begins what may follow a value
_NAME = r"[^\s(){}\[\],;'\"=<>`\ufdd0-\ufdef]{1,256}"
_CALL = r"(?:call[ ]?)?:?[ ]?"
_QUOTED_KEY = re.compile(
    r"""("(?:[^"\\]|\\.){0,256}"|'(?:[^'\\]|\\.){0,256}')\s*([:=])?""", re.DOTALL
)
_OPEN_KEY = re.compile(r"""("(?:[^"\\]|\\.){0,256}"?|'(?:[^'\\]|\\.){0,256}'?)\s*\\?$""", re.DOTALL)


class LiteralReader(StringReader):
    """Reads a block of calls such as `call:f{k:<|"|>v<|"|>}` or `[f(k='v'), g()]`.

    Args:
        syntax: that of the family.
        tools: those that may be called.
        marks: how markers are shown.
        bare: the opener is no clear marker, so calls are only those of these tools.
        listed: the block must begin with a bracket.
    """

    def __init__(
        self,
        syntax: LiteralSyntax,
        tools: Tools,
        marks: Marks,
        *,
        bare: bool = False,
        listed: bool = False,
    ) -> None:
        super().__init__(syntax, marks)
        self._tools = tools
        self._bare = bare
        self._brackets = 1 if listed else 0  # 0: may open; 1: must open; 2: is open; 3: was closed
        self._ends = Scanner([self._end_marker] if syntax.end else [])
        prefix = _CALL if syntax.colons else ""
        bracket = r"[{(]" if syntax.colons else r"\("
        self._named = re.compile(rf"{prefix}({_NAME})\s{{0,8}}")
        self._head = re.compile(rf"{prefix}({_NAME})\s{{0,8}}({bracket})")
        self._head_begun = re.compile(rf"{prefix}(?:{_NAME})?\s{{0,8}}$")
        self._state = self._read_between

    def _step(self) -> bool:
        return self._state()

    def _end(self, cut: bool) -> None:
        if cut:
            self._end_cut()
            return
        self._final = True
        while not self.over and not self.refused and self._state():
            pass
        if self.is_open:
            self._text = ""
            between = self._state in (self._read_after, self._read_key)
            if between and len(self._levels) == 1 and self._levels[0].count:
                self._finish()
        elif not self.over:
            self._leave_block()

    def _end_cut(self) -> None:
        if self.is_open:
            self._text = ""
        elif self._state == self._skip_echo:
            self._restore()
        else:
            self._leave_block()

    # Calls.

    def _read_between(self) -> bool:
        """Read up to the beginning of a call's arguments, or the end of the block."""
        self._text = text = self._text.lstrip(_SPACE + ",;)" if self.closed else _SPACE)
        if not text or self._may_be(text, self._end_marker):
            return False
        if self._end_marker and text.startswith(self._end_marker):
            return self._end_block()
        if text[0] == "[" and self._brackets < 2 and not self.closed:
            self._brackets = 2
            self._take(1)
            return True
        if text[0] == "]" and self._brackets == 2:
            self._brackets = 3
            self._take(1)
            return True
        if self._brackets in (1, 3):
            return self._leave_block()
        return self._read_head(text)

    def _end_block(self) -> bool:
        if not self.closed:
            self.refused = True
            return False
        self._take(len(self._end_marker))
        if not self._syntax.echoed:
            self.over = True
            return False
        self._state = self._read_echo
        return True

    def _read_head(self, text: str) -> bool:
        """Read a call's name and the bracket behind it."""
        found = self._head.match(text)
        if found is None:
            return self._read_no_head(text)
        if self._syntax.colons and self.closed and not text.startswith("call"):
            self.over = True
            return False
        self._open_call(found[1])
        if not self.is_open:
            return False
        self._take(found.end())
        self._levels[0].closer = _CLOSERS[found[2]]
        return True

    def _read_no_head(self, text: str) -> bool:
        spaced = self._bare and not self.closed and text[0] == " "
        if self._head_begun.match(text) and not self._final and not spaced:
            return False
        found = self._named.match(text)
        behind = text[found.end() :] if found else ""
        if found is None or not behind or self._tools.meant(found[1]) is None:
            self._leave_block()
        elif self._ends_here(behind):  # a call without arguments may have no brackets
            self._open_call(found[1])
            self._text = behind
            self._finish()
            return True
        elif not self._may_be(behind, self._end_marker):
            self._leave_block()
        return False

    def _open_call(self, name: str) -> None:
        name = self._marks.spell(name)
        known = self._tools.meant(name)
        if known is None and self._bare:
            self._leave_block()
            return
        name = known or name.rpartition(":")[2] or name
        schema = self._tools.schema(name)
        properties = schema.get("properties")
        self._names = list(properties) if isinstance(properties, dict) else []
        self._levels = [Level("", ArgumentTypes(schema).argument, outer=True)]
        self._open(name)
        self._put("{")
        self._state = self._read_key

    def _finish(self, fault: CallFault | None = None) -> None:
        """Close what is open of a call, with which it is over."""
        self._muted = 0
        if fault is None:
            self._put("".join("}" if level.keyed else "]" for level in reversed(self._levels)))
        self._levels.clear()
        self._close(fault)
        self._state = self._read_between

    def _read_broken(self) -> bool:
        """Give what cannot be read as it is written, up to the end of the block."""
        text = self._text
        found = self._ends.search(text)
        limit = found[0] if found else len(text) - self._ends.held(text) * (not self._final)
        self._give(self._marks.spell(self._take(limit)))
        if found or self._final:
            self._finish("its arguments are no JSON object")
        return found is not None

    def _break(self) -> bool:
        self._muted = 0
        self._state = self._read_broken
        return True

    # Keys.

    def _read_key(self) -> bool:
        """Read a key up to its value, or the end of the object."""
        self._text = text = self._text.lstrip(_SPACE + ",")
        level = self._levels[-1]
        if not text or self._may_be(text, self._end_marker) or self._may_be(text, self._quote):
            return False
        if text[0] in ")]}" or self._ends_here(text):
            return self._leave(text)
        if level.outer and text[0] == "{" and level.closer == ")" and not level.count:
            level.closer = "}"
            self._take(1)
            return True
        if self._quote and text.startswith(self._quote):
            return self._read_marked_key(text)
        if text[0] in _QUOTES and not (level.outer and not self._syntax.colons):
            return self._read_quoted_key(text)
        found = KEY_END.match(text)
        if found and (level.outer or found[2] == ":"):
            self._take(found.end())
            return self._begin(found[1])
        if Lookahead.key_begun(text) and not self._final:
            return False
        return self._begin_unnamed()

    def _read_quoted_key(self, text: str) -> bool:
        found = _QUOTED_KEY.match(text)
        if found and found[2]:
            self._take(found.end())
            return self._begin(unescape(found[1][1:-1]))
        if _OPEN_KEY.match(text) and not self._final:
            return False
        return self._begin_unnamed()

    def _read_marked_key(self, text: str) -> bool:
        size = len(self._quote)
        close = text.find(self._quote, size)
        behind = text[close + size :].lstrip(_SPACE) if close > 0 else ""
        if behind[:1] in (":", "=") and behind:
            self._text = behind[1:]
            return self._begin(self._marks.spell(text[size:close]))
        if not behind and len(text) < 256 and not self._final:
            return False
        return self._begin_unnamed()

    def _begin_unnamed(self) -> bool:
        """Begin a value without a key: of a call's argument, by its place."""
        level = self._levels[-1]
        if not level.outer:
            return self._break()
        at = level.count
        self._begin(self._names[at] if at < len(self._names) else str(at))
        level.unnamed = True
        return True

    def _begin(self, key: str) -> bool:
        """Begin the value of a key."""
        level = self._levels[-1]
        assert level.members is not None
        key = self._marks.spell(key)
        if key in level.keys and not self._muted:
            self._muted = len(self._levels)
        if not self._muted:
            self._put(f'{", " if level.count else ""}"{escape(key)}": ')
            level.count += 1
        level.keys.add(key)
        level.unnamed = False
        self._type = level.members(key)
        self._state = self._read_value
        return True

    # Values.

    def _read_item(self) -> bool:
        """Begin an item of a list, or end the list."""
        self._text = text = self._text.lstrip(_SPACE + ",")
        level = self._levels[-1]
        if not text or self._may_be(text, self._end_marker):
            return False
        if text[0] in ")]}" or self._ends_here(text):
            return self._leave(text)
        if "\ufdd0" <= text[0] <= "\ufdef" and text[0] != self._quote:
            return self._break()  # a marker that has no place in a call
        assert level.item is not None
        self._type = level.item
        self._put(", " if level.count else "")
        level.count += 1
        self._state = self._read_value
        return True

    def _read_value(self) -> bool:
        """Read the beginning of a value."""
        self._text = text = self._text.lstrip(_SPACE)
        if not text or self._may_be(text, self._end_marker) or self._may_be(text, self._quote):
            return False
        first = text[0]
        if self._quote and text.startswith(self._quote):
            return self._begin_string(self._quote, self._read_marked)
        if first in _QUOTES:
            triple = first * 3
            if self._may_be(text, triple) and len(text) < 3:
                return False
            return self._begin_string(
                triple if text.startswith(triple) else first, self._read_quoted
            )
        if first in "{[" or (first == "(" and not self._syntax.colons):
            return self._begin_level(first)
        if first in ",)]}":
            self._put('""' if self._type.kind == "text" else "null")
            self._state = self._read_after
            return True
        if self._ends_here(text):
            self._finish("never closed")
            return True
        return self._read_scalar(text)

    def _begin_level(self, bracket: str) -> bool:
        self._take(1)
        if bracket == "{":
            self._levels.append(Level("}", self._type.member))
            self._put("{")
            self._state = self._read_key
        else:
            self._levels.append(Level(_CLOSERS[bracket], None, self._type.item()))
            self._put("[")
            self._state = self._read_item
        return True

    def _read_scalar(self, text: str) -> bool:
        """Read a number or a word, if this is one."""
        found = Scalars.word(text)
        if found == len(text) and not self._final and found < 64:
            return False
        ended = found == len(text) or text[found] in ",)]}" or self._ends_here(text[found:])
        words = not self._syntax.colons or self._type.kind != "text"
        if ended and words:
            value = Scalars.read(text[:found].strip(), self._type)
            if value is not None:
                self._take(found)
                return self._give_value(value)
        self._kept.clear()
        self._depth = 0
        self._state = self._read_bare_marked if self._quote else self._read_bare
        return True

    def _read_after(self) -> bool:
        """Read what follows a value."""
        if self._muted == len(self._levels):
            self._muted = 0
        self._text = text = self._text.lstrip(_SPACE)
        level = self._levels[-1]
        if not text or self._may_be(text, self._end_marker):
            return False
        if text[0] in ")]}" or self._ends_here(text):
            return self._leave(text)
        if level.keyed and not (text[0] in _AFTER or KEY_END.match(text)):  # no comma, no key
            return False if Lookahead.key_begun(text) and not self._final else self._break()
        self._state = self._read_key if level.keyed else self._read_item
        return True

    def _leave(self, text: str) -> bool:
        """End the innermost level at a closing bracket or an end marker."""
        if self._ends_here(text):
            self._finish()
            return True
        level = self._levels[-1]
        if text[0] != level.closer and text[0] in (each.closer for each in self._levels):
            pass  # that of an outer level: the own one is missing
        elif text[0] == level.closer or level.outer:
            self._take(1)
        else:
            return self._break()
        if level.outer:
            self._finish()
            return True
        self._put("}" if level.keyed else "]")
        self._levels.pop()
        self._state = self._read_after
        return True

    # Calls that are repeated behind the end marker.

    def _read_echo(self) -> bool:
        text = self._text.lstrip(_SPACE)
        bare = text[1:].lstrip(_SPACE) if text[:1] == "[" else text
        if self._may_be(text, self._end_marker) or not bare:
            return False
        if text.startswith(self._end_marker):
            self._text = text[len(self._end_marker) :]
            return True
        found = self._head.match(bare)
        if found and self._tools.meant(found[1]):
            self._kept.clear()
            self._state = self._skip_echo
            return True
        self.over = found is not None or not self._head_begun.match(bare) or self._final
        return False

    def _skip_echo(self) -> bool:
        text = self._text
        found = self._ends.search(text)
        limit = found[0] if found else len(text) - self._ends.held(text)
        self._kept.append(self._take(limit))
        if found:
            self._state = self._read_echo
        elif self._final:
            self._restore()
        return found is not None

    def _restore(self) -> None:
        """End the block; what looked like a repeated call is content."""
        self._text = "".join(self._kept) + self._text
        self.over = True
