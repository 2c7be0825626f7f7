"""Chats that grow: each turn reads what is new, and draws what it would without kept prompts."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.events import Token
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.generation.parameters import Sampling
from mlxsrv.prompts.tokenizer import Tokenizer
from tests.support.chats import play_chat, play_text
from tests.support.effort import often, per_cache
from tests.support.fixtures import ModelFolder
from tests.support.text_engine import TextEngine, assert_greedy
from tests.support.tiny import FAMILIES, write_model

SMALL = [name for name in FAMILIES if name != "qwen3-46m"]
DRAWN = 8
OPENING = (7, 8)
"""Tokens behind each question, which the history of later turns lacks."""


def make(model: Any, *, rows: int, kept: int = 1 << 30) -> TextEngine:
    return TextEngine(model, max_rows=rows, pace=Pace(64, 10.0), cache_bytes=kept)


@pytest.mark.parametrize(
    ("play", "turns"), often([(play_chat, 4), (play_chat, 10), (play_text, 10)], [(play_chat, 4)])
)
@pytest.mark.parametrize("family", per_cache(SMALL))
@pytest.mark.slow
def test_a_turn_reads_what_is_new(
    models: Any, model_folder: ModelFolder, family: str, play: Any, turns: int
) -> None:
    engine = make(models(family), rows=4)
    tokenizer = Tokenizer(Path(model_folder(family)))
    tokenizer.marks_checkpoints = not engine.runner.facts.cuts
    first, *others = play(engine, tokenizer, turns)
    assert first.read == len(first.prompt)
    assert [turn.read for turn in others] == [turn.new for turn in others]


@pytest.mark.parametrize(
    ("family", "size"),
    often(
        [
            ("gemma3_text", "sliding_window"),
            ("gpt_oss", "sliding_window"),
            ("llama4", "attention_chunk_size"),
        ],
        [("gemma3_text", "sliding_window"), ("llama4", "attention_chunk_size")],
    ),
)
@pytest.mark.parametrize("play", often([play_chat, play_text], [play_chat]))
@pytest.mark.slow
def test_a_turn_reads_what_is_new_while_windows_fill(
    tmp_path: Path, family: str, size: str, play: Any
) -> None:
    """They can be cut back until then, and not any more behind it."""
    sizes: dict[str, Any] = {size: 700}
    folder = write_model(tmp_path, family, **sizes)
    engine = make(load_model(folder)[0], rows=4)
    tokenizer = Tokenizer(folder)
    tokenizer.marks_checkpoints = True
    _, *turns = play(engine, tokenizer, 10)
    assert len(turns[0].prompt) < 600
    assert len(turns[-1].prompt) > 1200
    assert [turn.read for turn in turns] == [turn.new for turn in turns]


class Talk:
    """One of several chats, and what it has been told.

    Attributes:
        text: the chat up to its next question.
        turns: how many are to come.
        asked: the prompt that is being answered; None: none is.
    """

    def __init__(self, number: int, head: tuple[int, ...], turns: int, chance: Random) -> None:
        self.number = number
        self.head = len(head)
        self.text = head
        self.turns = turns
        self.asked: tuple[int, ...] | None = None
        self.drawn: list[int] = []
        self.chance = chance

    def ask(self, engine: TextEngine) -> None:
        question = self.chance.choices(range(5, 300), k=self.chance.randint(3, 50))
        end = len(self.text) + len(question)
        self.asked = (*self.text, *question, *OPENING)
        self.drawn, self.turns = [], self.turns - 1
        engine.submit(
            Job(
                self.number,
                "m",
                self.asked,
                DRAWN,
                frozenset(),
                Sampling(temperature=0),
                checkpoints=(self.head, end),
            )
        )

    def end(self, model: Any) -> None:
        """Check what was drawn, and go on from it in one of the ways that clients have."""
        assert self.asked is not None
        if self.drawn:
            assert_greedy(model, self.asked, self.drawn, len(self.drawn))
        whole = (*self.asked, *self.drawn)
        short = (*self.asked[: -len(OPENING)], *self.chance.choices(range(5, 300), k=5))
        self.text = self.chance.choice([whole, short, short, self.asked[: -len(OPENING)]])
        self.asked = None


@pytest.mark.parametrize(
    ("seed", "turns"), often([(0, 5), *((seed, 10) for seed in range(6))], [(0, 5)])
)
@pytest.mark.parametrize("family", per_cache(SMALL))
@pytest.mark.slow
def test_chats_with_one_system_prompt_draw_what_each_would_alone(
    models: Any, family: str, seed: int, turns: int
) -> None:
    """Whatever comes between their turns: those of the other, cancels, few bytes to keep."""
    model, chance = models(family), Random(seed)
    rows = 4 if FAMILIES[family].batchable else 1
    engine = make(model, rows=rows, kept=chance.choice([1 << 30, 1 << 30, 300_000]))
    head = tuple(chance.choices(range(5, 300), k=chance.choice([70, 150])))
    talks = [Talk(number, head, turns, chance) for number in range(2)]
    while any(talk.turns or talk.asked for talk in talks):
        for talk in talks:
            if talk.asked is None and talk.turns and chance.random() < 0.3:
                talk.ask(engine)
            elif talk.asked is not None and chance.random() < 0.03:
                engine.cancel([talk.number])
                talk.end(model)
        for event in engine.round():
            if isinstance(event, Token):
                talk = talks[event.job]
                talk.drawn.append(event.id)
                if event.finish is not None:
                    talk.end(model)
    while not engine.idle:
        engine.round()
    assert not engine.runner._rows
    assert not engine.runner._texts
