"""Texts to tokens: long ones in pieces give exactly the tokens of the whole, in any thread."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
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
from mlxsrv.prompts.encoding import TextEncoder, TokenBudget, Truncation
from mlxsrv.prompts.tokenizer_steps import max_token_bytes
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


ODD: dict[str, Callable[[], Tokenizer]] = {
    "prepends": changed(normalizer=normalizers.Prepend("▁")),
    "prepends for spaces": changed(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        pre_tokenizer=None,
    ),
    "strips": changed(normalizer=normalizers.Strip()),
    "replaces by pattern": changed(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "looks back": split_by(r"(?<=a) b|\s+|\S+"),
    "many words in one": merging(split_by(r"[^\n]+|\n+"), "Ġ"),
    "a token with a space": adding("New York"),
    "a token that swallows spaces": adding(AddedToken("NL", rstrip=True)),
    "a token that is a word": adding(AddedToken(" NL", single_word=True)),
    "merges over spaces": merging(lambda: words_of_sentencepiece(joined=True), "▁"),
}


NEVER_CUT = ("prepends", "strips")


MADE = {name: make() for name, make in (CUT | ODD).items()}


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return transformers' tokenizer, with a copy of its own: some calls change settings in it."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.to_str()))


TOKENIZERS = {name: wrapped(tokenizer) for name, tokenizer in MADE.items()}
ENCODERS = {name: TextEncoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def ids(name: str, text: str, *, special: bool) -> list[int]:
    """Return the token ids that transformers makes of a text."""
    return list(TOKENIZERS[name].encode(text, add_special_tokens=special))


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


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=examples(150, usual=8), deadline=None)
@given(text=TEXTS, piece=st.integers(1, 24))
@pytest.mark.slow
def test_pieces_give_the_tokens_of_the_whole(name: str, text: str, piece: int) -> None:
    with patch.object(encoding, "PIECE_CHARACTERS", piece):
        for special in (True, False):
            assert ENCODERS[name].encode(text, special=special) == ids(name, text, special=special)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.slow
def test_a_long_text_is_cut_where_that_changes_nothing(name: str) -> None:
    text = "The quick brown fox jumps over the lazy dog\n" * 100
    whole = ids(name, text, special=True)
    pieces = [text]
    with patch.object(encoding, "PIECE_CHARACTERS", 1000):
        assert ENCODERS[name].encode(text, special=True) == whole
        pieces = [*ENCODERS[name]._pieces(text)]
    assert "".join(pieces).replace(" ", "") == text.replace(" ", "")
    assert (len(pieces) > 1) is (name not in NEVER_CUT)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.slow
def test_a_text_is_truncated_as_transformers_does_it(
    name: str, side: Literal["left", "right"]
) -> None:
    text = "The quick brown fox doesn't jump over 1234 lazy dogs\n" * 40
    for count in (4, 33, 5000):
        tokenizer = wrapped(MADE[name])
        tokenizer.truncation_side = side
        expected = tokenizer(text, truncation=True, max_length=count)["input_ids"]
        truncation = Truncation(count, side)
        with patch.object(encoding, "PIECE_CHARACTERS", 100):
            assert ENCODERS[name].encode_truncated(text, truncation, special=True) == expected
            whole = ids(name, text, special=True)
            assert ENCODERS[name].encode_end(text, count, special=True) == whole[-count:]


@pytest.mark.parametrize("name", ENCODERS)
def test_two_texts_are_one_input_as_transformers_makes_it(name: str) -> None:
    tokenizer = wrapped(MADE[name])
    long, short = "The quick brown fox jumps " * 9, "over the lazy dog"
    for one, other in ((long, short), (short, long), (long, long + "."), ("", short)):
        for count in (10, 21, 30, None):
            options = {"truncation": "longest_first", "max_length": count} if count else {}
            both = tokenizer(one, other, return_token_type_ids=True, **options)
            types = both["token_type_ids"]
            firsts = types.index(1) if 1 in types else len(types)
            truncation = Truncation(count, "right") if count else None
            found = ENCODERS[name].encode_pair(one, other, None, truncation)
            assert found == (both["input_ids"], firsts)


@pytest.mark.parametrize("name", ["demo", "sentencepiece, split", "unigram", "wordpiece"])
def test_threads_may_encode_at_the_same_time(name: str) -> None:
    texts = [f"{line} {number}" for line in CORPUS for number in range(40)]
    expected = [ids(name, text, special=True) for text in texts]

    def encode(thread: int) -> list[list[int]]:
        order = random.Random(thread).sample(range(len(texts)), len(texts))
        found = {place: ENCODERS[name].encode(texts[place], special=True) for place in order}
        return [found[place] for place in range(len(texts))]

    with ThreadPoolExecutor(8) as pool:
        assert all(found == expected for found in pool.map(encode, range(8)))


def test_a_tokenizer_in_python_is_used_by_one_thread_at_a_time() -> None:
    inside, most = 0, 0

    class Slow:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            threading.Event().wait(0.002)
            inside -= 1
            return [*text.encode()]

    encoder = TextEncoder(Slow())
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda number: encoder.encode(f"{number}", special=True), range(20))]
    assert found == [[*f"{number}".encode()] for number in range(20)]
    assert most == 1


def test_a_text_that_is_given_up_while_it_waits_for_the_tokenizer_is_not_encoded() -> None:
    """A request that ends while another is in the tokenizer is found ended before its turn."""
    turns = threading.Lock()
    done: list[str] = []

    class Turns:
        """The tokenizer's own lock: whoever enters it has waited."""

        def __enter__(self) -> None:
            turns.acquire()
            gone.set()  # the client leaves while its text waits

        def __exit__(self, *error: object) -> None:
            turns.release()

    class InPython:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            done.append(text)
            return [1]

    def check() -> None:
        if gone.is_set():
            raise KeyError("nobody waits")

    gone = threading.Event()
    encoder = TextEncoder(InPython(), check)
    with patch.object(encoder, "_python_calls", Turns()), pytest.raises(KeyError):
        encoder.encode("a", special=False)
    assert done == []
    assert not turns.locked()


