"""The text runner, driven by plans made by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.row_cache import RowCache
from mlxsrv.engine.execution.text_runner import TextRunner
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import Decoded, Fault, KeptPrompt
from mlxsrv.engine.plans import Decode, Keep, Leave, RowGroup, Span
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.generation.parameters import Constraint, Mask, Sampling, Steering
from tests.support.effort import per_cache
from tests.support.greedy import assert_greedy
from tests.support.tiny import FAMILIES

GREEDY = Sampling(temperature=0)
SMALL = [name for name in FAMILIES if name != "qwen3-46m"]
BATCHED = [name for name in SMALL if FAMILIES[name].batchable]
COUNT = 12
"""Tokens that a row draws, unless a test says otherwise."""
ROOM = 128
"""Columns for what a row draws."""


def prompt(seed: int, size: int = 40) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(5, 300), k=size))


class Driver:
    """A runner, and what its rows have drawn."""

    def __init__(self, model: Any, caches: KVCacheFactory | None = None, **more: Any) -> None:
        self.model = model
        self.runner = TextRunner(
            model,
            caches=caches or KVCacheFactory(model),
            steerer=Steerer(model),
            prompt_cache_bytes=0,
            **more,
        )
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.drawn: dict[int, list[int]] = {}

    def admit(
        self, row: int, tokens: tuple[int, ...], constraint: Constraint | None = None, **more: Any
    ) -> None:
        more.setdefault("sampling", GREEDY)
        self.prompts[row], self.drawn[row] = tokens, []
        job = Job(row, "m", tokens, more.pop("max_tokens", 99), frozenset(), **more)
        constraints = {} if constraint is None else {row: constraint}
        assert not self.runner.admit([job], constraints).failures

    def span(self, *rows: int, cuts: Sequence[int] = (), **more: Any) -> list[Span]:
        """Spans that read the text of `rows` to its end, cut at these places."""
        text = (*self.prompts[rows[0]], *self.drawn[rows[0]])
        places = [more.pop("begin", 0), *cuts, len(text) - 1]
        source, keep = more.pop("source", None), more.pop("keep", None)
        joins = more.pop("joins", rows)
        return [
            Span(
                rows=rows,
                begin=begin,
                end=end,
                opens=number == 0,
                source=source if number == 0 else None,
                keep=keep if end == places[-1] else None,
                joins=joins if end == places[-1] else None,
                **more,
            )
            for number, (begin, end) in enumerate(pairwise(places))
        ]

    def read(self, *rows: int, **more: Any) -> list[KeptPrompt]:
        """Read the text of `rows`, each span alone."""
        spans = self.span(*rows, **more)
        return [kept for span in spans for kept in self.runner.read([span]).kept]

    def read_together(self, *texts: Sequence[int]) -> None:
        self.runner.read([span for rows in texts for span in self.span(*rows)])

    def step(self, *groups: tuple[int, ...], **more: Any) -> tuple[Decoded, Fault | None]:
        """One step; of the same rows as before if no groups are given."""
        longest = max([len(self.prompts[row]) for rows in groups for row in rows], default=0)
        shaped = tuple(RowGroup(rows, len(rows), longest + ROOM) for rows in groups)
        done, fault = self.runner.decode(Decode(model=0, groups=shaped or None, **more))
        for row, token in done.tokens:
            self.drawn[row].append(token)
        return done, fault

    def run(self, *groups: tuple[int, ...], rows: Collection[int], count: int = COUNT) -> None:
        """Steps until each of these rows has drawn `count` tokens."""
        self.must(*groups)
        while any(len(self.drawn[row]) < count for row in rows):
            self.must()

    def must(self, *groups: tuple[int, ...], **more: Any) -> Decoded:
        done, fault = self.step(*groups, **more)
        assert fault is None
        return done

    def release(self, *rows: int, keep: Keep | None = None) -> tuple[KeptPrompt, ...]:
        return self.runner.release([Leave(row, keep) for row in rows]).prompts

    def check(self, *rows: int) -> None:
        """The rows' texts are those of the model."""
        for row in rows:
            drawn = self.drawn[row]
            assert drawn
            assert_greedy(self.model, self.prompts[row], drawn, len(drawn))

    @property
    def is_empty(self) -> bool:
        runner = self.runner
        decoders = (runner._main, runner._trial)
        return not (
            runner._rows or runner._texts or runner._ready or any(each.rows for each in decoders)
        )


