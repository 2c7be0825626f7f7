"""Calls with tagged arguments, in every format that has them."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlxsrv.text.calls import CallFormat, Tools, WrittenCall
from mlxsrv.text.lark import Lark
from mlxsrv.text.marks import SPELLED
from mlxsrv.text.tagged_formats import MUSE, TAGGED_FORMATS
from tests.support.reading import read, read_each_way, tokens

TEXT = {"type": "string"}
WRITE = {"properties": {"path": TEXT, "text": TEXT}, "required": ["path"]}
RUN = {
    "properties": {
        "opts": {"type": "object"},
        "n": {"type": "integer"},
        "on": {"type": ["boolean", "null"]},
        "any": {"type": ["string", "integer"]},
    }
}
TOOLS = Tools({"write": WRITE, "run": RUN, "now": {"properties": {}}})
WRITTEN = [
    WrittenCall("write", {"path": "a b", "text": ' l1\n\t"l2" é {</b> '}),
    WrittenCall("now", {}),
    WrittenCall("run", {"opts": {"a": ["<x>", None]}, "n": 5, "on": True, "any": "x"}),
]
HEARD = [(call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in WRITTEN]
WROTE = ("write", '{"path": "a"}')
NOW = ("now", "{}")


# A frame reads the header before its blocks.
OPENED = [each for each in TAGGED_FORMATS if each is not MUSE]


def named(format: CallFormat) -> str:
    return format.name


@pytest.mark.slow
@pytest.mark.parametrize("format", OPENED, ids=named)
def test_calls_as_the_model_writes_them(format: CallFormat) -> None:
    for count in (1, 3):
        assert read_each_way(format, format.spell(WRITTEN[:count]), TOOLS) == HEARD[:count]
    text = f"a\n\n{format.spell(WRITTEN[1:2])}"
    assert read_each_way(format, text, TOOLS) == ["a", HEARD[1]]


@pytest.mark.slow
@pytest.mark.parametrize("format", OPENED, ids=named)
def test_a_call_that_is_cut_anywhere_gives_the_beginning_of_the_whole_one(
    format: CallFormat,
) -> None:
    whole = format.spell([WRITTEN[0], WRITTEN[2]])
    for marks in (SPELLED, tokens(format)):
        text = marks.show(whole)
        for place in range(1, len(text)):
            heard = read(format, [text[:place]], TOOLS, marks=marks, cut=True)
            assert len(heard) <= 2
            for part, (name, arguments) in zip(heard, [HEARD[0], HEARD[2]], strict=False):
                if not isinstance(part, str):
                    assert part[0] == name
                    assert arguments.startswith(part[1])


@pytest.mark.parametrize("format", OPENED, ids=named)
def test_a_call_without_its_last_closers_is_whole(format: CallFormat) -> None:
    """An answer that ends early has lost markers only, or it is not whole."""
    text = format.spell(WRITTEN[2:])
    ends = [place for place in range(len(text)) if read(format, [text[:place]], TOOLS) == HEARD[2:]]
    assert ends == list(range(ends[0], len(text)))
    assert '"any": "x"' not in text[: ends[0]]


@pytest.mark.parametrize("format", TAGGED_FORMATS, ids=named)
def test_a_grammar_holds_what_the_model_writes(format: CallFormat) -> None:
    tokenizer = LLTokenizer("byte")
    lark = Lark(SPELLED, json.dumps)
    rules = format.rules([*TOOLS.schemas.items()], lark)

    def follows(rule: str, text: str) -> bool:
        grammar = json.dumps({"grammars": [{"lark_grammar": lark.grammar(rule)}]})
        matcher = LLMatcher(tokenizer, grammar)
        assert not matcher.get_error()
        taken = matcher.try_consume_tokens(tokenizer.tokenize_str(text))
        return taken == len(text.encode()) and matcher.is_accepting()

    for call in WRITTEN:
        assert follows(rules.one, format.spell([call])), call
        assert follows(rules.many, format.spell([call]))
    assert follows(rules.many, format.spell(WRITTEN))
    assert follows(rules.one, format.spell([WrittenCall("write", {"text": "x", "path": ""})]))
    refused: list[tuple[str, dict[str, Any]]] = [
        ("write", {}),
        ("write", {"text": "x"}),
        ("write", {"path": "x", "more": "y"}),
        ("run", {"n": "x"}),
        ("other", {"path": "x"}),
    ]
    for name, arguments in refused:
        assert not follows(rules.one, format.spell([WrittenCall(name, arguments)])), arguments
    one = format.spell(WRITTEN[:1])
    for opener, rule in rules.behind.items():
        assert not follows(rule, "")
        if one.startswith(opener):
            assert follows(rule, one.partition(opener)[2])
