"""Grammars that cannot be used, and tokenizers and machines that cannot use any."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizer

from mlxsrv.errors import InvalidRequest, Overloaded, UnsupportedParameter
from mlxsrv.prompts import sandbox
from mlxsrv.prompts.grammars import checks
from mlxsrv.prompts.grammars.grammar import GrammarCompiler
from mlxsrv.prompts.grammars.specs import GrammarSpec, tool_grammar
from tests.support import sleepy_sandbox
from tests.support.grammars import JSON_OBJECT, PADDED, Model, Schema, chain, model
from tests.support.sleepy_sandbox import KILLED, LATE
from tests.text.conftest import sentencepiece, wordpiece  # noqa: F401 (fixtures)

__all__ = ["model"]

pytestmark = pytest.mark.served  # a process of its own checks each grammar

# What is refused.


def test_where_a_schema_is_wrong_is_looked_for_in_so_much_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part that refers to definitions is tried with all of them."""
    tried: list[str] = []

    def find_failures(grammars: list[str]) -> dict[int, str]:
        tried.extend(grammars)
        return {}

    monkeypatch.setattr(checks, "find_failures", find_failures)
    part = {"properties": {"a": {"$ref": "#/$defs/0"}, "b": {"enum": ["x" * 1000]}}}
    checks.locate(json.dumps({"$defs": {str(i): part for i in range(200)}}), "nothing")
    assert len(tried) > 20
    assert sum(map(len, tried)) < 10**7


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
        (
            '{"properties": {"a/b": {"items": {"not": {}}}, "b": {"pattern": "("}}}',
            'Unimplemented keys: ["not"], at #/properties/a~1b/items',
        ),
        (
            '{"items": {"$ref": "#/definitions/N"}, "definitions": {"N": {"contains": {}}}}',
            'Unimplemented keys: ["contains"], at #/$defs/N',
        ),
        (
            '{"properties": {"a": {"anyOf": [{"type": "null"}, {"maximum": 1e300}]}}}',
            "numbers up to 2**53 can, at #/properties/a/anyOf/1",
        ),
        (
            '{"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}',
            "approximate oneOf with anyOf, at #/properties/a",
        ),
        ('{"pattern": "("}', "regex parse error: unclosed group"),
        ('{"$ref": "#/$defs/x"}', "Pointer '/$defs/x' does not exist"),
        ('{"$ref": "http://example.com/x"}', "not present in a registry"),
        ('{"$ref": "#"}', "nothing can satisfy it"),
        ('{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable schema: minimum"),
        ("true", "not a JSON schema: expected an object, got true or false"),
        ('{"type":', "not a JSON schema: input data was truncated"),
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
            tool_grammar([("a", {}), ("b", {"not": {}})], "hermes", many=True),
            'b: Unimplemented keys: ["not"]',
        ),
    ],
)
@pytest.mark.slow
def test_grammars_that_cannot_be_used_are_refused(
    model: Model, spec: GrammarSpec, reason: str
) -> None:
    assert reason in refusal(model, spec)


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
    monkeypatch.setattr(sandbox, "_SECONDS", 1)
    patterns = [{"type": "string", "pattern": f".{a}"} for a in "abcdefghijklmnopqrstuvwxyz"]
    spec = GrammarSpec("json_schema", json.dumps({"allOf": patterns}))
    assert refusal(model, spec) == "takes more than 1 s of processor time"


@pytest.mark.slow
def test_a_busy_machine_makes_no_grammar_bad(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_SECONDS", 1)
    monkeypatch.setattr(sandbox, "_PROCESS", Path(sleepy_sandbox.__file__))
    assert model.write(model.compile(GrammarSpec("regex", LATE))) == LATE


@pytest.mark.parametrize("times", [1, 2])
def test_a_killed_compiler_is_not_the_grammars_fault(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, times: int
) -> None:
    """It is started again once, and the next request may have more luck."""
    monkeypatch.setattr(sandbox, "_PROCESS", Path(sleepy_sandbox.__file__))
    (left := tmp_path / "left").write_text("x" * times)
    spec = GrammarSpec("regex", f"{KILLED} {left}")
    if times == 2:
        with pytest.raises(Overloaded, match="memory is short"):
            model.compile(spec)
    assert model.write(model.compile(spec)).startswith(KILLED)
    assert not left.read_text()


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
