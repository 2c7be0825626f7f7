"""Detokenizers: token ids to text, one id at a time.

Several tokens may write one character, so text is given only as far as characters are complete. No
detokenizer here gives U+FFFD for a character that is not complete. It does so only if the model
wrote U+FFFD itself, or bytes that are not UTF-8 at all.
"""

import codecs
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from mlxsrv.text.stage import Stage

Scheme = Literal["byte_level", "sentencepiece"]

_REPLACEMENT = "\ufffd"
_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")
_NONCHARACTER_BYTES = re.compile(rb"\xef\xb7[\x90-\xaf]")
_CUT_BYTES = 3  # a character is at most four bytes, so a cut one has at most three
_PATIENCE = 8  # ids that may wait for a complete character; more than any character needs
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SupportsContent(Protocol):
    """The part of a Hugging Face tokenizer's added token that is used here."""

    @property
    def content(self) -> str: ...
    @property
    def special(self) -> bool: ...


class SupportsVocabulary(Protocol):
    """The part of a Hugging Face tokenizer that a table is derived from."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, SupportsContent]: ...
    def convert_ids_to_tokens(self, ids: list[int], /) -> Sequence[str | None]: ...
    def __len__(self) -> int: ...


class SupportsDecode(Protocol):
    """The part that is used of a tokenizer whose tokens' bytes are not known."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str: ...


class TokenBytes(msgspec.Struct, frozen=True):
    """The text of every token id of a vocabulary, derived once and shared by all streams.

    Attributes:
        data: the bytes that each id writes; special tokens write none.
        texts: the same decoded; None if the bytes are not whole characters.
        masked: the model's own noncharacters, which may stand for markers, write U+FFFD.
    """

    data: tuple[bytes, ...]
    texts: tuple[str | None, ...]
    masked: bool = False

    def showing(self, tokens: Mapping[int, str]) -> "TokenBytes":
        """Return a copy in which `tokens` write the texts given for them."""
        data, texts = list(self.data), list(self.texts)
        for token_id, text in tokens.items():
            data[token_id], texts[token_id] = text.encode(), text
        return TokenBytes(data=tuple(data), texts=tuple(texts), masked=self.masked)

    def masking(self) -> "TokenBytes":
        """Return a copy that is masked, in which tokens may be shown as noncharacters."""
        data = tuple(_NONCHARACTER_BYTES.sub(_REPLACEMENT.encode(), each) for each in self.data)
        texts = tuple(text and _NONCHARACTER.sub(_REPLACEMENT, text) for text in self.texts)
        return TokenBytes(data=data, texts=texts, masked=True)


def token_bytes(
    tokenizer: SupportsVocabulary, scheme: Scheme, *, keep: Collection[str] = ()
) -> TokenBytes:
    """Derive the table of a tokenizer.

    An added token is spelled like the others, so that a run of ▁ is one of spaces. But added tokens
    are matched with whole characters: one that would be broken bytes is text as it stands.

    Args:
        scheme: how the vocabulary spells bytes.
        keep: special tokens that write their names, as markers for a later stage; others write
            nothing.
    """
    spell = _byte_level if scheme == "byte_level" else _sentencepiece
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    data = [b"" if token is None else spell(token) for token in tokens]
    added = tokenizer.added_tokens_decoder
    # Ids of added tokens may lie beyond the size that a tokenizer reports, with a gap before them.
    data.extend([b""] * (max(added, default=-1) + 1 - len(data)))
    for token_id, token in added.items():
        as_it_stands = token.content.encode()
        if token.special:
            data[token_id] = as_it_stands if token.content in keep else b""
            continue
        written = spell(token.content)
        broken = scheme == "byte_level" and _whole_text(written) is None
        data[token_id] = as_it_stands if broken else written
    return TokenBytes(data=tuple(data), texts=tuple(map(_whole_text, data)))


