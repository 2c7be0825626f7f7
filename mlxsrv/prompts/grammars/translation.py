"""Translates grammars as requests ask for them into llguidance's own form.

Grammars of clients are bounded in size. One that may be hard to compile is checked in the sandbox.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import msgspec

from mlxsrv.logs import log
from mlxsrv.prompts.grammars.checks import find_failures, locate
from mlxsrv.prompts.grammars.gbnf import GBNFError, translate_gbnf
from mlxsrv.prompts.grammars.schemas import JSONSchema, SchemaError, ascii_classes, prepare
from mlxsrv.prompts.grammars.specs import GrammarRefused, GrammarSpec, ToolGrammar
from mlxsrv.text.call_formats.calls import CallRules, NotEnforceable
from mlxsrv.text.call_formats.lark import Lark
from mlxsrv.text.formats import CALLS, THOUGHTS
from mlxsrv.text.marks import SPELLED, Marks
from mlxsrv.wording import error_in_words

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
_TEXT_BOUNDS = ('"pattern":', '"minLength":', '"maxLength":')


def translate(spec: GrammarSpec, vocabulary: Mapping[str, int]) -> str:
    """Return the spec as a grammar of llguidance's, checked if a client could have made it hard.

    Args:
        vocabulary: token ids by the names of tokens.

    Raises:
        GrammarRefused: it is no grammar of its kind, not supported, or too much.
    """
    from llguidance import LLMatcher

    size, most = len(spec.text.encode()), _MOST_BYTES[spec.kind]
    if size > most:
        raise GrammarRefused(f"{size} bytes are too many; at most {most}")
    match spec.kind:
        case "json_object":
            return _translate_json(_with_options(_ANY_OBJECT, spec.compact), spec, vocabulary)
        case "json_schema":
            [schema], reasons = _prepare([(_parse_schema(spec.text), spec.compact)])
            for reason in reasons.values():
                raise GrammarRefused(reason)
            return _translate_json(schema, spec, vocabulary)
        case "choice":
            choices = msgspec.json.decode(spec.text, type=list[str])
            if not choices:
                raise GrammarRefused("there must be something to choose from")
            return _lark_grammar("start: " + " | ".join(map(json.dumps, choices)))
        case "tool":
            return _lark_grammar(_translate_tools(spec, _marks(spec, vocabulary)))
        case "call":
            return _lark_grammar(_translate_call(spec, _marks(spec, vocabulary)))
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


def _translate_json(schema: str, spec: GrammarSpec, vocabulary: Mapping[str, int]) -> str:
    """Translate the grammar of an answer in JSON, which thoughts may precede."""
    from llguidance import LLMatcher

    if not spec.thoughts:
        return LLMatcher.grammar_from_json_schema(schema)
    lark = Lark(_marks(spec, vocabulary), lambda _: "")
    answer = _answer(f"%json {schema}", spec.thoughts, lark)
    return _lark_grammar(lark.grammar(f"{_thoughts(spec.thoughts, lark)} {answer}"))


def _marks(spec: GrammarSpec, vocabulary: Mapping[str, int]) -> Marks:
    """Return the markers of the spec's formats."""
    calls: Sequence[str] = ()
    if spec.kind in ("tool", "call"):
        calls = CALLS[msgspec.json.decode(spec.text, type=ToolGrammar).calls].marks
    thoughts = THOUGHTS[spec.thoughts].marks if spec.thoughts else ()
    return Marks((*thoughts, *calls), vocabulary)


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
        raise GrammarRefused(f"not a JSON schema: {error_in_words(str(error))}") from None


