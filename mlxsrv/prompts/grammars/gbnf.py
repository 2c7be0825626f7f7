"""Parses llama.cpp's GBNF grammars into expressions.

A grammar has rules `name ::= alternatives`; the rule `root` describes the text. An expression is a
class of characters, a sequence, alternatives, a repetition or a reference to a rule:

    root   ::= "[" item ("," item)* "]"    # a comment
    item   ::= [a-z]{1,5} | "\\u00e9" | . | [^0-9\\n]+

A rule ends with its line. A line may break after `::=`, around `|`, and anywhere in parentheses.
https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

LAST = 0x10FFFF  # the last code point

Ranges = tuple[tuple[int, int], ...]
"""Code points, as sorted ranges with gaps between them, both ends included."""


class Chars(msgspec.Struct, frozen=True):
    """One character of a class."""

    ranges: Ranges


class Seq(msgspec.Struct, frozen=True):
    items: tuple[Expr, ...]


class Alt(msgspec.Struct, frozen=True):
    options: tuple[Expr, ...]


class Rep(msgspec.Struct, frozen=True):
    """A repetition; `most` is None if there is no bound."""

    item: Expr
    least: int
    most: int | None


class Ref(msgspec.Struct, frozen=True):
    name: str


Expr = Chars | Seq | Alt | Rep | Ref

EMPTY = Seq(())

_DEEPEST = 100  # parentheses in parentheses
_MOST_TIMES = 2000  # of a repetition, as llama.cpp has it

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BAR = re.compile(_SPACES.pattern + r"\|")  # also at the beginning of the next line
_DEFINES = re.compile(r"::=")
_LINE_END = re.compile(r"\r?\n|\r|\Z")
_TIMES = re.compile(r"\{[ \t]*(\d{1,9})[ \t]*(?:(,)[ \t]*(\d{1,9})?[ \t]*)?\}")
_ESCAPED = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in '\\"[]-^'}


class GBNFError(ValueError):
    """The text is not a grammar. The message names the line."""


def parse(text: str) -> Mapping[str, Expr]:
    """Return the rules by name, with `root` and all that are referred to.

    Raises:
        GBNFError: it is not a grammar.
    """
    rules = _Parser(text).rules()
    for name in ("root", *(ref for rule in rules.values() for ref in references(rule))):
        if name not in rules:
            raise GBNFError(f"there is no rule {name}")
    return rules


def references(expr: Expr) -> list[str]:
    """Return the names of the rules that an expression refers to."""
    match expr:
        case Chars():
            return []
        case Ref(name):
            return [name]
        case Rep(item):
            return references(item)
        case Seq(items) | Alt(items):
            return [name for item in items for name in references(item)]


class _Parser:
    """Reads one grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Expr]:
        """Return all rules. If two have one name, the later one counts."""
        rules = {}
        self._skip(_SPACES)
        while self._at < len(self._text):
            name = self._expect(_NAME, "the name of a rule")
            self._skip(_SPACE)
            self._expect(_DEFINES, "::=")
            self._skip(_SPACES)
            rules[name] = self._alternatives()
            self._expect(_LINE_END, "the end of the rule")
            self._skip(_SPACES)
        return rules

    def _alternatives(self) -> Expr:
        options = [self._sequence()]
        while (bar := _BAR.match(self._text, self._at)) is not None:
            self._at = bar.end()
            self._skip(_SPACES)
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self) -> Expr:
        items: list[Expr] = []
        while (item := self._item()) is not None:
            self._skip_inside()
            while (times := self._times()) is not None:
                item = Rep(item, *times)
                self._skip_inside()
            items.append(item)
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _item(self) -> Expr | None:
        match self._peek():
            case '"':
                return self._literal()
            case "[":
                return self._class()
            case "(":
                return self._group()
            case ".":
                self._at += 1
                return Chars(((0, LAST),))
        name = _NAME.match(self._text, self._at)
        if name is None:
            return None
        self._at = name.end()
        return Ref(name[0])

    def _literal(self) -> Expr:
        self._at += 1
        chars: list[Expr] = []
        while self._peek() != '"':
            point = self._char()
            chars.append(Chars(((point, point),)))
        self._at += 1
        return chars[0] if len(chars) == 1 else Seq(tuple(chars))

    def _class(self) -> Expr:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges = []
        while self._peek() != "]":
            first = last = self._char()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._char()
            if last < first:
                raise self._error("a range of characters that ends before it begins")
            ranges.append((first, last))
        self._at += 1
        chars = Chars(complement(merge(ranges)) if negated else merge(ranges))
        if not chars.ranges:
            raise self._error("a class of no characters")
        return chars

    def _group(self) -> Expr:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error(f"parentheses nested more than {_DEEPEST} levels deep")
        self._at += 1
        self._skip(_SPACES)
        expr = self._alternatives()
        if self._peek() != ")":
            raise self._error("expected )")
        self._at += 1
        self._depth -= 1
        return expr

    def _times(self) -> tuple[int, int | None] | None:
        """Read how often the item before may come, if that is given here."""
        sign = self._peek()
        if sign and sign in "*+?":
            self._at += 1
            return (1 if sign == "+" else 0, 1 if sign == "?" else None)
        if sign != "{":
            return None
        match = _TIMES.match(self._text, self._at)
        if match is None:
            raise self._error("expected {m}, {m,} or {m,n}")
        least = int(match[1])
        most = int(match[3]) if match[3] else None if match[2] else least
        if max(least, most or 0) > _MOST_TIMES:
            raise self._error(f"a repetition of more than {_MOST_TIMES} times")
        if most is not None and most < least:
            raise self._error("a repetition with its bounds in the wrong order")
        self._at = match.end()
        return least, most

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
        if point > LAST or 0xD800 <= point <= 0xDFFF:
            raise self._error(f"{match[0]} is no character")
        return point

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        assert match is not None  # these patterns match the empty text, too
        self._at = match.end()

    def _skip_inside(self) -> None:
        self._skip(_SPACES if self._depth else _SPACE)

    def _expect(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._error(f"expected {what}")
        self._at = match.end()
        return match[0]

    def _error(self, what: str) -> GBNFError:
        line = self._text.count("\n", 0, self._at) + 1
        return GBNFError(f"line {line}: {what}")


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in order and with gaps between them."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Return all characters but those given."""
    starts = [0, *(last + 1 for _, last in ranges)]
    ends = [*(first - 1 for first, _ in ranges), LAST]
    return tuple((a, b) for a, b in zip(starts, ends, strict=True) if a <= b)
