"""Translates grammars as requests ask for them into llguidance's own form.

Grammars of clients are bounded in size. One that may be hard to compile is checked in the sandbox.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mlxsrv.logs import log
from mlxsrv.prompts.grammars.checks import find_failures, locate
from mlxsrv.prompts.grammars.gbnf import GBNFError, translate_gbnf
from mlxsrv.prompts.grammars.schemas import JSONSchema, SchemaError, ascii_classes, prepare
from mlxsrv.prompts.grammars.specs import GrammarRefused, GrammarSpec, ToolGrammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_log = logging.getLogger("mlxsrv.engine")

_KIB = 1024
_MOST_BYTES = {
    "json_object": 0,
    "json_schema": 256 * _KIB,
    "choice": 256 * _KIB,
    "tool": 256 * _KIB,
    "call": 1024 * _KIB,
    # For these a mask at one step takes time in proportion to the text, or worse.
    "regex": 32 * _KIB,
    "lark": 32 * _KIB,
    "gbnf": 32 * _KIB,
}
"""Limits for a grammar's text, by kind."""

_DEEPEST = 64  # levels of a JSON schema
_WHITESPACE = r" |\n {0,20}"
_ANY_OBJECT: JSONSchema = {"type": "object"}


def translate(spec: GrammarSpec, tokenizer: LLTokenizer) -> str:
    """Return the spec as a grammar of llguidance's, checked if a client could have made it hard.

    Raises:
        GrammarRefused: it is no grammar of its kind, not supported, or too much.
    """
    from llguidance import LLMatcher

    size, most = len(spec.text.encode()), _MOST_BYTES[spec.kind]
    if size > most:
        raise GrammarRefused(f"{size} bytes are too many; at most {most}")
    match spec.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema(_with_options(_ANY_OBJECT, spec.compact))
        case "json_schema":
            [schema] = _require([(_parse_schema(spec.text), spec.compact)], [""])
            return LLMatcher.grammar_from_json_schema(schema)
        case "choice":
            choices = msgspec.json.decode(spec.text, type=list[str])
            if not choices:
                raise GrammarRefused("there must be something to choose from")
            return _lark_grammar("start: " + " | ".join(map(json.dumps, choices)))
        case "tool":
            return _lark_grammar(_translate_tools(spec, tokenizer))
        case "call":
            return _lark_grammar(_translate_call(spec, tokenizer))
        case "regex":
            grammar = LLMatcher.grammar_from_regex(ascii_classes(spec.text))
        case "lark":
            grammar = _lark_grammar(spec.text)
        case "gbnf":
            try:
                grammar = _lark_grammar(translate_gbnf(spec.text))
            except GBNFError as error:
                raise GrammarRefused(f"not a GBNF grammar: {error}") from None
    for reason in find_failures([grammar]).values():
        raise GrammarRefused(reason)
    return grammar


def _lark_grammar(text: str) -> str:
    # Not grammar_from_lark: it takes a text that begins with a brace for any grammar, as JSON.
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def without_forcing(grammar: str) -> str:
    """Return the grammar with an option: text that must come is not tokenized at once.

    Otherwise a text that spells an added token would become that token, which the grammar does not
    allow.
    """
    [one] = json.loads(grammar)["grammars"]
    text = one.get("lark_grammar") or "start: %json " + json.dumps(one["json_schema"])
    return _lark_grammar('%llguidance {"no_forcing": true}\n' + text)


# JSON schemas.


