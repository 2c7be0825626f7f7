"""Bans, against the logits of mlx-lm's models with the same bans written down plainly."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from mlxsrv.engine.events import Event, Token
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.generation.parameters import Bans, Constraint, Mask, Sampling
from tests.support.effort import often
from tests.support.faulty_text import Faulty
from tests.support.text_engine import Always, TextEngine

GREEDY = Sampling(temperature=0)
NONE: frozenset[int] = frozenset()


def prompt(seed: int, size: int = 20) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(5, 300), k=size))


def make(model: Any, *, padding: int | None = None, draft: Any = None) -> TextEngine:
    batch = TextEngine(
        model,
        max_rows=8,
        pace=Pace(512, 10.0),
        cache_bytes=0,
        padding=padding,
        draft=draft,
    )
    batch.speculate(Always)
    return batch


def job(
    number: int, asked: tuple[int, ...], most: int = 24, ends: frozenset[int] = NONE, **more: Any
) -> Job:
    more.setdefault("sampling", GREEDY)
    return Job(number, "m", asked, most, ends, **more)


def run(batch: TextEngine, jobs: Iterable[Job]) -> dict[int, list[Token]]:
    """Every job's tokens; a new one joins at each second slice."""
    late = list(jobs)
    drawn: dict[int, list[Token]] = {}
    slices = 0
    while late or not batch.idle:
        events: list[Event] = []
        if late and (slices % 2 == 0 or batch.idle):
            events += batch.submit(late.pop(0))
        for event in events + batch.decode() + batch.prefill():
            if isinstance(event, Token):
                drawn.setdefault(event.job, []).append(event)
        slices += 1
    return drawn


def ids(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens]


def likeliest(model: Any, asked: Job, drawn: Sequence[int]) -> list[int]:
    """mlx-lm's likeliest token after the prompt and each beginning of `drawn`, under the bans of
    the job, up to its end. It is `drawn` if that is the greedy text."""
    tokens = mx.array([*asked.prompt, *drawn[:-1]])[None]
    logits = np.array(model(tokens)[0, len(asked.prompt) - 1 :])
    found: list[int] = []
    for i, row in enumerate(logits):
        row[_banned(asked, drawn[:i], row.size)] = -np.inf
        found.append(int(row.argmax()))
        if found[-1] in asked.end_tokens:
            break
    return found


def _banned(asked: Job, drawn: Sequence[int], vocabulary: int) -> list[int]:
    bans = asked.bans or Bans()
    banned = {word[-1] for word in bans.words if _ends_with(drawn, word[:-1])}
    if len(drawn) < bans.min_tokens:
        banned |= asked.end_tokens
    if bans.allowed:
        banned |= set(range(vocabulary)) - set(bans.allowed)
    return sorted(banned)


def assert_drawn(model: Any, asked: Job, drawn: Sequence[int]) -> None:
    """Fails unless this is the greedy text of the job, and ends where it should."""
    assert len(drawn) == asked.max_tokens or drawn[-1] in asked.end_tokens
    assert list(drawn) == likeliest(model, asked, drawn)


def _ends_with(drawn: Sequence[int], beginning: Sequence[int]) -> bool:
    return not beginning or tuple(drawn[-len(beginning) :]) == tuple(beginning)


def greedy(model: Any, asked: tuple[int, ...]) -> list[int]:
    """mlx-lm's own text, end tokens taken for any other."""
    return [int(token) for token, _ in generate_step(mx.array(asked), model, max_tokens=24)]


@pytest.fixture(scope="session")
def various(models: Any) -> Callable[[str], list[Job]]:
    """Jobs of a family's model whose bans all matter: they are of tokens that would be drawn
    without."""

    @cache
    def make(family: str) -> list[Job]:
        jobs = []
        for number, kind in enumerate(["", "soon", "1", "2", "3", "4", "allowed", "all"]):
            asked = prompt(number)
            text = greedy(models(family), asked)
            words = {
                "1": (text[3:4], text[8:9]),
                "2": (text[4:6], text[10:12]),
                "3": (text[2:5], text[7:10]),
                "4": (text[0:4], text[5:9], text[6:7]),
                "all": (text[0:1], text[1:3], text[2:5], text[6:11]),
            }.get(kind, ())
            ends = frozenset({text[2], text[5]}) if kind in ("soon", "all") else NONE
            bans = Bans(
                min_tokens=9 if ends else 0,
                allowed=tuple(range(0, 300, 3)) if kind in ("allowed", "all") else (),
                words=tuple(map(tuple, words)),
            )
            jobs.append(job(number, asked, 24, ends, bans=bans if kind else None))
        return jobs

    return make


@pytest.mark.parametrize("family", often(["qwen3", "gemma3_text", "qwen3_next"], ["qwen3"]))
@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.slow
def test_rows_with_bans_of_every_kind_draw_what_mlx_lm_draws(
    models: Any, various: Callable[[str], list[Job]], family: str, padding: int | None
) -> None:
    model = models(family)
    jobs = various(family)
    drawn = run(make(model, padding=padding), jobs)
    for asked in jobs:
        text = ids(drawn[asked.id])
        assert_drawn(model, asked, text)
        if asked.bans is not None:
            free = job(asked.id, asked.prompt, 24, asked.end_tokens)
            assert text != likeliest(model, free, text), "the ban matters"


@pytest.mark.slow
def test_an_end_may_come_once_there_are_enough_tokens(models: Any) -> None:
    model = models("qwen3")
    text = greedy(model, prompt(1))
    end = text[6]
    for least in range(10):
        asked = job(0, prompt(1), 24, frozenset({end}), bans=Bans(min_tokens=least))
        [drawn] = run(make(model), [asked]).values()
        assert_drawn(model, asked, ids(drawn))
        assert end not in ids(drawn)[:least]
    first = text.index(end)
    asked = job(0, prompt(1), 24, frozenset({end}), bans=Bans(min_tokens=first))
    [drawn] = run(make(model), [asked]).values()
    assert ids(drawn) == text[: first + 1]
    assert drawn[-1].finish == "stop"


