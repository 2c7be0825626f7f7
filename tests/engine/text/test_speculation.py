"""Speculative decoding: whatever a draft proposes, and when, the text is that of plain steps."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache
from typing import Any, ClassVar, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.events import Event, PromptRead, Token
from mlxsrv.engine.execution.speculation import Draft, check_draft, count_vocabulary, find_obstacle
from mlxsrv.engine.live_row import LiveRow
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.scheduling.speculation_controller import SpeculationController
from mlxsrv.generation.parameters import DryPenalty, Sampling
from tests.support.constraints import Anything, WakesUp
from tests.support.effort import often, per_cache
from tests.support.text_engine import Always, TextEngine, assert_greedy
from tests.support.tiny import write_model

GREEDY = Sampling(temperature=0)
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=7)
PLAIN = ["qwen3", "llama", "qwen3_moe"]
DRAFTS = ["itself", "perturbed", "another"]
CACHE_BYTES = 1 << 28


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loads a family's tiny model, or a draft model for it, once a session."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def load(family: str, kind: str = "itself", **overrides: Any) -> Any:
        folder = root / "-".join([family, kind, *map(str, overrides.values())])
        model, _ = load_model(write_model(folder, family, seed=int(kind == "another"), **overrides))
        if kind == "perturbed":
            mx.random.seed(3)
            parameters: Any = tree_flatten(model.parameters())
            noise = {name: 0.1 * mx.std(each) for name, each in parameters}
            model.load_weights(
                [
                    (name, each + noise[name] * mx.random.normal(each.shape))
                    for name, each in parameters
                ]
            )
        mx.eval(model.parameters())
        return model

    return load


def job(number: int, prompt: tuple[int, ...], max_tokens: int = 30, **more: Any) -> Job:
    more.setdefault("sampling", GREEDY)
    more.setdefault("end_tokens", frozenset())
    return Job(number, "m", prompt, max_tokens, **more)


def make(
    model: Any,
    draft: Any | None,
    *,
    max_rows: int = 4,
    chunk: int = 64,
    cache_bytes: int = 0,
    controller: SpeculationController | None = None,
    caches: KVCacheFactory | None = None,
) -> TextEngine:
    engine = TextEngine(
        model,
        max_rows=max_rows,
        pace=Pace(chunk, 10.0),
        cache_bytes=cache_bytes,
        caches=caches,
        draft=draft,
    )
    controller = controller or Always()
    engine.speculate(lambda: controller)
    return engine


def step(engine: TextEngine) -> list[Event]:
    """One slice; afterwards the engine is as plain steps would have left it."""
    events = engine.decode()
    assert_in_order(engine)
    events += engine.prefill()
    assert_in_order(engine)
    return events


def assert_in_order(engine: TextEngine) -> None:
    draft = engine.runner._draft
    if draft is None:
        return
    for sub_batch in engine.runner._decoder.sub_batches:
        for i, row in enumerate(sub_batch.rows):
            assert sub_batch.caches.lengths[i] == len(row.seen) - row.fresh
    assert draft._cache[0].size() == draft._read
    assert draft._row is None or draft._read <= len(draft._row.seen)


def run(engine: TextEngine, later: Iterable[Job] = ()) -> dict[int, list[int]]:
    """Every job's tokens; one more of `later` is submitted every few slices."""
    late = list(later)
    drawn: dict[int, list[int]] = {}
    slices = 0
    while late or not engine.idle:
        if late and (slices % 3 == 2 or engine.idle):
            engine.submit(late.pop(0))
        for event in tokens_of(step(engine)):
            drawn.setdefault(event.job, []).append(event.id)
        slices += 1
    return drawn


def run_alone(engine: TextEngine, asked: Job) -> list[Event]:
    """All events of one job."""
    events = engine.submit(asked)
    while not engine.idle:
        events += step(engine)
    return events


def tokens_of(events: Iterable[Event]) -> list[Token]:
    return [event for event in events if isinstance(event, Token)]


def prompts(n: int, seed: int, low: int = 3, high: int = 60) -> list[tuple[int, ...]]:
    dice = random.Random(seed)
    return [tuple(dice.choices(range(5, 300), k=dice.randint(low, high))) for _ in range(n)]


def solo(model: Any, prompt: tuple[int, ...], max_tokens: int = 30) -> list[int]:
    """mlx-lm's own greedy answer, end tokens taken for any other."""
    steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens)
    return [int(token) for token, _ in steps]


