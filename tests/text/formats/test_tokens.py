"""Answers as token ids of real tokenizers that have a family's markers as tokens."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mlxsrv.text.detokenize import Detokenizer, token_bytes
from mlxsrv.text.marks import Marks
from mlxsrv.text.pipeline import TextPipeline
from tests.text.conftest import wrap
from tests.text.formats.hearing import (
    APART,
    VECTORS,
    Heard,
    Vector,
    by_format,
    hear,
    names,
    places,
    reader,
    shown,
    tokens,
)

BY_FORMAT = by_format()


@cache
def plain() -> str:
    """A byte-level tokenizer, trained on the vectors."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(VECTORS.read_text().splitlines(), trainer)
    return str(tokenizer.to_str())


@cache
def family(calls: str, thoughts: str) -> tuple[Any, Marks]:
    """A tokenizer with the markers of two formats, every second one special, and its marks."""
    tokenizer = Tokenizer.from_str(plain())
    found = names(calls, thoughts)
    tokenizer.add_tokens(
        [AddedToken(name, special=number % 2 == 0) for number, name in enumerate(found)]
    )
    wrapped = wrap(tokenizer)
    return wrapped, Marks(found, wrapped.get_vocab())


def ids(tokenizer: Any, text: str) -> list[int]:
    return [
        token
        for part in text.split(APART)
        for token in tokenizer.encode(part, add_special_tokens=False)
    ]


def pipeline(vector: Vector) -> tuple[TextPipeline, Sequence[int]]:
    tokenizer, marks = family(vector.calls, vector.thoughts)
    table = token_bytes(tokenizer, "byte_level").showing(marks.tokens)
    stage = TextPipeline(Detokenizer(table), reader(vector, marks))
    return stage, ids(tokenizer, vector.text)


@pytest.mark.slow
@pytest.mark.parametrize("format", BY_FORMAT)
def test_answers_by_token(format: str) -> None:
    for vector in BY_FORMAT[format]:
        if vector.only == "spelled":
            continue
        marks = tokens(vector.calls, vector.thoughts)
        whole = hear(vector, [shown(vector, marks)], marks)
        stage, answer = pipeline(vector)
        for size in (1, 2, len(answer)):
            stage, answer = pipeline(vector)
            heard = Heard()
            for place in range(0, len(answer), size):
                heard.add(stage.feed(answer[place : place + size]))
                assert heard.begins(whole), vector.id
            assert heard.add(stage.flush(cut=vector.cut)) == whole, vector.id
            assert stage.calls == len(whole.calls)


@pytest.mark.slow
@pytest.mark.parametrize("format", BY_FORMAT)
def test_answers_that_end_at_any_token(format: str) -> None:
    for vector in BY_FORMAT[format]:
        if vector.only == "spelled":
            continue
        marks = tokens(vector.calls, vector.thoughts)
        whole = hear(vector, [shown(vector, marks)], marks, cut=True)
        _, answer = pipeline(vector)
        for place in places(vector, len(answer)):
            stage, _ = pipeline(vector)
            parts = stage.feed(answer[:place])
            ended = Heard().add(parts).add(stage.flush(cut=True))
            assert Heard(calls=ended.calls).begins(whole), (vector.id, place, ended)
