"""Translates grammars as requests ask for them into llguidance's own form.

Grammars of clients are bounded in size. One that may be hard to compile is tried in the sandbox.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mlxsrv.logs import log
from mlxsrv.prompts.grammars.gbnf import GBNFError, translate_gbnf
from mlxsrv.prompts.grammars.key_patterns import list_keys, spell_out
from mlxsrv.prompts.grammars.regexes import ascii_classes
from mlxsrv.prompts.grammars.schema_nodes import SchemaError
from mlxsrv.prompts.grammars.schemas import prepare
from mlxsrv.prompts.grammars.specs import GrammarRefused, GrammarSpec, ToolGrammar
from mlxsrv.prompts.grammars.trial import check_grammars, failures, locate, match_keys, prefixed

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


def translate(spec: GrammarSpec, tokenizer: LLTokenizer) -> str:
    """Return the spec as a grammar of llguidance's, tried if a client could have made it hard.

    Raises:
        GrammarRefused: it is no grammar of its kind, not supported, or too much.
    """
    from llguidance import LLMatcher

    size, most = len(spec.text.encode()), _MOST_BYTES[spec.kind]
    if size > most:
        raise GrammarRefused(f"{size} bytes are too many; at most {most}")
    match spec.kind:
        case "json_object":
            [schema] = _prepare_schemas([{"type": "object"}], compact=spec.compact)
            return LLMatcher.grammar_from_json_schema(schema)
        case "choice":
            choices = msgspec.json.decode(spec.text, type=list[str])
            if not choices:
                raise GrammarRefused("there must be something to choose from")
            return _lark_grammar("start: " + " | ".join(map(json.dumps, choices)))
        case "tool":
            return _translate_tools(spec, tokenizer)
        case "call":
            return _translate_call(spec, tokenizer)
        case "json_schema":
            [schema] = _prepare_schemas([_parse_schema(spec.text)], compact=spec.compact)
            grammar = LLMatcher.grammar_from_json_schema(schema)
            check_grammars([grammar], schemas=[schema])
            return grammar
        case "regex":
            grammar = LLMatcher.grammar_from_regex(ascii_classes(spec.text))
        case "lark":
            grammar = _lark_grammar(spec.text)
        case "gbnf":
            try:
                grammar = _lark_grammar(translate_gbnf(spec.text))
            except GBNFError as error:
                raise GrammarRefused(f"not a GBNF grammar: {error}") from None
    check_grammars([grammar])
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


def _parse_schema(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarRefused(f"not a JSON schema: {error}") from None


def _prepare_schemas(
    schemas: Sequence[dict[str, Any]], names: Sequence[str] = ("",), *, compact: bool = False
) -> list[str]:
    """Return the schemas as JSON, ready for llguidance, with our options for it.

    Args:
        names: what error messages call each schema; an empty name if there is one.
        compact: JSON has no whitespace.

    Raises:
        GrammarRefused: one of them cannot be used, or they take too long together.
    """
    ready, reasons = _prepare_each(schemas, compact=compact)
    for i, reason in reasons.items():
        raise GrammarRefused(prefixed(names[i], reason))
    return ready


def _prepare_each(
    schemas: Sequence[dict[str, Any]], *, compact: bool = False
) -> tuple[list[str], dict[int, str]]:
    """Return the schemas, prepared, and by index why some of them cannot be used. In the place of
    those stands any object.

    All schemas are tried together, since each process of the sandbox takes a while.

    Raises:
        GrammarRefused: they take too long together.
    """
    reasons: dict[int, str] = {}
    ready = _prepare_all(dict(enumerate(schemas)), reasons, close=True)
    _check_one_of({i: schemas[i] for i in ready if "oneOf" in str(schemas[i])}, reasons)
    prepared = [{"type": "object"} if i in reasons else ready[i] for i in range(len(schemas))]
    keys = [list_keys(schema) for schema in prepared]
    if asked := [each for each in keys if each is not None]:
        matches = iter(match_keys(asked))
        prepared = [
            schema if each is None else spell_out(schema, next(matches))
            for schema, each in zip(prepared, keys, strict=True)
        ]
    options = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITESPACE}
    texts = [msgspec.json.encode(schema | {"x-guidance": options}).decode() for schema in prepared]
    return texts, reasons


def _prepare_all(
    schemas: Mapping[int, dict[str, Any]], reasons: dict[int, str], *, close: bool
) -> dict[int, dict[str, Any]]:
    """Return the prepared schemas by index; add to `reasons` why others cannot be prepared."""
    ready = {}
    for i, schema in schemas.items():
        if _depth(schema) > _DEEPEST:
            reasons[i] = f"nested more than {_DEEPEST} levels deep"
            continue
        try:
            ready[i] = prepare(schema, close=close)
        except SchemaError as error:
            reasons[i] = str(error)
    return ready


def _check_one_of(schemas: Mapping[int, dict[str, Any]], reasons: dict[int, str]) -> None:
    """Add to `reasons` each schema that has a `oneOf` whose options may both be satisfied.

    Closed objects may hide that: then one option forbids what another lists, and a client who
    checks the answer finds that both fit. So the schemas are tried with their objects open.
    """
    from llguidance import LLMatcher

    opened = _prepare_all(schemas, reasons, close=False)
    if opened:
        texts = [msgspec.json.encode(schema).decode() for schema in opened.values()]
        found = failures([LLMatcher.grammar_from_json_schema(text) for text in texts])
        indices = list(opened)
        if found:  # the first one's place only: each takes a process
            i = next(iter(found))
            found[i] = locate(texts[i], found[i])
        reasons.update((indices[i], reason) for i, reason in found.items())


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


# Calls of tools.


def _translate_tools(spec: GrammarSpec, tokenizer: LLTokenizer) -> str:
    from llguidance import LLMatcher

    calls = msgspec.json.decode(spec.text, type=ToolGrammar)
    names = [name for name, _ in calls.tools]
    schemas = _prepare_schemas([schema | {"type": "object"} for _, schema in calls.tools], names)
    answer = None
    if calls.otherwise is not None:
        [answer] = _prepare_schemas([calls.otherwise], compact=spec.compact)
    tried = schemas if answer is None else [*schemas, answer]
    check_grammars(
        [*map(LLMatcher.grammar_from_json_schema, tried)],
        [*names, *([] if answer is None else ["schema"])],
        tried,
    )
    return _lark_grammar(_tools_lark(calls, schemas, answer, tokenizer))


def _translate_call(spec: GrammarSpec, tokenizer: LLTokenizer) -> str:
    """Translate the grammar of a call that a model may make.

    The request does not ask for it. So a schema that cannot be used is no error: the arguments are
    then any JSON object.
    """
    from llguidance import LLMatcher

    calls = msgspec.json.decode(spec.text, type=ToolGrammar)
    names = [name for name, _ in calls.tools]
    [anything] = _prepare_schemas([{"type": "object"}])
    schemas, reasons = _prepare_each([schema | {"type": "object"} for _, schema in calls.tools])
    reasons |= failures([*map(LLMatcher.grammar_from_json_schema, schemas)])
    for i, reason in reasons.items():
        schemas[i] = anything
        log(_log, logging.WARNING, "tool schema not enforced", tool=names[i], reason=reason)
    return _lark_grammar(_call_lark(calls, schemas, tokenizer))


def _tools_lark(
    calls: ToolGrammar,
    schemas: Sequence[str],
    answer: str | None,
    tokenizer: LLTokenizer,
) -> str:
    start, end = _marker(calls.start, tokenizer), _marker(calls.end, tokenizer)
    heads = [f'{{"name": {json.dumps(name)}, "arguments": ' for name, _ in calls.tools]
    bodies = [
        f'{json.dumps(head)} %json {schema} "}}"'
        for head, schema in zip(heads, schemas, strict=True)
    ]
    return "\n".join(
        [
            "start: calls" if answer is None else f"start: calls | answer\nanswer: %json {answer}",
            r'calls: call ("\n" call)*' if calls.many else "calls: call",
            rf'call: {start} "\n" tool "\n" {end}',
            *_alternatives("tool", bodies),
        ]
    )


def _call_lark(calls: ToolGrammar, schemas: Sequence[str], tokenizer: LLTokenizer) -> str:
    heads = [
        _spaced("{", '"name"', ":", json.dumps(name), ",", '"arguments"', ":")
        for name, _ in calls.tools
    ]
    bodies = [
        f'{head} ws %json {schema} ws "}}"' for head, schema in zip(heads, schemas, strict=True)
    ]
    return "\n".join(
        [
            f"start: ws tool ws {_marker(calls.end, tokenizer)}",
            r"ws: /[ \t\r\n]{1,2}/?",
            *_alternatives("tool", bodies),
        ]
    )


def _alternatives(name: str, bodies: Sequence[str]) -> list[str]:
    """Return a rule for one of the bodies, and a rule for each."""
    each = [f"{name}{i}" for i in range(len(bodies))]
    return [
        f"{name}: " + " | ".join(each),
        *(f"{rule}: {body}" for rule, body in zip(each, bodies, strict=True)),
    ]


def _spaced(*texts: str) -> str:
    """Return literals in Lark, with whitespace between them."""
    return " ws ".join(map(json.dumps, texts))


def _marker(text: str, tokenizer: LLTokenizer) -> str:
    """Return a marker in Lark, by its number if it is a special token, which no text matches."""
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    if len(tokens) == 1 and tokenizer.is_special_token(tokens[0]):
        return f"<[{tokens[0]}]>"
    return json.dumps(text)
