"""What grammars a client may ask for, and how llguidance is told of them.

A spec is translated into llguidance's own form. What clients send is bounded in size, and tried in
a process of its own: it may keep the compiler busy for minutes, or overflow its stack.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from mlxsrv.prompts.grammars import gbnf_lark
from mlxsrv.prompts.grammars.gbnf import GBNFError
from mlxsrv.prompts.grammars.regexes import ascii_classes
from mlxsrv.prompts.grammars.schemas import KeyMatches, SchemaError, list_keys, prepare, spell_out

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_KIB = 1024
_LONGEST = {
    "json_object": 0,
    "json_schema": 256 * _KIB,
    "choice": 256 * _KIB,
    "tool": 256 * _KIB,
    # For these a mask at one step takes time in proportion to the text, or worse.
    "regex": 32 * _KIB,
    "lark": 32 * _KIB,
    "gbnf": 32 * _KIB,
}
"""Bytes of a grammar's text, by kind."""

_DEEPEST = 64  # levels of a JSON schema

_WHITESPACE = r" |\n {0,20}"

_TRIAL_SECONDS = 5.0

_TRIAL = Path(__file__).with_name("trial.py")

Kind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf", "tool"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """What a text must be.

    `text` is, by kind: nothing (json_object: any JSON object), the schema as JSON, the regex that
    the whole text matches, a JSON array of strings, the grammar in llguidance's variant of Lark
    or in llama.cpp's GBNF; for "tool" it is what `tool_grammar` writes. `compact` is for JSON that
    is an answer: it has no whitespace then.
    """

    kind: Kind
    text: str = ""
    compact: bool = False


class _Calls(msgspec.Struct, frozen=True):
    """The text of a "tool" spec."""

    tools: list[tuple[str, dict[str, Any]]]
    start: str
    end: str
    many: bool
    otherwise: dict[str, Any] | None


def tool_grammar(
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    start: str,
    end: str,
    *,
    many: bool,
    otherwise: Mapping[str, Any] | None = None,
    compact: bool = False,
) -> GrammarSpec:
    """Nothing but calls of `tools`, written as Qwen and Hermes models write them.

    A call is a line of `{"name": ..., "arguments": {...}}` between a line with `start` and one
    with `end`. `many` allows any number of calls from one up, a newline between two.

    Args:
        tools: each tool's name and the JSON schema of its arguments, which are an object
            whatever the schema says. At least one.
        otherwise: the JSON schema of an answer that may come in place of calls, if any may.
        compact: whether that answer has no whitespace.
    """
    if not tools:
        raise ValueError("a call needs a tool to call")
    calls = _Calls(
        [(name, dict(schema)) for name, schema in tools],
        start,
        end,
        many,
        None if otherwise is None else dict(otherwise),
    )
    return GrammarSpec("tool", msgspec.json.encode(calls).decode(), compact)


class GrammarRefused(ValueError):
    """A grammar that cannot be used. The message is for the client."""


def translate(spec: GrammarSpec, tokenizer: LLTokenizer) -> str:
    """The spec as a grammar of llguidance's, tried if a client could have made it hard."""
    from llguidance import LLMatcher

    size, most = len(spec.text.encode()), _LONGEST[spec.kind]
    if size > most:
        raise GrammarRefused(f"{size} bytes are too many; at most {most}")
    match spec.kind:
        case "json_object":
            [schema] = _vetted([{"type": "object"}], compact=spec.compact)
            return LLMatcher.grammar_from_json_schema(schema)
        case "choice":
            choices = msgspec.json.decode(spec.text, type=list[str])
            if not choices:
                raise GrammarRefused("there must be something to choose from")
            return _lark("start: " + " | ".join(map(json.dumps, choices)))
        case "tool":
            calls = msgspec.json.decode(spec.text, type=_Calls)
            names = [name for name, _ in calls.tools]
            schemas = _vetted([schema | {"type": "object"} for _, schema in calls.tools], names)
            answer = None
            if calls.otherwise is not None:
                [answer] = _vetted([calls.otherwise], compact=spec.compact)
            tried = schemas if answer is None else [*schemas, answer]
            _try([LLMatcher.grammar_from_json_schema(each) for each in tried], [*names, "schema"])
            return _lark(_tool_lark(calls, names, schemas, answer, tokenizer))
        case "json_schema":
            [schema] = _vetted([_parsed(spec.text)], compact=spec.compact)
            grammar = LLMatcher.grammar_from_json_schema(schema)
        case "regex":
            grammar = LLMatcher.grammar_from_regex(ascii_classes(spec.text))
        case "lark":
            grammar = _lark(spec.text)
        case "gbnf":
            try:
                grammar = _lark(gbnf_lark.translate(spec.text))
            except GBNFError as error:
                raise GrammarRefused(f"not a GBNF grammar: {error}") from None
    _try([grammar])
    return grammar


def _lark(text: str) -> str:
    # Not grammar_from_lark: it takes what begins with a brace for any grammar, as JSON.
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def unforced(grammar: str) -> str:
    """The grammar, without text that is forced being tokenized at once: what spells an added token
    would become that token, which the grammar does not allow."""
    [one] = json.loads(grammar)["grammars"]
    text = one.get("lark_grammar") or "start: %json " + json.dumps(one["json_schema"])
    return _lark('%llguidance {"no_forcing": true}\n' + text)


