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
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

_DEEPEST = 100  # parentheses in parentheses
_MOST_TIMES = 2000  # of a repetition, as llama.cpp has it
_LONGEST_REGEX = 64 * 1024  # characters, after names of rules are replaced by the rules
_DEEPEST_RULE = 200  # rules in rules, in one regex

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\#[^\r\n]*)
    |(?P<line>\r?\n|\r)
    |(?P<text>"(?:[^"\\]|\\.)*")
    |(?P<class>\[(?:[^\]\\]|\\.)*\])
    |(?P<name>[A-Za-z0-9_-]+)
    |(?P<times>[*+?]|\{[ \t]*(?P<least>\d{1,9})[ \t]*(?:(?P<to>,)[ \t]*(?P<most>\d{1,9})?[ \t]*)?\})
    |(?P<sign>::=|[|().])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_CHAR = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)|.", re.DOTALL)
_ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t"} | {f"\\{char}": char for char in '\\"[]-^'}
_ANY = r"[\x{0}-\x{10ffff}]"


class _Char(msgspec.Struct, frozen=True):
    """One character, as a regex."""

    regex: str


class _Rule(msgspec.Struct, frozen=True):
    """A reference to the rule of this name."""

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
    rules = _parse(text)
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


# Reading.


class _Token(NamedTuple):
    kind: str
    text: str
    found: re.Match[str]
    line: int

    def error(self, what: str) -> GBNFError:
        return GBNFError(f"line {self.line}: {what}")


def _tokens(text: str) -> list[_Token]:
    """Return the tokens of a grammar. Ends of lines are only those behind a rule."""
    found: list[_Token] = []
    depth, line = 0, 1
    for match in _TOKEN.finditer(text + "\n"):
        token = _Token(str(match.lastgroup), match[0], match, line)
        line += token.text.count("\n")
        depth += (token.text == "(") - (token.text == ")")
        if token.kind == "line":
            inside = depth > 0 or not found or found[-1].text in ("::=", "|")
            if inside or found[-1].kind == "line":
                continue
        elif token.text == "|" and found and found[-1].kind == "line":
            found.pop()
        if token.kind != "space":
            found.append(token)
    return found


def _parse(text: str) -> dict[str, _Pieces]:
    """Return all rules. If two have one name, the later one counts."""
    rules = {}
    tokens = iter(_tokens(text))
    for name in tokens:
        if name.kind != "name":
            raise name.error("expected the name of a rule")
        if next(tokens, name).text != "::=":
            raise name.error("expected ::=")
        rules[name.text] = _rule(tokens)
    return rules


def _rule(tokens: Iterator[_Token]) -> _Pieces:
    """Read a rule from behind `::=` to the end of its line."""
    pieces: _Pieces = []
    item = 0  # where in the pieces the last item begins
    groups: list[int] = []  # where those begin that are open
    repeated: Counter[int] = Counter()  # how often the item that begins there is repeated
    for token in tokens:
        begin = len(pieces)
        match token.kind, token.text:
            case "line", _:
                break
            case "name", name:
                pieces.append(_Rule(name))
            case "text", text:
                chars = [_Char(rf"\x{{{point:x}}}") for _, point in _chars(text[1:-1], token)[::-1]]
                pieces += ["(", *chars, ")"] if chars else [_EMPTY]
            case "class", _:
                pieces.append(_class(token))
            case "sign", ".":
                pieces.append(_Char(_ANY))
            case "sign", "(":
                groups.append(begin)
                pieces.append("(")
                if len(groups) > _DEEPEST:
                    raise token.error(f"parentheses nested more than {_DEEPEST} levels deep")
            case "sign", "|":
                pieces += [_EMPTY, "|"] if _lacks_item(pieces) else ["|"]
            case "sign", ")" if groups:
                pieces += [_EMPTY, ")"] if _lacks_item(pieces) else [")"]
                begin = groups.pop()
            case "times", _ if not _lacks_item(pieces):
                begin = item
                repeated[item] += 1
                pieces += [")", _times(token)]
            case _, '"' | "[":
                raise token.error("a text or class without an end")
            case _, "{":
                raise token.error("expected {m}, {m,} or {m,n}")
            case _:
                raise token.error("expected )" if groups else "expected the end of the rule")
        item = begin
    if groups:
        raise token.error("expected )")
    if _lacks_item(pieces):
        pieces.append(_EMPTY)
    # Not before: each repetition would move all that it repeats.
    return [each for i, piece in enumerate(pieces) for each in (*("(" * repeated[i]), piece)]


def _lacks_item(pieces: _Pieces) -> bool:
    return not pieces or pieces[-1] in ("(", "|")


def _times(token: _Token) -> str:
    """Return a repetition as regexes and Lark write it."""
    least, to, most = token.found.group("least", "to", "most")
    if least is not None:
        if max(int(least), int(most or 0)) > _MOST_TIMES:
            raise token.error(f"a repetition of more than {_MOST_TIMES} times")
        if most and int(most) < int(least):
            raise token.error("a repetition with its bounds in the wrong order")
        return f"{{{least},{(most or '') if to else least}}}"
    return token.text


def _class(token: _Token) -> _Char:
    negated = "^" if token.text[1] == "^" else ""
    chars = _chars(token.text[1 + len(negated) : -1], token)
    ranges = ""
    while chars:
        _, first = chars.pop()
        wide = len(chars) > 1 and chars[-1][0] == "-"
        last = chars[-2][1] if wide else first
        if wide:
            del chars[-2:]
        if last < first:
            raise token.error("a range of characters that ends before it begins")
        ranges += rf"\x{{{first:x}}}-\x{{{last:x}}}"
    if not ranges and not negated:
        raise token.error("a class of no characters")
    return _Char(f"[{negated}{ranges}]" if ranges else _ANY)


def _chars(text: str, token: _Token) -> list[tuple[str, int]]:
    """Return the characters of a text or class, the last one first: as written, and their code
    points."""
    chars = []
    for match in _CHAR.finditer(text):
        digits = match[1] or match[2] or match[3]
        if digits is None and match[0] not in _ESCAPES and len(match[0]) > 1:
            raise token.error(f"unknown escape {match[0]}")
        point = int(digits, 16) if digits else ord(_ESCAPES.get(match[0], match[0]))
        if digits and (point > 0x10FFFF or 0xD800 <= point <= 0xDFFF):
            raise token.error(f"{match[0]} is no character")
        chars.append((match[0], point))
    return chars[::-1]
