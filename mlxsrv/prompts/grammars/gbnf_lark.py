"""GBNF grammars as llguidance takes them: as one regex where they are regular, else as Lark.

Lark has a lexer: what may come next is cut into terminals, of which the longest match counts,
whatever comes after. GBNF has none. Every character is a terminal of its own here, so the two
describe the same texts.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxsrv.prompts.grammars.gbnf import Alt, Chars, Expr, Ranges, Ref, Rep, Seq, parse

_LONGEST_REGEX = 64 * 1024  # characters, once rules are put in the place of their names
_DEEPEST = 200  # rules in rules, as far as one regex goes


def translate(text: str) -> str:
    """The grammar in Lark.

    Raises:
        GBNFError: it is not a grammar.
    """
    rules = parse(text)
    regexes: dict[str, str | None] = {}
    whole = _regular("root", rules, regexes, ())
    if whole is not None:
        return f"start: /{whole}/"
    names = {name: f"r{i}" for i, name in enumerate(rules)}
    lines = [f"{names[name]}: {_lark(rule, names)}" for name, rule in rules.items()]
    return "\n".join([f"start: {names['root']}", *lines])


def _regular(
    name: str,
    rules: Mapping[str, Expr],
    known: dict[str, str | None],
    within: tuple[str, ...],
) -> str | None:
    """The rule as a regex; None if it leads back to itself, or is long. `known` is filled."""
    if name in within or len(within) > _DEEPEST:
        return None
    if name not in known:
        known[name] = _regex(rules[name], rules, known, (*within, name))
    return known[name]


def _regex(
    expr: Expr,
    rules: Mapping[str, Expr],
    known: dict[str, str | None],
    within: tuple[str, ...],
) -> str | None:
    match expr:
        case Chars(ranges):
            return _class(ranges)
        case Ref(name):
            return _regular(name, rules, known, within)
        case Rep(item, least, most):
            inner = _regex(item, rules, known, within)
            return None if inner is None else f"(?:{inner}){_times(least, most)}"
        case Seq(items) | Alt(items):
            parts = [_regex(item, rules, known, within) for item in items]
            if None in parts or sum(len(part or "") for part in parts) > _LONGEST_REGEX:
                return None
            sign = "" if isinstance(expr, Seq) else "|"
            return "(?:" + sign.join(part or "" for part in parts) + ")"


def _lark(expr: Expr, names: Mapping[str, str]) -> str:
    match expr:
        case Chars(ranges):
            return f"/{_class(ranges)}/"
        case Ref(name):
            return names[name]
        case Rep(item, least, most):
            return f"({_lark(item, names)}){_times(least, most)}"
        case Seq(items):
            return "(" + " ".join(_lark(item, names) for item in items) + ")" if items else '""'
        case Alt(options):
            return "(" + " | ".join(_lark(option, names) for option in options) + ")"


def _class(ranges: Ranges) -> str:
    return "[" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in ranges) + "]"


def _times(least: int, most: int | None) -> str:
    if most is None and least < 2:
        return "+" if least else "*"
    return f"{{{least},{'' if most is None else most}}}"
