"""Translates GBNF grammars of llama.cpp: into one regex if they are regular, else into Lark.

A grammar has rules `name ::= alternatives`; the rule `root` describes the text:

    root   ::= "[" item ("," item)* "]"    # a comment
    item   ::= [a-z]{1,5} | "\\u00e9" | . | [^0-9\\n]+

A rule ends with its line. A line may break after `::=`, around `|`, and anywhere in parentheses.
https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md

Lark has a lexer: it splits the text into terminals, and the longest match counts whatever comes
after. GBNF has none. So every character is a terminal of its own in the Lark grammar, and the two
describe the same texts. (llguidance has a converter of its own, which makes a terminal of each text
and class. So it reads some grammars wrongly without a word: `tests/prompts/grammars/test_gbnf.py`.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

_LAST = 0x10FFFF  # the last code point
_DEEPEST_GROUP = 100  # parentheses in parentheses
_MOST_TIMES = 2000  # of a repetition, as llama.cpp has it
_LONGEST_REGEX = 64 * 1024  # characters, after names of rules are replaced by the rules
_DEEPEST_RULE = 200  # rules in rules, in one regex

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BAR = re.compile(_SPACES.pattern + r"\|" + _SPACES.pattern)  # also on the next line
_DEFINES = re.compile(_SPACE.pattern + "::=" + _SPACES.pattern)
_LINE_END = re.compile(r"\r?\n|\r|\Z")
_TIMES = re.compile(r"[*+?]|\{[ \t]*(\d{1,9})[ \t]*(?:(,)[ \t]*(\d{1,9})?[ \t]*)?\}")
_ESCAPED = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in '\\"[]-^'}


class _Char(msgspec.Struct, frozen=True):
    """One character, as a regex."""

    regex: str


class _Rule(msgspec.Struct, frozen=True):
    """What the rule of this name describes."""

    name: str


_Pieces = list[_Char | _Rule | str]
"""An expression, from left to right. A str is a parenthesis, a bar, a repetition, or the empty
text: GBNF, regexes and Lark all write these alike, up to the details of `_regex` and `_lark`."""

_EMPTY = '""'


class GBNFError(ValueError):
    """The text is not a grammar. The message names the line."""


def translate_gbnf(text: str) -> str:
    """Return the grammar in Lark.

    Raises:
        GBNFError: it is not a grammar.
    """
    rules = _Parser(text).rules()
    referred = (piece.name for rule in rules.values() for piece in rule if isinstance(piece, _Rule))
    for name in ("root", *referred):
        if name not in rules:
            raise GBNFError(f"there is no rule {name}")
    whole = _regex("root", rules, {}, ())
    if whole is not None:
        return f"start: /{whole}/"
    names = {rule: f"r{i}" for i, rule in enumerate(rules)}
    lines = [f"{names[rule]}: {_lark(pieces, names)}" for rule, pieces in rules.items()]
    return "\n".join([f"start: {names['root']}", *lines])


def _regex(
    name: str,
    rules: Mapping[str, _Pieces],
    known: dict[str, str | None],
    within: tuple[str, ...],
) -> str | None:
    """Return a rule as a regex, or None if it refers to itself or is too long; fill `known`."""
    if name in within or len(within) > _DEEPEST_RULE:
        return None
    if name not in known:
        parts: list[str | None] = []
        for piece in rules[name]:
            match piece:
                case _Char(regex):
                    parts.append(regex)
                case _Rule(inner):
                    parts.append(_regex(inner, rules, known, (*within, name)))
                case _:
                    parts.append({"(": "(?:", _EMPTY: ""}.get(piece, piece))
        whole = [part for part in parts if part is not None]
        fits = len(whole) == len(parts) and sum(map(len, whole)) <= _LONGEST_REGEX
        known[name] = f"(?:{''.join(whole)})" if fits else None
    return known[name]


def _lark(pieces: _Pieces, names: Mapping[str, str]) -> str:
    parts = []
    for piece in pieces:
        match piece:
            case _Char(regex):
                parts.append(f"/{regex}/")
            case _Rule(name):
                parts.append(names[name])
            case _:
                parts.append(piece)
    return " ".join(parts)


class _Parser:
    """Reads one grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, _Pieces]:
        """Return all rules. If two have one name, the later one counts."""
        rules = {}
        self._skip(_SPACES)
        while self._at < len(self._text):
            name = self._expect(_NAME, "the name of a rule")
            self._expect(_DEFINES, "::=")
            rules[name] = self._alternatives()
            self._expect(_LINE_END, "the end of the rule")
            self._skip(_SPACES)
        return rules

    def _alternatives(self) -> _Pieces:
        pieces = self._sequence()
        while self._skip(_BAR):
            pieces += ["|", *self._sequence()]
        return pieces

    def _sequence(self) -> _Pieces:
        pieces: _Pieces = []
        while item := self._item():
            self._skip_space()
            while times := self._times():
                item = ["(", *item, ")", times]
                self._skip_space()
            pieces += item
        return pieces or [_EMPTY]

    def _item(self) -> _Pieces | None:
        match self._peek():
            case '"':
                return self._literal()
            case "[":
                return [self._class()]
            case "(":
                return self._group()
            case ".":
                self._at += 1
                return [_Char(f"[{_range(0, _LAST)}]")]
        found = self._skip(_NAME)
        return [_Rule(found[0])] if found else None

    def _literal(self) -> _Pieces:
        self._at += 1
        chars: _Pieces = []
        while self._peek() != '"':
            point = self._char()
            chars.append(_Char(f"[{_range(point, point)}]"))
        self._at += 1
        return ["(", *chars, ")"] if chars else [_EMPTY]

    def _class(self) -> _Char:
        self._at += 1
        negated = "^" if self._peek() == "^" else ""
        self._at += len(negated)
        ranges = ""
        while self._peek() != "]":
            first = last = self._char()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._char()
            if last < first:
                raise self._error("a range of characters that ends before it begins")
            ranges += _range(first, last)
        self._at += 1
        if not ranges and not negated:
            raise self._error("a class of no characters")
        return _Char(f"[{negated}{ranges}]" if ranges else f"[{_range(0, _LAST)}]")

    def _group(self) -> _Pieces:
        self._depth += 1
        if self._depth > _DEEPEST_GROUP:
            raise self._error(f"parentheses nested more than {_DEEPEST_GROUP} levels deep")
        self._at += 1
        self._skip(_SPACES)
        pieces = self._alternatives()
        if self._peek() != ")":
            raise self._error("expected )")
        self._at += 1
        self._depth -= 1
        return ["(", *pieces, ")"]

    def _times(self) -> str | None:
        """Read how often the item before may come, if that is given here."""
        found = self._skip(_TIMES)
        if found is None:
            if self._peek() == "{":
                raise self._error("expected {m}, {m,} or {m,n}")
            return None
        if found[1] is None:
            return found[0]
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        if max(least, most or 0) > _MOST_TIMES:
            raise self._error(f"a repetition of more than {_MOST_TIMES} times")
        if most is not None and most < least:
            raise self._error("a repetition with its bounds in the wrong order")
        return f"{{{least},{'' if most is None else most}}}"

    def _char(self) -> int:
        """Read a character, which may be escaped, and return its code point."""
        char = self._peek()
        if not char:
            raise self._error("a text or class without an end")
        if char != "\\":
            self._at += 1
            return ord(char)
        match = _ESCAPED.match(self._text, self._at)
        if match is None or (match[4] is not None and match[4] not in _ESCAPES):
            raise self._error(f"unknown escape {self._text[self._at : self._at + 2]}")
        self._at = match.end()
        if match[4] is not None:
            return ord(_ESCAPES[match[4]])
        point = int(match[1] or match[2] or match[3], 16)
        if point > _LAST or 0xD800 <= point <= 0xDFFF:
            raise self._error(f"{match[0]} is no character")
        return point

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Go on behind the pattern, if it is here."""
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _skip_space(self) -> None:
        self._skip(_SPACES if self._depth else _SPACE)

    def _expect(self, pattern: re.Pattern[str], what: str) -> str:
        found = self._skip(pattern)
        if found is None:
            raise self._error(f"expected {what}")
        return found[0]

    def _error(self, what: str) -> GBNFError:
        line = self._text.count("\n", 0, self._at) + 1
        return GBNFError(f"line {line}: {what}")


def _range(first: int, last: int) -> str:
    """Return a range of characters, as it stands in a class of a regex."""
    return rf"\x{{{first:x}}}-\x{{{last:x}}}"
