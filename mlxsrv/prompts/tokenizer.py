"""A model's tokenizer, chat template and config files, ready for requests."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from mlxsrv.formats.answer_formats import (
    FROM_FILES,
    Evidence,
    FormatWords,
    detect,
    find_ends,
)
from mlxsrv.formats.capabilities import OF_TOKENIZERS, decoder_capabilities
from mlxsrv.formats.format_names import NONE
from mlxsrv.generation.parameters import Constraint, Grammar
from mlxsrv.logs import log
from mlxsrv.prompts.checkpoints import CheckpointFinder
from mlxsrv.prompts.encoding import TextEncoder, TokenBudget, Truncation
from mlxsrv.prompts.grammars.calls import CallConstraint
from mlxsrv.prompts.grammars.grammar import GrammarCompiler
from mlxsrv.prompts.model_defaults import (
    find_end_tokens,
    read_config,
    sampling_defaults,
    vocabulary_size,
)
from mlxsrv.prompts.templates.chat_template import ChatTemplate, template_texts
from mlxsrv.prompts.templates.messages import Chat
from mlxsrv.prompts.thought_budget import BudgetConstraint
from mlxsrv.prompts.token_texts import TokenTexts
from mlxsrv.prompts.tokenizer_steps import mend_decoder
from mlxsrv.text.formats import formats_of
from mlxsrv.text.marks import Marks
from mlxsrv.text.pipeline import TextPipeline
from mlxsrv.text.reader import AnswerReader, OfferedCalls
from mlxsrv.text.repetition import RepetitionGuard
from mlxsrv.text.stops import StopStrings

_CACHED = 16  # strings, and the tokens that have them

_log = logging.getLogger("mlxsrv.models")


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as token ids.

    Attributes:
        tokens: the ids to generate from.
        text: the text of these ids.
        thinking: the prompt leaves a think block open.
        checkpoints: how many of the first tokens other prompts will share, where that can be
            foreseen.
        ends: tokens that end this answer, besides those that end any.
    """

    tokens: tuple[int, ...]
    text: str
    thinking: bool = False
    checkpoints: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()


