"""Grammars with random sampling: any token that the mask allows may be drawn."""

from __future__ import annotations

import json
import logging
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.parameters import Grammar
from mlxsrv.prompts.grammars import grammar
from mlxsrv.prompts.grammars.grammar import CompiledGrammar, GrammarCompiler
from mlxsrv.prompts.grammars.specs import GrammarSpec, tool_grammar
from tests.support.effort import examples
from tests.support.grammars import (
    CITY,
    JSON_OBJECT,
    PADDED,
    SCHEMAS,
    TOOLS,
    Model,
    Schema,
    model,
    strict_json,
)
from tests.support.tiny import VOCABULARY
from tests.text.conftest import sentencepiece, wordpiece  # noqa: F401 (fixtures)

__all__ = ["model"]

pytestmark = pytest.mark.usefixtures("near_sandbox")


@pytest.mark.slow
@settings(max_examples=examples(60, usual=10))
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_text_that_ends_is_valid_json_of_its_schema(
    model: Model, schema: Schema, seed: int
) -> None:
    try:
        template = model.schema(schema)
    except InvalidRequest as error:
        # what random bounds make impossible together, say a pattern in fewer characters
        assume("nsatisfiable" not in error.message)
        raise
    Draft202012Validator(schema).validate(strict_json(model.write(template, seed)))


@pytest.mark.parametrize("seed", range(10))
def test_a_json_object_is_any_object(model: Model, seed: int) -> None:
    assert isinstance(strict_json(model.write(model.compile(JSON_OBJECT), seed)), dict)


def test_recursive_schemas_end(model: Model) -> None:
    tree: Schema = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    template = model.schema(tree)
    for seed in range(10):
        Draft202012Validator(tree).validate(strict_json(model.write(template, seed)))


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('{"city":"Oslo","days":3}', True),
        ('{"city": "Oslo", "days": 3}', True),
        ('{\n  "city": "Oslo",\n  "days": 3\n}', True),
        ('{"city":  "Oslo", "days": 3}', False),
        ('{\n\n  "city": "Oslo", "days": 3}', False),
        (' {"city":"Oslo","days":3}', False),
        ('{"days":3,"city":"Oslo"}', False),  # the schema's order is the order
        ('{"city":"Oslo","days":15}', False),
        ('{"city":"Oslo","days":3,"more":1}', False),
    ],
)
def test_whitespace_is_free_within_bounds(model: Model, text: str, allowed: bool) -> None:
    constraint = model.schema(CITY | {"x-guidance": {"whitespace_flexible": True}}).constraint()
    tokens = model.encode(text)
    fits = 0
    while fits < len(tokens) and tokens[fits] in model.allowed(constraint):
        constraint.accept(tokens[fits])
        fits += 1
    assert (fits == len(tokens)) == allowed
    assert (model.allowed(constraint) == model.ends) == allowed


def test_json_of_a_sentencepiece_tokenizer(sentencepiece: Any) -> None:  # noqa: F811
    size = len(sentencepiece)
    model = Model(sentencepiece, size, [sentencepiece.convert_tokens_to_ids("</s>")])
    for seed in range(10):
        text = model.write(model.schema(CITY), seed)
        Draft202012Validator(CITY).validate(strict_json(text))


# The other kinds.


@pytest.mark.parametrize(
    "regex",
    [r"[a-c]{2,9}", r"(yes|no|[0-9]+(\.[0-9]+)?) ?", r'"(\\.|[^"\\\n]){0,8}"', "a/b|ж*😀", ""],
)
@pytest.mark.parametrize("seed", range(5))
def test_a_regex_matches_the_whole_text(model: Model, regex: str, seed: int) -> None:
    assert re.fullmatch(regex, model.write(model.compile(GrammarSpec("regex", regex)), seed))


