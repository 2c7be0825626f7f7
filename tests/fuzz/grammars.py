"""Random grammars, and random texts of them: every grammar that is accepted leads to an end.

`python -m tests.fuzz.grammars --count 10000` reports how many were accepted, refused and stuck.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import random
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema
import msgspec
import numpy as np

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.parameters import Mask
from mlxsrv.prompts.grammars.grammar import GrammarCompiler
from mlxsrv.prompts.grammars.specs import GrammarSpec
from tests.support.tiny import END_TOKENS, make_tokenizer

Schema = dict[str, Any]

_STEPS = 4000
_SECONDS = 3  # an ambiguous grammar takes its time
_HURRY = 120  # tokens after which a text goes for its end
_LIMITS = ("Too many items", "Current row has")
_NAMES = ["a", "b", "ab", "x-y", "é", "0", ""]
_PATTERNS = ["^a$", "^(a|b)$", "a", "^[ab]?$", ".*", "^x-", "^.$", "^\\d+$", "^a{1,2}$", "[^!-~]"]


class Schemas:
    """Makes random JSON schemas, of all keywords that are supported and some that are not."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def schema(self) -> Schema:
        made = self._any(3)
        shared = {name: self._any(2) for name in ("s", "t")}
        return (made if isinstance(made, dict) else {"allOf": [made]}) | {"$defs": shared}

    def _any(self, depth: int) -> Any:
        dice = self._dice
        if dice.random() < 0.06:
            return dice.choice([True, False, {}])
        kinds = [self._string, self._number, self._constant, self._reference, self._several]
        if depth:
            kinds += [self._object] * 5 + [self._array] * 2 + [self._combined] * 3
        made: Schema = dice.choice(kinds)(depth - 1)
        if dice.random() < 0.1:
            made |= {"title": "t", "default": 2**70, "description": "d"}
        return made

    def _maybe(self, chance: float, **parts: Callable[[], Any]) -> Schema:
        return {key: part() for key, part in parts.items() if self._dice.random() < chance}

    def _string(self, depth: int) -> Schema:
        dice = self._dice
        return {"type": "string"} | self._maybe(
            0.3,
            minLength=lambda: dice.randint(0, 3),
            maxLength=lambda: dice.randint(0, 6),
            pattern=lambda: dice.choice([*_PATTERNS, "^\\S\\s\\w$", "^[^\\d]{2}$", "b+"]),
            format=lambda: dice.choice(["date", "uuid", "time", "ipv4"]),
        )

    def _number(self, depth: int) -> Schema:
        dice = self._dice

        def bound() -> float:
            big = [2**53, 2**53 + 1, -(2**60), 1e20, 10**15]
            return dice.choice([dice.randint(-9, 9), dice.randint(-999, 999) / 8, dice.choice(big)])

        return {"type": dice.choice(["integer", "number"])} | self._maybe(
            0.25,
            minimum=bound,
            maximum=bound,
            exclusiveMinimum=bound,
            exclusiveMaximum=bound,
            multipleOf=lambda: dice.choice([1, 2, 3, 7, 0.5, 0.25, 10, 1000]),
        )

    def _value(self, depth: int = 1) -> Any:
        dice = self._dice
        made: list[Callable[[], Any]] = [
            lambda: dice.choice([None, True, False]),
            lambda: dice.choice([0, -7, 12, 1.5, 2**53 + 1, 2**60, 1e20, 10**30, 1e-7]),
            lambda: dice.choice([*_NAMES, "\n", '"', "\x7f", "🚀"]),
        ]
        if depth:
            made.append(lambda: [self._value(0) for _ in range(dice.randint(0, 2))])
            made.append(lambda: {dice.choice(_NAMES): self._value(0)})
        return dice.choice(made)()

    def _constant(self, depth: int) -> Schema:
        if self._dice.random() < 0.5:
            return {"const": self._value()}
        return {"enum": [self._value() for _ in range(self._dice.randint(1, 3))]}

    def _reference(self, depth: int) -> Schema:
        return {"$ref": self._dice.choice(["#", "#/$defs/s", "#/$defs/t"])}

    def _several(self, depth: int) -> Schema:
        kinds = ["null", "boolean", "integer", "string", "object", "array"]
        return {"type": self._dice.sample(kinds, self._dice.randint(1, 3))}

    def _object(self, depth: int) -> Schema:
        dice = self._dice

        def named(names: list[str], most: int) -> Callable[[], Schema]:
            return lambda: {
                name: self._any(depth) for name in dice.sample(names, dice.randint(0, most))
            }

        made = self._maybe(0.9, type=lambda: "object") | self._maybe(
            0.7, properties=named(_NAMES, 3)
        )
        made |= self._maybe(0.35, patternProperties=named(_PATTERNS, 2))
        made |= self._maybe(0.4, required=lambda: dice.sample(_NAMES, dice.randint(0, 2)))
        made |= self._maybe(
            0.4, additionalProperties=lambda: dice.choice([False, True, self._any(depth)])
        )
        return made | self._maybe(
            0.08,
            minProperties=lambda: dice.randint(0, 1),  # keys may come twice, and count twice
            maxProperties=lambda: dice.randint(0, 3),
        )

    def _array(self, depth: int) -> Schema:
        dice = self._dice
        return {"type": "array"} | self._maybe(
            0.4,
            items=lambda: self._any(depth),
            prefixItems=lambda: [self._any(depth) for _ in range(dice.randint(1, 2))],
            minItems=lambda: dice.randint(0, 3),
            maxItems=lambda: dice.randint(0, 4),
        )

    def _combined(self, depth: int) -> Schema:
        dice = self._dice
        key = dice.choice(["allOf", "anyOf", "anyOf", "oneOf"])
        kind = self._object if dice.random() < 0.6 else self._any
        made = {key: [kind(depth) for _ in range(dice.randint(1, 3))]}
        if dice.random() < 0.3:
            beside = self._object(depth)
            made = made | beside if dice.random() < 0.5 else beside | made
        return made


