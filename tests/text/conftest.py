"""Real tokenizers, trained here: one of each scheme, and one of neither."""

import json
from typing import Any

import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Stop here, user: hello again!",
    "def feed(self, text):\n    return text\n\n\nUser: what is a café?\nAssistant: 你好,世界!",
    "日本語のテキストと emoji 🙂🙂 family 👩‍👩‍👧 flag 🇨🇿 naïve ﬁne",
] * 4

# Text with what is hard in it more often than chance would put it there.
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(["hello", " the", "\n\n", "你好", "👩‍👩‍👧", "🙂", "é", "\ufffd", "  "]),
    ),
    max_size=12,
).map("".join)


def wrap(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="session")
def byte_level() -> Any:
    """Like GPT-2's: no unknown text, characters in parts, and added tokens of every kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<think>", "</think>"])
    tokenizer.add_tokens(["<tool é>", "ĠĠĠ", "naïve"])
    return wrap(tokenizer)


@pytest.fixture(scope="session")
def sentencepiece() -> Any:
    """Like Llama 2's: words begin with ▁, and what the vocabulary lacks is spelled in bytes."""
    specials = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        limit_alphabet=60,
        special_tokens=specials + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # The byte tokens had to be named to be in the vocabulary, but they are not special.
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in specials]
    trained = Tokenizer.from_str(json.dumps(spec))
    trained.add_tokens(["▁▁▁", "<▁tool é>"])  # Gemma's runs of spaces are of this kind
    return wrap(trained)


@pytest.fixture(scope="session")
def wordpiece() -> Any:
    """Like BERT's: of neither scheme, as a space comes of there being no ## on the next word."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer)