@settings(max_examples=examples(50))
@given(choices=st.lists(st.text(max_size=10), min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_a_choice_is_one_of_the_choices(model: Model, choices: list[str], seed: int) -> None:
    spec = GrammarSpec("choice", json.dumps(choices, ensure_ascii=False))
    assert model.write(model.compile(spec), seed) in choices


def test_every_choice_can_be_made(model: Model) -> None:
    choices = ["yes", "yesterday", "no", "<think>", "\x7f"]
    template = model.compile(GrammarSpec("choice", json.dumps(choices)))
    assert {model.write(template, seed) for seed in range(200)} == set(choices)


@pytest.mark.parametrize("seed", range(5))
def test_a_lark_grammar(model: Model, seed: int) -> None:
    lark = 'start: sum\nsum: NUMBER | NUMBER " + " sum\nNUMBER: /[1-9][0-9]{0,3}/'
    text = model.write(model.compile(GrammarSpec("lark", lark)), seed)
    assert all(re.fullmatch("[1-9][0-9]{0,3}", number) for number in text.split(" + "))


@pytest.mark.parametrize("many", [False, True])
def test_tools_are_called_and_nothing_else(model: Model, many: bool) -> None:
    start, end = "<tool_call>", "</tool_call>"
    template = model.compile(tool_grammar(list(TOOLS.items()), "hermes", many=many))
    call = re.compile(re.escape(start) + r"\n(\{.*?\})\n" + re.escape(end) + r"(\n|\Z)", re.DOTALL)
    called = []
    for seed in range(20):
        tokens = model.draw(template.constraint(), seed)
        text = model.decode(tokens)
        assert tokens[0] == model.id(start)
        assert tokens[-1] == model.id(end)
        assert call.sub("", text) == ""
        assert not text.endswith("\n")
        calls = [strict_json(match[1]) for match in call.finditer(text)]
        assert (len(calls) >= 1) if many else (len(calls) == 1)
        for use in calls:
            assert list(use) == ["name", "arguments"]
            assert isinstance(use["arguments"], dict)
            Draft202012Validator(TOOLS[use["name"]]).validate(use["arguments"])
            called.append(use["name"])
    assert set(called) == set(TOOLS)
    assert len(called) > 20 or not many


def test_calls_are_written_as_models_write_them(model: Model) -> None:
    spec = tool_grammar(list(TOOLS.items()), "hermes", many=True)
    constraint = model.compile(spec).constraint()
    call = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
    model.feed(constraint, model.encode(f"<tool_call>\n{call}\n</tool_call>"))
    assert model.allowed(constraint) == model.ends | {model.id("Ċ")}  # another call may follow
    model.feed(constraint, model.encode(f"\n<tool_call>\n{call}\n</tool_call>"))


def test_where_tools_may_be_called_an_answer_may_come_instead(model: Model) -> None:
    otherwise = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    spec = tool_grammar(list(TOOLS.items()), "hermes", many=False, otherwise=otherwise)
    template = model.compile(spec)
    answers = []
    for seed in range(40):
        text = model.decode(model.draw(template.constraint(), seed))
        if text.startswith("<tool_call>"):
            assert strict_json(text[11:-12])["name"] in TOOLS
        else:
            answers.append(text)
            Draft202012Validator(otherwise).validate(strict_json(text))
    assert 0 < len(answers) < 40


def test_a_call_needs_a_tool() -> None:
    with pytest.raises(ValueError, match="tool"):
        tool_grammar([], "hermes", many=False)


# Ends.


def test_a_finished_grammar_allows_all_end_tokens_and_nothing_else(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    constraint = model.compile(GrammarSpec("regex", "ab?")).constraint()
    assert len(model.ends) == 2
    assert not model.allowed(constraint) & model.ends
    constraint.accept(model.id("a"))
    assert model.allowed(constraint) == model.ends | {model.id("b")}
    constraint.accept(model.id("b"))
    assert model.allowed(constraint) == model.ends
    for token in sorted(model.ends):
        constraint.accept(token)
        assert model.allowed(constraint) == model.ends
    assert caplog.messages == []


def test_tokens_that_do_not_exist_are_never_allowed(model: Model) -> None:
    constraint = model.compile(GrammarSpec("lark", "start: <[*]> <[*]>")).constraint()
    assert model.allowed(constraint) == set(range(VOCABULARY))
    constraint = model.compile(GrammarSpec("regex", "(?s:.*)")).constraint()
    assert max(model.allowed(constraint)) < VOCABULARY


def test_a_grammar_of_tokens_that_do_not_exist_ends(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    constraint = model.compile(GrammarSpec("lark", f'start: <[{PADDED - 1}]> "a"')).constraint()
    assert model.allowed(constraint) == model.ends
    assert "grammar abandoned" in caplog.text


def test_a_tokenizer_with_more_tokens_than_the_model(model: Model) -> None:
    """Such as a text model's that knows the token for an image."""
    end, other = sorted(model.ends)
    small = Model(model.tokenizer, end + 1, model.ends)
    assert small.vocabulary <= other < VOCABULARY
    text = small.write(small.schema(CITY))
    Draft202012Validator(CITY).validate(strict_json(text))
    constraint = small.compile(GrammarSpec("lark", "start: <[*]>")).constraint()
    assert small.allowed(constraint) == set(range(end + 1))


def test_a_token_out_of_place_ends_the_text(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mlxsrv")
    constraint = model.schema(CITY).constraint()
    constraint.accept(model.id("a"))
    for _ in range(3):
        assert model.allowed(constraint) == model.ends
        constraint.accept(model.id("a"))
    assert caplog.messages == ["grammar abandoned"]


# Reasoning.


def test_the_grammar_waits_for_the_end_of_a_think_block(model: Model) -> None:
    end = (model.id("</think>"),)
    constraint = model.compile(GrammarSpec("regex", "a|b")).constraint(end)
    everything = set(range(-(-PADDED // 32) * 32))
    for token in [*model.encode('Hm, {"b'), model.id("<think>"), model.id("a")]:
        assert model.allowed(constraint) == everything - model.ends
        constraint.accept(token)
    constraint.accept(*end)
    assert model.allowed(constraint) == {model.id("a"), model.id("b"), model.id("Ċ")}
    constraint.accept(model.id("b"))
    assert model.allowed(constraint) == model.ends


def test_two_newlines_may_come_after_the_think_block_and_no_more(model: Model) -> None:
    (newline,) = model.encode("\n")
    end = (model.id("</think>"),)
    constraint = model.compile(GrammarSpec("regex", "x+")).constraint(end)
    model.feed(constraint, [*end, newline, newline])
    assert newline not in model.allowed(constraint)
    model.feed(constraint, model.encode("x"))
    assert newline not in model.allowed(constraint)
    assert model.allowed(constraint) >= model.ends


def test_a_newline_that_the_grammar_asks_for_is_the_grammars(model: Model) -> None:
    (newline,) = model.encode("\n")
    end = (model.id("</think>"),)
    constraint = model.compile(GrammarSpec("regex", "\n")).constraint(end)
    model.feed(constraint, [*end, newline])
    assert model.allowed(constraint) == model.ends


def test_a_think_end_of_several_tokens(model: Model) -> None:
    a, b = model.id("a"), model.id("b")
    constraint = model.compile(GrammarSpec("regex", "c")).constraint((a, a, b))
    for token in (a, b, b, a, a, a):
        constraint.accept(token)
        assert len(model.allowed(constraint)) > VOCABULARY
    constraint.accept(b)
    model.feed(constraint, model.encode("c"))
    assert model.allowed(constraint) == model.ends


def test_without_a_think_block_none_can_be_opened(model: Model) -> None:
    constraint = model.compile(GrammarSpec("regex", "(?s:.*)")).constraint()
    assert not model.allowed(constraint) & {model.id("<think>"), model.id("</think>")}


# The cache, and use by several at once.


def test_a_grammar_is_compiled_once_while_it_is_in_use(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "_CACHED", 2)
    few = GrammarCompiler(model.tokenizer, vocabulary=PADDED, end_tokens=model.ends)

    def compiled(text: str) -> CompiledGrammar:
        return few.compile(GrammarSpec("choice", json.dumps([text])), param="p")

    first = compiled("a")
    assert compiled("a") is first
    compiled("b")
    assert compiled("a") is first
    compiled("c")
    compiled("d")
    assert compiled("a") is first  # somebody holds it
    assert few.recall(Grammar(first.grammar.text, thinking=True)) is first
    gone = weakref.ref(first)
    del first
    assert compiled("a") is gone()
    compiled("b")
    compiled("c")
    assert gone() is None


@given(turns=st.lists(st.integers(0, 2), max_size=60), data=st.data())
@settings(max_examples=examples(30))
def test_constraints_of_one_template_know_nothing_of_each_other(
    model: Model, turns: list[int], data: st.DataObject
) -> None:
    template = model.schema(CITY)
    texts = [model.draw(template.constraint(), seed) for seed in (1, 2, 3)]
    constraints = [template.constraint() for _ in texts]
    places = [0, 0, 0]
    for turn in turns:
        if places[turn] < len(texts[turn]):
            model.feed(constraints[turn], [texts[turn][places[turn]]])
            places[turn] += 1
    for constraint, text, place in zip(constraints, texts, places, strict=True):
        model.feed(constraint, text[place:])
        assert model.allowed(constraint) >= model.ends


@pytest.mark.slow
def test_many_threads_may_compile(model: Model) -> None:
    grammars = GrammarCompiler(model.tokenizer, vocabulary=PADDED, end_tokens=model.ends)
    specs = [GrammarSpec("regex", f"[a-c]{{{n}}}") for n in range(1, 5)] * 6

    def write(spec: GrammarSpec) -> str:
        template = grammars.compile(spec, param="p")
        return model.decode(model.draw(template.constraint()))

    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(write, specs))
    for spec, text in zip(specs, texts, strict=True):
        assert re.fullmatch(spec.text, text)