def make_regex(dice: random.Random, depth: int = 3) -> str:
    """A regex that Python's `re` reads alike, as ASCII."""
    if not depth or dice.random() < 0.3:
        return dice.choice(
            [
                "a",
                "b",
                "[ab]",
                "[^a]",
                "\\d",
                "\\w",
                "\\s",
                "[\\d-]",
                "[^\\w\\s]",
                "é",
                "\\.",
                "x{2}",
            ]
        )
    inner = [make_regex(dice, depth - 1) for _ in range(dice.randint(1, 3))]
    return dice.choice(["".join(inner), f"({'|'.join(inner)})", f"(?:{inner[0]})" + _times(dice)])


def make_gbnf(dice: random.Random) -> str:
    """A GBNF grammar of three rules, which may never end."""

    def expr(depth: int) -> str:
        if not depth or dice.random() < 0.3:
            leaves = ['"a"', '"ab"', "[a-c]", "[^a-z]", ".", "x", "y", '"\\n"', '"é"', '""']
            return dice.choice(leaves)
        inner = [expr(depth - 1) for _ in range(dice.randint(1, 3))]
        return dice.choice(
            [" ".join(inner), f"({' | '.join(inner)})", f"({inner[0]}){_times(dice)}"]
        )

    return f'root ::= {expr(3)}\nx ::= {expr(2)} | "x"\ny ::= {expr(2)} | "y"'


def make_lark(dice: random.Random) -> str:
    """A Lark grammar whose terminals are single characters and words apart from them."""

    def expr(depth: int) -> str:
        if not depth or dice.random() < 0.3:
            return dice.choice(['"a"', '"b"', "/[c-f]/", "x", "y", "NUMBER", '"+"'])
        inner = [expr(depth - 1) for _ in range(dice.randint(1, 3))]
        return dice.choice(
            [" ".join(inner), f"({' | '.join(inner)})", f"({inner[0]}){_times(dice)}"]
        )

    return f'start: {expr(3)}\nx: {expr(2)} | "x"\ny: {expr(2)} | "y"\nNUMBER: /[0-9]+/'


def _times(dice: random.Random) -> str:
    return dice.choice(["*", "+", "?", "{2}", "{0,3}", "{1,}"])


def make_spec(seed: int | bytes) -> GrammarSpec:
    """A grammar of some kind, most of them schemas."""
    dice = random.Random(seed)
    kind = dice.choice(["json_schema"] * 7 + ["regex", "gbnf", "lark"])
    match kind:
        case "json_schema":
            return GrammarSpec("json_schema", json.dumps(Schemas(dice).schema()))
        case "regex":
            return GrammarSpec("regex", make_regex(dice))
        case "gbnf":
            return GrammarSpec("gbnf", make_gbnf(dice))
    return GrammarSpec("lark", make_lark(dice))