@pytest.mark.slow
def test_drawn_tokens_are_as_they_would_be_alone(
    models: Any, various: Callable[[str], list[Job]]
) -> None:
    """A row that draws at random keeps its random numbers, whoever bans what beside it."""
    model = models("qwen3")
    seeded = Sampling(temperature=0.9, top_p=0.95, seed=11)
    plain = job(90, prompt(90), sampling=seeded)
    bound = job(91, prompt(91), sampling=seeded, bans=Bans(allowed=tuple(range(5, 200))))
    together = run(make(model), [plain, *various("qwen3")[1:6], bound])
    for one in (plain, bound):
        assert together[one.id] == run(make(model), [one])[one.id]
    assert set(ids(together[91])) <= set(range(5, 200))


@pytest.mark.parametrize("steps", often([[2, 11], [*range(1, 12)]], [[2, 11]]), ids=len)
@pytest.mark.slow
def test_bans_hold_after_a_row_is_read_anew(
    models: Any, various: Callable[[str], list[Job]], steps: list[int]
) -> None:
    """A fault at one step after the other: what was drawn is read again, and the counts go on."""
    model = models("qwen3")
    jobs = various("qwen3")
    wanted: dict[int, list[int]] = {}
    for at in steps:
        failing = {at}

        def fault(step: int, tokens: mx.array, failing: set[int] = failing) -> None:
            if step in failing:
                failing.discard(step)
                raise RuntimeError("of a test")

        batch = make(Faulty(model, fault))
        for asked in jobs:  # a row that steps alone is to blame
            batch.submit(asked)
        drawn = run(batch, [])
        assert not failing
        for asked in jobs:
            text = ids(drawn[asked.id])
            if asked.id not in wanted:
                assert_drawn(model, asked, text)
                wanted[asked.id] = text
            assert text == wanted[asked.id], (at, asked.bans)


@pytest.mark.slow
def test_a_draft_proposes_to_rows_whose_bans_are_over(models: Any) -> None:
    model = models("qwen3")
    text = greedy(model, prompt(1))
    end = frozenset({text[4]})
    for bans in (Bans(min_tokens=8), Bans(words=(tuple(text[9:11]),)), Bans(allowed=(1, 2, 7))):
        asked = job(0, prompt(1), 40, end if bans.min_tokens else NONE, bans=bans)
        batch = make(model, draft=model)
        [drawn] = run(batch, [asked]).values()
        assert_drawn(model, asked, ids(drawn))
        assert (batch.statistics()["accepted"] > 0) == bool(bans.min_tokens)


# Constraints.


class Only:
    """A constraint that allows one set of tokens after another; the last set stays."""

    dormant = False
    failure = None

    def __init__(self, *sets: set[int]) -> None:
        self._sets = list(sets)

    def fill(self, mask: Mask) -> None:
        bits = np.zeros(mask.size * 32, dtype=np.uint8)
        bits[list(self._sets[0])] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        assert token in self._sets[0]
        if len(self._sets) > 1:
            del self._sets[0]


def run_bound(model: Any, asked: Job, constraint: Constraint) -> list[Token]:
    batch = make(model)
    batch.submit(asked, constraint)
    batch.submit(job(7, prompt(7), 30))  # a neighbour that asks for nothing
    drawn: list[Token] = []
    while not batch.idle:
        for event in batch.decode() + batch.prefill():
            assert isinstance(event, Token) or event.__class__.__name__ == "PromptRead", event
            if isinstance(event, Token) and event.job == asked.id:
                drawn.append(event)
    return drawn


def test_a_grammar_that_can_only_end_ends(models: Any) -> None:
    bans = Bans(min_tokens=9)
    asked = job(0, prompt(3), 24, frozenset({2}), bans=bans)
    drawn = run_bound(models("qwen3"), asked, Only({10, 2}, {11}, {2}))
    assert ids(drawn) == [10, 11, 2], "an end is not chosen where another token may come"
    assert drawn[-1].finish == "stop"


def test_bans_give_way_to_a_grammar_and_not_the_other_way_round(models: Any) -> None:
    bans = Bans(allowed=(10, 20), words=((20,), (10, 12)))
    asked = job(0, prompt(3), 4, bans=bans)
    drawn = run_bound(models("qwen3"), asked, Only({10, 11}, {12, 13}, {12}, {20, 21}))
    assert ids(drawn)[0] == 10
    assert ids(drawn)[1] in (12, 13)  # none of them is allowed; of those left, none is worse
    assert ids(drawn)[2] == 12
    assert ids(drawn)[3] == 20, "allowed is more than not bad"


def test_what_is_both_allowed_and_bad_comes_where_nothing_else_is_left(models: Any) -> None:
    asked = job(0, prompt(3), 5, bans=Bans(allowed=(7, 9), words=((7,), (9, 9))))
    [drawn] = run(make(models("qwen3")), [asked]).values()
    assert ids(drawn)[0] == 9
    assert set(ids(drawn)) <= {7, 9}


def test_tokens_that_the_model_lacks_are_no_bans(models: Any) -> None:
    bans = Bans(min_tokens=3, words=((5000,), (3, 5000)), allowed=(7, 5000))
    asked = job(0, prompt(3), 5, frozenset({5000}), bans=bans)
    [drawn] = run(make(models("qwen3")), [asked]).values()
    assert ids(drawn) == [7] * 5
