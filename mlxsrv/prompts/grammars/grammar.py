"""Structured output: which tokens may come next, so that the text stays within a grammar.

llguidance compiles a JSON schema, a regex, a list of choices, a Lark grammar or the calls of some
tools, and says at each step which tokens may follow. This module adds limits, a cache, the model's
own end tokens, and reasoning, which comes before the constrained text and is free.

A text that ends by itself, and not at its token limit, is one that the grammar describes. JSON may
have one space, or one newline and up to 20 spaces, wherever JSON allows whitespace. So models have
room for their ways of writing it, and cannot pad an answer without end.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from mlxsrv.errors import InvalidRequest, UnsupportedParameter
from mlxsrv.generation.parameters import Constraint, Grammar, Mask
from mlxsrv.logs import log
from mlxsrv.prompts.grammars.checks import one_line
from mlxsrv.prompts.grammars.specs import GrammarRefused, GrammarSpec
from mlxsrv.prompts.grammars.translation import find_openers, translate, without_forcing

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_log = logging.getLogger("mlxsrv.engine")

_CACHED = 64  # grammars that a model keeps, those of requests and compiled ones

_WALKED = 4  # tokens
_MOST_BREAKS = 2  # tokens of newlines between thoughts and the text that is bound

# Limits of llguidance's parser: items in a step and in a row. A grammar with a terminal for each
# character needs more; a step of 150,000 tokens then takes at most 0.1 s.
_ITEMS = 50_000, 2_000
_ITEMS_OF_CHARACTERS = 1_000_000, 5_000


class _Vocabulary(msgspec.Struct, frozen=True):
    """A model's tokens, for llguidance and as masks.

    Attributes:
        tokenizer: llguidance's, which may have more tokens than the model.
        ids: token ids by the names of tokens.
        added: the names of added tokens, which are not part of the vocabulary proper.
        known: mask of the tokens that exist.
        ends: mask of the tokens that end a text.
        breaks: mask of the tokens that are one or two newlines and nothing else.
    """

    tokenizer: LLTokenizer
    ids: Mapping[str, int]
    added: frozenset[str]
    known: Mask
    ends: Mask
    breaks: Mask


class GrammarCompiler:
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
        self._translated = functools.lru_cache(maxsize=_CACHED)(self._translate)
        self._usable = functools.lru_cache(maxsize=_CACHED)(self._is_usable)
        # The latest compiled grammars, and all that an answer still has.
        self._used: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()
        self._compiled = functools.lru_cache(maxsize=_CACHED)(self._compile)

    def prepare(self, *, param: str) -> None:
        """Derive all that is needed from the tokenizer, once: a second for 150,000 tokens.

        The other methods do it, too.

        Raises:
            UnsupportedParameter: llguidance is not installed or cannot use the tokenizer.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._derive(param)

    def compile(self, spec: GrammarSpec, *, param: str) -> CompiledGrammar:
        """Return the compiled grammar, from the cache if it was compiled lately.

        A new one is first checked in the sandbox, for up to 5 s. Not for the event loop.

        Raises:
            InvalidRequest: the grammar is not valid, not supported, or too much.
            UnsupportedParameter: as `prepare`.
        """
        self.prepare(param=param)
        try:
            return self._compiled(self._translated(spec))
        except GrammarRefused as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None

    def compile_call(self, spec: GrammarSpec, *, param: str) -> CompiledGrammar | None:
        """Return the compiled grammar of a call that a model may make, as `compile` does.

        No request asks for it. So if it cannot be used, the log says so, and the result is None.

        Raises:
            UnsupportedParameter: as `prepare`.
        """
        self.prepare(param=param)
        return self.compile(spec, param=param) if self._usable(spec) else None

    def recall(self, grammar: Grammar) -> CompiledGrammar:
        """Return what `compile` has returned for the same text; it is compiled again only if nobody
        has that any more. It is not checked in the sandbox: it was, when the text was made.

        Raises:
            GrammarRefused: another version of llguidance made the text.
            UnsupportedParameter: as `prepare`.
        """
        self.prepare(param="grammar")
        return self._compiled(Grammar(grammar.text, grammar.by_characters, grammar.openers))

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
        names: dict[str, int] = self._source.get_vocab()
        ids = set(names.values())
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
            names,
            frozenset(self._source.get_added_vocab()),
            known=_bits((i for i in ids if i < self._size), self._size),
            ends=_bits(self._ends, self._size),
            breaks=_bits((tokens[0] for tokens in breaks if len(tokens) == 1), self._size),
        )

    def _translate(self, spec: GrammarSpec) -> Grammar:
        vocabulary = self._vocabulary
        assert vocabulary is not None  # compile() has derived it
        text = translate(spec, vocabulary.ids)
        if any(name in text.replace("\\", "") for name in vocabulary.added):
            text = without_forcing(text)
        openers = find_openers(spec) if spec.kind == "call" else ()
        return Grammar(text, by_characters=spec.kind == "gbnf", openers=openers)

    def _is_usable(self, spec: GrammarSpec) -> bool:
        try:
            self.compile(spec, param="tools")
        except InvalidRequest as error:
            log(_log, logging.WARNING, "tool calls not enforced", reason=error.message)
            return False
        return True

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, unless an answer has it. Two threads may compile the same one."""
        from llguidance import LLMatcher, LLParserLimits

        if (used := self._used.get(grammar)) is not None:
            return used
        vocabulary = self._vocabulary
        assert vocabulary is not None  # its callers have derived it
        # Not verbose: errors are logged, and a model's text does not belong in the log.
        step, row = _ITEMS_OF_CHARACTERS if grammar.by_characters else _ITEMS
        limits = LLParserLimits(verbose_errors=False, step_max_items=step, max_items_in_row=row)
        matcher = LLMatcher(vocabulary.tokenizer, grammar.text, log_level=0, limits=limits)
        if reason := matcher.get_error() or _first_error(matcher.deep_copy()):
            raise GrammarRefused(one_line(reason))
        compiled = self._used[grammar] = CompiledGrammar(grammar, matcher, vocabulary)
        return compiled


class CompiledGrammar:
    """A compiled grammar. Any thread may use it.

    Attributes:
        grammar: the part of it that jobs carry.
        refused: for the grammar of calls: by the beginning of an opener that has come, the tokens
            that may not come next. They write the rest of the opener and more, with which no call
            begins.
    """

    def __init__(self, grammar: Grammar, matcher: LLMatcher, vocabulary: _Vocabulary) -> None:
        self.grammar = grammar
        self._matcher = matcher  # stays at the beginning; copies of it are used
        self._vocabulary = vocabulary
        # Tokens of which the grammar speaks by number, within openers too.
        named = {name: vocabulary.ids[name] for name in vocabulary.added}
        self._named = {name: i for name, i in named.items() if f"<[{i}]>" in grammar.text}
        self._names = re.compile("|".join(map(re.escape, self._named)) or "(?!)")
        self.refused = self._find_refused(self._spelled())

    def constraint(self, think_end: Sequence[int] | None = None) -> Constraint:
        """Return the grammar at its beginning, for one answer.

        Args:
            think_end: the tokens that close the think block that the prompt left open. The grammar
                applies after them, and after one or two newlines that may follow. The answer cannot
                end before. Without `think_end` the grammar applies from the first token, so the
                answer cannot open a think block itself.
        """
        grammar = self.begin()
        if not think_end:
            return grammar
        return _ThinkingFirst(grammar, tuple(think_end), self._vocabulary)

    def begin(self) -> GrammarConstraint:
        """Return the grammar at its beginning."""
        return GrammarConstraint(self._matcher.deep_copy(), self._vocabulary)

    def begin_within(self, opener: str, text: str) -> GrammarConstraint | None:
        """Return the grammar behind an opener and `text`; None if it does not allow that, or ends
        in it."""
        grammar = self.begin()
        tokens: list[int] = []
        place = 0
        for found in self._names.finditer(opener):
            tokens += [*self._tokenize(opener[place : found.start()]), self._named[found[0]]]
            place = found.end()
        tokens += [*self._tokenize(opener[place:]), *self._tokenize(text)]
        return grammar if grammar.skip(tokens) else None

    def _tokenize(self, text: str) -> list[int]:
        # Not tokenize_str: this is no thread for the model's own tokenizer.
        return self._vocabulary.tokenizer.greedy_tokenize(text) if text else []

    def _spelled(self) -> list[str]:
        """Return the openers that are no token, so that several tokens write them."""
        added = self._vocabulary.added
        return [opener for opener in self.grammar.openers if opener not in added]

    def mask(self, tokens: Iterable[int]) -> Mask:
        """Return a mask of the model's tokens in which those given are set."""
        size = len(self._vocabulary.known) * 32
        return _bits((token for token in tokens if token < size), size)

    def _find_refused(self, openers: Sequence[str]) -> dict[str, Mask]:
        tokenizer = self._vocabulary.tokenizer
        parts = [
            (opener, opener[:size], opener[size:].encode())
            for opener in openers
            for size in range(1, len(opener))
        ]
        lasts = {opener[-1].encode() for opener in openers}
        refused: defaultdict[str, list[int]] = defaultdict(list)
        for token in range(min(len(self._vocabulary.known) * 32, tokenizer.vocab_size)):
            spelling = tokenizer.decode_bytes([token])
            if not any(last in spelling for last in lasts):
                continue
            for opener, begun, rest in parts:
                more = spelling.removeprefix(rest)
                goes_on = len(spelling) > len(more) > 0
                if goes_on and self.begin_within(opener, more.decode(errors="replace")) is None:
                    refused[begun].append(token)
        return {begun: self.mask(tokens) for begun, tokens in refused.items()}


