r"""Grammars of a text that stands in a JSON string: each character is written as JSON has it.

A quotation mark is written `\"`, a line end `\n`, and so on; other characters are written as they
are. So what a JSON parser reads from the string is a text of the grammar.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxsrv.prompts.grammars.gbnf import LAST, Alt, Chars, Expr, Ranges, Ref, Rep, Seq, merge
from mlxsrv.prompts.grammars.gbnf_lark import lark_rules
from mlxsrv.prompts.grammars.lark import START, LarkError, parse_lark
from mlxsrv.prompts.grammars.specs import GrammarRefused

_LARGEST = 32 * 1024  # bytes

_LETTERS = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_PLAIN = ((0x20, 0x21), (0x23, 0x5B), (0x5D, LAST))


def read_input(text: str) -> Mapping[str, Expr]:
    """Return the rules of a grammar in Lark for a text in a JSON string.

    Raises:
        GrammarRefused: it is no grammar, not supported, or too much.
    """
    size = len(text.encode())
    if size > _LARGEST:
        raise GrammarRefused(f"{size} bytes are too many; at most {_LARGEST}")
    try:
        rules = parse_lark(text)
        return {name: _escaped(rule) for name, rule in rules.items()}
    except LarkError as error:
        raise GrammarRefused(f"not a Lark grammar that can be enforced: {error}") from None
    except RecursionError:
        raise GrammarRefused("nested too deeply") from None


def input_lark(text: str, name: str) -> list[str]:
    """Return the lines of Lark for a rule `name`: a text of the grammar in a JSON string, without
    its quotation marks. Rules that it needs have names that begin so. Raises as `read_input`."""
    return lark_rules(read_input(text), START, name)


def _escaped(expr: Expr) -> Expr:
    match expr:
        case Chars(ranges):
            return _escaped_chars(ranges)
        case Seq(items):
            return Seq(tuple(map(_escaped, items)))
        case Alt(options):
            return Alt(tuple(map(_escaped, options)))
        case Rep(item, least, most):
            return Rep(_escaped(item), least, most)
        case Ref():
            return expr


def _escaped_chars(ranges: Ranges) -> Expr:
    options: list[Expr] = []
    if plain := _common(ranges, _PLAIN):
        options.append(Chars(plain))
    marked = [point for point in (*range(0x20), 34, 92) if _common(ranges, ((point, point),))]
    if letters := [ord(_LETTERS[point]) for point in marked if point in _LETTERS]:
        options.append(Seq((_char("\\"), Chars(merge([(each, each) for each in letters])))))
    others = [point for point in marked if point not in _LETTERS]
    for high in "01":
        lows = [f"{point:02x}"[1] for point in others if f"{point:02x}"[0] == high]
        digits = {ord(case) for low in lows for case in (low, low.upper())}
        if digits:
            last = Chars(merge([(digit, digit) for digit in digits]))
            options.append(Seq((*map(_char, f"\\u00{high}"), last)))
    return options[0] if len(options) == 1 else Alt(tuple(options))


def _char(char: str) -> Chars:
    return Chars(((ord(char), ord(char)),))


def _common(one: Ranges, other: Ranges) -> Ranges:
    """Return the characters in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return merge((first, last) for first, last in pairs if first <= last)
