"""Prompt lookup: whatever is proposed to the rows of a batch, their text is that of plain steps."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.events import Event, Failed, PromptRead, Token
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.scheduling.proposers import Lookup
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.engine.scheduling.speculation_controller import SpeculationController
from mlxsrv.generation.parameters import Sampling
from tests.support.constraints import WakesUp
from tests.support.effort import often, per_cache
from tests.support.text_engine import TextEngine, assert_greedy
from tests.support.tiny import write_model

GREEDY = Sampling(temperature=0)
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=7)
CACHE_BYTES = 1 << 28


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loads a family's tiny model, once a session."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def load(family: str, **overrides: Any) -> Any:
        folder = root / "-".join([family, *overrides])
        model, _ = load_model(write_model(folder, family, **overrides))
        mx.eval(model.parameters())
        return model

    return load


class Eager(SpeculationController):
    """Finds proposals worth it most of the time, with as many proposals as the dice say."""

    def __init__(self) -> None:
        super().__init__()
        self._dice = random.Random(0)

    def affords(self, unread: int) -> bool:
        return self._dice.random() < 0.8

    def choose(self, found: Sequence[int], *, known: bool = True) -> int:
        return self._dice.randint(1, max(found))

    def saw_speculative_step(self, *args: Any, **more: Any) -> None:
        """Nothing to find out."""

    def saw_delay(self, seconds: float) -> None:
        """Nothing to find out."""


class Knowing(Lookup):
    """Knows what rows say, and is often wrong: at the input, in the middle, or not at all.

    Args:
        answers: by job.
    """

    def __init__(self, answers: Mapping[int, Sequence[int]], slips: float = 0.15) -> None:
        self._answers, self._slips = answers, slips
        self._chance = random.Random(1)

    def _continue(self, row: Row, most: int, following: int | None) -> tuple[int, ...]:
        drawn = len(row.drawn)
        most = min(self._chance.randint(0, 8), most)
        found = self._answers[row.id][drawn : drawn + most + 1]
        slips = [self._chance.random() < self._slips for _ in found]
        guess = [(t + 1) % 500 if slip else t for t, slip in zip(found, slips, strict=True)]
        return (*guess,) if len(guess) > 1 else ()


def job(number: int, prompt: tuple[int, ...], max_tokens: int = 30, **more: Any) -> Job:
    more.setdefault("sampling", GREEDY)
    more.setdefault("end_tokens", frozenset())
    return Job(number, "m", prompt, max_tokens, **more)


def make(
    model: Any,
    proposer: Lookup | None,
    *,
    max_rows: int = 4,
    cache_bytes: int = 0,
    caches: KVCacheFactory | None = None,
    padding: int = 1 << 20,
) -> TextEngine:
    """An engine with this proposer; without one, of plain steps only."""
    engine = TextEngine(
        model,
        max_rows=max_rows,
        pace=Pace(64, 10.0),
        cache_bytes=cache_bytes,
        caches=caches,
        lookup=proposer is not None,
        padding=padding,
    )
    engine.speculate(Eager, proposer)
    return engine


def step(engine: TextEngine) -> list[Event]:
    """One round; afterwards the rows are as plain steps would have left them."""
    events = engine.decode() + engine.prefill()
    for sub_batch in engine.runner._decoder.sub_batches if engine.runner.facts.lookup else ():
        for i, row in enumerate(sub_batch.rows):
            assert sub_batch.caches.lengths[i] == len(row.seen) - row.fresh
    return events


def run(engine: TextEngine, later: Iterable[Job] = ()) -> dict[int, list[int]]:
    """Every job's tokens; one more of `later` is submitted every few rounds."""
    late = list(later)
    drawn: dict[int, list[int]] = {}
    rounds = 0
    while late or not engine.idle:
        if late and (rounds % 3 == 2 or engine.idle):
            engine.submit(late.pop(0))
        events = step(engine)
        assert not [event for event in events if isinstance(event, Failed)]
        for event in tokens_of(events):
            drawn.setdefault(event.job, []).append(event.id)
        rounds += 1
    return drawn


def tokens_of(events: Iterable[Event]) -> list[Token]:
    return [event for event in events if isinstance(event, Token)]


def prompts(n: int, seed: int, low: int = 3, high: int = 60) -> list[tuple[int, ...]]:
    dice = random.Random(seed)
    return [tuple(dice.choices(range(5, 300), k=dice.randint(low, high))) for _ in range(n)]


