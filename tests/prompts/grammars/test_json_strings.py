"""Grammars of free texts in JSON strings: what a JSON parser reads is a text of the grammar."""

from __future__ import annotations

import functools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from mlxsrv.prompts.grammars.json_strings import input_lark, read_input
from mlxsrv.prompts.grammars.specs import GrammarRefused
from tests.support.effort import examples

BYTES = LLTokenizer("byte")
END = int(BYTES.eos_token)

# As Codex sends it for its tool apply_patch.
APPLY_PATCH = """\
start: begin_patch environment_id? hunk+ end_patch
begin_patch: "*** Begin Patch" LF
environment_id: "*** Environment ID: " filename LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = """\
*** Begin Patch
*** Add File: src/né "w".py
+print("C:\\\\temp\\n")
+
*** Update File: a.py
*** Move to: b.py
@@ def f():
-\tx = 'old'
+\tx = "new"
 \x1f
*** End of File
*** Delete File: c.txt
*** End Patch"""


@functools.cache
def matcher(grammar: str) -> LLMatcher:
    """The grammar in a JSON string."""
    text = "\n".join(['start: "\\"" input "\\""', *input_lark(grammar, "input")])
    made = LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": text}]}), log_level=0)
    assert made.get_error() == ""
    return made


def takes(made: LLMatcher, text: str, *, ascii_only: bool = False) -> bool:
    data = [*json.dumps(text, ensure_ascii=ascii_only).encode()]
    walker = made.deep_copy()
    return walker.try_consume_tokens(data) == len(data) and walker.is_accepting()


def write(made: LLMatcher, seed: int) -> str | None:
    """A random text of the grammar; None if it does not end soon."""
    dice, walker, data = np.random.default_rng(seed), made.deep_copy(), bytearray()
    while len(data) < 100:
        mask = np.frombuffer(walker.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if walker.is_accepting():
            assert not walker.is_error()
            return str(json.loads(data.decode(errors="replace")))
        ending = [token for token in allowed if token == ord('"') and data[-1:] != b"\\"]
        token = int(dice.choice(ending if ending and dice.random() < 0.3 else allowed))
        assert walker.consume_token(token)
        data.append(token)
    return None


def test_codex_patches() -> None:
    made = matcher(APPLY_PATCH)
    assert len(input_lark(APPLY_PATCH, "input")) == 1, "it is regular, so it is one regex"
    for good in (PATCH, PATCH + "\n", "*** Begin Patch\n*** Delete File: a\n*** End Patch"):
        assert takes(made, good)
    for bad in ("", PATCH[:-1], PATCH.replace("+print", "print"), PATCH.replace("\n", "\r", 1)):
        assert not takes(made, bad)


REGEXES = [
    r"[^a]*",
    r".+",
    r"(?s:.)*",
    r"a\"?\\*[\t\n\x00-\x08]+",
    r"[\s\S]{2,3}",
    r"\w+\W\d*\D",
    r"(?i:ab\x1f[x-z\"])+|\n",
    r"(a|[^\"\\])*?\\",
    r"\S{3}|[^\d\s]",
]


@pytest.mark.parametrize("regex", REGEXES)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_what_comes_out_of_the_string_is_a_text_of_the_regex(
    regex: str, data: st.DataObject
) -> None:
    slashes = regex.replace("/", r"\/")
    made = matcher(f"start: /{slashes}/")  # compiled once
    whole = re.compile(regex, re.ASCII)
    text = write(made, data.draw(st.integers(0, 2**32)))
    if text is not None and "\ufffd" not in text:  # bytes of half a character are no text
        assert whole.fullmatch(text)
    text = data.draw(st.from_regex(whole, fullmatch=True, alphabet=st.characters(codec="utf-8")))
    wide = {"\x1c", "\x1d", "\x1e", "\x1f", "\x85", "\xa0"} | {
        chr(c) for c in range(0x1680, 0xFF00)
    }
    if r"\S" not in regex or not wide & set(text):
        assert takes(made, text)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "a"i "\\n"', ["a\n", "A\n"], ["a", "a\\n", "a\nN"]),
        ('start: "a".."c" ~ 2..3', ["ab", "ccc"], ["a", "abcd", "ad"]),
        ('start: A{2} ["x"]\nA: "q" | /\\//', ["qq", "/q", "qqx"], ["q", "qqxx"]),
        ('?start: x | _Y\n!x: "1" -> a\n  | "2" -> b\n_Y.2: "3"\n', ["1", "2", "3"], ["", "12"]),
        ("start: WORD (COMMA WORD)*\nCOMMA: \",\"\n%import common.WORD\n%ignore /[ \\t]/",
         ["a", " a , b ", "a\t,b"], ["a,", "a,,b", "a b"]),
        ('start: "(" start? ")"\n// nested', ["()", "((()))"], ["(()", "", "())"]),
        ('start: s\ns: "\\"" (s | "\\\\")* "\\""', ['""', '"\\"""'], ['"', '"\\']),
        ('start: ""', [""], ["a"]),
        ("start: N\n%import common (NUMBER, INT)\nN: INT | NUMBER", ["1", "1.5e3"], ["x"]),
        ("start: N\n%import common.NUMBER -> N # comment", ["1.5"], ["+1"]),
    ],
)  # fmt: skip
def test_what_lark_has(grammar: str, good: list[str], bad: list[str]) -> None:
    made = matcher(grammar)
    assert [text for text in good if not takes(made, text)] == []
    assert [text for text in bad if takes(made, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root: "a"', "there is no rule start"),
        ("start: x", "there is no rule x"),
        ('start: "a', 'line 1: " is not expected'),
        ('start: "a"\nstart: "b"', "line 2: start is not the name of a new rule"),
        ('start: ("a"', "line 1: expected )"),
        ('start: "a" )', "line 1: ) is not the name of a new rule"),
        ('start: "a" ~ 3..2', "line 1: a repetition with its bounds in the wrong order"),
        ('start: "a" ~ 5000', "line 1: a repetition of more than 2000 times"),
        ('start: "ab".."c"', "line 1: a range needs two characters in order"),
        ('start: "\\q"', "line 1: unknown escape \\q"),
        ("start: /a(?=b)/", "line 1: assert in a regex is not supported"),
        ("start: /^a/", "line 1: an anchor within a grammar is not supported"),
        ("start: /(a)\\1/", "line 1: groupref in a regex is not supported"),
        ("start: /\\p{L}/", "not a regex that is supported: bad escape \\p"),
        ("start: /[^\\s\\S\x0b]/l", "the flag l of a regex is not supported"),
        ('start: a{"x"}', "line 1: expected a number"),
        ("start: a{b}\na{x}: x", "line 1: templates are not supported"),
        ("%import python.x", "line 1: only common terminals can be imported"),
        ("%import common.X", "line 1: common.X is not known"),
        ("start: %json {}", "line 1: %json is not supported"),
        ("%declare A", "line 1: %declare is not supported"),
        ("start: <tool>", "line 1: < is not expected"),
        ("start:", ""),
        ("(" * 200, "( is not the name"),
        ("start: " + "(" * 200, "parentheses nested more than 100 levels deep"),
        ("x" * 40_000, "40000 bytes are too many; at most 32768"),
    ],
)
def test_what_is_refused(grammar: str, reason: str) -> None:
    if not reason:
        assert read_input(grammar)
        return
    with pytest.raises(GrammarRefused) as refused:
        read_input(grammar)
    assert reason in str(refused.value)


@given(
    st.text()
    | st.lists(st.sampled_from([*'()[]{}|:?*+~.,/"% \n', "start", "A", "->", "a"])).map("".join)
)
def test_any_text_is_a_grammar_or_refused(text: str) -> None:
    try:
        read_input("start: " + text)
    except GrammarRefused as refused:
        assert "\n" not in str(refused)  # noqa: PT017