class Writer:
    """Writes random texts of grammars with the tokenizer of the tiny models."""

    def __init__(self) -> None:
        from transformers import PreTrainedTokenizerFast

        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer())
        self._size = len(self.tokenizer)
        self._ends = frozenset(self.tokenizer.convert_tokens_to_ids(END_TOKENS))
        self._grammars = GrammarCompiler(
            self.tokenizer, vocabulary=self._size, end_tokens=self._ends
        )
        texts = {i: self.tokenizer.decode([i]) for i in range(self._size)}
        self._closers = {i for i, text in texts.items() if text[:1] in set('"}])')}

    def write(self, spec: GrammarSpec, seed: int) -> tuple[str | None, str]:
        """A text, or None if none ended in time, and what went wrong, if anything did.

        Raises:
            InvalidRequest: the grammar is refused.
        """
        constraint = self._grammars.compile(spec, param="p").constraint()
        dice = np.random.default_rng(seed)
        mask: Mask = np.empty(-(-self._size // 32), dtype=np.int32)
        drawn: list[int] = []
        until = time.monotonic() + _SECONDS
        while len(drawn) < _STEPS and time.monotonic() < until:
            mask[:] = -1
            constraint.fill(mask)
            if constraint.failure is not None:
                return None, f"{constraint.failure} after {self.tokenizer.decode(drawn)[-200:]!r}"
            allowed = {
                int(i)
                for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            }
            hurry = dice.random() < (0.95 if len(drawn) > _HURRY else 0.4)
            wanted = (allowed & self._ends or allowed & self._closers) if hurry else set()
            token = int(dice.choice(sorted(wanted or allowed)))
            if token in self._ends:
                return self.tokenizer.decode(drawn), ""
            drawn.append(token)
            constraint.accept(token)
        return None, ""


def judge(spec: GrammarSpec, text: str) -> str | None:
    """The fault of a text that a grammar wrote; None if none is seen."""
    if spec.kind == "regex":
        fits = re.fullmatch(spec.text, text, re.ASCII)
        return None if fits else "the regex does not match"
    if spec.kind != "json_schema":
        return None
    msgspec.json.decode(text.encode(), type=msgspec.Raw)
    validator = jsonschema.Draft202012Validator(json.loads(spec.text))
    try:
        error = next(validator.iter_errors(json.loads(text)), None)
    except RecursionError:  # in that library, of a text that is nested deeply
        return None
    return None if error is None else error.message[:200]


@functools.cache
def writer() -> Writer:
    return Writer()


def check(seed: int | bytes, texts: int = 2) -> str:
    """Return the fate of one grammar: accepted, refused (with the reason's first words), unended,
    or more ambiguous than the parser takes.

    Raises:
        AssertionError: it was accepted, and got stuck or wrote what it does not describe.
    """
    spec = make_spec(seed)
    ended = 0
    for turn in range(texts):
        try:
            text, failure = writer().write(spec, turn)
        except InvalidRequest as error:
            return f"refused {spec.kind}: {' '.join(error.message.split()[1:4])}"
        if any(limit in failure for limit in _LIMITS):
            return f"too ambiguous {spec.kind}"
        assert not failure, (seed, spec, failure)
        if text is not None:
            ended += 1
            wrong = judge(spec, text)
            assert wrong is None, (seed, spec, text, wrong)
    return f"{'accepted' if ended else 'unended'} {spec.kind}"


def check_grammars(data: bytes) -> None:
    """A random grammar, drawn with the input as seed, leads to texts that it describes."""
    check(data[:64], texts=1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz.grammars", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="grammars (1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    options = parser.parse_args()
    told: collections.Counter[str] = collections.Counter()
    for seed in range(options.first, options.first + options.count):
        try:
            told[check(seed)] += 1
        except AssertionError as error:
            told["broken"] += 1
            print(error, flush=True)
    report(told)
    return 1 if told["broken"] else 0


def report(told: Mapping[str, int]) -> None:
    for what, count in sorted(told.items(), key=lambda item: -item[1]):
        print(f"{count:6} {what}")


if __name__ == "__main__":
    sys.exit(main())
