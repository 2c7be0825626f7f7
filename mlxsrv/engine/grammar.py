"""Structured output: which tokens may come next for the text to stay within a grammar.

llguidance compiles a JSON schema, a regex, a list of choices, a Lark grammar or the calls of some
tools, and says at each step which tokens may follow. Here is what it needs around it: limits and a
trial compilation for what clients send, a cache, the model's own end tokens, and reasoning, which
comes before the text that is constrained and is free.

What is promised of a text that ends by itself, and not at its token limit, is that it is one that
the grammar describes. JSON may have one space, or one newline and up to 20 spaces, wherever JSON
allows whitespace: room for the ways models write it, and none to pad an answer without end.
"""

from __future__ import annotations

import functools
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from mlxsrv.errors import InvalidRequest, UnsupportedParameter
from mlxsrv.events import Constraint, Mask
from mlxsrv.logs import log

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_log = logging.getLogger("mlxsrv.engine")

_CACHED = 64  # compiled grammars that a model keeps

_KIB = 1024
_LONGEST = {
    "json_object": 0,
    "json_schema": 256 * _KIB,
    "choice": 256 * _KIB,
    "tool": 256 * _KIB,
    # For these a mask at one step takes time in proportion to the text, or worse.
    "regex": 32 * _KIB,
    "lark": 32 * _KIB,
}
"""Bytes of a grammar's text, by kind."""

_DEEPEST = 64  # levels of a JSON schema

_WALKED = 4  # tokens

_WHITESPACE = r" |\n {0,20}"

_TRIAL_SECONDS = 5.0

# The stack is a quarter of what threads have by default where they have least, so that what
# compiles on it compiles in this process as well.
_TRIAL = """
import json, sys, threading
sys.path.append(sys.argv[1])
from llguidance import LLMatcher, LLParserLimits

def check():
    for i, grammar in enumerate(json.load(sys.stdin)):
        failed, reasons = LLMatcher.validate_grammar_with_warnings(
            grammar, limits=LLParserLimits(verbose_errors=False)
        )
        if failed:
            return [i, reasons[0][:4096]]

threading.stack_size(2 << 20)
thread = threading.Thread(target=lambda: print(json.dumps(check())))
thread.start()
thread.join()
"""