class Failing:
    """A model that fails at its next pass, or at a later one, over as many tokens of a row as
    `when` says."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.when: Callable[[mx.array], bool] = lambda _: False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        if self.when(tokens):
            raise RuntimeError("out of memory, says the test")
        return self._model(tokens, cache=cache)


# The text of rows is mlx-lm's, however they are read and decoded.


@pytest.mark.parametrize("family", per_cache(SMALL))
def test_a_text_read_in_parts(models: Any, family: str) -> None:
    driver = Driver(models(family))
    driver.admit(1, prompt(1, 60))
    driver.read(1, cuts=(7, 8, 33))
    driver.run((1,), rows=[1])
    driver.check(1)
    driver.release(1)
    assert driver.is_empty


@pytest.mark.parametrize("family", per_cache(BATCHED))
def test_texts_read_together_of_one_length_or_padded(models: Any, family: str) -> None:
    driver = Driver(models(family))
    sizes = (30, 9, 41) if driver.runner.facts.pads else (30, 30, 30)
    for row, size in enumerate(sizes):
        driver.admit(row, prompt(row, size))
    driver.admit(3, driver.prompts[1])
    driver.read_together([0], [1, 3], [2])
    driver.run((0, 1, 3, 2), rows=range(4))
    driver.check(0, 1, 2, 3)
    assert driver.drawn[1] == driver.drawn[3]


@pytest.mark.parametrize("family", per_cache(BATCHED))
def test_twins_groups_that_merge_and_rows_that_leave(models: Any, family: str) -> None:
    driver = Driver(models(family))
    for row in range(5):
        driver.admit(row, prompt(row, 11 + 6 * row))
    driver.admit(5, driver.prompts[4])
    driver.read(0)
    driver.must((0,))
    driver.read(1)
    driver.read(4, 5, cuts=(16,))
    driver.must((4, 5), (0,), (1,))  # groups of their own, in another order than before
    for _ in range(3):
        driver.must()
    driver.read(2)
    driver.must((4, 5), (0, 1, 2))
    driver.must()
    driver.release(4, 1)
    driver.read(3)
    driver.must((5,), (0, 2), (3,))
    driver.run((3, 5, 0, 2), rows=[0, 2, 3, 5])
    driver.check(*range(6))
    assert driver.drawn[5][: len(driver.drawn[4])] == driver.drawn[4]


def test_a_group_that_is_not_there_is_a_fault_and_all_can_be_read_anew(models: Any) -> None:
    driver = Driver(models("qwen3"))
    for row in range(3):
        driver.admit(row, prompt(row))
        driver.read(row)
    driver.must((0, 1), (2,))
    driver.must()
    driver.admit(3, prompt(3))
    driver.admit(4, prompt(4))
    driver.read_together([3], [4])
    _, fault = driver.step((0, 2), (1,), (4,))
    assert fault is not None
    assert [*driver.runner._ready] == [3]
    for row in range(3):
        driver.read(row)
    driver.run((0, 2), (1,), rows=range(3))
    driver.check(0, 1, 2)


def test_rows_that_are_ready_may_wait(models: Any) -> None:
    driver = Driver(models("qwen3"))
    for row in range(3):
        driver.admit(row, prompt(row))
        driver.read(row)
    driver.must((0,))
    driver.must()
    driver.release(1)
    driver.run((0, 2), rows=[0, 2])
    driver.check(0, 2)


def test_a_row_on_trial_joins_the_others(models: Any) -> None:
    driver = Driver(models("qwen3"))
    for row in range(2):
        driver.admit(row, prompt(row), logprobs=2)
        driver.read(row)
        driver.must((row,), trial=row == 1)
    for _ in range(3):
        driver.must(trial=True)
        driver.must()
    done = driver.must((0, 1))
    assert [row for row, _ in done.tokens] == [0, 1]
    assert [*done.likelihoods] == [0, 1]
    assert not driver.runner._trial.rows
    driver.run(rows=[0, 1])
    driver.check(0, 1)


def test_a_row_that_is_only_read_is_nowhere(models: Any) -> None:
    driver = Driver(models("qwen3"))
    driver.admit(0, prompt(0), max_tokens=0, scores=2, ranks=True)
    first, last = driver.span(0, cuts=(20,), scored=True, joins=())
    assert driver.runner.read([first]).scores is None
    scores = driver.runner.read([last]).scores
    assert scores is not None
    assert scores.job == 0
    logits = models("qwen3")(mx.array([prompt(0)]))[0]
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert len(scores.scores) == 40
    for place, likelihood in enumerate(scores.scores[1:]):
        token = prompt(0)[place + 1]
        assert likelihood.logprob == pytest.approx(expected[place, token].item(), abs=1e-3)
    driver.release(0)
    assert driver.is_empty


def test_nan_in_a_prompt_is_told_and_no_row_is_ready(models: Any) -> None:
    class Spoiled(Failing):
        def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
            return mx.where(tokens[..., None] == 7, mx.nan, super().__call__(tokens, cache))

    driver = Driver(Spoiled(models("qwen3")))
    driver.admit(0, (5, 6, 7, 8, 9), scores=0)
    done = driver.runner.read(driver.span(0, scored=True, keep=Keep(1, 4)))
    assert done.broken == (0,)
    assert not done.kept
    driver.release(0)
    assert driver.is_empty


def test_nan_in_a_step_is_of_one_row(models: Any) -> None:
    class Spoiled(Failing):
        def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
            logits = super().__call__(tokens, cache)
            if tokens.shape[1] > 1:
                return logits
            return mx.where(tokens[..., None] == 7, mx.nan, logits)

    driver = Driver(Spoiled(models("qwen3")))
    driver.admit(0, prompt(0))
    driver.admit(1, (*prompt(1), 7))
    driver.read_together([0], [1])
    driver.must((0, 1))
    done = driver.must()
    assert done.broken == (1,)
    assert [row for row, _ in done.tokens] == [0]
    driver.release(1)
    driver.model = models("qwen3")
    driver.run((0,), rows=[0])
    driver.check(0)


def test_a_row_whose_steering_is_not_there_fails_alone(models: Any) -> None:
    model = models("qwen3")
    runner = Driver(model).runner
    bad = Job(0, "m", (5, 6), 9, frozenset(), GREEDY, steering=Steering(vectors=(("no", 1.0),)))
    done = runner.admit([bad, Job(1, "m", (5, 6), 9, frozenset(), GREEDY)], {})
    assert [failure.row for failure in done.failures] == [0]
    assert "no control vector" in done.failures[0].reason
    assert [*runner._rows] == [1]


def test_a_slice_passes_over_rows_that_were_not_admitted(models: Any) -> None:
    driver = Driver(models("qwen3"))
    bad = Job(9, "m", prompt(0), 9, frozenset(), GREEDY, steering=Steering(vectors=(("no", 1.0),)))
    driver.runner.admit([bad], {})
    driver.prompts[9], driver.drawn[9] = prompt(0), []
    for row in (0, 1):
        driver.admit(row, prompt(row))
    assert driver.runner.read(driver.span(9, keep=Keep(1, 39))).kept == ()
    driver.read_together([9], [0])
    # A twin of one that was to be scored is not scored in its place.
    driver.prompts[9] = prompt(1)
    assert driver.runner.read(driver.span(9, 1, scored=True)).scores is None
    driver.release(9)
    driver.run((0,), (1,), rows=[0, 1])
    driver.check(0, 1)
    driver.release(0, 1)
    assert driver.is_empty


# Kept prompts.


@pytest.mark.parametrize("family", per_cache(SMALL))
def test_what_a_row_leaves_is_where_another_begins(models: Any, family: str) -> None:
    driver = Driver(models(family))
    driver.admit(0, prompt(0))
    driver.read(0)
    driver.run((0,), rows=[0])
    [kept] = driver.release(0, keep=Keep(5, len(prompt(0)) + COUNT))
    # All windows are full.
    assert kept == KeptPrompt(5, kept.bytes, cuts={*FAMILIES[family].caches} == {"KVCache"})
    assert kept.bytes > 0
    text = (*prompt(0), *driver.drawn[0])
    for row in (1, 2):  # the entry stays as it is
        driver.admit(row, (*text, *prompt(row, 9)))
        driver.read(row, source=5, begin=len(text), cuts=(len(text) + 3,))
        driver.run((row,), rows=[row])
        driver.check(row)
        driver.release(row)
    driver.runner.forget([5], spare=True)
    assert not driver.runner._kept


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "falcon_h1", "llama4"])
def test_a_prompt_is_kept_after_a_span_and_cut_where_it_can_be(models: Any, family: str) -> None:
    driver = Driver(models(family))
    driver.admit(0, prompt(0))
    [kept] = driver.read(0, cuts=(30,), keep=Keep(1, 39))
    driver.run((0,), rows=[0])
    driver.check(0)
    begin = 25 if kept.cuts else 39
    driver.admit(1, (*prompt(0)[:begin], *prompt(1)))
    driver.release(0)
    driver.read(1, source=1, begin=begin)
    driver.run((1,), rows=[1])
    driver.check(1)


@pytest.mark.parametrize("family", per_cache(BATCHED))
def test_prompts_are_kept_after_a_padded_pass(models: Any, family: str) -> None:
    driver = Driver(models(family))
    sizes = (30, 18) if driver.runner.facts.pads else (30, 30)
    for row, size in enumerate(sizes):
        driver.admit(row, prompt(row, size))
    spans = [driver.span(row, keep=Keep(row, sizes[row] - 1))[0] for row in range(2)]
    assert [kept.entry for kept in driver.runner.read(spans).kept] == [0, 1]
    driver.run((0, 1), rows=[0, 1])
    driver.release(0, 1)
    for row, size in enumerate(sizes):
        driver.admit(row, prompt(row, size)[:-1] + prompt(9, 7))
        driver.read(row, source=row, begin=size - 1)
    driver.run((1, 0), rows=[0, 1])
    driver.check(0, 1)


def test_tokens_behind_what_is_kept_are_cut_off_or_nothing_is_kept(models: Any) -> None:
    for family, cut in (("qwen3", True), ("mamba2", False)):
        driver = Driver(models(family))
        driver.admit(0, prompt(0))
        driver.read(0)
        driver.run((0,), rows=[0])
        kept = driver.release(0, keep=Keep(1, 42))
        assert [each.entry for each in kept] == [1] * cut
        if cut:
            assert driver.runner._kept[1].cache.layers[0].size() == 42


def test_a_row_that_was_never_decoded_leaves_what_is_read(models: Any) -> None:
    driver = Driver(models("mamba2"))
    driver.admit(0, prompt(0))
    driver.admit(1, prompt(1, 30))
    driver.read_together([0], [1])
    [kept] = driver.release(0, keep=Keep(3, 39))
    driver.admit(2, (*prompt(0)[:-1], *prompt(2)))
    driver.read(2, source=kept.entry, begin=39)
    driver.run((1,), (2,), rows=[1, 2])
    driver.check(1, 2)


def test_half_read_twins_leave_one_after_the_other(models: Any) -> None:
    driver = Driver(models("qwen3_next"))
    for row in range(4):
        driver.admit(row, prompt(0))
    first, last = driver.span(0, 1, 2, cuts=(20,))
    driver.runner.read([first])
    [kept] = driver.release(1, keep=Keep(1, 20))
    driver.runner.rewind([2])
    driver.runner.read([msgspec.structs.replace(last, rows=(0,), joins=(0,))])
    driver.read(3, source=kept.entry, begin=20)
    first, _ = driver.span(2, cuts=(20,))
    driver.runner.read([first])
    [kept] = driver.release(2, keep=Keep(2, 20))
    assert kept.entry == 2
    assert not driver.runner._texts
    driver.run((0, 3), rows=[0, 3])
    driver.check(0, 3)


def test_a_prompt_is_not_scored_on_when_who_asked_has_left(models: Any) -> None:
    driver = Driver(models("qwen3"))
    driver.admit(0, prompt(0), scores=2)
    driver.admit(1, prompt(0))
    first, last = driver.span(0, 1, cuts=(20,), scored=True)
    driver.runner.read([first])
    driver.release(0)
    last = msgspec.structs.replace(last, rows=(1,), joins=(1,), scored=False)
    assert driver.runner.read([last]).scores is None
    driver.run((1,), rows=[1])
    driver.check(1)


def test_a_row_leaves_whatever_happens_to_those_that_are_ready(models: Any) -> None:
    driver = Driver(models("qwen3"))
    for row in range(4):
        driver.admit(row, prompt(row))
    driver.read_together([0], [1])
    driver.read(2)
    driver.runner._ready[0].cache.layers = [None]  # whatever is done with it fails
    with pytest.raises(AttributeError):
        driver.release(0, 2, keep=Keep(1, 20))
    driver.release(1, 3)
    assert driver.is_empty


def test_rows_that_are_rewound_go_on_where_they_were(models: Any) -> None:
    driver = Driver(models("qwen3"))
    seeded = Sampling(temperature=1, seed=3)
    for row in range(3):
        driver.admit(row, prompt(row), sampling=seeded if row == 2 else GREEDY)
    driver.read_together([0], [1], [2])
    driver.run((0, 1, 2), rows=range(3), count=5)
    driver.runner.rewind([0, 2])
    driver.must((1,))
    driver.read(0)
    driver.read(2)
    driver.run((1, 0, 2), rows=range(3))
    driver.check(0, 1)
    alone = Driver(models("qwen3"))
    alone.admit(2, prompt(2), sampling=seeded)
    alone.read(2)
    alone.run((2,), rows=[2], count=len(driver.drawn[2]))
    assert alone.drawn[2] == driver.drawn[2]


# Faults.


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "llama4"])
def test_a_pass_that_fails_while_reading_drops_its_texts(models: Any, family: str) -> None:
    model = Failing(models(family))
    driver = Driver(model)
    driver.admit(0, prompt(0))
    driver.admit(1, prompt(1))
    first, last = driver.span(0, cuts=(20,))
    driver.runner.read([first])
    model.when = lambda tokens: tokens.shape[1] > 1
    with pytest.raises(RuntimeError, match="says the test"):
        driver.runner.read([last])
    if driver.runner.facts.batched:
        with pytest.raises(RuntimeError, match="says the test"):
            driver.read_together([0], [1])
    assert not driver.runner._texts
    model.when = lambda _: False
    driver.read(0, cuts=(20,))
    driver.run((0,), rows=[0])
    driver.check(0)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "mamba2"])
def test_a_step_that_fails_drops_the_caches_of_its_decoder(models: Any, family: str) -> None:
    model = Failing(models(family))
    driver = Driver(model)
    for row in range(4):
        driver.admit(row, prompt(row))
        driver.read(row)
    driver.must((0, 1))
    driver.must((2,), trial=True)
    for _ in range(3):
        driver.must()
        driver.must(trial=True)
    before = {row: list(drawn) for row, drawn in driver.drawn.items()}
    model.when = lambda tokens: tokens.shape[0] == 3
    done, fault = driver.step((0, 1, 3))
    assert fault is not None
    assert fault.memory
    assert not done.tokens
    assert driver.drawn == before
    assert [row.id for row in driver.runner._trial.rows] == [2]
    model.when = lambda _: False
    for row in (0, 1, 3):
        driver.read(row)
    driver.must((3, 0), (1,))
    driver.run((3, 0, 1, 2), rows=range(4))
    driver.check(*range(4))


def test_tokens_count_that_were_told_before_a_step_failed(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(models("qwen3"))
    driver.admit(0, prompt(0), Parity())
    driver.read(0)
    driver.must((0,))
    driver.must()
    with monkeypatch.context() as patched:
        patched.setattr("mlxsrv.engine.sampling.processors.np.unpackbits", _fail)
        done, fault = driver.step()
    assert fault is not None
    assert len(done.tokens) == 1
    driver.read(0)
    driver.run((0,), rows=[0])
    assert [token % 2 for token in driver.drawn[0]] == [1, 0] * (COUNT // 2)
    alone = Driver(models("qwen3"))
    alone.admit(0, prompt(0), Parity())
    alone.read(0)
    alone.run((0,), rows=[0])
    assert alone.drawn[0] == driver.drawn[0]


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no")


def test_a_release_that_fails_frees_its_rows_and_drops_what_it_touched(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(models("qwen3"))
    for row in range(4):
        driver.admit(row, prompt(row))
        driver.read(row)
    driver.must((0, 1), (2,))
    driver.must()
    with monkeypatch.context() as patched:
        patched.setattr(RowCache, "settle", _fail)
        with pytest.raises(RuntimeError):
            driver.release(0, keep=Keep(1, 41))
    assert not driver.runner._kept
    assert [*driver.runner._rows] == [1, 2, 3]
    for row in (1, 2):
        driver.read(row)
    driver.run((3, 1), (2,), rows=[1, 2, 3])
    driver.check(1, 2, 3)


# Constraints.


class Parity:
    """A constraint: odd tokens and even ones by turns. Raises `error` at the n-th call of a
    method."""

    failure: str | None = None

    def __init__(
        self, at: tuple[str, int] = ("", 0), error: BaseException | None = None, asleep: int = 0
    ) -> None:
        self._at = at
        self._error = error
        self._calls = {"fill": 0, "accept": 0, "dormant": 0}
        self._asleep = asleep
        self.seen: list[int] = []

    @property
    def dormant(self) -> bool:
        self._call("dormant")
        return len(self.seen) < self._asleep

    def fill(self, mask: Mask) -> None:
        self._call("fill")
        odd = (len(self.seen) - self._asleep) % 2 == 0
        mask[:] = 0x55555555 * 2 - 2**32 if odd else 0x55555555

    def accept(self, token: int) -> None:
        self._call("accept")
        self.seen.append(token)

    def _call(self, method: str) -> None:
        self._calls[method] += 1
        if self._error is not None and self._at == (method, self._calls[method]):
            raise self._error


class PanicException(BaseException):
    """As Rust's panics come out of pyo3."""