def _prepare(schemas: Sequence[tuple[JSONSchema, bool]]) -> tuple[list[str], dict[int, str]]:
    """Return schemas as JSON, ready for llguidance, and by index why some of them cannot be used.
    In the place of those stands any object, or any JSON. Equal ones are checked once.

    Args:
        schemas: each with whether its JSON has no whitespace.

    Raises:
        GrammarRefused: they take too long together.
    """
    keys = [(msgspec.json.encode(schema), compact) for schema, compact in schemas]
    each = dict(zip(keys, schemas, strict=True))
    ready, reasons = _check([*each.values()])
    numbers = {key: number for number, key in enumerate(each)}
    places = [numbers[key] for key in keys]
    failed = {i: reasons[number] for i, number in enumerate(places) if number in reasons}
    return [ready[number] for number in places], failed


def _check(schemas: Sequence[tuple[JSONSchema, bool]]) -> tuple[list[str], dict[int, str]]:
    """Do the work of `_prepare`, for schemas of which no two are equal."""
    from llguidance import LLMatcher

    reasons: dict[int, str] = {}
    checked: list[tuple[int, str]] = []
    ready = [_with_options(_least(schema), compact) for schema, compact in schemas]
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
        ready[i] = _with_options(_least(schemas[i][0]), schemas[i][1])
    return ready, reasons


def _least(schema: JSONSchema) -> JSONSchema:
    """Return what is left of a schema that cannot be used."""
    return _ANY_OBJECT if schema.get("type") == "object" else {}


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


# Calls of tools, and thoughts.


def _translate_tools(spec: GrammarSpec, marks: Marks) -> str:
    """Translate the grammar of an answer that is calls, or follows a schema instead.

    Raises:
        GrammarRefused: a schema cannot be used, or the format cannot hold a tool.
    """
    calls = msgspec.json.decode(spec.text, type=ToolGrammar)
    parts = _list_parts(calls)
    for name, reason in parts.unheld.items():
        raise GrammarRefused(f"{name}: {reason}")
    names = [name for name, _ in calls.tools]
    asked = [({**schema, "type": "object"}, False) for _, schema in calls.tools]
    if calls.otherwise is not None:
        names.append("schema")
        asked.append(({**calls.otherwise}, spec.compact))
    ready, reasons = _prepare([*asked, *((schema, False) for schema in parts.schemas)])
    for i in sorted(reasons.keys() & range(len(asked))):
        raise GrammarRefused(f"{names[i]}: {reasons[i]}")
    lark = Lark(marks, parts.finder(ready[len(asked) :]))
    rules = _rules(calls, lark)
    start = lark.rule(rules.many if calls.many else rules.one)
    if calls.otherwise is not None:
        answer = _answer(f"%json {ready[len(asked) - 1]}", spec.thoughts, lark)
        start = lark.choice([start, answer])
    return lark.grammar(f"{_thoughts(spec.thoughts, lark)} {start}")


def _translate_call(spec: GrammarSpec, marks: Marks) -> str:
    """Translate the grammar of the calls that a model may make.

    The request does not ask for it. So a schema that cannot be used is no error: that value is then
    any JSON, or the tool has any arguments, and the other tools are held all the same.
    """
    calls = msgspec.json.decode(spec.text, type=ToolGrammar)
    parts = _list_parts(calls)
    if unheld := parts.unheld:
        tools = [(name, {} if name in unheld else schema) for name, schema in calls.tools]
        calls = msgspec.structs.replace(calls, tools=tools)
        parts = _list_parts(calls)
    ready, failed = _prepare([(schema, False) for schema in parts.schemas])
    for tool, reason in [*unheld.items(), *((parts.tools[i], why) for i, why in failed.items())]:
        log(_log, logging.WARNING, "tool schema not enforced", tool=tool, reason=reason)
    lark = Lark(marks, parts.finder(ready))
    rules = _rules(calls, lark)
    if openers := list_openers(calls.calls, rules.behind):
        return lark.grammar(
            lark.choice(f"{lark.text(opener)} {rules.behind[opener]}" for opener in openers)
        )
    # Nothing tells a call from other text but its place: the grammar is that of the whole answer.
    free = _answer(lark.any_text(), spec.thoughts, lark)
    called = f"{_preamble(spec.thoughts, lark)} {rules.many}"
    return lark.grammar(f"{_thoughts(spec.thoughts, lark)} {lark.choice([called, free])}")