Kind = Literal["json_object", "json_schema", "regex", "choice", "lark", "tool"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """What a text must be.

    `text` is, by kind: nothing (json_object: any JSON object), the schema as JSON, the regex that
    the whole text matches, a JSON array of strings, the grammar in llguidance's variant of Lark;
    for "tool" it is what `tool_grammar` writes.
    """

    kind: Kind
    text: str = ""


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
) -> GrammarSpec:
    """Nothing but calls of `tools`, written as Qwen and Hermes models write them.

    A call is a line of `{"name": ..., "arguments": {...}}` between a line with `start` and one
    with `end`. `many` allows any number of calls from one up, a newline between two.

    Args:
        tools: each tool's name and the JSON schema of its arguments, which are an object
            whatever the schema says. At least one.
        otherwise: the JSON schema of an answer that may come in place of calls, if any may.
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
    return GrammarSpec("tool", msgspec.json.encode(calls).decode())


class _Refused(ValueError):
    """A grammar that cannot be used. The message is for the client."""


class _Vocabulary(msgspec.Struct, frozen=True):
    """A model's tokens, as masks say them, and what llguidance makes of them.

    `known` has the bits of tokens that exist, `ends` those that end a text, `breaks` those that
    are one or two newlines and nothing else. `added` are the tokens that are no part of the
    vocabulary proper, by their text. `tokenizer` may have more tokens than the model.
    """

    tokenizer: LLTokenizer
    added: tuple[str, ...]
    known: Mask
    ends: Mask
    breaks: Mask


class Grammars:
    """Compiles grammars for one model. Any thread may use it.

    Args:
        tokenizer: the model's fast tokenizer, a transformers PreTrainedTokenizerFast.
        vocabulary: the width of the model's logits. May be more or less than the tokenizer has.
        end_tokens: all tokens that end an answer. Once the text is complete any of them may come.
    """

    def __init__(self, tokenizer: Any, *, vocabulary: int, end_tokens: Iterable[int]) -> None:
        self._source = tokenizer
        self._size = vocabulary
        self._ends = sorted(token for token in end_tokens if token < vocabulary)
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._compiled = functools.lru_cache(maxsize=_CACHED)(self._compile)

    def prepare(self, *, param: str) -> None:
        """Derive what is derived from the tokenizer, once: a second for 150,000 tokens.

        `compile` does it too. But this alone reads the tokenizer, so whoever must not use it
        beside others calls this first, where it may, and then compiles anywhere.

        Raises:
            UnsupportedParameter: llguidance is not installed or cannot use the tokenizer.
        """
        self._derived(param)

    def compile(self, spec: GrammarSpec, *, param: str) -> Template:
        """The grammar, ready to use; from the cache if it was compiled lately.

        A new one is tried in a process of its own first, for up to 5 s: some schemas of a
        kilobyte keep the compiler busy for minutes, and others overflow its stack, which no
        thread survives. Not for the event loop.

        Raises:
            InvalidRequest: the grammar is not valid, not supported, or too much.
            UnsupportedParameter: as `prepare`.
        """
        self._derived(param)
        try:
            return self._compiled(spec)
        except _Refused as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None

    def _derived(self, param: str) -> _Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._derive(param)
            return self._vocabulary

    def _derive(self, param: str) -> _Vocabulary:
        try:
            import llguidance.hf
        except ImportError:
            raise UnsupportedParameter(
                f"{param}: needs the library llguidance: pip install 'mlxsrv[structured]'",
                param=param,
            ) from None
        if not self._ends:
            raise UnsupportedParameter(
                f"{param}: this model has no end token, so no grammar could end", param=param
            )
        ids = set(self._source.get_vocab().values())
        try:
            tokenizer = llguidance.hf.from_tokenizer(
                self._source, n_vocab=max(self._size, max(ids) + 1), eos_token=self._ends
            )
        except ValueError as error:
            raise UnsupportedParameter(
                f"{param}: this model's tokenizer cannot be constrained: {error}", param=param
            ) from None
        breaks = [tokenizer.tokenize_str(text) for text in ("\n", "\n\n")]
        return _Vocabulary(
            tokenizer,
            tuple(self._source.get_added_vocab()),
            known=_bits((i for i in ids if i < self._size), self._size),
            ends=_bits(self._ends, self._size),
            breaks=_bits((tokens[0] for tokens in breaks if len(tokens) == 1), self._size),
        )

    def _compile(self, spec: GrammarSpec) -> Template:
        from llguidance import LLMatcher, LLParserLimits

        vocabulary = self._vocabulary
        assert vocabulary is not None  # compile() has seen to it
        grammar = _translate(spec, vocabulary.tokenizer)
        if any(name in grammar.replace("\\", "") for name in vocabulary.added):
            grammar = _unforced(grammar)
        # Not verbose: errors are logged, and what a model says is not for the log.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if reason := matcher.get_error() or _first_error(matcher.deep_copy()):
            raise _Refused(_one_line(reason))
        return Template(matcher, vocabulary)


class Template:
    """A compiled grammar. Any thread may use it."""

    def __init__(self, matcher: LLMatcher, vocabulary: _Vocabulary) -> None:
        self._matcher = matcher  # never moves on: only its copies do
        self._vocabulary = vocabulary

    def constraint(self, think_end: Sequence[int] | None = None) -> Constraint:
        """The grammar at its beginning, for one answer.

        With `think_end` a think block is open, as the prompt left it: the grammar applies after
        these tokens, which close it, and one or two newlines may come between. An answer cannot
        end before that. Without, it applies from the first token, and so none can be thought in
        a block that the answer itself would open.
        """
        grammar = _Grammar(self._matcher.deep_copy(), self._vocabulary)
        if not think_end:
            return grammar
        return _AfterThinking(grammar, tuple(think_end), self._vocabulary)


class _Grammar:
    """A grammar in some state. One that cannot go on has a `failure`, and no more may come."""

    def __init__(self, matcher: LLMatcher, vocabulary: _Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        # llguidance's own mask, which is wider where the tokenizer has more tokens than the model.
        words = -(-vocabulary.tokenizer.vocab_size // 32)
        self._full = np.zeros(words, dtype=np.int32)
        self._address = self._full.ctypes.data
        self._model = self._full[: len(vocabulary.known)]
        self.failure: str | None = None

    def fill(self, mask: Mask) -> None:
        if self.failure is None:
            self._matcher.unsafe_compute_mask_ptr(self._address, self._full.nbytes)
            np.bitwise_and(self._model, self._vocabulary.known, out=mask)
            if self._matcher.is_error():
                self._fail(self._matcher.get_error())
            elif not mask.any():
                self._fail("the grammar asks for tokens that the model does not have")
        if self.failure is not None:
            mask[:] = self._vocabulary.ends

    def accept(self, token: int) -> None:
        if self.failure is not None or _has(self._vocabulary.ends, token):
            return
        if not self._matcher.consume_token(token):
            self._fail(self._matcher.get_error())

    def allows(self, token: int) -> bool:
        return self._matcher.validate_tokens([token]) == 1

    def _fail(self, reason: str) -> None:
        self.failure = _one_line(reason)
        log(_log, logging.WARNING, "grammar abandoned", reason=self.failure)


class _AfterThinking:
    """A grammar that waits for the end of a think block."""

    def __init__(
        self, grammar: _Grammar, think_end: tuple[int, ...], vocabulary: _Vocabulary
    ) -> None:
        self._grammar = grammar
        self._think_end = think_end
        self._vocabulary = vocabulary
        self._recent: tuple[int, ...] = ()
        self._state: Literal["thinking", "break", "text"] = "thinking"

    @property
    def failure(self) -> str | None:
        return self._grammar.failure

    def fill(self, mask: Mask) -> None:
        if self._state == "thinking":
            mask &= ~self._vocabulary.ends
            return
        self._grammar.fill(mask)
        if self._state == "break":
            mask |= self._vocabulary.breaks

    def accept(self, token: int) -> None:
        if self._state == "thinking":
            self._recent = (*self._recent, token)[-len(self._think_end) :]
            if self._recent == self._think_end:
                self._state = "break"
            return
        between = self._state == "break" and _has(self._vocabulary.breaks, token)
        self._state = "text"
        if not between or self._grammar.allows(token):
            self._grammar.accept(token)


def _translate(spec: GrammarSpec, tokenizer: LLTokenizer) -> str:
    """The spec as a grammar of llguidance's, tried if a client could have made it hard."""
    from llguidance import LLMatcher

    size, most = len(spec.text.encode()), _LONGEST[spec.kind]
    if size > most:
        raise _Refused(f"{size} bytes are too many; at most {most}")
    match spec.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema(_vetted({"type": "object"}))
        case "choice":
            choices = msgspec.json.decode(spec.text, type=list[str])
            if not choices:
                raise _Refused("there must be something to choose from")
            return _lark("start: " + " | ".join(map(json.dumps, choices)))
        case "tool":
            calls = msgspec.json.decode(spec.text, type=_Calls)
            names = [name for name, _ in calls.tools]
            schemas = [_vetted(schema | {"type": "object"}, name) for name, schema in calls.tools]
            answer = None if calls.otherwise is None else _vetted(calls.otherwise)
            tried = schemas if answer is None else [*schemas, answer]
            _try([LLMatcher.grammar_from_json_schema(each) for each in tried], [*names, "schema"])
            return _lark(_tool_lark(calls, names, schemas, answer, tokenizer))
        case "json_schema":
            grammar = LLMatcher.grammar_from_json_schema(_vetted(_parsed(spec.text)))
        case "regex":
            grammar = LLMatcher.grammar_from_regex(spec.text)
        case "lark":
            grammar = _lark(spec.text)
    _try([grammar])
    return grammar


