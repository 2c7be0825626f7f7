r"""Parses Lark grammars into expressions, without a lexer: rules and terminals alike are rules.

    start: "*** Begin" LF line+        // a comment
    line: ("+" | "-") /.*/ LF -> name  // what a parser would call it does not matter
    %import common.LF
    %ignore " "

Priorities and aliases are read and do not matter. Templates, `%declare`, `%extend`, `%override` and
what llguidance adds (`%json`, `<tokens>`, attributes) are refused.
https://lark-parser.readthedocs.io/en/stable/grammar.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mlxsrv.prompts.grammars.gbnf import EMPTY, Alt, Chars, Expr, Ref, Rep, Seq, references
from mlxsrv.prompts.grammars.regex_expressions import MOST_TIMES, RegexError, read_regex

START = "start"

_DEEPEST = 100  # parentheses in parentheses
_IGNORED = "%ignore"  # no rule's name

_TOKEN = re.compile(
    r"""(?P<space>\s+|(?://|\#)[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[a-z]*)
    |(?P<directive>%[a-z_]+)
    |(?P<name>[!?]{0,2}[A-Za-z_]\w*)
    |(?P<number>[+-]?\d+)
    |(?P<sign>->|\.\.|[:|()\[\]{}*+?~.,])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b"} | {c: c for c in "\\\"'/"}

_COMMON = {
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[A-Za-z]",
    "WORD": r"[A-Za-z]+",
    "CNAME": r"[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*([^*]|\*+[^*/])*\*+/",
    "SQL_COMMENT": r"--[^\n]*",
}


class LarkError(ValueError):
    """The text is no grammar in Lark, or none that is supported. The message names the line."""


def parse_lark(text: str) -> Mapping[str, Expr]:
    """Return the rules by name, with `start` and all that are referred to.

    Raises:
        LarkError: it is no grammar, or not supported.
    """
    rules = _Parser(text).rules()
    for name in (START, *(ref for rule in rules.values() for ref in references(rule))):
        if name not in rules:
            raise LarkError(f"there is no rule {name}")
    return rules


class _Parser:
    """Reads one grammar."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str, int]] = []  # kind, text, line
        line = 1
        for found in _TOKEN.finditer(text):
            kind = str(found.lastgroup)
            if kind == "other":
                raise LarkError(f"line {line}: {found[0]} is not expected")
            if kind != "space":
                self._tokens.append((kind, found[0], line))
            line += found[0].count("\n")
        self._last = line
        self._at = 0
        self._depth = 0
        self._ignored: list[Expr] = []
        self._in_rule = False  # not within a terminal: what is ignored may come between two items

    def rules(self) -> dict[str, Expr]:
        """Return all rules and terminals."""
        found: dict[str, Expr] = {}
        while self._at < len(self._tokens):
            kind, text, _ = self._take()
            if kind == "directive":
                self._directive(text, found)
                continue
            name = text.lstrip("!?")
            if kind != "name" or name in found:
                raise self._error(f"{text} is not the name of a new rule")
            if self._accept("."):
                self._take()  # a priority
            self._expect(":")
            self._in_rule = not _is_terminal(name)
            found[name] = self._alternatives()
        return self._with_ignored(found)

    def _with_ignored(self, rules: dict[str, Expr]) -> dict[str, Expr]:
        """Say what may come between items, which each item of a rule refers to."""
        ignored = Rep(Alt(tuple(self._ignored)), 0, None) if self._ignored else EMPTY
        if START in rules:
            rules[START] = Seq((Ref(_IGNORED), rules[START]))
        return {**rules, _IGNORED: ignored}

    # Directives.

    def _directive(self, text: str, rules: dict[str, Expr]) -> None:
        if text == "%ignore":
            self._in_rule = False
            self._ignored.append(self._alternatives())
        elif text == "%import":
            self._import(rules)
        else:
            raise self._error(f"{text} is not supported")

    def _import(self, rules: dict[str, Expr]) -> None:
        _, module, _ = self._take()
        if module != "common":
            raise self._error("only common terminals can be imported, such as %import common.WS")
        names: dict[str, str] = {}
        if self._accept("."):
            _, name, _ = self._take()
            names[name] = self._take()[1] if self._accept("->") else name
        else:
            self._expect("(")
            while not self._accept(")"):
                _, name, _ = self._take()
                names[name] = name
                self._accept(",")
        for name, called in names.items():
            if name not in _COMMON:
                raise self._error(f"common.{name} is not known")
            rules[called] = read_regex(_COMMON[name])

    # Expressions.

    def _alternatives(self) -> Expr:
        self._accept("|")
        options = [self._sequence()]
        while self._accept("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self) -> Expr:
        items: list[Expr] = []
        while (item := self._item()) is not None:
            items.append(self._repeated(item))
        if self._accept("->"):
            self._take()
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _repeated(self, item: Expr) -> Expr:
        while True:
            if self._accept("?"):
                item = Rep(item, 0, 1)
            elif self._accept("*"):
                item = Rep(item, 0, None)
            elif self._accept("+"):
                item = Rep(item, 1, None)
            elif self._accept("~"):
                least = self._number()
                item = self._times(item, least, self._number() if self._accept("..") else least)
            elif self._accept("{"):
                item = self._braced(item)
            else:
                return item

    def _braced(self, item: Expr) -> Expr:
        least = 0 if self._peek()[1] == "," else self._number()
        most: int | None = least
        if self._accept(","):
            most = None if self._peek()[1] == "}" else self._number()
        self._expect("}")
        return self._times(item, least, most)

    def _times(self, item: Expr, least: int, most: int | None) -> Expr:
        if max(least, most or 0) > MOST_TIMES:
            raise self._error(f"a repetition of more than {MOST_TIMES} times")
        if least < 0 or (most is not None and most < least):
            raise self._error("a repetition with its bounds in the wrong order")
        return Rep(item, least, most)

    def _item(self) -> Expr | None:
        kind, text, _ = self._peek()
        if kind == "string":
            self._at += 1
            return self._spaced(self._string(text))
        if kind == "regex":
            self._at += 1
            return self._spaced(self._regex(text))
        if kind == "name" and not self._begins_rule():
            self._at += 1
            if self._peek()[1] == "{" and self._peek(1)[0] == "name":
                raise self._error("templates are not supported")
            return self._spaced(Ref(text)) if _is_terminal(text) else Ref(text)
        if text in ("(", "["):
            self._at += 1
            return self._group(text)
        return None

    def _group(self, opening: str) -> Expr:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error(f"parentheses nested more than {_DEEPEST} levels deep")
        inner = self._alternatives()
        self._expect(")" if opening == "(" else "]")
        self._depth -= 1
        return inner if opening == "(" else Rep(inner, 0, 1)

    def _spaced(self, item: Expr) -> Expr:
        """Return an item of a rule with what is ignored behind it."""
        return Seq((item, Ref(_IGNORED))) if self._in_rule else item

    def _string(self, text: str) -> Expr:
        body, _, flags = text[1:].rpartition('"')
        chars = self._unescaped(body)
        if self._accept(".."):
            kind, other, _ = self._take()
            last = self._unescaped(other[1:-1]) if kind == "string" else ""
            if len(chars) != 1 or len(last) != 1 or last < chars:
                raise self._error("a range needs two characters in order")
            return Chars(((ord(chars), ord(last)),))
        return self._regex(f"/{re.escape(chars)}/{flags}") if chars else EMPTY

    def _regex(self, text: str) -> Expr:
        body, _, flags = text[1:].rpartition("/")
        try:
            return read_regex(body.replace("\\/", "/"), flags)
        except RegexError as error:
            raise self._error(str(error)) from None

    def _unescaped(self, text: str) -> str:
        def char(found: re.Match[str]) -> str:
            if found[4] is None:
                point = int(found[1] or found[2] or found[3], 16)
                return chr(point) if point <= 0x10FFFF else found[0]
            if found[4] not in _ESCAPES:
                raise self._error(f"unknown escape {found[0]}")
            return _ESCAPES[found[4]]

        return _ESCAPED.sub(char, text)

    # Tokens.

    def _begins_rule(self) -> bool:
        """Whether the next token is the name of the next rule."""
        if self._peek(1)[1] == ".":
            return self._peek(3)[1] == ":"
        return self._peek(1)[1] == ":"

    def _peek(self, ahead: int = 0) -> tuple[str, str, int]:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else ("end", "", self._last)

    def _take(self) -> tuple[str, str, int]:
        token = self._peek()
        if token[0] == "end":
            raise self._error("the grammar ends too early")
        self._at += 1
        return token

    def _accept(self, sign: str) -> bool:
        kind, text, _ = self._peek()
        found = kind == "sign" and text == sign
        self._at += found
        return found

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            raise self._error(f"expected {sign}")

    def _number(self) -> int:
        kind, text, _ = self._take()
        if kind != "number":
            raise self._error("expected a number")
        return int(text)

    def _error(self, what: str) -> LarkError:
        line = self._tokens[max(self._at - 1, 0)][2] if self._tokens else 1
        return LarkError(f"line {line}: {what}")


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()
