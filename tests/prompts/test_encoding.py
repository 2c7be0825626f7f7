"""Long texts in pieces: exactly the tokens of the whole, or no pieces at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

import mlxsrv.models
from mlxsrv.errors import ContextLengthExceeded
from mlxsrv.prompts import encoding
from mlxsrv.prompts.encoding import IncrementalEncoder, TokenBudget
from mlxsrv.prompts.split_points import find_split_points
from mlxsrv.prompts.token_width import max_token_bytes
from tests.support.effort import examples
from tests.support.tiny import make_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789\n",
    "Pack my box with five dozen liquor jugs: don't, we'll, I'm, they've, he'd!\n\n",
    "def f(x):\n    return x + 1\n\tABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz",
    "Žluťoučký kůň 你好，世界。",
]
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS_BY_THREE = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))|\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def tiny() -> Tokenizer:
    return Tokenizer.from_str(make_tokenizer().to_str())


def demo() -> Tokenizer:
    return Tokenizer.from_file(str(Path(mlxsrv.models.__file__).parent / "demo" / "tokenizer.json"))


def split_by(pattern: str, normalizer: Any = None) -> Callable[[], Tokenizer]:
    """Byte-level, split into words by a pattern, as most models since GPT-4 are."""

    def make() -> Tokenizer:
        tokenizer = tiny()
        tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        return tokenizer

    return make


def byte_level(*splitters: Any, prefix: bool = False) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = tiny()
        last = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splitters, last])
        return tokenizer

    return make


def surrounded() -> Tokenizer:
    """With a token before and one after each text, and added tokens that swallow spaces."""
    tokenizer = tiny()
    one, two = "<|im_start|>", "<|im_end|>"
    ids = [(name, tokenizer.token_to_id(name)) for name in (one, two)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{one} $A {two}", pair=f"{one} $A {two} $B {two}", special_tokens=ids
    )
    tokenizer.add_special_tokens(
        [AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True), AddedToken("   ")]
    )
    return tokenizer


def words_of_sentencepiece(*, joined: bool) -> Tokenizer:
    """▁ before each word, and no token that holds parts of two."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([line.replace("\n", " ") for line in CORPUS * 3], trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in ("<unk>", "<s>")]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=not joined)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def gemma() -> Tokenizer:
    """As Gemma's: spaces are ▁ before anything is split, so nothing is."""
    tokenizer = words_of_sentencepiece(joined=True)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    numbers = tokenizer.get_vocab()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", numbers["[SEP]"]), ("[CLS]", numbers["[CLS]"])
    )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


CUT: dict[str, Callable[[], Tokenizer]] = {
    "tiny": tiny,
    "demo": demo,
    "gpt-4": split_by(GPT4),
    "gpt-4, nfc": split_by(GPT4, normalizers.NFC()),
    "digits by three": split_by(DIGITS_BY_THREE),
    "digits alone": byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "prefix": byte_level(prefix=True),
    "surrounded": surrounded,
    "sentencepiece, split": lambda: words_of_sentencepiece(joined=False),
    "sentencepiece, joined": lambda: words_of_sentencepiece(joined=True),
    "gemma": gemma,
    "wordpiece": wordpiece,
    "unigram": unigram,
}


def changed(**parts: Any) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = tiny()
        for name, part in parts.items():
            setattr(tokenizer, name, part)
        return tokenizer

    return make


def adding(*tokens: str | AddedToken) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = tiny()
        tokenizer.add_tokens([*tokens])
        return tokenizer

    return make


def merging(make: Callable[[], Tokenizer], space: str) -> Callable[[], Tokenizer]:
    """With a token that reaches over a space."""

    def merge() -> Tokenizer:
        spec = json.loads(make().to_str())
        vocabulary = spec["model"]["vocab"]
        vocabulary[f"e{space}"] = max(vocabulary.values()) + 100
        spec["model"]["merges"].append(["e", space])
        return Tokenizer.from_str(json.dumps(spec))

    return merge