def _lark(text: str) -> str:
    # Not grammar_from_lark: it takes what begins with a brace for any grammar, as JSON.
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _unforced(grammar: str) -> str:
    """The grammar, without text that is forced being tokenized at once: what spells an added token
    would become that token, which the grammar does not allow."""
    [one] = json.loads(grammar)["grammars"]
    text = one.get("lark_grammar") or "start: %json " + json.dumps(one["json_schema"])
    return _lark('%llguidance {"no_forcing": true}\n' + text)


def _parsed(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise _Refused(f"not a JSON schema: {error}") from None


def _vetted(schema: dict[str, Any], name: str = "") -> str:
    """The schema with our options in place of what the client may have set. `name` is for the
    message if it is nested too deeply."""
    if _depth(schema) > _DEEPEST:
        raise _Refused(f"{name}{': ' if name else ''}nested more than {_DEEPEST} levels deep")
    options = {"whitespace_pattern": _WHITESPACE}
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

    Raises _Refused with the compiler's reason.
    """
    import llguidance

    command = [sys.executable, "-P", "-c", _TRIAL, str(Path(llguidance.__file__).parents[1])]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(grammars).encode(),
            capture_output=True,
            timeout=_TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise _Refused(f"takes more than {_TRIAL_SECONDS:.0f} s to compile") from None
    if done.returncode < 0:
        raise _Refused("more than the compiler takes: references may be nested too deeply")
    if done.returncode > 0 or not done.stdout:
        raise RuntimeError(f"cannot try a grammar: {done.stderr.decode(errors='replace')}")
    if (failure := msgspec.json.decode(done.stdout, type=tuple[int, str] | None)) is not None:
        i, reason = failure
        raise _Refused(f"{names[i]}: {_one_line(reason)}" if names else _one_line(reason))


def _first_error(matcher: LLMatcher) -> str:
    """What goes wrong within the first few tokens, if anything: automata are built as they are
    walked, and one that explodes mostly does at once."""
    for _ in range(_WALKED):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_stopped():
            break
        matcher.consume_token(int(np.unpackbits(mask, bitorder="little").argmax()))
    return matcher.get_error()


def _one_line(reason: str) -> str:
    """An error of llguidance's without the excerpts of the grammar that follow on more lines."""
    first, *rest = reason.splitlines() or ["no reason given"]
    if first.startswith("NoExtension"):
        return "nothing can satisfy it"
    for line in rest:  # of a regex: the first line says where, this one what
        if line.startswith("error: "):
            first += line.removeprefix("error:")
    return first if len(first) <= 400 else f"{first[:200]} ... {first[-200:]}"


def _bits(tokens: Iterable[int], size: int) -> Mask:
    """A mask of `size` tokens in which those given are set."""
    bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _has(mask: Mask, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)
