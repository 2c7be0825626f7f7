"""A model that draws at random among the tokens that a grammar allows, and schemas to try."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

from mlxsrv.generation.parameters import Constraint, Mask
from mlxsrv.prompts.grammars.grammar import CompiledGrammar, GrammarCompiler
from mlxsrv.prompts.grammars.specs import GrammarSpec
from tests.support.fixtures import ModelFolder
from tests.support.tiny import END_TOKENS

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


TOOLS: dict[str, Schema] = {
    "get_weather": CITY,
    "get": {"properties": {"n": {"type": "integer"}}, "additionalProperties": False},
    "ping": {"type": "object", "additionalProperties": False},
}


def chain(length: int, step: Callable[[Schema], Schema]) -> Schema:
    """A schema whose references lead `length` levels down."""
    steps = {f"d{i}": step({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": steps | {f"d{length}": {"type": "null"}}}
