r"""Reads regexes into expressions, for grammars that are rewritten character by character.

`\d`, `\w` and `\s` are as in `regexes`. What looks around a place or back at a group cannot be an
expression: anchors, assertions, references to groups.
"""

from __future__ import annotations

import re
import re._parser as sre  # type: ignore[import-not-found]  # typeshed has it under its old name
import string
from collections.abc import Iterable
from typing import Any

from mlxsrv.prompts.grammars.gbnf import (
    LAST,
    Alt,
    Chars,
    Expr,
    Rep,
    Seq,
    complement,
    merge,
)

MOST_TIMES = 2000  # of a repetition

_FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE, "u": re.UNICODE}
_WIDEST = 3000  # characters of a range whose other cases are looked for

_DIGITS = ((0x30, 0x39),)
_WORD = merge([(ord(char), ord(char)) for char in string.ascii_letters + string.digits + "_"])
_SPACES = merge([(ord(char), ord(char)) for char in " \t\n\r\f\v"])
# Everything that is whitespace somewhere.
_ALL_SPACES = merge(
    [(point, point) for point in (*range(0x3001), 0xFEFF) if chr(point).isspace() or point > 0x3000]
)
_CATEGORIES = {
    "CATEGORY_DIGIT": _DIGITS,
    "CATEGORY_NOT_DIGIT": complement(_DIGITS),
    "CATEGORY_WORD": _WORD,
    "CATEGORY_NOT_WORD": complement(_WORD),
    "CATEGORY_SPACE": _SPACES,
    "CATEGORY_NOT_SPACE": complement(_ALL_SPACES),
}


class RegexError(ValueError):
    """The text is no regex, or none that an expression can say."""


def read_regex(regex: str, flags: str = "") -> Expr:
    """Return a regex as an expression.

    Args:
        flags: letters, as behind the last slash of a regex in Lark.

    Raises:
        RegexError: it is no regex, or cannot be an expression.
    """
    if odd := set(flags) - set(_FLAGS):
        raise RegexError(f"the flag {min(odd)} of a regex is not supported")
    number = 0
    for flag in flags:
        number |= _FLAGS[flag]
    try:
        parsed = sre.parse(regex, number)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise RegexError(f"not a regex that is supported: {error}") from None
    return _sequence(parsed, parsed.state.flags)


def _sequence(parsed: Iterable[tuple[Any, Any]], flags: int) -> Expr:
    items = tuple(_item(str(op), given, flags) for op, given in parsed)
    return items[0] if len(items) == 1 else Seq(items)


def _item(op: str, given: Any, flags: int) -> Expr:
    match op:
        case "LITERAL":
            return _chars([(given, given)], flags)
        case "NOT_LITERAL":
            return Chars(complement(_chars([(given, given)], flags).ranges))
        case "ANY":
            return Chars(((0, LAST),) if flags & re.DOTALL else complement(((10, 10),)))
        case "IN":
            return _class(given, flags)
        case "BRANCH":
            return Alt(tuple(_sequence(option, flags) for option in given[1]))
        case "SUBPATTERN":
            _, more, less, inner = given
            return _sequence(inner, flags & ~less | more)
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, most, inner = given
            bound = None if most is sre.MAXREPEAT else int(most)
            if max(least, bound or 0) > MOST_TIMES:
                raise RegexError(f"a repetition of more than {MOST_TIMES} times")
            return Rep(_sequence(inner, flags), int(least), bound)
        case "AT":
            raise RegexError("an anchor within a grammar is not supported")
    raise RegexError(f"{op.lower().replace('_', ' ')} in a regex is not supported")


def _class(given: list[tuple[Any, Any]], flags: int) -> Expr:
    ranges: list[tuple[int, int]] = []
    categories: list[tuple[int, int]] = []
    negated = False
    for kind, value in given:
        match str(kind):
            case "NEGATE":
                negated = True
            case "LITERAL":
                ranges.append((value, value))
            case "RANGE":
                ranges.append(value)
            case _:
                categories += _CATEGORIES[str(value)]
    chars = merge([*_chars(ranges, flags).ranges, *categories])
    found = complement(chars) if negated else chars
    if not found:
        raise RegexError("a class of no characters")
    return Chars(found)


def _chars(ranges: list[tuple[int, int]], flags: int) -> Chars:
    if not flags & re.IGNORECASE:
        return Chars(merge(ranges))
    cases = [
        ord(case)
        for first, last in ranges
        if last - first < _WIDEST
        for point in range(first, last + 1)
        for case in (chr(point).lower(), chr(point).upper())
        if len(case) == 1
    ]
    return Chars(merge([*ranges, *((point, point) for point in cases)]))
