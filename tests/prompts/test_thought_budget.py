"""The tokens that close a thought at its bound."""

from __future__ import annotations

import numpy as np
import pytest

from mlxsrv.generation.parameters import Mask
from mlxsrv.prompts.grammars.specs import GrammarSpec
from mlxsrv.prompts.thought_budget import BudgetConstraint
from mlxsrv.prompts.tokenizer import Tokenizer
from mlxsrv.text.formats import THOUGHTS
from mlxsrv.text.marks import SPELLED, Marks
from mlxsrv.text.reader import AnswerReader
from tests.support.fixtures import ModelFolder

THINKING = [name for name, each in THOUGHTS.items() if each.thinks]


@pytest.mark.parametrize("name", THINKING)
def test_the_closing_text_of_each_format_closes_its_thought(name: str) -> None:
    """Otherwise it would be forced again and again."""
    each = THOUGHTS[name]
    ids = {mark: number for number, mark in enumerate(each.marks)}
    for marks in (SPELLED, Marks(each.marks, ids)):
        for thinking in (True, False):  # the prompt opened the thought, or the model does
            reader = AnswerReader(each.frame(marks, thinking=thinking), marks, thinking=thinking)
            if not thinking:
                reader.feed(marks.show(each.thought[0] or "Here is my thought process:"))
            reader.feed("Well, ")
            inside = [reader.reasoning]
            reader.feed(marks.show(each.close))
            said = [*reader.feed("x"), *reader.flush()]
            inside.append(reader.reasoning)
            assert inside == [True, False], (marks.ids, thinking)
            assert said == [("content", "x")], (marks.ids, thinking)


def test_what_does_not_close_a_thought_is_forced_once(model_folder: ModelFolder) -> None:
    tokenizer = Tokenizer(model_folder("qwen3"))
    text = tokenizer.content_pipeline(thinking=True)
    close = tokenizer.token_ids("no end", special=False)
    constraint = BudgetConstraint(3, close, tokenizer.turn_ends, text)
    thought = tokenizer.token_ids("a b c d e f g h", special=False)
    drawn: list[int] = []
    for token in [*thought, *thought, *thought]:
        mask: Mask = np.full(-(-tokenizer.vocabulary // 32), -1, dtype=np.int32)
        if not constraint.dormant:
            constraint.fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        drawn.append(token if bits[token] else int(np.flatnonzero(bits)[0]))
        constraint.accept(drawn[-1])
    begins = [i for i in range(len(drawn)) if drawn[i : i + len(close)] == close]
    assert begins == [3]
    assert constraint.dormant


def test_an_answer_whose_grammar_allows_only_the_end_ends(model_folder: ModelFolder) -> None:
    tokenizer = Tokenizer(model_folder("qwen3"))
    close = tokenizer.token_ids("no end", special=False)
    inner = tokenizer.grammars.compile(GrammarSpec("choice", '["ano end"]'), param="")
    text = tokenizer.content_pipeline(thinking=True)
    constraint = BudgetConstraint(1, close, tokenizer.turn_ends, text, inner.constraint())
    for token in [*tokenizer.token_ids("a", special=False), *close]:
        constraint.accept(token)
    mask: Mask = np.full(-(-tokenizer.vocabulary // 32), -1, dtype=np.int32)
    constraint.fill(mask)
    assert {*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))} & {
        *tokenizer.turn_ends
    }