class GrammarConstraint:
    """A grammar at some place in an answer.

    If it cannot go on, it has a `failure` and only allows the answer to end.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: _Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        # llguidance's mask, which is wider if the tokenizer has more tokens than the model.
        words = -(-vocabulary.tokenizer.vocab_size // 32)
        self._full = np.zeros(words, dtype=np.int32)
        self._address = self._full.ctypes.data
        self._model = self._full[: len(vocabulary.known)]
        self.dormant = False
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

    def skip(self, tokens: list[int]) -> bool:
        """Go on behind `tokens`; return whether they are allowed and the text is not over then."""
        return self._matcher.try_consume_tokens(tokens) == len(tokens) and not self.over

    @property
    def over(self) -> bool:
        """Whether the text is complete. It may still go on, if the grammar allows that."""
        return bool(self._matcher.is_accepting())

    def _fail(self, reason: str) -> None:
        self.failure = one_line(reason)
        log(_log, logging.WARNING, "grammar abandoned", reason=self.failure)


class _ThinkingFirst:
    """A grammar constraint that begins after a think block."""

    def __init__(
        self, grammar: GrammarConstraint, think_end: tuple[int, ...], vocabulary: _Vocabulary
    ) -> None:
        self._grammar = grammar
        self._think_end = think_end
        self._vocabulary = vocabulary
        self._recent: tuple[int, ...] = ()
        self._state: Literal["thinking", "break", "text"] = "thinking"
        self._breaks = 0  # tokens behind the thought

    @property
    def dormant(self) -> bool:
        return False

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
        if self._state == "break":
            self._breaks += 1
            between = _has(self._vocabulary.breaks, token) and not self._grammar.allows(token)
            if not between or self._breaks == _MOST_BREAKS:
                self._state = "text"
            if between:
                return
        self._grammar.accept(token)


def _first_error(matcher: LLMatcher) -> str:
    """Return the error within the first few tokens, or an empty text.

    Automata are built as they are walked. One that grows without bounds mostly does so at once.
    """
    for _ in range(_WALKED):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_stopped():
            break
        matcher.consume_token(int(np.unpackbits(mask, bitorder="little").argmax()))
    return matcher.get_error()


def _bits(tokens: Iterable[int], size: int) -> Mask:
    """Return a mask of `size` tokens in which those given are set."""
    bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _has(mask: Mask, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)