def plainly(model: Any, asked: Job) -> list[int]:
    """Return what the engine draws without a draft."""
    engine = make(model, None)
    engine.submit(asked)
    return run(engine)[asked.id]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("family", per_cache(PLAIN))
@pytest.mark.slow
def test_the_text_is_that_of_plain_steps(
    models: Any, family: str, kind: str, sampling: Sampling
) -> None:
    model = models(family)
    engine = make(model, models(family, kind))
    for number, prompt in enumerate(prompts(2, seed=1)):
        asked = job(number, prompt, sampling=sampling)
        engine.submit(asked)
        drawn = run(engine)[number]
        if sampling is GREEDY:
            assert_greedy(model, prompt, drawn, 30)
        else:
            assert drawn == plainly(model, asked)
    seen = engine.statistics()
    share = seen["accepted"] / seen["drafted"]
    low, high = {"itself": (1.0, 1.0), "perturbed": (0.05, 0.95), "another": (0.0, 0.1)}[kind]
    assert low <= share <= high


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("max_rows", often([1, 3], [3]))
@pytest.mark.slow
def test_rows_join_and_leave_between_speculative_steps(
    models: Any, max_rows: int, sampling: Sampling
) -> None:
    model = models("qwen3")
    lengths = [*(random.Random(i).randint(1, 30) for i in range(7)), 80]
    jobs = [  # the last one is alone for a while, in which it is speculated for
        job(i, prompt, lengths[i], sampling=sampling) for i, prompt in enumerate(prompts(8, seed=2))
    ]
    engine = make(model, models("qwen3", "perturbed"), max_rows=max_rows, cache_bytes=CACHE_BYTES)
    drawn = run(engine, jobs)
    assert engine.statistics()["accepted"] > 0
    for asked in jobs:
        assert drawn[asked.id] == plainly(model, asked)


def test_a_row_cancelled_between_speculative_steps_is_gone_and_others_go_on(models: Any) -> None:
    model = models("qwen3")
    first, second = prompts(2, seed=3, low=70, high=80)
    engine = make(model, models("qwen3", "perturbed"), cache_bytes=CACHE_BYTES)
    engine.submit(job(0, first))
    drawn: list[int] = []
    while len(drawn) < 10:
        drawn += [event.id for event in tokens_of(step(engine))]
    engine.cancel([0])
    assert engine.idle
    follow_up = (*first, *drawn, *second)
    engine.submit(job(1, second))
    engine.submit(job(2, follow_up))
    rest = run(engine)
    assert {*rest} == {1, 2}
    assert_greedy(model, second, rest[1], 30)
    assert_greedy(model, follow_up, rest[2], 30)


@pytest.mark.parametrize("ends", ["end token", "max_tokens"])
def test_a_row_that_ends_within_a_speculative_step_leaves_its_cache_as_it_should_be(
    models: Any, ends: str
) -> None:
    model = models("qwen3")
    first, more = prompts(2, seed=4, low=70, high=80)
    expected = solo(model, first)
    place = next(i for i in range(12, 30) if expected[i] not in expected[:i])
    end = frozenset({expected[place]}) if ends == "end token" else frozenset[int]()
    most = 30 if ends == "end token" else place + 1
    engine = make(model, models("qwen3"), cache_bytes=CACHE_BYTES, controller=Always(7))
    events = tokens_of(run_alone(engine, job(0, first, most, end_tokens=end)))
    answer = [event.id for event in events]
    assert answer == expected[: place + 1]
    assert [event.finish for event in events[:-1]] == [None] * place
    assert events[-1].finish == ("stop" if ends == "end token" else "length")
    follow_up = (*first, *answer, *more)
    heard = run_alone(engine, job(1, follow_up))
    assert PromptRead(1, len(first) + len(answer)) in heard
    assert_greedy(model, follow_up, [event.id for event in tokens_of(heard)], 30)


def test_no_speculative_step_behind_a_token_that_ends_the_row(models: Any) -> None:
    model = models("qwen3")
    [prompt] = prompts(1, seed=4)
    expected = solo(model, prompt)
    place = next(i for i in range(4, 30) if expected[i] not in expected[:i])
    # The first one draws all tokens before the end, and with them the end as its next input.
    engine = make(model, models("qwen3"), controller=Always(place - 1))
    engine.submit(job(0, prompt, end_tokens=frozenset({expected[place]})))
    assert run(engine)[0] == expected[: place + 1]
    assert engine.statistics()["drafted"] == place - 1