def plainly(
    model: Any, jobs: Iterable[Job], caches: KVCacheFactory | None = None
) -> dict[int, list[int]]:
    """Return what each job draws alone, in plain steps."""
    return {
        asked.id: run(make(model, None, max_rows=1, caches=caches), [asked])[asked.id]
        for asked in jobs
    }


@pytest.mark.parametrize(
    ("max_rows", "sampling"),
    often(product([1, 3, 8], [GREEDY, SEEDED]), [(1, GREEDY), (3, SEEDED)]),
)
@pytest.mark.parametrize("family", per_cache(["qwen3", "llama", "qwen3_moe"]))
@pytest.mark.slow
def test_the_text_is_that_of_plain_steps(
    models: Any, family: str, max_rows: int, sampling: Sampling
) -> None:
    model = models(family)
    dice = random.Random(2)
    jobs = [
        job(i, prompt, dice.randint(1, 40) if i % 3 else 60, sampling=sampling)
        for i, prompt in enumerate(prompts(9, seed=1))
    ]
    answers = plainly(model, jobs)
    if sampling is GREEDY:
        for asked in jobs:
            assert_greedy(model, asked.prompt, answers[asked.id], asked.max_tokens)
    engine = make(model, Knowing(answers), max_rows=max_rows, cache_bytes=CACHE_BYTES)
    assert run(engine, jobs) == answers
    seen = engine.statistics()
    assert 0 < seen["accepted"] < seen["drafted"]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_text_of_rows_with_quantized_caches(models: Any, sampling: Sampling) -> None:
    model = models("qwen3", head_dim=32)
    caches = KVCacheFactory(model, group=32, bits=8)
    jobs = [job(i, each, 20 + 9 * i, sampling=sampling) for i, each in enumerate(prompts(4, 14))]
    answers = plainly(model, jobs, caches)
    engine = make(model, Knowing(answers), cache_bytes=CACHE_BYTES, caches=caches)
    assert run(engine, jobs) == answers
    seen = engine.statistics()
    assert 0 < seen["accepted"] < seen["drafted"]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_texts_that_repeat_themselves(models: Any, sampling: Sampling) -> None:
    model = models("qwen3")
    files = prompts(3, seed=3, low=20, high=40)
    answers = plainly(model, [job(i, file * 2, 40) for i, file in enumerate(files)])
    # Each prompt has its answer to another prompt in it, so some of what is found holds.
    jobs = [
        job(i, (*file, *file, *answers[i], *file, *file), 40, sampling=sampling)
        for i, file in enumerate(files)
    ]
    expected = plainly(model, jobs)
    engine = make(model, Lookup())
    for asked in jobs:
        engine.submit(asked)
    assert run(engine) == expected
    assert engine.statistics()["drafted"] > 0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_one_pass_checks_what_is_proposed_to_several_groups(
    models: Any, sampling: Sampling
) -> None:
    model = models("qwen3")
    asked = [prompts(1, seed=n, low=low, high=low)[0] for n, low in enumerate((300, 20, 90))]
    jobs = [job(n, prompt, 40, sampling=sampling) for n, prompt in enumerate(asked)]
    answers = plainly(model, jobs)
    engine = make(model, Knowing(answers), padding=0)
    drawn: dict[int, list[int]] = {0: [], 1: [], 2: []}
    accepted = set()
    for each in jobs:
        engine.submit(each)
    while not engine.idle:
        for event in tokens_of(step(engine)):
            drawn[event.job].append(event.id)
        if engine.statistics()["groups"] > 1:
            accepted.add(engine.statistics()["accepted"])
    assert drawn == answers
    assert len(accepted) > 3, "tokens were accepted while there were several groups"


def test_a_row_that_is_cancelled_between_speculative_steps_is_gone_and_others_go_on(
    models: Any,
) -> None:
    model = models("qwen3")
    jobs = [job(i, prompt, 50) for i, prompt in enumerate(prompts(3, seed=4))]
    answers = plainly(model, jobs)
    engine = make(model, Knowing(answers))
    for asked in jobs:
        engine.submit(asked)
    drawn: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while len(drawn[1]) < 20:
        for event in tokens_of(step(engine)):
            drawn[event.job].append(event.id)
    engine.cancel([1])
    rest = run(engine)
    assert {*rest} == {0, 2}
    for number in rest:
        assert drawn[number] + rest[number] == answers[number]


