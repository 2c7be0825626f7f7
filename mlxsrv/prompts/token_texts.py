"""The text of each token in an answer: which special tokens are shown, and to which later stage.

Every table is made once, when the model is loaded: for a large vocabulary that takes longer than
most answers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)

from mlxsrv.text.detokenize import (
    DecodingDetokenizer,
    Detokenizer,
    Scheme,
    TokenBytes,
    token_bytes,
)

# Tokens between the markers of a call in some families' dialects, often special ones.
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


class TokenTexts:
    """Makes the detokenizers of one model. May be used from several threads.

    Args:
        wrapper: mlx-lm's tokenizer.
        end_tokens: tokens that end any answer.
        turn_ends: tokens that end an answer in a chat.
        byte_level: the vocabulary spells bytes, whatever its files say of its decoder.

    Attributes:
        strips_first_space: a text that begins an answer in a chat loses its first space.
    """

    def __init__(
        self,
        wrapper: TokenizerWrapper,
        *,
        end_tokens: frozenset[int],
        turn_ends: frozenset[int],
        byte_level: bool = False,
    ) -> None:
        self._wrapper = wrapper
        self._end_tokens = end_tokens
        self._turn_ends = turn_ends
        added = wrapper.added_tokens_decoder
        think, call = [*self._think_markers()], [*self._call_markers()]
        self._markers = frozenset(token for token in think + call if token in added)
        self._shown_in_chats = self._special(think)
        self._shown_in_calls = self._shown_in_chats | self._special([*call, *self._inside_calls()])
        detokenizer = wrapper.detokenizer
        self.strips_first_space = False
        scheme: Scheme | None = None
        if byte_level or isinstance(detokenizer, BPEStreamingDetokenizer):
            scheme = "byte_level"
        elif isinstance(detokenizer, SPMStreamingDetokenizer):
            scheme = "sentencepiece"
            self.strips_first_space = detokenizer.trim_space
        if scheme is None:
            # A copy: it decodes on the event loop while the original encodes in a thread.
            self._decoder = copy.deepcopy(wrapper._tokenizer)
            self._table: TokenBytes | None = None
            return
        table = token_bytes(wrapper, scheme)
        hidden = {token: "" for token in turn_ends if token < len(table.data)}
        # An end token is no text either if a request has it ignored.
        self._table = table.showing({t: "" for t in hidden if t in end_tokens})
        markers = {token: added[token].content for token in self._markers}
        # Markers of calls are no text where no tools were given; neither are those of thoughts in
        # a text completion.
        self._text_table = self._table.showing(dict.fromkeys(markers, ""))
        self._chat_table = self._text_table.showing(
            hidden | {token: text for token, text in markers.items() if token in think}
        )
        self._call_table = self._table.showing(hidden | markers | self._shown_in_calls)

    def token_bytes(self, token: int) -> bytes:
        """Return what a token writes; nothing for special tokens and ids beyond the vocabulary."""
        if token in self._markers:
            return b""
        if self._table is None:
            return DecodingDetokenizer(self._decoder, keep={}).feed(token).encode()
        return self._table.data[token] if token < len(self._table.data) else b""

    def detokenizer(self, *, chat: bool, calls: bool) -> Detokenizer | DecodingDetokenizer:
        """Return a new detokenizer for one answer.

        Args:
            chat: markers of thoughts are shown, for the stage that tells thoughts from content.
            calls: markers of calls are shown too, for the stage that reads calls.
        """
        if self._table is None:
            keep = self._shown_in_calls if calls else self._shown_in_chats if chat else {}
            ends = dict.fromkeys(self._turn_ends if chat else self._end_tokens, "")
            return DecodingDetokenizer(self._decoder, keep={**ends, **keep})
        table = self._call_table if calls else self._chat_table if chat else self._text_table
        # In a completion the space belongs between the prompt and what follows it.
        return Detokenizer(table, strip_first_space=chat and self.strips_first_space)

    def _think_markers(self) -> Iterator[int]:
        if self._wrapper.has_thinking:
            yield from self._wrapper.think_start_tokens
            yield from self._wrapper.think_end_tokens

    def _call_markers(self) -> Iterator[int]:
        if self._wrapper.has_tool_calling:
            yield from self._wrapper.tool_call_start_tokens or ()
            yield from self._wrapper.tool_call_end_tokens or ()

    def _inside_calls(self) -> Iterator[int]:
        if self._wrapper.has_tool_calling:
            vocabulary = self._wrapper.get_vocab()
            yield from (vocabulary[name] for name in _INSIDE_CALLS if name in vocabulary)

    def _special(self, tokens: Iterable[int]) -> dict[int, str]:
        """Return the texts of those `tokens` that are special, so that a table can show them."""
        added = self._wrapper.added_tokens_decoder
        return {id: added[id].content for id in tokens if id in added and added[id].special}
