"""The text of each token in an answer: which special tokens are shown, and to which later stage.

Every table is made once, when the model is loaded: for a large vocabulary that takes longer than
most answers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

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


class TokenTexts:
    """Makes the detokenizers of one model. May be used from several threads.

    Args:
        wrapper: mlx-lm's tokenizer.
        end_tokens: tokens that end any answer.
        turn_ends: tokens that end an answer in a chat.
        byte_level: the vocabulary spells bytes, whatever its files say of its decoder.
        thoughts: the tokens that mark thoughts, and how each is shown to the reader of answers.
        calls: those that mark calls.

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
        thoughts: Mapping[int, str],
        calls: Mapping[int, str],
    ) -> None:
        self._end_tokens = end_tokens
        self._turn_ends = turn_ends
        # An end token is no text, also if a request has it ignored.
        self._shown_in_chats = {id: sign for id, sign in thoughts.items() if id not in turn_ends}
        called = {id: sign for id, sign in calls.items() if id not in turn_ends}
        self._shown_in_calls = {**self._shown_in_chats, **called}
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
        self._table = table.showing({t: "" for t in hidden if t in end_tokens})
        # Markers of calls are no text where no tools were given; neither are those of thoughts in
        # a text completion.
        self._text_table = self._table.showing(dict.fromkeys(self._shown_in_calls, ""))
        self._chat_table = self._text_table.masking().showing(hidden | self._shown_in_chats)
        self._call_table = self._chat_table.showing(self._shown_in_calls)

    def token_bytes(self, token: int) -> bytes:
        """Return what a token writes; nothing for special tokens and ids beyond the vocabulary."""
        if token in self._shown_in_calls:
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
            return DecodingDetokenizer(self._decoder, keep={**ends, **keep}, masked=chat)
        table = self._call_table if calls else self._chat_table if chat else self._text_table
        # In a completion the space belongs between the prompt and what follows it.
        return Detokenizer(table, strip_first_space=chat and self.strips_first_space)