def _parsed(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarRefused(f"not a JSON schema: {error}") from None


def _vetted(
    schemas: Sequence[dict[str, Any]], names: Sequence[str] = ("",), *, compact: bool = False
) -> list[str]:
    """The schemas, prepared, with our options in place of what the client may have set. `names`
    are for messages, and empty where there is one schema."""
    named = list(zip(names, schemas, strict=True))
    ready = [_prepared(name, schema, close=True) for name, schema in named]
    _check_one_of([(name, schema) for name, schema in named if _ONE_OF in str(schema)])
    keys = [list_keys(schema) for schema in ready]
    if asked := [each for each in keys if each is not None]:
        found = iter(_run_trial({"keys": asked}, type=list[KeyMatches]))
        ready = [
            schema if each is None else spell_out(schema, next(found))
            for schema, each in zip(ready, keys, strict=True)
        ]
    options = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITESPACE}
    return [msgspec.json.encode(schema | {"x-guidance": options}).decode() for schema in ready]


_ONE_OF = "oneOf"


def _prepared(name: str, schema: dict[str, Any], *, close: bool) -> dict[str, Any]:
    if _depth(schema) > _DEEPEST:
        raise GrammarRefused(f"{name}{': ' if name else ''}nested more than {_DEEPEST} levels deep")
    try:
        return prepare(schema, close=close)
    except SchemaError as error:
        raise GrammarRefused(f"{name}{': ' if name else ''}{error}") from None


def _check_one_of(named: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Refuse a `oneOf` whose options may both be satisfied. Closing them may hide that: then one
    option forbids what another lists, and a client who checks the answer finds that both fit. So
    they are tried as they were."""
    from llguidance import LLMatcher

    opened = [_prepared(name, schema, close=False) for name, schema in named]
    grammars = [
        LLMatcher.grammar_from_json_schema(msgspec.json.encode(schema).decode())
        for schema in opened
    ]
    if grammars:
        _try(grammars, [name for name, _ in named])


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


def _tool_lark(
    calls: _Calls,
    names: Sequence[str],
    schemas: Sequence[str],
    answer: str | None,
    tokenizer: LLTokenizer,
) -> str:
    start, end = _marker(calls.start, tokenizer), _marker(calls.end, tokenizer)
    heads = [f'{{"name": {json.dumps(name)}, "arguments": ' for name in names]
    bodies = [
        f'{json.dumps(head)} %json {schema} "}}"'
        for head, schema in zip(heads, schemas, strict=True)
    ]
    return "\n".join(
        [
            "start: calls" if answer is None else f"start: calls | answer\nanswer: %json {answer}",
            r'calls: call ("\n" call)*' if calls.many else "calls: call",
            rf'call: {start} "\n" tool "\n" {end}',
            "tool: " + " | ".join(f"tool{i}" for i in range(len(bodies))),
            *(f"tool{i}: {body}" for i, body in enumerate(bodies)),
        ]
    )


def _marker(text: str, tokenizer: LLTokenizer) -> str:
    """A marker in Lark: by number if it is one special token, which no text matches, else text."""
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    if len(tokens) == 1 and tokenizer.is_special_token(tokens[0]):
        return f"<[{tokens[0]}]>"
    return json.dumps(text)


def _try(grammars: Sequence[str], names: Sequence[str] = ()) -> None:
    """Compile the grammars in a process that may hang or crash. `names` tell them apart.

    Raises GrammarRefused with the compiler's reason.
    """
    for i, reason in _run_trial({"grammars": grammars}, type=list[tuple[int, str]]):
        name = names[i] if names else ""
        raise GrammarRefused(f"{name}{': ' if name else ''}{one_line(reason)}")


T = TypeVar("T")


def _run_trial(asked: object, *, type: type[T]) -> T:
    """What a process that may hang or crash answers.

    Raises GrammarRefused if it did.
    """
    import llguidance

    command = [sys.executable, "-P", str(_TRIAL), str(Path(llguidance.__file__).parents[1])]
    try:
        done = subprocess.run(
            command,
            input=msgspec.json.encode(asked),
            capture_output=True,
            timeout=_TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise GrammarRefused(f"takes more than {_TRIAL_SECONDS:.0f} s to compile") from None
    if done.returncode < 0:
        raise GrammarRefused("more than the compiler takes: references may be nested too deeply")
    if done.returncode > 0 or not done.stdout:
        raise RuntimeError(f"cannot try a grammar: {done.stderr.decode(errors='replace')}")
    return msgspec.json.decode(done.stdout, type=type)


def one_line(reason: str) -> str:
    """An error of llguidance's without the excerpts of the grammar that follow on more lines."""
    first, *rest = reason.splitlines() or ["no reason given"]
    if first.startswith("NoExtension"):
        return "nothing can satisfy it"
    for line in rest:  # of a regex: the first line says where, this one what
        if line.startswith("error: "):
            first += line.removeprefix("error:")
    return first if len(first) <= 400 else f"{first[:200]} ... {first[-200:]}"
