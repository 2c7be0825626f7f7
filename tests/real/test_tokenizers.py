"""Real tokenizers: each id is written as the tokenizers library writes it, and each chat becomes
the token ids that transformers makes of it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.prompts.templates.messages import Chat
from mlxsrv.prompts.tokenizer import Tokenizer
from mlxsrv.text.detokenize import Detokenizer
from tests.real.conftest import real
from tests.real.material import NPM

REPOSITORY = Path(__file__).parents[2]
FOLDERS = (
    *(f"tokenizer-{name}" for name in (*NPM, "deepseek_v4", "qwen3_5", "tekken")),
    "smollm2-float32",
)
WITH_TEMPLATES = (
    *(f"tokenizer-{name}" for name in ("deepseek_v3", "gemma3", "llama3", "llama3_1", "qwen3")),
    "smollm2-float32",
)
TEXTS = (
    "What is the capital of France?",
    "def f(x):\n    if x:\n        return 1\n\t# naïve café\n\n\n    return 2",
    "日本語のテキスト、中文字符。 Ελληνικά, кириллица, العربية, हिन्दी",
    "👩‍👩‍👧 🇨🇿 🙂🙂 1234567890 3.14159 1e-9",
    "  two leading spaces, a trailing one ",
    "<|im_start|>system <start_of_turn> <｜User｜> [INST] </s> &lt;b&gt;",
    '{"a": [1, 2, {"b": null}], "c": "\\n\\u00e9"}',
    "▁ Ġ Ċ <0x0A> \u00a0\u200b\ufeff",
    "| a | b |\n|---|---|\n|  1 |   2 |\n",
)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer(real(name))


def library(name: str) -> Any:
    return tokenizer_of(name)._wrapper._tokenizer


@pytest.mark.parametrize("name", FOLDERS)
def test_every_id_is_written_as_the_library_writes_it(name: str) -> None:
    """In order and shuffled, one id at a time; and all bytes that are characters.

    Left out are bytes that are no text alone: each decoder has its own count of U+FFFD for these.
    """
    theirs, tokenizer = library(name), tokenizer_of(name)
    table = tokenizer._texts._table
    assert table is not None, "its scheme is known"
    special = {id for id, token in theirs.added_tokens_decoder.items() if token.special}
    ids = [i for i in range(len(theirs)) if table.texts[i] is not None]
    bytes_alone = {i for i in ids if str(theirs.convert_ids_to_tokens(i)).startswith("<0x")}
    ids = [i for i in ids if i not in bytes_alone]
    assert len(ids) > len(theirs) * 0.95
    assert all(not table.data[i] for i in special)
    shuffled = random.Random(31).sample(ids, len(ids))
    for order in (ids, shuffled):
        stage = Detokenizer(table, strip_first_space=tokenizer.strips_first_space)
        written = "".join(map(stage.feed, order)) + stage.flush()
        assert written == theirs.decode(order, skip_special_tokens=True)


@pytest.mark.parametrize("name", FOLDERS)
def test_texts_come_back_whole(name: str) -> None:
    """Characters in parts, in bytes and beside special tokens, streamed."""
    theirs, tokenizer = library(name), tokenizer_of(name)
    for text in TEXTS:
        ids = tokenizer.token_ids(text, special=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        stage = tokenizer._texts.detokenizer(chat=False, calls=False)
        written = "".join(map(stage.feed, ids)) + stage.flush()
        expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if tokenizer.strips_first_space:
            written = written.removeprefix(" ")
        assert written == expected, text


@pytest.mark.parametrize("name", FOLDERS)
def test_eight_threads_make_the_token_ids_of_transformers(name: str) -> None:
    """Short texts, and long ones, which are tokenized in pieces."""
    theirs, tokenizer = library(name), tokenizer_of(name)
    dice = random.Random(name)
    sources = [file.read_text() for file in sorted(REPOSITORY.glob("docs/*.md"))]
    sources += [file.read_text() for file in sorted(REPOSITORY.glob("mlxsrv/prompts/*.py"))]
    texts = [*TEXTS, *("\n".join(dice.sample([*sources, *TEXTS * 9], 20)) for _ in range(2))]
    texts += [source[:2000] for source in sources]
    expected = [theirs.encode(text, add_special_tokens=True) for text in texts]

    def encode(thread: int) -> list[int]:
        order = random.Random(thread).sample(range(len(texts)), len(texts))
        return [n for n in order if tokenizer.token_ids(texts[n], special=True) != expected[n]]

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(encode, range(8))] == [[]] * 8


@pytest.mark.parametrize("name", WITH_TEMPLATES)
def test_chats_become_the_token_ids_of_transformers(name: str) -> None:
    """25 chats for each template: one to five turns, with and without a system message."""
    theirs, tokenizer = library(name), tokenizer_of(name)
    dice = random.Random(name)
    for number in range(25):
        messages = [{"role": "system", "content": dice.choice(TEXTS)}] if number % 2 else []
        for _ in range(number % 5):
            messages.append({"role": "user", "content": dice.choice(TEXTS)})
            messages.append({"role": "assistant", "content": dice.choice(TEXTS)})
        messages.append({"role": "user", "content": dice.choice(TEXTS)})
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert [*tokenizer.render(Chat(messages=messages)).tokens] == expected, messages