class Counting:
    """The real model, how many tokens each pass has fed it, and the highest of them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.layers = model.layers
        self.fed: list[int] = []
        self.highest = 0
        self.failing = False

    def __call__(self, tokens: Any, cache: Any) -> Any:
        if self.failing:
            raise RuntimeError("refused")
        self.fed.append(tokens.shape[1])
        self.highest = max(self.highest, int(tokens.max().item()))
        return self._model(tokens, cache=cache)


@pytest.mark.slow
def test_the_draft_reads_in_slices_and_only_what_it_has_not_read(models: Any) -> None:
    model = models("qwen3")
    [long, *tails] = prompts(3, seed=5, low=300, high=300)
    draft = Counting(models("qwen3", "perturbed"))
    engine = make(model, draft, chunk=64, controller=Always(4))
    draft.fed.clear()
    engine.submit(job(0, long))
    assert_greedy(model, long, run(engine)[0], 30)
    assert max(draft.fed) == 64
    assert sum(each for each in draft.fed if each > 16) >= 300 - 16
    for tail in tails:
        draft.fed.clear()
        prompt = (*long[:250], *tail[:40])
        engine.submit(job(1, prompt))
        assert_greedy(model, prompt, run(engine)[1], 30)
        assert sum(each for each in draft.fed if each > 16) <= 42


def test_plain_steps_while_other_prompts_are_read(models: Any) -> None:
    model = models("qwen3")
    [short, long] = (*prompts(1, seed=6), *prompts(1, seed=7, low=300, high=300))
    engine = make(model, models("qwen3"), chunk=32)
    engine.submit(job(0, short, 120))
    drawn: list[int] = []
    while (drafted := engine.statistics()["drafted"]) == 0:
        drawn += [event.id for event in tokens_of(step(engine))]
    engine.submit(job(1, long, 5))
    while engine.statistics()["waiting"] + engine.statistics()["reading"]:
        drawn += [event.id for event in tokens_of(step(engine))]
        assert engine.statistics()["drafted"] == drafted
    rest = run(engine)
    assert_greedy(model, short, drawn + rest[0], 120)
    assert_greedy(model, long, rest[1], 5)
    assert engine.statistics()["drafted"] > drafted


@pytest.mark.parametrize(
    ("more", "constraint"),
    [
        ({"sampling": Sampling(temperature=0, repetition_penalty=1.3)}, None),
        ({"sampling": Sampling(temperature=0, logit_bias=((7, 5.0),))}, None),
        ({"sampling": Sampling(temperature=0, dry=DryPenalty(2.0))}, None),
        ({"logprobs": 2}, None),
        ({}, Anything()),
    ],
    ids=["penalty", "bias", "dry", "logprobs", "constraint"],
)
def test_rows_that_need_a_look_at_every_token_are_decoded_plainly(
    models: Any, more: dict[str, Any], constraint: Anything | None
) -> None:
    model = models("qwen3")
    [prompt] = prompts(1, seed=8)
    asked = job(0, prompt, **more)
    engine = make(model, models("qwen3"))
    engine.submit(asked, constraint)
    assert run(engine)[0] == plainly(model, asked)
    assert engine.statistics()["drafted"] == 0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", often(["itself", "perturbed"], ["perturbed"]))
@pytest.mark.slow
def test_a_speculative_step_ends_where_a_dormant_constraint_wakes_up(
    models: Any, kind: str, sampling: Sampling
) -> None:
    model = models("qwen3")
    for number, prompt in enumerate(prompts(2, seed=12)):
        asked = job(number, prompt, 40, sampling=sampling)
        plain, engine = make(model, None), make(model, models("qwen3", kind))
        first, second = WakesUp(), WakesUp()
        plain.submit(asked, first)
        engine.submit(asked, second)
        drawn = run(engine)[number]
        assert drawn == run(plain)[number]
        assert second.accepted[:39] == first.accepted[:39] == drawn[:39]
        assert second.bound
        assert all(token % 2 for token in second.bound)
        assert engine.statistics()["drafted"] > 0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_draft_proposes_to_a_row_with_a_quantized_cache(models: Any, sampling: Sampling) -> None:
    model = models("qwen3", head_dim=32)
    caches = KVCacheFactory(model, group=32, bits=8)
    [prompt] = prompts(1, seed=14)
    asked = job(0, prompt, 60, sampling=sampling)
    plain = run(make(model, None, caches=caches), [asked])
    engine = make(model, models("qwen3", "perturbed", head_dim=32), caches=caches)
    assert run(engine, [asked]) == plain
    seen = engine.statistics()
    assert 0 < seen["accepted"] < seen["drafted"]


@pytest.mark.parametrize("family", ["gemma3_text", "mamba2", "qwen3_next", "llama4"])
def test_a_draft_is_unused_where_a_cache_cannot_be_cut_back(models: Any, family: str) -> None:
    model, plain = models(family), models("qwen3")
    [prompt] = prompts(1, seed=9)
    assert "the model's cache cannot" in (find_obstacle(KVCacheFactory(model), plain) or "")
    assert "the draft model's" in (find_obstacle(KVCacheFactory(plain), model) or "")
    for one, other in ((model, plain), (plain, model)):
        engine = make(one, other)
        engine.submit(job(0, prompt, 10))
        assert run(engine)[0] == plainly(one, job(0, prompt, 10))
        assert "drafted" not in engine.statistics()


def test_a_draft_with_another_vocabulary_is_refused(models: Any) -> None:
    model, draft = models("qwen3"), models("qwen3", vocab_size=480)
    with pytest.raises(ValueError, match=r"480 tokens, the model's 512"):
        check_draft(model, draft)
    with pytest.raises(ValueError, match=r"480 tokens, the model's 512"):
        make(model, draft)


@pytest.mark.parametrize("size", [509, 515])
def test_a_vocabulary_that_is_padded_differently_is_the_same(models: Any, size: int) -> None:
    model, draft = models("qwen3"), Counting(models("qwen3", vocab_size=size))
    prompt = (*prompts(1, seed=10)[0], 511, 7)
    engine = make(model, draft)
    engine.submit(job(0, prompt))
    assert_greedy(model, prompt, run(engine)[0], 30)
    assert draft.highest == min(size - 1, 511)


def test_an_error_of_the_draft_costs_nobody_a_token(models: Any) -> None:
    model, draft = models("qwen3"), Counting(models("qwen3", "perturbed"))
    first, second = prompts(2, seed=11)
    engine = make(model, draft)
    engine.submit(job(0, first))
    drawn = [event.id for _ in range(5) for event in tokens_of(step(engine))]
    draft.failing = True
    fed = len(draft.fed)
    drawn += run(engine, [job(1, second)])[0]
    assert_greedy(model, first, drawn, 30)
    assert len(draft.fed) == fed
    draft.failing = False
    engine.submit(job(2, second))
    assert_greedy(model, second, run(engine)[2], 30)
    assert len(draft.fed) == fed, "it is not used any more"


def test_the_first_trial_is_soon(models: Any) -> None:
    model = models("qwen3")
    [prompt] = prompts(1, seed=12, low=12, high=12)
    engine = make(model, models("qwen3", "another"), controller=SpeculationController())
    assert engine.statistics()["speculating"] == 0
    engine.submit(job(0, prompt))
    assert_greedy(model, prompt, run(engine)[0], 30)
    assert engine.statistics()["drafted"] > 0


def test_every_plain_step_of_a_row_is_measured_the_last_one_too(models: Any) -> None:
    class Plain(SpeculationController):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def affords(self, unread: int) -> bool:
            return False

        def saw_plain_step(self, seconds: float) -> None:
            self.steps += 1

    controller = Plain()
    engine = make(models("qwen3"), models("qwen3", "another"), controller=controller)
    engine.submit(job(0, tuple(range(5, 15)), max_tokens=6))
    assert len(run(engine)[0]) == controller.steps == 6


class Sliced(tuple[int, ...]):
    """A prompt that notes how many tokens are taken out of it at once."""

    most: ClassVar[int] = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(key, slice):
            Sliced.most = max(Sliced.most, len(found))
        return found


def test_a_draft_that_reads_a_slice_copies_no_more_than_that(models: Any) -> None:
    draft = Draft(models("qwen3"), count_vocabulary(models("qwen3")))
    row = LiveRow(job(0, Sliced(range(5, 205))))
    row.drawn += [7, 8, 9]
    draft.follow(row, 0)
    fed: list[int] = []
    feed = draft._feed

    def note(tokens: mx.array) -> mx.array:
        fed.extend(cast(list[int], tokens.tolist()))
        return feed(tokens)

    draft._feed = note  # type: ignore[method-assign]
    for tokens in (16, 182, 3, 16):  # across the end of the prompt, and beyond that of the text
        draft.read_on(tokens)
    assert fed == [*range(5, 205), 7, 8, 9]
    assert Sliced.most <= 182
