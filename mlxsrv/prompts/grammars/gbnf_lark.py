"""Translates GBNF grammars for llguidance: into one regex if they are regular, else into Lark.

Lark has a lexer: it splits the text into terminals, and the longest match counts whatever comes
after. GBNF has none. So every character is a terminal of its own in the Lark grammar, and the two
describe the same texts.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxsrv.prompts.grammars.gbnf import Alt, Chars, Expr, Ranges, Ref, Rep, Seq, parse

_LONGEST_REGEX = 64 * 1024  # characters, after names of rules are replaced by the rules
_DEEPEST = 200  # rules in rules, in one regex


def translate_gbnf(text: str) -> str:
    """Return the grammar in Lark.

    Raises:
        GBNFError: it is not a grammar.
    """
    return "\n".join(lark_rules(parse(text), "root", "start"))


def lark_rules(rules: Mapping[str, Expr], root: str, name: str) -> list[str]:
    """Return lines of Lark in which the rule `name` is the rule `root`.

    Args:
        rules: all that are referred to; in Lark their names begin with `name`.
    """
    regexes: dict[str, str | None] = {}
    whole = _regular(root, rules, regexes, ())
    if whole is not None:
        return [f"{name}: /{whole}/"]
    names = {rule: f"{name}_r{i}" for i, rule in enumerate(rules)}
    lines = [f"{names[rule]}: {_lark(expr, names)}" for rule, expr in rules.items()]
    return [f"{name}: {names[root]}", *lines]


def _regular(
    name: str,
    rules: Mapping[str, Expr],
    known: dict[str, str | None],
    within: tuple[str, ...],
) -> str | None:
    """Return a rule as a regex, or None if it refers to itself or is too long; fill `known`."""
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