class Tokenizer:
    """The text side of one model.

    Any thread may use it, and several at the same time.

    Args:
        folder: the model's files.
        trust_remote_code: run Python code that comes with them.
        words: the operator's, for its formats of thoughts and calls.
        check: called before each text, and each piece of a long one, that becomes tokens. It raises
            to end the work.

    Attributes:
        end_tokens: those that the tokenizer and the config files name, as for mlx-lm.
        capabilities: those of `OF_TOKENIZERS` that it has.
        grammars: compiles grammars for answers.
        formats: those of its thoughts and calls.
        marks: the markers of these.
        think_end: the tokens at which a thought ends.
        turn_ends: tokens that end an answer in a chat: `end_tokens`, those of the model's formats,
            and the one that the chat template ends turns with.
        vocabulary: the width of the model's logits.
        context: tokens of prompt and answer together, or None; set by the pool.
        marks_checkpoints: prompts tell their `checkpoints`. The pool turns it off for models whose
            KV caches can be cut back, which is known once they are loaded.
        leaves_calls: the operator wants calls as the model writes them, in the content.
        tokens_with: finds the tokens that have a string in their text, or else in their name.
        enforces_calls: each call that the model makes is held to its tool's schema; set by the
            pool.

    Raises:
        OSError, ValueError: files are missing or cannot be understood.
    """

    def __init__(
        self,
        folder: Path,
        *,
        trust_remote_code: bool = False,
        words: FormatWords = FROM_FILES,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        config = read_config(folder / "config.json")
        generation = read_config(folder / "generation_config.json")
        extra = {"trust_remote_code": True} if trust_remote_code else None
        self._wrapper: TokenizerWrapper = load_tokenizer(folder, extra)
        _require_vocabulary(self._wrapper)
        backend = getattr(self._wrapper._tokenizer, "backend_tokenizer", None)
        mended = backend is not None and mend_decoder(backend)
        self._encoder = TextEncoder(self._wrapper._tokenizer, check)
        vocabulary = self.ids_by_name
        evidence = Evidence(
            vocabulary=vocabulary,
            templates=template_texts(self._wrapper),
            settings=read_config(folder / "tokenizer_config.json"),
            config=config,
        )
        self.formats = formats_of(detect(evidence, words))
        self.chat_template = ChatTemplate(self._wrapper, self.formats)
        self.end_tokens = find_end_tokens(self._wrapper.eos_token_ids, config, generation)
        ends = (vocabulary[name] for name in find_ends(evidence))
        self.turn_ends = self.end_tokens.union(self.chat_template.turn_ends(), ends)
        calls, thoughts = self.formats.calls, self.formats.thoughts
        called = () if calls is None else calls.marks
        self.marks = Marks([*thoughts.marks, *called], vocabulary)
        shown = self.marks.tokens
        framed = {token: shown[token] for token in self.think_markers}
        self._texts = TokenTexts(
            self._wrapper,
            end_tokens=self.end_tokens,
            turn_ends=self.turn_ends,
            byte_level=mended,
            thoughts=framed,
            calls={token: sign for token, sign in shown.items() if token not in framed},
        )
        # The device thread needs these, and is no thread for the model's own tokenizer.
        self.think_end, self._closing, self._bound_closing = (
            tuple(self.token_ids(text, special=False))
            for text in (thoughts.ending, thoughts.close, thoughts.bound_close)
        )
        self._checkpoints = CheckpointFinder(self.chat_template, self._encoder, self.turn_ends)
        self.defaults = sampling_defaults(generation)
        self.vocabulary = vocabulary_size(config) or len(self._wrapper)
        capabilities = decoder_capabilities(
            chats=self.chat_template.exists, evidence=evidence, words=words
        )
        self.capabilities = tuple(name for name in OF_TOKENIZERS if name in capabilities)
        self.leaves_calls = words.calls == NONE
        self.marks_checkpoints = True
        self.context: int | None = None
        self.enforces_calls = False
        self._logged: set[str] = set()
        self.tokens_with = lru_cache(maxsize=_CACHED)(self._find_tokens)
        self.grammars = GrammarCompiler(
            self._wrapper._tokenizer, vocabulary=self.vocabulary, end_tokens=self.turn_ends
        )

    # Facts.

    @property
    def class_name(self) -> str:
        """The name of the class in transformers."""
        return type(self._wrapper._tokenizer).__name__

    @property
    def special_tokens(self) -> dict[str, str | None]:
        """The names of tokens with a role of their own, by role."""
        roles = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {role: getattr(self._wrapper, role) for role in roles}

    @property
    def ids_by_name(self) -> dict[str, int]:
        """The vocabulary: token ids by the names of tokens."""
        return dict(self._wrapper.get_vocab())

    @property
    def strips_first_space(self) -> bool:
        """Whether the tokenizer writes a space before each text, which is not part of it."""
        return self._texts.strips_first_space

    def make_constraint(self, grammar: Grammar) -> Constraint:
        """Return the constraint of one answer, which begins with it.

        The device thread calls it, while other threads compile. What they have compiled is found,
        and takes some microseconds; else the grammar is compiled here.

        Raises:
            GrammarRefused, UnsupportedParameter: as `GrammarCompiler.recall`.
        """
        inner = self._follow(grammar) if grammar.text else None
        if grammar.budget is None:
            assert inner is not None  # nothing would be asked of the answer
            return inner
        text = self.content_pipeline(thinking=grammar.thinking)
        # A grammar of the whole answer says itself what follows a thought, such as a header.
        close = self._closing if inner is None or grammar.openers else self._bound_closing
        return BudgetConstraint(grammar.budget, close, self.turn_ends, text, inner)

    def _follow(self, grammar: Grammar) -> Constraint:
        compiled = self.grammars.recall(grammar)
        if grammar.openers:
            content = self.content_pipeline(thinking=grammar.thinking)
            calls = self.formats.calls
            called = () if calls is None else calls.marks
            shared = {self.marks.ids[name] for name in called if name in self.marks.ids}
            taken = re.compile("|".join(map(re.escape, called)) or "(?!)")
            headers = {taken.sub("", opener): opener for opener in grammar.openers}
            return CallConstraint(compiled, content, self.think_markers - shared, headers)
        return compiled.constraint(self.think_end if grammar.thinking else None)

    def budget(self, param: str) -> TokenBudget | None:
        """Return the token budget of the text at `param`, or None if the context has no limit."""
        return None if self.context is None else TokenBudget(self.context, param)

    def log_once(self, event: str, **fields: Any) -> None:
        """Log a warning about the model, the first time only."""
        if event not in self._logged:
            self._logged.add(event)
            log(_log, logging.WARNING, event, **fields)

    # Texts to tokens.

    def encode(
        self, text: str, budget: TokenBudget | None = None, last: int | None = None
    ) -> Prompt:
        """Return the prompt of a text that is to be continued.

        It begins with the model's start token if there is one.

        Args:
            last: how many tokens of the end are wanted, if not all.

        Raises:
            ContextLengthExceeded: the text is so far over the budget that its tokens were not
                counted.
        """
        bos = self._wrapper.bos_token
        special = bos is None or not text.startswith(bos)
        return self._keep_last(Prompt(self._encode(text, special, budget, last), text), last)

    def prompt_of(self, tokens: Sequence[int]) -> Prompt:
        """Return the prompt of token ids."""
        return Prompt(tuple(tokens), self.decode(tokens))

    def token_ids(
        self,
        text: str,
        *,
        special: bool,
        budget: TokenBudget | None = None,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """Return the token ids of a text, with the tokenizer's own around it if `special`.

        Raises:
            ContextLengthExceeded: the text is so far over the budget that its tokens were not
                counted.
            InvalidRequest: the truncation leaves no room beside the special tokens.
        """
        if truncation is None:
            return self._encoder.encode(text, special=special, budget=budget)
        return self._encoder.encode_truncated(text, truncation, special=special)

    def pair_ids(
        self,
        first: str,
        second: str,
        budget: TokenBudget | None = None,
        truncation: Truncation | None = None,
    ) -> tuple[list[int], int]:
        """Return the token ids of two texts as one input of a cross-encoder.

        Truncation takes from the longer of the two texts.

        Returns:
            The ids, and how many of them belong to the first text; all, if the model does not tell
            the texts apart.

        Raises:
            ContextLengthExceeded: a text is so far over the budget that its tokens were not
                counted.
            InvalidRequest: the truncation leaves no room beside the special tokens.
        """
        return self._encoder.encode_pair(first, second, budget, truncation)

    def word_ids(self, word: str) -> list[tuple[int, ...]]:
        """Return the token ids of a word at the beginning of a text and after a space.

        They are one entry if both are the same, and none if the tokenizer drops the word.
        """
        word = word.lstrip()
        found = (tuple(self.token_ids(text, special=False)) for text in (word, f" {word}"))
        return [ids for ids in dict.fromkeys(found) if ids]

    def render(
        self, chat: Chat, budget: TokenBudget | None = None, last: int | None = None
    ) -> Prompt:
        """Return the prompt of a chat, by the model's template or the chat's own.

        Args:
            last: how many tokens of the end are wanted, if not all.

        Raises:
            UnsupportedParameter: the model has no template.
            InvalidRequest: the template refuses these messages; the error is the template's.
            ContextLengthExceeded: the chat is so far over the budget that its tokens were not
                counted.
        """
        text = self.chat_template.render(chat)
        tokens = self._encode(text, False, budget, last)
        checkpoints: tuple[int, ...] = ()
        if self.marks_checkpoints and chat.template is None and last is None:
            checkpoints = self._checkpoints.mark(chat, text, tokens)
        thinking = self.formats.thoughts.leaves_open(text)
        return self._keep_last(Prompt(tokens, text, thinking, checkpoints), last)

    def _encode(
        self, text: str, special: bool, budget: TokenBudget | None, last: int | None
    ) -> tuple[int, ...]:
        """Return the token ids of a text. If only the `last` are wanted, these and one more."""
        if last is None:
            return tuple(self._encoder.encode(text, special=special, budget=budget))
        return tuple(self._encoder.encode_end(text, last + 1, special=special))

    def _keep_last(self, prompt: Prompt, last: int | None) -> Prompt:
        """Return the end of a prompt, from its `last` tokens on."""
        if last is None or len(prompt.tokens) <= last:
            return prompt
        tokens = prompt.tokens[-last:]
        return Prompt(tokens, self.decode(tokens), thinking=prompt.thinking)

    # Tokens to text.

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included, nothing tidied up."""
        text: str = self._wrapper.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them; ids beyond it have an empty name."""
        found: list[str | None] = self._wrapper.convert_ids_to_tokens(list(tokens))
        return [name or "" for name in found]

    def token_bytes(self, token: int) -> bytes:
        """Return what a token writes; nothing for special tokens and ids beyond the vocabulary."""
        return self._texts.token_bytes(token)

    def token_bytes_or_name(self, token: int) -> bytes:
        """Return what a token writes, or its name if it writes nothing."""
        return self.token_bytes(token) or self.decode([token]).encode()

    def _find_tokens(self, text: str) -> tuple[int, ...]:
        part = text.encode()
        texts = map(self.token_bytes_or_name, range(self.vocabulary))
        return tuple(token for token, written in enumerate(texts) if part in written)

    def pipeline(
        self,
        *,
        stops: Sequence[str],
        chat: bool,
        thinking: bool,
        prompt: str = "",
        bound: bool = False,
        calls: OfferedCalls | None = None,
        min_tokens: int = 0,
        guard: RepetitionGuard | None = None,
    ) -> TextPipeline:
        """Return the stages from token ids to text for one answer.

        A text completion is one text, with thoughts where they stand: it has no field for them.

        Args:
            thinking: the prompt leaves a think block open.
            prompt: its text, of which the end may be the beginning of a message.
            bound: the answer follows a grammar.
            calls: those that the answer may make.
        """
        reader = None
        if chat:
            thoughts = self.formats.thoughts
            frame = thoughts.frame(self.marks, thinking=thinking, prompt=prompt)
            reader = AnswerReader(frame, self.marks, calls, thinking=thinking, bound=bound)
        return TextPipeline(
            self._texts.detokenizer(chat=chat, calls=calls is not None),
            reader,
            StopStrings(stops) if stops else None,
            min_tokens=min_tokens,
            guard=guard,
        )

    def content_pipeline(self, *, thinking: bool) -> TextPipeline:
        """Return the stages that tell an answer's content, with its calls, from its thoughts."""
        detokenizer = self._texts.detokenizer(chat=True, calls=True)
        frame = self.formats.thoughts.frame(self.marks, thinking=thinking)
        return TextPipeline(detokenizer, AnswerReader(frame, self.marks, thinking=thinking))

    def own_thoughts(self, prompt: Prompt) -> str:
        """Return the name of the format of the thoughts that the model may open itself behind a
        prompt, or in whose frame it answers; empty if there are none."""
        thoughts = self.formats.thoughts
        start, end = thoughts.thought
        if thoughts.answer[0]:
            return thoughts.name
        closed = prompt.thinking or not start or prompt.text.rstrip().endswith(end)
        return "" if closed or not self._opens_itself else thoughts.name

    @cached_property
    def _opens_itself(self) -> bool:
        """Whether the template knows of thoughts, and leaves it to the model to open them."""
        start = self.formats.thoughts.thought[0].strip()
        known = any(start in text for text in template_texts(self._wrapper))
        question = self.chat_template.write_question(thinking=True)
        return known and not self.formats.thoughts.leaves_open(question or "")

    @property
    def think_markers(self) -> frozenset[int]:
        """Tokens that are a whole marker of thoughts."""
        ids = self.marks.ids
        return frozenset(ids[name] for name in self.formats.thoughts.marks if name in ids)


def _require_vocabulary(tokenizer: TokenizerWrapper) -> None:
    """Raise ValueError where transformers has read no file of the vocabulary: it then makes a
    tokenizer that knows its special tokens, and at most one more, without a word."""
    if len(tokenizer) - len(tokenizer.added_tokens_decoder) < 2:
        kind = type(tokenizer._tokenizer).__name__
        raise ValueError(f"{kind} finds no vocabulary in its folder; tokenizer.json is missing")