class Detokenizer(Stage[int, str]):
    """Detokenizer that reads a table of the ids' bytes.

    Ids beyond the table, which models with a padded vocabulary have, write nothing.

    Args:
        strip_first_space: drop one space at the very beginning, which sentencepiece puts before the
            first word.
    """

    __slots__ = ("_data", "_decoder", "_masked", "_plain", "_strip_space", "_texts")

    def __init__(self, table: TokenBytes, *, strip_first_space: bool = False) -> None:
        self._data = table.data
        self._texts = table.texts
        self._masked = table.masked
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = strip_first_space
        self._plain = not strip_first_space  # nothing waits, so the table's texts are right

    def feed(self, token_id: int) -> str:
        try:
            text = self._texts[token_id]
        except IndexError:
            return ""
        if text is not None and self._plain:
            return text
        return self._join(self._data[token_id])

    def flush(self, *, cut: bool = False) -> str:
        """Return nothing: an incomplete character at the end cannot be shown."""
        return ""

    def _join(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        if self._masked and data[:1] < b"\xc0" and _NONCHARACTER.match(text):
            text = _REPLACEMENT + text[1:]  # the bytes of one that began before
        if text and self._strip_space:
            text = text.removeprefix(" ")
            self._strip_space = False
        pending, _ = self._decoder.getstate()
        self._plain = not pending and not self._strip_space
        return text


class DecodingDetokenizer(Stage[int, str]):
    """Detokenizer that calls the tokenizer's own `decode`, for tokenizers of neither scheme.

    The text of an id depends on its neighbours (a space at the beginning, a character in parts). So
    a window of the last few ids is decoded with every new id, and the text that it adds is given.
    The window is bounded, so the cost of an id does not grow with the text.

    A U+FFFD that the model wrote waits a few ids for what follows, and is lost at the very end:
    `decode` does not distinguish it from an incomplete character.

    Args:
        keep: the texts of special ids that `decode` would skip and a later stage looks for.
        masked: the model's own noncharacters, which may stand for markers, write U+FFFD.
    """

    __slots__ = ("_context", "_decoder", "_ids", "_keep", "_masked", "_sent")

    def __init__(
        self,
        decoder: SupportsDecode,
        *,
        keep: Mapping[int, str] | None = None,
        masked: bool = False,
    ) -> None:
        self._decoder = decoder
        self._masked = masked
        self._keep = keep or {}
        self._ids: list[int] = []  # the window: ids whose text was sent, then those that wait
        self._context = 0  # how many of them are of the first kind
        self._sent = 0  # how much of the window's text was sent

    def feed(self, token_id: int) -> str:
        if token_id in self._keep:
            return self.flush() + self._keep[token_id]
        self._ids.append(token_id)
        text = self._decode(self._ids)
        waiting = len(self._ids) - self._context
        tail = _replacements(text)
        if tail and waiting < _PATIENCE:
            return ""
        if len(text) <= self._sent:  # a special token, which adds nothing
            if waiting >= _PATIENCE:
                del self._ids[self._context]
            return ""
        return self._settle(text, min(tail, _CUT_BYTES))

    def flush(self, *, cut: bool = False) -> str:
        """Return the text that waited, and drop a character that is still incomplete."""
        if len(self._ids) == self._context:
            return ""
        # Every U+FFFD at the end is dropped: some decoders write it for whole characters before an
        # incomplete one, too, and those were sent.
        text = self._decode(self._ids)
        fresh = self._settle(text, _replacements(text))
        self._sent = len(self._decode(self._ids))
        return fresh

    def _settle(self, text: str, cut: int) -> str:
        """Return the window's new text but its last `cut` characters; its ids become context."""
        fresh = text[self._sent : len(text) - cut]
        del self._ids[: self._context]
        self._context = len(self._ids)
        self._sent = max(0, len(self._decode(self._ids)) - cut)
        return _NONCHARACTER.sub(_REPLACEMENT, fresh) if self._masked else fresh

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)


def _replacements(text: str) -> int:
    """Return how many U+FFFD are at the end."""
    return len(text) - len(text.rstrip(_REPLACEMENT))


def _byte_alphabet() -> dict[int, str]:
    """Return GPT-2's characters for bytes, each mapped to the character of the byte's value.

    Bytes that print are spelled as themselves, the others with characters from U+0100 on. A
    character that spells no byte maps to one that cannot be encoded.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {byte: chr(byte) if byte in printable else _REPLACEMENT for byte in range(0x100)}
    return alphabet | {0x100 + n: chr(byte) for n, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTE_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # not in that spelling: text as it stands
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace("▁", " ").encode()


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