def _parse_schema(text: str) -> JSONSchema:
    try:
        return msgspec.json.decode(text, type=JSONSchema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarRefused(f"not a JSON schema: {error}") from None


def _require(schemas: Sequence[tuple[JSONSchema, bool]], names: Sequence[str]) -> list[str]:
    """Return schemas as `_prepare` does.

    Args:
        names: what the error calls each schema; empty for one that needs no name.

    Raises:
        GrammarRefused: one of them cannot be used, or they take too long together.
    """
    ready, reasons = _prepare(schemas)
    for i, reason in sorted(reasons.items()):
        raise GrammarRefused(f"{names[i]}: {reason}" if names[i] else reason)
    return ready


def _prepare(schemas: Sequence[tuple[JSONSchema, bool]]) -> tuple[list[str], dict[int, str]]:
    """Return schemas as JSON, ready for llguidance, and by index why some of them cannot be used.
    In the place of those stands any object.

    Args:
        schemas: each with whether its JSON has no whitespace.

    Raises:
        GrammarRefused: they take too long together.
    """
    from llguidance import LLMatcher

    reasons: dict[int, str] = {}
    checked: list[tuple[int, str]] = []
    ready = [_with_options(_ANY_OBJECT, compact) for _, compact in schemas]
    for i, (schema, compact) in enumerate(schemas):
        try:
            if _depth(schema) > _DEEPEST:
                raise SchemaError(f"nested more than {_DEEPEST} levels deep")
            texts = [_with_options(prepare(schema), compact)]
            if "oneOf" in str(schema):
                # Closed objects may hide that two options can both be satisfied: one then forbids
                # what the other lists, and a client who checks the answer finds that both fit.
                texts.append(_with_options(prepare(schema, close=False), compact))
        except SchemaError as error:
            reasons[i] = str(error)
        else:
            ready[i] = texts[0]
            checked += ((i, text) for text in texts)
    grammars = [LLMatcher.grammar_from_json_schema(text) for _, text in checked]
    failed = find_failures(grammars) if grammars else {}
    for number, reason in failed.items():
        i, text = checked[number]
        if number == min(failed):  # for the others it would take a process each
            reason = locate(text, reason)
        reasons.setdefault(i, reason)
        ready[i] = _with_options(_ANY_OBJECT, schemas[i][1])
    return ready, reasons


def _with_options(schema: JSONSchema, compact: bool) -> str:
    """Return a schema as JSON, with our options for llguidance."""
    options = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITESPACE}
    return msgspec.json.encode(schema | {"x-guidance": options}).decode()


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [
        inner
        for item in level
        if isinstance(item, dict | list)
        for inner in (item.values() if isinstance(item, dict) else item)
    ]:
        depth += 1
    return depth


# Calls of tools: how they look is here, and nowhere else.


def _translate_tools(spec: GrammarSpec, tokenizer: LLTokenizer) -> str:
    calls = msgspec.json.decode(spec.text, type=ToolGrammar)
    names = [name for name, _ in calls.tools]
    asked = [({**schema, "type": "object"}, False) for _, schema in calls.tools]
    if calls.otherwise is not None:
        asked.append(({**calls.otherwise}, spec.compact))
    schemas = _require(asked, [*names, "schema"])
    answers = [f"%json {schema}" for schema in schemas[len(names) :]]
    heads = [json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ') for name in names]
    tools = [f'{head} %json {schema} "}}"' for head, schema in zip(heads, schemas, strict=False)]
    start, end = _marker(calls.start, tokenizer), _marker(calls.end, tokenizer)
    return "\n".join(
        [
            *_alternatives("start", ["calls", *answers]),
            r'calls: call ("\n" call)*' if calls.many else "calls: call",
            rf'call: {start} "\n" tool "\n" {end}',
            *_alternatives("tool", tools),
        ]
    )


def _translate_call(spec: GrammarSpec, tokenizer: LLTokenizer) -> str:
    """Translate the grammar of a call that a model may make.

    The request does not ask for it. So a schema that cannot be used is no error: the arguments are
    then any JSON object.
    """
    calls = msgspec.json.decode(spec.text, type=ToolGrammar)
    names = [name for name, _ in calls.tools]
    asked = [({**schema, "type": "object"}, False) for _, schema in calls.tools]
    schemas, reasons = _prepare(asked)
    for i, reason in reasons.items():
        log(_log, logging.WARNING, "tool schema not enforced", tool=names[i], reason=reason)
    heads = [["{", '"name"', ":", json.dumps(name), ",", '"arguments"', ":"] for name in names]
    tools = [
        " ws ".join([*map(json.dumps, head), f"%json {schema}", '"}"'])
        for head, schema in zip(heads, schemas, strict=True)
    ]
    return "\n".join(
        [
            f"start: ws tool ws {_marker(calls.end, tokenizer)}",
            r"ws: /[ \t\r\n]{1,2}/?",
            *_alternatives("tool", tools),
        ]
    )


def _alternatives(name: str, bodies: Iterable[str]) -> list[str]:
    """Return a rule for one of the bodies, and a rule for each."""
    each = {f"{name}{i}": body for i, body in enumerate(bodies)}
    return [f"{name}: " + " | ".join(each), *(f"{rule}: {body}" for rule, body in each.items())]


def _marker(text: str, tokenizer: LLTokenizer) -> str:
    """Return a marker in Lark, by its number if it is a special token, which no text matches."""
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    if len(tokens) == 1 and tokenizer.is_special_token(tokens[0]):
        return f"<[{tokens[0]}]>"
    return json.dumps(text)