class _Parts(msgspec.Struct, frozen=True):
    """The schemas that the rules of some calls need: those of values, or of all arguments.

    Attributes:
        schemas: each once, with `tools` of the same number: the tool that needs it.
        unheld: by the names of tools, why the format cannot hold their calls to their schemas: a
            name cannot stand in it, or a text's bounds cannot be used.
    """

    schemas: list[JSONSchema]
    tools: list[str]
    unheld: dict[str, str]

    def finder(self, ready: Sequence[str]) -> Callable[[Mapping[str, Any]], str]:
        """Return what finds a schema among those that are ready for llguidance."""
        found = dict(zip(map(msgspec.json.encode, self.schemas), ready, strict=True))
        return lambda schema: found[msgspec.json.encode(schema)]


def _list_parts(calls: ToolGrammar) -> _Parts:
    """List the schemas that the rules of calls need, tool by tool.

    Raises:
        GrammarRefused: bounds of texts take too long together.
    """
    parts: dict[bytes, tuple[JSONSchema, str]] = {}
    unheld: dict[str, str] = {}
    bounded: dict[str, str] = {}
    for name, schema in calls.tools:
        needed: list[JSONSchema] = []

        def note(part: Mapping[str, Any], needed: list[JSONSchema] = needed) -> str:
            needed.append({**part})
            return "{}"

        lark = Lark(SPELLED, note)
        try:
            rules = CALLS[calls.calls].rules([(name, schema)], lark)
        except NotEnforceable as error:
            unheld[name] = str(error)
            continue
        for part in needed:
            parts.setdefault(msgspec.json.encode(part), (part, name))
        whole = {**schema, "type": "object"} in needed
        if not whole and any(bound in json.dumps(schema) for bound in _TEXT_BOUNDS):
            bounded[name] = _lark_grammar(lark.grammar(rules.one))
    failed = find_failures([*bounded.values()]) if bounded else {}
    unheld |= {name: failed[i] for i, name in enumerate(bounded) if i in failed}
    schemas, tools = [part for part, _ in parts.values()], [tool for _, tool in parts.values()]
    return _Parts(schemas, tools, unheld)


def list_openers(calls: str, behind: Container[str]) -> list[str]:
    """Return the openers behind which a grammar of calls begins; none if it is that of the whole
    answer."""
    return [opener for opener in CALLS[calls].openers if opener in behind]


def find_openers(spec: GrammarSpec) -> tuple[str, ...]:
    """Return the openers behind which the grammar of a spec of kind "call" begins."""
    calls = msgspec.json.decode(spec.text, type=ToolGrammar)
    calls = msgspec.structs.replace(calls, tools=[(name, {}) for name, _ in calls.tools])
    rules = _rules(calls, Lark(SPELLED, lambda _: "{}"))
    return tuple(list_openers(calls.calls, rules.behind))


def _rules(calls: ToolGrammar, lark: Lark) -> CallRules:
    try:
        return CALLS[calls.calls].rules(calls.tools, lark)
    except NotEnforceable as error:
        raise GrammarRefused(str(error)) from None


def _thoughts(name: str, lark: Lark) -> str:
    """Return the body of the thought that a model may open itself, before anything else: one, or it
    may never come to the answer."""
    start, end = THOUGHTS[name].thought if name else ("", "")
    return rf"({lark.text(start)} {lark.until(end)} /\n{{0,2}}/)?" if start else ""


def _preamble(name: str, lark: Lark) -> str:
    """Return the body of the content that may stand before calls."""
    start, end = THOUGHTS[name].preamble if name else ("", "")
    return f"({lark.text(start)} {lark.until(end)})?" if start else ""


def _answer(body: str, thoughts: str, lark: Lark) -> str:
    """Return the body of an answer's content, with what its format has around it."""
    before, behind = THOUGHTS[thoughts].answer if thoughts else ("", "")
    return f"{lark.text(before)} {lark.rule(body)} {lark.text(behind)}"