@pytest.mark.parametrize("error", [ValueError("no"), PanicException("no")])
@pytest.mark.parametrize("method", ["fill", "accept", "dormant"])
def test_a_constraint_that_fails_is_its_rows_failure(
    models: Any, method: str, error: BaseException
) -> None:
    driver = Driver(models("qwen3"))
    driver.admit(0, prompt(0), Parity((method, 3), error))
    driver.admit(1, prompt(1), Parity())
    driver.admit(2, prompt(2))
    driver.read_together([0], [1], [2])
    done = driver.must((0, 1, 2))
    assert done.bound == (0, 1)
    failures: list[tuple[int, str | None]] = []
    while not failures:
        done = driver.must()
        failures = [(failure.row, failure.clear) for failure in done.failures]
    assert failures == [(0, None)]
    driver.release(0)
    driver.run((2, 1), rows=[1, 2])
    driver.check(2)
    assert [token % 2 for token in driver.drawn[1]][:COUNT] == [1, 0] * (COUNT // 2)


def test_a_constraint_that_cannot_go_on_says_why(models: Any) -> None:
    driver = Driver(models("qwen3"))
    constraint = Parity()
    driver.admit(0, prompt(0), constraint)
    driver.read(0)
    driver.must((0,))
    constraint.failure = "too ambiguous"
    [failure] = driver.must().failures
    assert failure.clear == "the grammar cannot go on: too ambiguous"


# Proposals.


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=7)])
@pytest.mark.parametrize("draft", ["itself", "another"])
def test_rounds_and_steps_give_one_text(models: Any, draft: str, sampling: Sampling) -> None:
    model = models("qwen3")
    driver = Driver(model, draft=model if draft == "itself" else models("llama"))
    assert driver.runner.facts.drafts
    dice = random.Random(0)
    for row in range(2):
        driver.admit(row, prompt(row), sampling=sampling)
        driver.read(row)
        driver.must((row,))
        driver.runner.read_draft(row, 0, 30)
        while len(driver.drawn[row]) < 30:
            count = dice.choice([0, 1, 3, 5])
            before = len(driver.drawn[row])
            done = driver.must(proposals=(count,))
            new = driver.drawn[row][before:]
            if count:
                assert len(new) == done.accepted[row] + 1
                assert done.waited > 0
                assert draft == "another" or done.accepted[row] == count
                following = done.following[row]
                assert driver.must().tokens == ((row, following),)
            _check_lengths(driver, row)
        [kept] = driver.release(row, keep=Keep(row, 45))
        assert driver.runner._kept[kept.entry].cache.layers[0].size() == 45
        plain = Driver(model)
        plain.admit(row, prompt(row), sampling=sampling)
        plain.read(row)
        plain.run((row,), rows=[row], count=len(driver.drawn[row]))
        assert plain.drawn[row] == driver.drawn[row]


