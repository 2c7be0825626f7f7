"""GBNF grammars: how they are read, and that their translation describes the same texts."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from mlxsrv.prompts.grammars.gbnf import GBNFError, translate_gbnf
from tests.support.effort import examples

BYTES = LLTokenizer("byte")


def matcher(lark: str) -> LLMatcher:
    return LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0)


def accepts(compiled: LLMatcher, text: str) -> bool:
    compiled.reset()
    tokens = list(text.encode())
    return bool(compiled.try_consume_tokens(tokens) == len(tokens) and compiled.is_accepting())


@pytest.mark.parametrize(
    ("gbnf", "texts", "others"),
    [
        ('root ::= "ab" "c"?', ["ab", "abc"], ["a", "abcc", ""]),
        ('root ::= [a-c]{2} [^a-c]{1,2} "x"{2,}', ["ab1xx", "cc\nxxxx"], ["ab1x", "a1xx"]),
        ("root ::= .{2}", ["\n😀", "ab"], ["a", "abc"]),
        ("root ::= [-a] [a-] [\\]\\\\^]", ["--]", "aa\\", "-a^"], ["b-]"]),
        ("root ::= [a-zc-d] [^a-zc-d]", ["z1", "dé"], ["11", "zz"]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\t\\"\\\\"', ['Aé😀\t"\\'], ["Aé😀"]),
        ('root ::= a-b | c_d\na-b ::= "1"\nc_d ::= "2"', ["1", "2"], ["12"]),
        ('root ::= # one\n  "a" |\n  "b" # two\n  | "c"\n\n\n', ["a", "b", "c"], ["ab"]),
        ('root ::= ("a"\n  "b" # in\n | "c")+\r\n', ["ab", "cab"], ["", "a"]),
        ('root ::= "a" | ', ["a", ""], ["aa"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "(" root ")" | [a-z]*', ["((ab))", ""], ["(ab", "ab)"]),
        ('root ::= word "b"\nword ::= [a-z] word | [a-z]', ["aab", "bbb"], ["b", "ba"]),
        ('root ::= root "+" root | [0-9]', ["1", "1+2+3"], ["1+"]),
        ('root ::= x x\nx ::= "ab" "d" | "a" "bc" | "(" x ")"', ["abcabd", "(abd)abc"], ["abcab"]),
        ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
        ('root ::= "a"**', ["", "aa"], ["b"]),
    ],
)
def test_a_grammar_describes_its_texts(gbnf: str, texts: list[str], others: list[str]) -> None:
    compiled = matcher(translate_gbnf(gbnf))
    assert not compiled.get_error()
    assert [text for text in texts if not accepts(compiled, text)] == []
    assert [text for text in others if accepts(compiled, text)] == []


@pytest.mark.parametrize(
    ("gbnf", "reason"),
    [
        ("", "there is no rule root"),
        ('roots ::= "a"', "there is no rule root"),
        ('root ::= "a" b', "there is no rule b"),
        ('root ::= "a', "line 1: a text or class without an end"),
        ("root ::= [a", "line 1: a text or class without an end"),
        ("root ::= []", "line 1: a class of no characters"),
        ("root ::= [z-a]", "line 1: a range of characters that ends before it begins"),
        ('root ::= "a"\nx ::= "\\q"', "line 2: unknown escape \\q"),
        ('root ::= "\\ud800"', "is no character"),
        ('root ::= "a"{2,1}', "in the wrong order"),
        ('root ::= "a"{,3}', "expected {m}, {m,} or {m,n}"),
        ('root ::= "a"{2001}', "more than 2000 times"),
        ('root ::= ("a"', "line 1: expected )"),
        ('root ::= "a")', "line 1: expected the end of the rule"),
        ('root = "a"', "line 1: expected ::="),
        ("root ::= <think>", "line 1: expected the end of the rule"),
        ("root ::= " + "(" * 101, "nested more than 100 levels deep"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_line(gbnf: str, reason: str) -> None:
    with pytest.raises(GBNFError) as caught:
        translate_gbnf(gbnf)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("gbnf", "text"),
    [
        ("root ::= .{2}", "a\n"),
        ('root ::= x x\nx ::= "ab" "d" | "a" "bc" | "(" x ")"', "abcabd"),
    ],
)
def test_llguidances_own_converter_reads_it_wrongly(gbnf: str, text: str) -> None:
    """If it reads this and all grammars above rightly one day, ours can go."""
    assert accepts(matcher(translate_gbnf(gbnf)), text)
    assert not accepts(matcher(gbnf_to_lark(gbnf)), text)


# Against the definition.

CHARS = "abé"


class Chars(msgspec.Struct, frozen=True):
    """One character of a class; ranges of code points, both ends included."""

    ranges: tuple[tuple[int, int], ...]


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


def written(expr: Expr) -> str:
    """The expression in GBNF."""
    match expr:
        case Chars(ranges):
            return "[" + "".join(f"{chr(a)}-{chr(b)}" for a, b in ranges) + "]"
        case Ref(name):
            return name
        case Rep(item, least, most):
            return f"({written(item)}){{{least},{'' if most is None else most}}}"
        case Seq(items):
            return "(" + (" ".join(map(written, items)) or '""') + ")"
        case Alt(options):
            return "(" + " | ".join(map(written, options)) + ")"


class Reference:
    """Return where matches of a text may end, by definition. Rules nest up to `depth` levels."""

    def __init__(self, text: str, rules: Mapping[str, Expr]) -> None:
        self._text = text
        self._rules = rules
        self._known: dict[tuple[Expr, int, int], frozenset[int]] = {}

    def ends(self, expr: Expr, at: int, depth: int) -> frozenset[int]:
        key = (expr, at, depth)
        if key not in self._known:
            self._known[key] = frozenset(self._find(expr, at, depth))
        return self._known[key]

    def _find(self, expr: Expr, at: int, depth: int) -> set[int]:
        match expr:
            case Chars(ranges):
                fits = self._text[at : at + 1]
                return {at + 1} if fits and any(a <= ord(fits) <= b for a, b in ranges) else set()
            case Ref(name):
                return set(self.ends(self._rules[name], at, depth - 1)) if depth else set()
            case Seq(items):
                places = {at}
                for item in items:
                    places = self._after(item, places, depth)
                return places
            case Alt(options):
                return {end for option in options for end in self.ends(option, at, depth)}
            case Rep(item, least, most):
                reached, places = set(), {at}
                for count in range(len(self._text) + least + 1):
                    if count >= least:
                        reached |= places
                    if count == most:
                        break
                    places = self._after(item, places, depth)
                return reached

    def _after(self, item: Expr, places: set[int], depth: int) -> set[int]:
        return {end for place in places for end in self.ends(item, place, depth)}


def texts() -> Iterator[str]:
    for length in range(4):
        yield from map("".join, itertools.product(CHARS, repeat=length))


LEAVES: st.SearchStrategy[Expr] = st.sampled_from(
    [
        *(Chars(((ord(char), ord(char)),)) for char in CHARS),
        Chars(((ord("a"), ord("b")),)),
        Chars(((ord("b"), ord("é")),)),
        Seq((Chars(((97, 97),)), Chars(((98, 98),)))),
    ]
)
EXPRS: st.SearchStrategy[Expr] = st.recursive(
    LEAVES | st.sampled_from([Ref("x"), Ref("y")]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: Seq(tuple(items))),
        st.lists(inner, min_size=1, max_size=3).map(lambda items: Alt(tuple(items))),
        st.builds(Rep, inner, st.integers(0, 2), st.none() | st.integers(2, 3)),
    ),
    max_leaves=6,
)


@settings(max_examples=examples(60), deadline=None)
@given(rules=st.fixed_dictionaries({"root": EXPRS, "x": EXPRS, "y": LEAVES}))
def test_the_translation_describes_the_same_texts(rules: Mapping[str, Expr]) -> None:
    gbnf = "\n".join(f"{name} ::= {written(rule)}" for name, rule in rules.items())
    compiled = matcher(translate_gbnf(gbnf))
    if compiled.get_error():  # a rule that never ends
        return
    for text in texts():
        reference = Reference(text, rules)
        if accepts(compiled, text):
            assert len(text) in reference.ends(rules["root"], 0, depth=12), (gbnf, text)
        else:
            assert len(text) not in reference.ends(rules["root"], 0, depth=6), (gbnf, text)


def test_repetitions_of_repetitions_take_time_in_proportion_to_the_text() -> None:
    """Eight times the text took sixty times as long: 32 KiB of signs, half a minute."""

    def seconds(signs: int) -> float:
        begun = time.thread_time()
        translate_gbnf('root ::= "a"' + "*" * signs)
        return time.thread_time() - begun

    assert seconds(16_000) < 30 * max(seconds(2_000) for _ in range(3))