@pytest.mark.parametrize("ends", ["end token", "max_tokens"])
def test_a_row_that_ends_within_a_speculative_step_leaves_its_cache_as_it_should_be(
    models: Any, ends: str
) -> None:
    model = models("qwen3")
    first, other, more = prompts(3, seed=5, low=70, high=80)
    jobs = [job(0, first, 40), job(1, other, 60)]
    answers = plainly(model, jobs)
    expected = answers[0]
    place = next(i for i in range(12, 30) if expected[i] not in expected[:i])
    if ends == "end token":
        jobs[0] = job(0, first, 40, end_tokens=frozenset({expected[place]}))
    else:
        jobs[0] = job(0, first, place + 1)
    engine = make(model, Knowing(answers, slips=0.0), cache_bytes=CACHE_BYTES)
    for asked in jobs:
        engine.submit(asked)
    drawn = run(engine)
    assert drawn == {0: expected[: place + 1], 1: answers[1]}
    assert engine.statistics()["accepted"] > 0
    follow_up = (*first, *drawn[0], *more)
    answers[2] = plainly(model, [job(2, follow_up)])[2]
    events = engine.submit(job(2, follow_up))
    while not engine.idle:
        events += step(engine)
    assert PromptRead(2, len(first) + place + 1) in events
    assert [event.id for event in tokens_of(events)] == answers[2]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.slow
def test_speculative_steps_of_rows_whose_constraints_wake_up(
    models: Any, sampling: Sampling
) -> None:
    model = models("qwen3")
    jobs = [job(i, prompt, 40, sampling=sampling) for i, prompt in enumerate(prompts(4, seed=6))]
    answers: dict[int, list[int]] = {}
    for asked in jobs:
        plain = make(model, None)
        plain.submit(asked, WakesUp() if asked.id < 2 else None)
        answers |= run(plain)
    engine = make(model, Knowing(answers))
    for asked in jobs:
        engine.submit(asked, WakesUp() if asked.id < 2 else None)
    assert run(engine) == answers
    assert engine.statistics()["accepted"] > 0


def test_rows_that_need_a_look_at_every_token_and_others_beside_them(models: Any) -> None:
    model = models("qwen3")
    first, second = prompts(2, seed=7)
    jobs = [job(0, first, 40, logprobs=2), job(1, second, 70)]
    answers = plainly(model, jobs)
    engine = make(model, Knowing(answers))
    for asked in jobs:
        engine.submit(asked)
    drawn: dict[int, list[int]] = {0: [], 1: []}
    while not engine.idle:
        for event in tokens_of(step(engine)):
            assert (event.likelihood is not None) == (event.job == 0)
            drawn[event.job].append(event.id)
        assert engine.statistics()["drafted"] == 0 or len(drawn[0]) == 40
    assert drawn == answers
    assert engine.statistics()["drafted"] > 0, "from when the row with log-probabilities has left"


@pytest.mark.parametrize(
    "family", often(["gemma3_text", "mamba2", "qwen3_next", "llama4"], ["gemma3_text", "mamba2"])
)
def test_nothing_is_looked_up_where_a_cache_cannot_be_cut_back(models: Any, family: str) -> None:
    model = models(family)
    asked = job(0, prompts(1, seed=8)[0] * 3, 10)
    engine = make(model, Lookup())
    assert "drafted" not in engine.statistics()
    assert run(engine, [asked]) == plainly(model, [asked])


