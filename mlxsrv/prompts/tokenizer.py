"""What a model's tokenizer, chat template and config files say, ready for requests.

Everything that derives from the tokenizer is derived here, once, when the model is loaded: a
table of a large vocabulary takes longer to make than most answers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from mlx_lm.tool_parsers import json_tools
from mlx_lm.utils import load_tokenizer

from mlxsrv.errors import InvalidRequest, UnsupportedParameter
from mlxsrv.prompts.encoding import (
    PIECE_CHARACTERS,
    IncrementalEncoder,
    Pause,
    TokenBudget,
    Truncation,
)
from mlxsrv.prompts.model_defaults import (
    end_tokens,
    read_config,
    sampling_defaults,
    vocabulary_size,
)
from mlxsrv.prompts.templates import write
from mlxsrv.text.channels import Channels
from mlxsrv.text.detokenize import (
    DecodingDetokenizer,
    Detokenizer,
    Scheme,
    TokenBytes,
    token_bytes,
)
from mlxsrv.text.pipeline import TextPipeline
from mlxsrv.text.stops import StopStrings
from mlxsrv.text.tools import ToolCalls, ToolDialect

# End-of-turn tokens by family. Published models forget to list theirs often enough, so one that
# the chat template ends a turn with counts, in chats.
_TURN_ENDS = (
    "<|im_end|>",  # ChatML: Qwen and many others
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",  # Llama 3, before a tool's answer
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",  # Gemma
)

# What stands between the markers of a call in some families' dialects, often as special tokens.
_INSIDE_CALLS = (
    '<|"|>',  # Gemma 4
    "<escape>",  # FunctionGemma
    "<|tool_call_begin|>",  # Kimi K2
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|open|>",  # Kimi K3
    "<|close|>",
    "<|sep|>",
    "[TOOL_CALLS]",  # Mistral
    "[CALL_ID]",
    "[ARGS]",
    "<arg_key>",  # GLM
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<longcat_arg_key>",  # LongCat
    "</longcat_arg_key>",
    "<longcat_arg_value>",
    "</longcat_arg_value>",
)

# What rendering names itself where a signature does not say so, in transformers and Jinja.
_RENDERED = frozenset({"self", "conversations", "messages"})


if TYPE_CHECKING:
    from mlxsrv.prompts.grammars.grammar import GrammarCompiler


class Prompt(msgspec.Struct, frozen=True):
    """Token ids to generate from, the text that they are, whether they leave a think block open,
    how many of the first are a system message that other chats will share (0: not known), and
    tokens that end this answer, beside those that end any."""

    tokens: tuple[int, ...]
    text: str
    thinking: bool = False
    checkpoint: int = 0
    ends: frozenset[int] = frozenset()


class Tokenizer:
    """The text side of one model. Not for concurrent use: the pool lends it to one thread at a
    time, since fast tokenizers panic when two threads encode; `pipeline` may be called any time.

    Attributes:
        end_tokens: what the tokenizer and the config files name, as for mlx-lm.
        turn_ends: what ends an answer in a chat: these, and what the template ends turns with.

    Args:
        folder: the model's files.
        trust_remote_code: run Python code that comes with them.

    Raises:
        OSError, ValueError: files that are missing or cannot be understood.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        config = read_config(folder / "config.json")
        generation = read_config(folder / "generation_config.json")
        extra = {"trust_remote_code": True} if trust_remote_code else None
        self._wrapper: TokenizerWrapper = load_tokenizer(folder, extra)
        self._encoder = IncrementalEncoder(self._wrapper)
        self.end_tokens = end_tokens(self._wrapper.eos_token_ids, config, generation)
        self.defaults = sampling_defaults(generation)
        self.vocabulary = vocabulary_size(config) or len(self._wrapper)
        self.thinks: bool = self._wrapper.has_thinking
        self.marks_checkpoints = False  # set by the pool, for models whose caches cannot be cut
        self.context: int | None = None  # tokens; set by the pool
        self._reserved = _RENDERED.union(inspect.signature(self._apply_template()).parameters)
        self._grammars: GrammarCompiler | None = None
        self.turn_ends = self.end_tokens | self._template_ends()
        self._derive_detokenizer()

    @property
    def chats(self) -> bool:
        return bool(self._wrapper.has_chat_template)

    @property
    def chat_template(self) -> str | None:
        """The source of the template, if it is one of text."""
        template = self._wrapper.chat_template if self.chats else None
        return template if isinstance(template, str) else None

    @property
    def kind(self) -> str:
        """The class that reads it."""
        return type(self._wrapper._tokenizer).__name__

    @property
    def special_names(self) -> dict[str, str | None]:
        """Names of the tokens with a part of their own."""
        parts = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {part: getattr(self._wrapper, part) for part in parts}

    def names(self, tokens: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them; ids beyond it have no name."""
        found: list[str | None] = self._wrapper.convert_ids_to_tokens(list(tokens))
        return [name or "" for name in found]

    def knows(self, variable: str) -> bool:
        """Whether the chat template has a variable of this name."""
        template = self._wrapper.chat_template
        return isinstance(template, str) and variable in template

    def lend(self, pause: Pause) -> None:
        """Have `pause` called between two texts, or two pieces of a long one."""
        self._encoder.pause = pause

    def limit(self, param: str) -> TokenBudget | None:
        """What the context allows the text at `param`, if it has an end."""
        return None if self.context is None else TokenBudget(self.context, param)

    def encode(
        self, text: str, limit: TokenBudget | None = None, last: int | None = None
    ) -> Prompt:
        """A text to be continued. Starts with the model's start token if it has one. Or the `last`
        so many tokens of that.

        Raises:
            ContextLengthExceeded: it is so long over the limit that its tokens were not counted.
        """
        bos = self._wrapper.bos_token
        special = bos is None or not text.startswith(bos)
        return self._cut(Prompt(self._read(text, special, limit, last), text), last)

    def _read(
        self, text: str, special: bool, limit: TokenBudget | None, last: int | None
    ) -> tuple[int, ...]:
        """The token ids of a text: not all where only the `last` are wanted."""
        if last is not None:
            text, limit = self._encoder.end(text, last), None
        return tuple(self._encoder.encode(text, special=special, limit=limit))

    def _cut(self, prompt: Prompt, last: int | None) -> Prompt:
        """The end of a prompt, from its `last` tokens on."""
        if last is None or len(prompt.tokens) <= last:
            return prompt
        tokens = prompt.tokens[-last:]
        return Prompt(tokens, self.decode(tokens), thinking=prompt.thinking)

    def given(self, tokens: Sequence[int]) -> Prompt:
        """Token ids that a client made itself."""
        return Prompt(tuple(tokens), self.decode(tokens))

    @property
    def numbers(self) -> dict[str, int]:
        """The vocabulary: ids by the names of tokens."""
        return dict(self._wrapper.get_vocab())

    def split(
        self,
        text: str,
        *,
        special: bool,
        limit: TokenBudget | None = None,
        cut: Truncation | None = None,
    ) -> list[int]:
        """The token ids of a text, with those that the tokenizer puts around one if `special`.

        Raises:
            ContextLengthExceeded: it is so long over the limit that its tokens were not counted.
            InvalidRequest: the cut leaves no room beside the special tokens.
        """
        if cut is None:
            return self._encoder.encode(text, special=special, limit=limit)
        short = self._encoder.shorten(text, cut)
        with self._cutting(cut, pair=False) as options:
            return list(self._wrapper.encode(short, add_special_tokens=special, **options))

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The token ids of a word at the beginning of a text and, if they are others, after a
        space. None of a word that the tokenizer drops."""
        word = word.lstrip()
        found = (tuple(self.split(text, special=False)) for text in (word, f" {word}"))
        return [spelling for spelling in dict.fromkeys(found) if spelling]

    def pair(
        self,
        first: str,
        second: str,
        limit: TokenBudget | None = None,
        cut: Truncation | None = None,
    ) -> tuple[list[int], int]:
        """Two texts as one, as a cross-encoder reads them; and how many tokens belong to the first,
        if the model tells them apart. Where it is to be cut, the longer of the two is.

        Raises:
            ContextLengthExceeded: one is so long over the limit that its tokens were not counted.
            InvalidRequest: the cut leaves no room beside the special tokens.
        """
        if cut is not None:
            first, second = (self._encoder.shorten(text, cut) for text in (first, second))
        for text in (first, second) if cut is None and limit is not None else ():
            if len(text) > PIECE_CHARACTERS:
                self._encoder.encode(text, special=False, limit=limit)
        with self._cutting(cut, pair=True) as options:
            encoded = self._wrapper._tokenizer(first, second, return_token_type_ids=True, **options)
        types: list[int] = encoded["token_type_ids"]
        return list(encoded["input_ids"]), types.index(1) if 1 in types else len(types)

    @contextmanager
    def _cutting(self, cut: Truncation | None, *, pair: bool) -> Iterator[dict[str, Any]]:
        """What makes the tokenizer cut, which leaves its special tokens where they belong.

        Raises InvalidRequest if they alone are too many.
        """
        if cut is None:
            yield {}
            return
        tokenizer = self._wrapper._tokenizer
        own = tokenizer.num_special_tokens_to_add(pair=pair)
        if cut.tokens <= own:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {cut.tokens} leave no room for text, since the model's "
                f"tokenizer adds {own} of its own",
                param="truncate_prompt_tokens",
            )
        usual, tokenizer.truncation_side = tokenizer.truncation_side, cut.side
        try:
            yield {"truncation": "longest_first", "max_length": cut.tokens}
        finally:
            tokenizer.truncation_side = usual
            if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
                backend.no_truncation()  # others call it without transformers

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included, nothing tidied up."""
        text: str = self._wrapper.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def token_bytes(self, token: int) -> bytes:
        """What a token writes; nothing for special tokens, markers, and ids beyond the table."""
        if token in self._markers:
            return b""
        if self._table is None:
            return DecodingDetokenizer(self._decoder, keep={}).feed(token).encode()
        return self._table.data[token] if token < len(self._table.data) else b""

    def spelling(self, token: int) -> bytes:
        """As `token_bytes`, but special tokens are given by their names."""
        return self.token_bytes(token) or self.decode([token]).encode()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any],
        continue_final: bool,
        answers: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        limit: TokenBudget | None = None,
        last: int | None = None,
    ) -> Prompt:
        """A chat through the model's template.

        Args:
            continue_final: the last message goes on.
            answers: else, the beginning of an answer follows.
            template: a client's, in place of the model's.
            last: how many tokens of the end are wanted, if not all.

        Raises:
            InvalidRequest: the template refuses these messages; the error is the template's.
            ContextLengthExceeded: it is so long over the limit that its tokens were not counted.
        """
        if not self.chats and template is None:
            raise UnsupportedParameter(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        apply: Any = partial(
            self._apply_template(),
            list(messages),
            tokenize=False,
            add_generation_prompt=answers and not continue_final,
            continue_final_message=continue_final,
            tools=None if tools is None else list(tools),
            **variables,
        )
        text = write(apply, template)
        tokens = self._read(text, False, limit, last)
        checkpoint = 0
        if template is None and last is None:
            checkpoint = self._system_tokens(tokens, messages, {**variables, "tools": tools})
        thinking = self._opens_thinking(text)
        return self._cut(Prompt(tokens, text, thinking=thinking, checkpoint=checkpoint), last)

    def _system_tokens(
        self,
        tokens: tuple[int, ...],
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> int:
        """How many of `tokens` the leading system message alone accounts for."""
        if not self.marks_checkpoints or messages[0]["role"] != "system":
            return 0
        try:
            text = self._apply_template()(list(messages[:1]), tokenize=False, **variables)
        except Exception:  # a template that insists on a user message; nothing is lost but time
            return 0
        alone = tuple(self._encoder.encode(text, special=False))
        # The text after the message may share its last token with what follows it in the chat.
        return next((n for n in range(len(alone), 0, -1) if tokens[:n] == alone[:n]), 0)

    def reserved(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that are parameters of rendering itself and not free variables of a
        template. A client that could set them could replace the template."""
        return [name for name in names if name in self._reserved]

    def pipeline(
        self,
        *,
        stops: Sequence[str],
        chat: bool,
        thinking: bool,
        bound: bool = False,
        tools: ToolCalls | None = None,
        min_tokens: int = 0,
    ) -> TextPipeline:
        """The stages from token ids to text for one answer, which a grammar may have `bound`.

        A text completion is one text, with thoughts where they stand: it has no field for them.
        """
        start, end = self._wrapper.think_start, self._wrapper.think_end
        return TextPipeline(
            self._detokenizer(chat=chat, calls=tools is not None),
            Channels(start, end, thinking=thinking, bound=bound) if chat else None,
            StopStrings(stops) if stops else None,
            tools,
            min_tokens=min_tokens,
        )

    def dialect(self, tools: Sequence[Mapping[str, Any]]) -> ToolDialect | None:
        """How the model calls these tools, if it is known."""
        if not self._wrapper.has_tool_calling:
            return None
        parse, given = self._wrapper.tool_parser, list(tools)
        return ToolDialect(
            start=self._wrapper.tool_call_start,
            end=self._wrapper.tool_call_end,
            # By position: the parsers do not agree on the name.
            parse=lambda text: parse(text, given),
            json=parse is json_tools.parse_tool_call,
            names=tuple(tool["function"]["name"] for tool in given),
        )

    @property
    def grammars(self) -> GrammarCompiler:
        """What answers may be bound to; made on first use, which imports its library."""
        if self._grammars is None:
            from mlxsrv.prompts.grammars.grammar import GrammarCompiler

            self._grammars = GrammarCompiler(
                self._wrapper._tokenizer,
                vocabulary=self.vocabulary,
                end_tokens=self.turn_ends,
            )
        return self._grammars

    @property
    def think_end(self) -> tuple[int, ...]:
        return tuple(self._wrapper.think_end_tokens or ())

    def _apply_template(self) -> Any:
        # mlx-lm's wrapper turns thinking on wherever the vocabulary has a think token; a request
        # that says nothing should get what the template's author made the default. Only models
        # whose template is code of mlx-lm's must go through the wrapper.
        if self._wrapper._chat_template is not None:
            return self._wrapper.apply_chat_template
        return self._wrapper._tokenizer.apply_chat_template

    def _template_ends(self) -> set[int]:
        """The marker of a family that the chat template writes behind an assistant's answer."""
        if not self.chats:
            return set()
        answer = "mlxsrv"
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        try:
            text = self._apply_template()(chat, tokenize=False)
        except Exception:  # a template that wants more than a user's question
            return set()
        rest = text.rpartition(answer)[2].lstrip()
        vocabulary = self._wrapper.get_vocab()
        return {vocabulary[end] for end in _TURN_ENDS if end in vocabulary and rest.startswith(end)}

    def _opens_thinking(self, text: str) -> bool:
        return self.thinks and text.rstrip().endswith(self._wrapper.think_start)

    def _derive_detokenizer(self) -> None:
        detokenizer = self._wrapper.detokenizer
        added = self._wrapper.added_tokens_decoder
        thoughts, calls = [*self._think_tokens()], [*self._marker_tokens()]
        self._markers = frozenset(token for token in thoughts + calls if token in added)
        self._thoughts = self._special(thoughts)
        self._calls = self._thoughts | self._special([*self._call_tokens()])
        self.strips_first_space = False
        scheme: Scheme | None = None
        if isinstance(detokenizer, BPEStreamingDetokenizer):
            scheme = "byte_level"
        elif isinstance(detokenizer, SPMStreamingDetokenizer):
            scheme = "sentencepiece"
            self.strips_first_space = detokenizer.trim_space
        if scheme is None:
            # A copy: it decodes on the event loop while the original encodes in a thread.
            self._decoder = copy.deepcopy(self._wrapper._tokenizer)
            self._table: TokenBytes | None = None
            return
        # An end token is no text either, where a request has it ignored.
        table = token_bytes(self._wrapper, scheme)
        hidden = {token: "" for token in self.turn_ends if token < len(table.data)}
        self._table = table.showing({t: "" for t in hidden if t in self.end_tokens})
        shown = {token: added[token].content for token in self._markers}
        # Where no tools were given, what looks like a call is none, and its markers are no text;
        # neither are those of thoughts in a text completion.
        self._text_table = self._table.showing(dict.fromkeys(shown, ""))
        self._chat_table = self._text_table.showing(
            hidden | {token: text for token, text in shown.items() if token in thoughts}
        )
        self._call_table = self._table.showing(hidden | shown | self._calls)

    def _think_tokens(self) -> Iterator[int]:
        if self.thinks:
            yield from self._wrapper.think_start_tokens
            yield from self._wrapper.think_end_tokens

    def _marker_tokens(self) -> Iterator[int]:
        if self._wrapper.has_tool_calling:
            yield from self._wrapper.tool_call_start_tokens or ()
            yield from self._wrapper.tool_call_end_tokens or ()

    def _call_tokens(self) -> Iterator[int]:
        if self._wrapper.has_tool_calling:
            yield from self._marker_tokens()
            vocabulary = self._wrapper.get_vocab()
            yield from (vocabulary[name] for name in _INSIDE_CALLS if name in vocabulary)

    def _special(self, tokens: Iterable[int]) -> dict[int, str]:
        """Those of `tokens` that are no text by themselves, but needed as such: by a later stage
        that looks for them, or by the parser of a call."""
        added = self._wrapper.added_tokens_decoder
        return {id: added[id].content for id in tokens if id in added and added[id].special}

    def _detokenizer(self, *, chat: bool, calls: bool) -> Detokenizer | DecodingDetokenizer:
        if self._table is None:
            keep = self._calls if calls else self._thoughts if chat else {}
            ends = dict.fromkeys(self.turn_ends if chat else self.end_tokens, "")
            return DecodingDetokenizer(self._decoder, keep={**ends, **keep})
        table = self._call_table if calls else self._chat_table if chat else self._text_table
        # In a completion the space belongs between the prompt and what follows it.
        return Detokenizer(table, strip_first_space=chat and self.strips_first_space)
