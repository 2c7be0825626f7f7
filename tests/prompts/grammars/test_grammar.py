"""Grammars with random sampling: any token that the mask allows may be drawn."""

from __future__ import annotations

import json
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from mlx_lm.utils import load_tokenizer
from transformers import PreTrainedTokenizer

from mlxsrv.errors import InvalidRequest, UnsupportedParameter
from mlxsrv.generation.parameters import Constraint, Grammar, Mask
from mlxsrv.prompts.grammars import grammar, sandbox
from mlxsrv.prompts.grammars.grammar import CompiledGrammar, GrammarCompiler
from mlxsrv.prompts.grammars.specs import GrammarSpec, tool_grammar
from tests.support.effort import examples
from tests.support.fixtures import ModelFolder
from tests.support.tiny import END_TOKENS, VOCABULARY
from tests.text.conftest import sentencepiece, wordpiece  # noqa: F401 (fixtures)

pytestmark = pytest.mark.served  # a process of its own tries each grammar

Schema = dict[str, Any]

PADDED = 600  # logits for more tokens than there are, as published models have
PATIENCE = 150  # tokens after which a draw goes for the end wherever it can

JSON_OBJECT = GrammarSpec("json_object")
CITY: Schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
}


class Model:
    """A tokenizer and its grammars: what a mask is for, without the model."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.ends = frozenset(end_tokens)
        self.grammars = GrammarCompiler(tokenizer, vocabulary=vocabulary, end_tokens=self.ends)
        texts = ((i, self.decode([i])) for i in set(tokenizer.get_vocab().values()))
        self.closers = {i for i, text in texts if text[:1] in set('"}]')}

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return self.grammars.compile(spec, param="response_format")

    def schema(self, schema: Schema) -> CompiledGrammar:
        return self.compile(GrammarSpec("json_schema", json.dumps(schema)))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def id(self, token: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(token))

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))

    def allowed(self, constraint: Constraint) -> set[int]:
        mask: Mask = np.full(-(-self.vocabulary // 32), -1, dtype=np.int32)
        constraint.fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        return {int(i) for i in np.flatnonzero(bits)}

    def feed(self, constraint: Constraint, tokens: Iterable[int]) -> None:
        """Tokens that must each be allowed."""
        for token in tokens:
            assert token in self.allowed(constraint)
            constraint.accept(token)

    def draw(self, constraint: Constraint, seed: int = 0) -> list[int]:
        """Random tokens up to an end token, which is left out. Random text hardly ever closes
        what it opens, so closing is made likelier, and all but certain in the long run."""
        dice = np.random.default_rng(seed)
        drawn: list[int] = []
        while len(drawn) < 5000:
            allowed = self.allowed(constraint)
            assert allowed
            assert max(allowed) < self.vocabulary
            hurry = dice.random() < (0.95 if len(drawn) > PATIENCE else 0.4)
            wanted = (allowed & self.ends or allowed & self.closers) if hurry else set()
            token = int(dice.choice(sorted(wanted or allowed)))
            constraint.accept(token)
            if token in self.ends:
                return drawn
            drawn.append(token)
        raise AssertionError(f"no end in sight: {self.decode(drawn)[:500]}")

    def write(self, template: CompiledGrammar, seed: int = 0) -> str:
        return self.decode(self.draw(template.constraint(), seed))


@pytest.fixture(scope="module")
def model(model_folder: ModelFolder) -> Model:
    tokenizer = load_tokenizer(model_folder("qwen3"))._tokenizer
    return Model(tokenizer, PADDED, tokenizer.convert_tokens_to_ids(END_TOKENS))


def strict_json(text: str) -> Any:
    """The value, read by a parser that takes nothing but JSON, and its text as Python reads it."""
    msgspec.json.decode(text, type=msgspec.Raw)
    return json.loads(text)


# JSON schemas.

SCALARS = st.none() | st.booleans() | st.integers(-999, 999) | st.text(max_size=6)


def bounded(kind: str, bound: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    def make(low: Any, high: Any, given: int) -> Schema:
        low, high = min(low, high), max(low, high)
        bounds = {"minimum": low, "maximum": high}
        return {"type": kind} | {key: bounds[key] for key in list(bounds)[:given]}

    return st.builds(make, bound, bound, st.integers(0, 2))


def lengths(shortest: str, longest: str, most: int) -> st.SearchStrategy[Schema]:
    def make(low: int, more: int | None) -> Schema:
        return {shortest: low} | ({} if more is None else {longest: low + more})

    return st.builds(make, st.integers(0, most), st.none() | st.integers(0, most))


STRINGS: st.SearchStrategy[Schema] = st.one_of(
    lengths("minLength", "maxLength", 5).map(lambda bounds: {"type": "string"} | bounds),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]+$"},
            {"type": "string", "pattern": "b+", "maxLength": 12},
            {"type": "string", "format": "date"},
        ]
    ),
)
LEAVES: st.SearchStrategy[Schema] = st.one_of(
    STRINGS,
    bounded("integer", st.integers(-(10**6), 10**6)),
    bounded("number", st.integers(-4000, 4000).map(lambda n: n / 8)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]),
    st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
    st.just({"$ref": "#/$defs/shared"}),
)
NAMES = st.sampled_from(["a", "b", "name", "the place", "é", 'quo"te', "x/y", "Ω\n"])


def objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def make(properties: Schema, optional: int, more: bool | Schema) -> Schema:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[optional:],
            "additionalProperties": more,
        }

    fields = st.dictionaries(NAMES, inner, max_size=4)
    closed: st.SearchStrategy[bool | Schema] = st.just(False)
    return st.builds(make, fields, st.integers(0, 4), closed | inner)


def arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.builds(
        lambda items, bounds: {"type": "array", "items": items} | bounds,
        inner,
        lengths("minItems", "maxItems", 3),
    )


def unions(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})


SCHEMAS: st.SearchStrategy[Schema] = st.builds(
    lambda schema, shared: schema | {"$defs": {"shared": shared}},
    st.recursive(
        LEAVES,
        lambda inner: objects(inner) | arrays(inner) | unions(inner),
        max_leaves=8,
    ),
    STRINGS | objects(STRINGS),
)


@settings(max_examples=examples(60, usual=10))  # each starts a process
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


TOOLS: dict[str, Schema] = {
    "get_weather": CITY,
    "get": {"properties": {"n": {"type": "integer"}}, "additionalProperties": False},
    "ping": {"type": "object", "additionalProperties": False},
}


@pytest.mark.parametrize(
    ("start", "end"),
    [("<tool_call>", "</tool_call>"), ("[CALL]", "[/CALL]"), ('<f "', "\\>")],
)
@pytest.mark.parametrize("many", [False, True])
def test_tools_are_called_and_nothing_else(model: Model, start: str, end: str, many: bool) -> None:
    template = model.compile(tool_grammar(list(TOOLS.items()), start, end, many=many))
    call = re.compile(re.escape(start) + r"\n(\{.*?\})\n" + re.escape(end) + r"(\n|\Z)", re.DOTALL)
    called = []
    for seed in range(20):
        tokens = model.draw(template.constraint(), seed)
        text = model.decode(tokens)
        if start == "<tool_call>":
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
    spec = tool_grammar(list(TOOLS.items()), "<tool_call>", "</tool_call>", many=True)
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
    spec = tool_grammar(
        list(TOOLS.items()), "<tool_call>", "</tool_call>", many=False, otherwise=otherwise
    )
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
        tool_grammar([], "<tool_call>", "</tool_call>", many=False)


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


def test_a_newline_may_come_after_the_think_block_but_once(model: Model) -> None:
    (newline,) = model.encode("\n")
    end = (model.id("</think>"),)
    constraint = model.compile(GrammarSpec("regex", "x+")).constraint(end)
    model.feed(constraint, [*end, newline])
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
    assert few.find(Grammar(first.grammar.text, thinking=True)) is first
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


# What is refused.


def refusal(model: Model, spec: GrammarSpec) -> str:
    """Why the spec is refused; the message names the parameter and is one line."""
    with pytest.raises(InvalidRequest) as caught:
        model.compile(spec)
    assert caught.value.param == "response_format"
    assert type(caught.value) is InvalidRequest
    assert "\n" not in caught.value.message
    return caught.value.message.removeprefix("response_format: ")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"type": "objectx"}', "Invalid type: objectx"),
        ('{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        ('{"x-guidance": {"lenient": true}, "not": {}}', 'Unimplemented keys: ["not"]'),
        ('{"type": "string", "format": "secret"}', "Unknown format: secret"),
        ('{"pattern": "("}', "regex parse error: unclosed group"),
        ('{"$ref": "#/$defs/x"}', "Pointer '/$defs/x' does not exist"),
        ('{"$ref": "http://example.com/x"}', "not present in a registry"),
        ('{"$ref": "#"}', "nothing can satisfy it"),
        ('{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable schema: minimum"),
        ("true", "not a JSON schema: Expected `object`, got `bool`"),
        ('{"type":', "not a JSON schema: Input data was truncated"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "not a JSON schema"),
        ('{"items":' * 65 + "{}" + "}" * 65, "nested more than 64 levels deep"),
        ('{"const": "' + "x" * 2**18 + '"}', "262157 bytes are too many; at most 262144"),
    ],
)
def test_schemas_that_cannot_be_used_are_refused(model: Model, schema: str, reason: str) -> None:
    assert reason in refusal(model, GrammarSpec("json_schema", schema))


def test_a_schema_as_deep_as_allowed_is_used(model: Model) -> None:
    schema: Schema = {"const": 1}
    for _ in range(63):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    assert (
        model.write(model.schema(schema)).translate({32: "", 10: ""}) == "[" * 63 + "1" + "]" * 63
    )


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec("regex", "a("), "regex parse error: unclosed group"),
        (GrammarSpec("regex", "(?=a)a"), "look-around"),
        pytest.param(
            GrammarSpec("regex", "((a{1000}){1000}){1000}"),
            "too many expressions",
            marks=pytest.mark.long,
        ),
        (GrammarSpec("regex", "a" * 40_000), "40000 bytes are too many; at most 32768"),
        (GrammarSpec("lark", 'start: "a" b'), 'unknown name: "b"'),
        (GrammarSpec("lark", ""), "no start rule found"),
        (GrammarSpec("lark", "start: <|nope|>"), "unknown special token"),
        (GrammarSpec("lark", '{"grammars": []}'), "expecting rule, token or statement"),
        (GrammarSpec("choice", "[]"), "there must be something to choose from"),
        (
            tool_grammar([("a", {}), ("b", {"not": {}})], "<tool_call>", "</tool_call>", many=True),
            'b: Unimplemented keys: ["not"]',
        ),
    ],
)
@pytest.mark.slow
def test_grammars_that_cannot_be_used_are_refused(
    model: Model, spec: GrammarSpec, reason: str
) -> None:
    assert reason in refusal(model, spec)


def chain(length: int, step: Callable[[Schema], Schema]) -> Schema:
    """A schema whose references lead `length` levels down."""
    steps = {f"d{i}": step({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": steps | {f"d{length}": {"type": "null"}}}


@pytest.mark.parametrize(
    "step",
    [
        lambda ref: ref,
        lambda ref: {"allOf": [ref]},
        lambda ref: {"items": {"items": ref}},
        lambda ref: {"properties": {"a": ref}, "required": ["a"]},
    ],
)
def test_a_schema_that_overflows_the_compilers_stack_is_refused(
    model: Model, step: Callable[[Schema], Schema]
) -> None:
    spec = GrammarSpec("json_schema", json.dumps(chain(2000, step)))
    assert "too much for the compiler" in refusal(model, spec)
    model.schema(chain(50, step))


def test_a_lark_grammar_that_overflows_the_compilers_stack_is_refused(model: Model) -> None:
    rules = ["start: r0", *(f"r{i}: r{i + 1}" for i in range(2000)), 'r2000: "a"']
    assert "too much for the compiler" in refusal(model, GrammarSpec("lark", "\n".join(rules)))


@pytest.mark.slow
def test_a_schema_that_never_compiles_is_refused(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_SECONDS", 2.0)
    patterns = [{"type": "string", "pattern": f".{a}"} for a in "abcdefghijklmnopqrstuvwxyz"]
    spec = GrammarSpec("json_schema", json.dumps({"allOf": patterns}))
    assert refusal(model, spec) == "takes more than 2 s to compile"


def test_a_failed_grammar_is_tried_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    spec = GrammarSpec("regex", "tried twice")
    with pytest.raises(RuntimeError):
        model.compile(spec)
    monkeypatch.undo()
    assert model.write(model.compile(spec)) == "tried twice"


# Models that cannot be constrained.


def unsupported(tokenizer: Any, ends: Iterable[int]) -> str:
    grammars = GrammarCompiler(tokenizer, vocabulary=PADDED, end_tokens=ends)
    with pytest.raises(UnsupportedParameter) as caught:
        grammars.prepare(param="tools")
    assert caught.value.param == "tools"
    with pytest.raises(UnsupportedParameter):
        grammars.compile(JSON_OBJECT, param="tools")
    return caught.value.message


class SlowTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """One that is written in Python."""

    vocab_size = 1

    def get_vocab(self) -> Mapping[str, int]:
        return {"a": 0}


def test_a_tokenizer_of_python(model: Model) -> None:
    assert "Only fast tokenizers are supported" in unsupported(SlowTokenizer(), model.ends)


def test_a_tokenizer_whose_tokens_are_not_bytes(wordpiece: Any) -> None:  # noqa: F811
    assert "this model's tokenizer cannot be constrained" in unsupported(wordpiece, [1])


def test_a_model_without_an_end_token(model: Model) -> None:
    assert "no end token" in unsupported(model.tokenizer, [PADDED])


def test_the_library_is_optional(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "llguidance"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "pip install 'mlxsrv[structured]'" in unsupported(model.tokenizer, model.ends)