WHOLE: dict[str, Callable[[], Tokenizer]] = {
    "prepends": changed(normalizer=normalizers.Prepend("▁")),
    "strips": changed(normalizer=normalizers.Strip()),
    "replaces by pattern": changed(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "looks back": split_by(r"(?<=a) b|\s+|\S+"),
    "many words in one": merging(split_by(r"[^\n]+|\n+"), "Ġ"),
    "a token with a space": adding("New York"),
    "a token that swallows spaces": adding(AddedToken("NL", rstrip=True)),
    "a token that is a word": adding(AddedToken(" NL", single_word=True)),
    "drops merges": changed(model=models.BPE(dropout=0.1)),
    "merges over spaces": merging(lambda: words_of_sentencepiece(joined=True), "▁"),
}


class Wrapper:
    """A tokenizer with the part of mlx-lm's interface that the encoder uses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))


WRAPPERS = {name: Wrapper(make()) for name, make in CUT.items()}
ENCODERS = {name: IncrementalEncoder(wrapper) for name, wrapper in WRAPPERS.items()}

# What texts are made of: anything, and what tokenizers look at.
SPACES = [" ", "  ", "   ", "\n", "\r\n", "\n\n", "\t", "\u3000", "\xa0", "▁", " ▁"]
WORDS = ["The ", "quick", " fox", "don't", "'s", "1", "123", "0000", " 7", "_", "--", ".", " ."]
OTHERS = [
    "你好",
    "，",
    "é",
    "e\u0301",
    "\u212b",
    "<|im_end|>",
    "<think>",
    "<l>",
    "<r>",
    "<s>",
    "<0x41>",
]
PARTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(SPACES + WORDS + OTHERS),
    st.text("aZ1 \n", min_size=1, max_size=8),
)
TEXTS = st.lists(PARTS, max_size=40).map("".join)


@pytest.mark.parametrize("name", CUT)
@settings(max_examples=examples(150, usual=8), deadline=None)
@given(text=TEXTS, piece=st.integers(1, 24))
@pytest.mark.slow
def test_pieces_give_the_tokens_of_the_whole(name: str, text: str, piece: int) -> None:
    encoder, wrapper = ENCODERS[name], WRAPPERS[name]
    assert encoder._split_points is not None
    with patch.object(encoding, "PIECE_CHARACTERS", piece):
        for special in (True, False):
            whole = wrapper.encode(text, add_special_tokens=special)
            assert encoder.encode(text, special=special) == whole


@pytest.mark.parametrize("name", CUT)
@pytest.mark.slow
def test_a_long_text_is_cut_indeed(name: str) -> None:
    pauses: list[bool] = []
    encoder = ENCODERS[name]
    text = "The quick brown fox jumps over the lazy dog\n" * 100
    whole = WRAPPERS[name].encode(text, add_special_tokens=True)
    with (
        patch.object(encoding, "PIECE_CHARACTERS", 1000),
        patch.object(encoder, "pause", lambda characters: pauses.append(True)),
    ):
        assert encoder.encode(text, special=True) == whole
    assert len(pauses) >= len(text) // 1000


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.slow
def test_where_it_is_not_certain_nothing_is_cut(name: str) -> None:
    tokenizer = WHOLE[name]()
    cuts = find_split_points(tokenizer)
    assert cuts is None or not cuts.search("a b")
    encoder = IncrementalEncoder(Wrapper(tokenizer))
    text = "The quick brown fox " * 200
    whole = Wrapper(tokenizer).encode(text, add_special_tokens=True)
    if "drops" not in name:
        with patch.object(encoding, "PIECE_CHARACTERS", 1000):
            assert encoder.encode(text, special=True) == whole


def test_the_work_ends_as_soon_as_there_are_too_many_tokens() -> None:
    pauses = []
    encoder = IncrementalEncoder(WRAPPERS["demo"])
    encoder.pause = lambda *_: pauses.append(True)
    text = "The quick brown fox " * 20_000
    with pytest.raises(ContextLengthExceeded, match="30000 tokens; the text has more") as error:
        encoder.encode(text, special=True, budget=TokenBudget(30_000, "prompt"))
    assert error.value.param == "prompt"
    assert str(len(text)) in error.value.message
    assert 1 < len(pauses) < len(text) // encoding.PIECE_CHARACTERS


@pytest.mark.slow
def test_what_pause_raises_ends_the_work() -> None:
    class Gone(Exception):
        pass

    def pause(characters: int = 0) -> None:
        raise Gone

    encoder = IncrementalEncoder(WRAPPERS["tiny"])
    encoder.pause = pause
    with pytest.raises(Gone):
        encoder.encode("a " * encoding.PIECE_CHARACTERS, special=True)
    with pytest.raises(Gone):
        encoder.encode("a", special=True)


def test_short_texts_tell_their_length() -> None:
    told: list[int] = []
    encoder = IncrementalEncoder(WRAPPERS["tiny"])
    encoder.pause = told.append
    encoder.encode("abc", special=True)
    encoder.encode("", special=True)
    assert told == [3, 0]


# Bytes.

WIDTHS: dict[str, int | None] = {
    "tiny": 13,  # <|endoftext|>
    "demo": 15,
    "gpt-4": 13,
    "gpt-4, nfc": 3 * 13,
    "surrounded": None,  # tokens that swallow spaces
    "sentencepiece, split": 10,
    "wordpiece": None,  # [UNK]
    "unigram": None,
}


@pytest.mark.parametrize("name", WIDTHS)
def test_the_max_token_bytes_is_known_where_it_can_be(name: str) -> None:
    width = max_token_bytes(CUT[name]())
    assert (width is None) == (WIDTHS[name] is None)
    if name != "sentencepiece, split":
        assert width == WIDTHS[name]


@pytest.mark.parametrize("name", [name for name, width in WIDTHS.items() if width is not None])
@settings(max_examples=examples(300, usual=50), deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_its_bytes_say(name: str, text: str) -> None:
    width = max_token_bytes(WRAPPERS[name]._tokenizer.backend_tokenizer)
    assert width is not None
    tokens = WRAPPERS[name].encode(text, add_special_tokens=False)
    assert len(text.encode()) <= width * len(tokens)


@pytest.mark.parametrize(
    "make",
    [
        changed(normalizer=normalizers.Strip()),
        changed(normalizer=normalizers.Replace(Regex(" +"), " ")),
        changed(normalizer=normalizers.Replace("a", "")),
        changed(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        changed(model=models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
        changed(model=models.BPE({"a": 0}, [])),
        adding(AddedToken("<l>", lstrip=True)),
    ],
)
def test_a_tokenizer_that_leaves_text_out_has_no_max_token_bytes(make: Any) -> None:
    assert max_token_bytes(make()) is None


def test_a_text_is_refused_by_its_bytes_before_anything_is_spent_on_it() -> None:
    class Untouched(Wrapper):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            raise AssertionError("it was tokenized")

    encoder = IncrementalEncoder(Untouched(tiny()))
    with patch.object(IncrementalEncoder, "_encode_whole", side_effect=AssertionError):
        with pytest.raises(ContextLengthExceeded) as error:
            encoder.encode("é" * 60_000, special=True, budget=TokenBudget(4096, "messages"))
        assert error.value.message == (
            f"this model's maximum context length is 4096 tokens, which are at most {13 * 4096} "
            "bytes; the text has 120000 bytes"
        )