def _check_lengths(driver: Driver, row: int) -> None:
    """The KV caches hold the row's text, or a beginning of it."""
    length = len(driver.prompts[row]) + len(driver.drawn[row])
    [sub_batch] = driver.runner._main.sub_batches
    assert sub_batch.caches.lengths == [length]
    draft: Any = driver.runner._draft
    assert draft._cache[0].size() == draft._read <= length


def test_a_constraint_that_wakes_up_in_a_round_binds_the_next_token(models: Any) -> None:
    for proposals in ((0,), (4,)):
        driver = Driver(models("qwen3"), draft=models("qwen3"))
        driver.admit(0, prompt(0), Parity(asleep=8))
        driver.read(0)
        driver.must((0,))
        bound: tuple[int, ...] = ()
        while not bound:
            bound = driver.must(proposals=proposals).bound
        assert len(driver.drawn[0]) == 8
        driver.run(rows=[0], count=14)
        assert [token % 2 for token in driver.drawn[0][8:]] == [1, 0] * 3
        if proposals == (0,):
            plain = driver.drawn[0]
    assert driver.drawn[0] == plain


def test_a_draft_that_fails_is_forgotten(models: Any) -> None:
    draft = Failing(models("qwen3"))
    driver = Driver(models("qwen3"), draft=draft)
    driver.admit(0, prompt(0))
    driver.read(0)
    driver.must((0,))
    read: Any = driver.runner._draft
    driver.runner.read_draft(0, 0, 30)
    draft.when = lambda _: True
    with pytest.raises(RuntimeError, match="says the test"):
        driver.runner.read_draft(0, 30, 5)
    assert read._read == 0
    assert read._row is None
    driver.must()
    draft.when = lambda _: False
    driver.runner.read_draft(0, 0, 30)
    draft.when = lambda tokens: tokens.shape[1] == 1  # the second of its passes
    _, fault = driver.step(proposals=(3,))
    assert fault is not None
    assert read._read == 0
    assert read._row is None
    driver.read(0)
    driver.run((0,), rows=[0])
    driver.check(0)