def test_the_work_ends_as_soon_as_there_are_too_many_tokens() -> None:
    checks: list[bool] = []
    encoder = TextEncoder(TOKENIZERS["demo"], lambda: checks.append(True))
    text = "The quick brown fox " * 20_000
    with pytest.raises(ContextLengthExceeded, match="30000 tokens; the text has more") as error:
        encoder.encode(text, special=True, budget=TokenBudget(30_000, "prompt"))
    assert error.value.param == "prompt"
    assert str(len(text)) in error.value.message
    pieces = 30_000 * 5 // encoding.PIECE_CHARACTERS + 1
    assert len(checks) < 5 * pieces + 10, "each piece is checked, and the texts around its end"


@pytest.mark.parametrize("text", ["a", "a " * encoding.PIECE_CHARACTERS])
def test_what_the_check_raises_ends_the_work(text: str) -> None:
    class Gone(Exception):
        pass

    def check() -> None:
        raise Gone

    encoder = TextEncoder(TOKENIZERS["tiny"], check)
    with pytest.raises(Gone):
        encoder.encode(text, special=True)


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
    width = max_token_bytes(TOKENIZERS[name].backend_tokenizer)
    assert width is not None
    tokens = ids(name, text, special=False)
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
    encoder = TextEncoder(wrapped(tiny()))
    with patch.object(TextEncoder, "_encode", side_effect=AssertionError("it was tokenized")):
        with pytest.raises(ContextLengthExceeded) as error:
            encoder.encode("é" * 60_000, special=True, budget=TokenBudget(4096, "messages"))
        assert error.value.message == (
            f"this model's maximum context length is 4096 tokens, which are at most {13 * 4096} "
            "bytes; the text has 120000 bytes"
        )