class Refusing:
    """The real model, which fails in passes over several tokens while it is to."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.layers = model.layers
        self.failing = False
        self.failed = 0

    def __call__(self, tokens: Any, cache: Any) -> Any:
        if self.failing and 1 < tokens.shape[1] < 10:
            self.failed += 1
            raise RuntimeError("refused")
        return self._model(tokens, cache=cache)


@pytest.mark.parametrize("rows", [1, 3])
def test_an_error_of_a_speculative_step_costs_nobody_a_token(models: Any, rows: int) -> None:
    model = Refusing(models("qwen3"))
    jobs = [job(i, p, 40) for i, p in enumerate(prompts(2 * rows, seed=9, low=20, high=30))]
    answers = plainly(model, jobs)
    engine = make(model, Knowing(answers))
    model.failing = True
    for asked in jobs[:rows]:
        engine.submit(asked)
    drawn: dict[int, list[int]] = {}
    while not engine.idle:
        events = step(engine)
        assert not [event for event in events if isinstance(event, Failed)]
        for event in tokens_of(events):
            drawn.setdefault(event.job, []).append(event.id)
        model.failing &= model.failed == 0
    assert model.failed == 1
    assert drawn == {asked.id: answers[asked.id] for asked in jobs[:rows]}
    assert engine.statistics()["drafted"] == 0
    for asked in jobs[rows:]:
        engine.submit(asked)
    assert run(engine) == {asked.id: answers[asked.id] for asked in jobs[rows:]}
    assert engine.statistics()["accepted"] > 0


class Breaking:
    """The real model, which computes NaN behind a token at one place of a row."""

    def __init__(self, model: Any, token: int) -> None:
        self._model = model
        self.layers = model.layers
        self._token = token

    def __call__(self, tokens: Any, cache: Any) -> Any:
        logits = self._model(tokens, cache=cache)
        return mx.where((tokens == self._token)[..., None], float("nan"), logits)


def test_a_row_whose_logits_are_nan_fails_alone(models: Any) -> None:
    model = models("qwen3")
    jobs = [job(i, prompt, 40) for i, prompt in enumerate(prompts(3, seed=10))]
    answers = plainly(model, jobs)
    others = {*answers[1], *answers[2]}.union(*(asked.prompt for asked in jobs))
    place = next(i for i in range(10, 40) if answers[0][i] not in others)
    token = answers[0][place]
    place = answers[0].index(token)
    engine = make(Breaking(model, token), Knowing(answers, slips=0.0))
    for asked in jobs:
        engine.submit(asked)
    drawn: dict[int, list[int]] = {}
    failed: list[int] = []
    while not engine.idle:
        for event in step(engine):
            if isinstance(event, Token):
                drawn.setdefault(event.job, []).append(event.id)
            elif isinstance(event, Failed):
                failed.append(event.job)
    assert failed == [0]
    assert {1: drawn[1], 2: drawn[2]} == {1: answers[1], 2: answers[2]}
    assert drawn[0] == answers[0][: len(drawn[0])]
    assert len(drawn[0]) <= place + 1


class Mistaken(Knowing):
    """Knows what rows say but for their next inputs."""

    proposed = False

    def _continue(self, row: Row, most: int, following: int | None) -> tuple[int, ...]:
        guess = super()._continue(row, most, following)
        self.proposed |= len(guess) > 1
        return (guess[0] ^ 1, *guess[1:]) if guess else ()


def test_a_step_whose_inputs_are_all_guessed_wrongly_is_a_plain_one(models: Any) -> None:
    model = models("qwen3")
    jobs = [job(i, prompt) for i, prompt in enumerate(prompts(3, seed=11))]
    answers = plainly(model, jobs)
    proposer = Mistaken(answers, slips=0.0)
    engine = make(model, proposer)
    for asked in jobs:
        engine.submit(asked)
    assert run(engine) == answers
    assert proposer.proposed
    assert engine.statistics()["drafted"] == 0


class Silent:
    """The real model, for which token 0 is the likeliest everywhere."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.layers = model.layers

    def __call__(self, tokens: Any, cache: Any) -> Any:
        logits = self._model(tokens, cache=cache)
        return mx.where(mx.arange(logits.shape[-1]) == 0, 1e6, logits)


def test_padding_is_no_proposal(models: Any) -> None:
    """A row with fewer proposals than others has zeros behind its own."""
    model = Silent(models("qwen3"))
    jobs = [job(i, prompt) for i, prompt in enumerate(prompts(4, seed=12))]
    answers = {asked.id: [0] * 30 for asked in jobs}
    engine = make(model, Knowing(answers, slips=0.0))
    for asked in jobs:
        engine.submit(asked)
    assert run(engine) == answers
    seen = engine.statistics()
    assert seen["accepted"] == seen["drafted"] > 0


def test_rows_that_were_cut_apart_go_on_plainly(models: Any) -> None:
    model = models("qwen3")
    jobs = [job(i, prompt, 90) for i, prompt in enumerate(prompts(3, seed=13))]
    answers = plainly(model, jobs)
    engine = make(model, Knowing(answers))
    for asked in jobs:
        engine.submit(asked)
    drawn: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def go_on(rounds: int) -> None:
        for _ in range(rounds):
            for event in tokens_of(step(engine)):
                drawn[event.job].append(event.id)

    while sum(map(len, drawn.values())) < 60:
        go_on(1)
    engine.schedule._speculation = None
    while not engine.idle:
        go_on(1)
    assert drawn == answers