def test_a_draft_of_another_vocabulary_is_refused(models: Any) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        Driver(models("qwen3"), draft=models("qwen3-46m"))
    assert not Driver(models("mamba2"), draft=models("qwen3")).runner.facts.drafts
    bounded = KVCacheFactory(models("qwen3"), max_size=20)
    assert not Driver(models("qwen3"), bounded, draft=models("qwen3")).runner.facts.drafts


# Facts.


@pytest.mark.parametrize("family", SMALL)
def test_kv_costs_are_those_of_real_rows(models: Any, family: str) -> None:
    model = models(family)
    driver = Driver(model)
    facts = driver.runner.facts
    assert facts.vocabulary == FAMILIES[family].vocabulary
    assert facts.batched == FAMILIES[family].batchable
    assert len(facts.kv_costs) <= 3
    for row, size in enumerate((2, 10, 17, 40, 300)):
        driver.admit(row, prompt(row, size + 1))
        driver.read(row)
        driver.must((row,))
        driver.must()
        [kept] = driver.release(row, keep=Keep(row, size + 2))
        cache = driver.runner._kept[row].cache
        assert facts.kv_bytes(size + 2) == _count_used(cache.layers)
        if facts.batched:
            assert facts.kv_bytes(size + 2) == kept.bytes


def _count_used(cache: Iterable[Any]) -> int:
    """Bytes of a row's KV cache but for what is allocated for later tokens."""
    total = 0
    for layer in cache:
        if hasattr(layer, "caches"):
            total += _count_used(layer.caches)
        elif hasattr(layer, "keys_and_values"):
            total += sum(array.nbytes for array in layer.keys_and_values())
        else:
            total += layer.nbytes
    return total


@pytest.mark.parametrize("more", [{"max_size": 20}, {"group": 32, "bits": 8}])
def test_kv_costs_of_bounded_and_quantized_caches(models: Any, more: Any) -> None:
    model = models("qwen3-46m")
    driver = Driver(model, KVCacheFactory(model, **more))
    facts = driver.runner.facts
    for row, size in enumerate((12, 18, 256, 300)):
        driver.admit(row, prompt(row, size - 1))
        driver.read(row)
        driver.must((row,))
        driver.must()
        [kept] = driver.release(row, keep=Keep(row, size))
        if facts.batched:
            assert facts.kv_bytes(size) == kept.bytes
        else:  # as many tokens as were allocated
            assert facts.kv_bytes(-(-size // 256) * 256) == kept.bytes
