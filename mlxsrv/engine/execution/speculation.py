"""Speculative decoding: a small model proposes tokens, the large one checks them in one pass.

A pass over a few tokens costs a large model little more than a pass over one, so each proposal
that holds saves one (Leviathan et al. 2023, Chen et al. 2023).

- What is drawn does not depend on what is proposed: the large model's logits at each place go
  through the row's own sampler with that place's own key, and a proposal holds if it is the token
  so drawn. The text is that of plain decoding, greedy or not.
- The draft draws from the same random numbers. Where both models think alike they draw alike at
  any temperature, while the likeliest token would miss whatever the sampler does not favour.
- Rounds are timed against plain steps. What rounds may lose is earned by plain steps: see Gain.

Used on the device thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low
from time import perf_counter
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.models.cache import (
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)

from mlxsrv.engine.cache.prompt_cache import Cache, as_tokens, common_prefix
from mlxsrv.engine.execution.sub_batches import SubBatch
from mlxsrv.engine.row import Row
from mlxsrv.engine.sampling.bans import Banning
from mlxsrv.engine.sampling.processors import Penalties, Proof
from mlxsrv.engine.sampling.sampler import Sampler

_MOST_PADDING = 128  # entries by which families pad the vocabularies of their sizes differently
_MOST_UNREAD = 16  # tokens that the draft reads on the way to its first proposal

_FIRST = 2  # proposals of a trial's first round
_MOST = 8  # proposals of a round; more than so many in a row rarely hold
_WIDEN = 2  # proposals more than any round has had: the line is not trusted beyond
_VARY_EVERY = 16  # rounds; one with more or fewer proposals shows what they cost

_STEPS_KEPT = 32
_LEAST_STEPS = 4  # plain steps to be seen before rounds are compared with them
_ROUNDS_KEPT = 32
_TRIAL = 4  # rounds before a trial is judged, if it can afford them
_EARLY = 16  # rounds in which luck counts for much, so that only clear losses end a trial
_CLEARLY = 0.8  # of the plain speed
_COMPARE_EVERY = 64  # rounds, after which plain steps are timed anew

_SHARE = 0.03  # of the time of plain steps: what trials may lose
_TRIAL_STEPS = 4  # steps' time that must be there for a trial, doubled by each that fails
_FIRST_STEPS = 6  # steps' time to begin with: a trial, and reading a prompt for it
_MOST_STEPS = 512  # steps' time of what rounds have gained, to read long prompts with
_MOST_DOUBLINGS = 4
_READING = 1 / 64  # of a step: what reading a token is taken to cost until it is known

_PRIOR = 2.0, 1.4  # proposals tested and accepted before any was, lest one decides
_FADE = 0.95  # a round's weight against the next one's
_SMOOTHING = 0.2  # of the exponential average


class Gain:
    """Whether rounds are worth it, and with how many proposals. Times are in seconds.

    A purse bounds what is lost where they are not. Plain steps put a share of their time into
    it, and rounds what they save; the draft's reading takes its time out, and rounds what they
    cost beyond plain steps. A trial begins when there is enough for it, ends at once when the
    purse is empty, and must wait twice as long for the next when it has failed. So however bad a
    draft is, decoding is slower by no more than that share, a few steps at the start aside.

    The tokens of a round of k proposals, each accepted with probability p, are 1 + p + ... + p^k.
    Its time is the median of such rounds; of those not seen, that of a line through the two next
    ones that were, where a plain step is a round of none. The best k is that with most tokens a
    second. A trial doubles it while all proposals hold: what a round costs beyond its tokens may
    be such that only long ones are worth it.
    """

    def __init__(self) -> None:
        self.on = False
        self._steps: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._plain: float | None = None  # a step's seconds: the median
        self._purse: float | None = None  # seconds; None until a step's are known
        self._failures = 0  # trials in a row
        self._reading: float | None = None  # seconds a token, as far as known
        self._begin()

    def _begin(self) -> None:
        """Forget rounds seen before: a trial finds out about the text at hand."""
        self._rounds: deque[tuple[int, float]] = deque(maxlen=_ROUNDS_KEPT)
        self._known: dict[int, float] = {}  # seconds by the number of proposals
        self._tested, self._accepted = _PRIOR
        self._bold = _FIRST  # proposals of the trial's next round, while all hold
        self._count = 0
        self._won = 0.0

    def affords(self, unread: int) -> bool:
        """Whether to decode in rounds, if the draft has so many tokens to read first."""
        if self._plain is None or self._purse is None or len(self._steps) < _LEAST_STEPS:
            return False
        reading = _READING * self._plain if self._reading is None else self._reading
        price = reading * unread if unread > _MOST_UNREAD else 0.0
        if not self.on:
            price += _TRIAL_STEPS * 2**self._failures * self._plain
        return self._purse >= price

    def bound(self, limit: int) -> int:
        """How many of `limit` tokens the draft may read at once: a few, until it has been timed."""
        return min(limit, _MOST_UNREAD) if self._reading is None else limit

    def choose(self, most: int) -> int:
        """How many tokens to propose, `most` at the most and at least one."""
        if not self.on:
            self.on = True
            self._begin()
        if self._bold:
            return min(self._bold, most)
        best = max(range(1, self._widest + 1), key=self._speed)
        if self._count % _VARY_EVERY == 0:
            best += 1 if self._count // _VARY_EVERY % 2 else -1
        return max(1, min(best, self._widest, most))

    def saw_step(self, seconds: float) -> None:
        """A plain step took so long."""
        self._steps.append(seconds)
        self._plain = median_low(self._steps)
        if self._purse is not None:
            self._purse += _SHARE * seconds
        elif len(self._steps) == _LEAST_STEPS:
            self._purse = _FIRST_STEPS * self._plain

    def saw_reading(self, tokens: int, seconds: float) -> None:
        """The draft has read so many tokens, to catch up with a row."""
        each = seconds / tokens
        known = each if self._reading is None else self._reading
        self._reading = known + _SMOOTHING * (each - known)
        self._win(-seconds)

    def saw_round(self, proposed: int, accepted: int, seconds: float) -> None:
        """A round took so long and has accepted so many of its proposals."""
        assert self._plain is not None
        self._count += 1
        self._tested = _FADE * self._tested + min(accepted + 1, proposed)
        self._accepted = _FADE * self._accepted + accepted
        held = accepted == proposed and self._count < _TRIAL
        self._bold = min(2 * proposed, _MOST) if held else 0
        self._rounds.append((proposed, seconds))
        self._known = {
            size: median_low([each for count, each in self._rounds if count == size])
            for size in {count for count, _ in self._rounds}
        }
        # By the median: that something else held this round up does not count against it.
        self._win((accepted + 1) * self._plain - self._known[proposed])
        best = max(map(self._speed, range(1, self._widest + 1))) * self._plain
        least = 0.0 if self._count < _TRIAL else _CLEARLY if self._count < _EARLY else 1.0
        if cast(float, self._purse) < 0 or best < least:
            self._end()
        elif self._count % _COMPARE_EVERY == 0:
            self._steps.clear()

    def _end(self) -> None:
        self.on = False
        self._failures = 0 if self._won > 0 else min(self._failures + 1, _MOST_DOUBLINGS)
        self._purse = min(cast(float, self._purse), 0.0)

    def _win(self, seconds: float) -> None:
        assert self._plain is not None
        assert self._purse is not None
        self._won += seconds
        self._purse = min(self._purse + seconds, max(self._purse, _MOST_STEPS * self._plain))

    @property
    def _widest(self) -> int:
        return min(max(self._known) + _WIDEN, _MOST)

    def _speed(self, count: int) -> float:
        """Tokens a second of rounds with `count` proposals."""
        chance = self._accepted / self._tested
        return sum(chance**i for i in range(count + 1)) / self._seconds(count)

    def _seconds(self, count: int) -> float:
        """Of a round with `count` proposals."""
        assert self._plain is not None
        if count in self._known:
            return self._known[count]
        known = {0: self._plain, **self._known}
        low, high = sorted(sorted(known, key=lambda size: abs(size - count))[:2])
        slope = max(known[high] - known[low], 0.0) / (high - low)
        return max(known[high] + slope * (count - high), known[low])


class Draft:
    """The model that proposes, and a cache of the first tokens of the row that it follows.

    Args:
        model: the small one.
        vocabulary: entries of the large one's logits: what may be proposed.
    """

    def __init__(self, model: Any, vocabulary: int) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._last = _count_vocabulary(model) - 1
        self.forget()

    def forget(self) -> None:
        self._cache: Cache = make_prompt_cache(self._model)
        self._row: Row | None = None
        self._read = 0  # tokens of the row that the cache holds

    def follow(self, row: Row) -> int:
        """Turn to `row`, keeping what it shares with the last one; how much of it is not read."""
        if row is not self._row:
            shared = 0
            if self._row is not None:
                read = as_tokens(self._row.seen)[: self._read]
                shared = common_prefix(read, as_tokens(row.seen))
            if shared:
                self._cut(self._read - shared)
            else:
                self.forget()  # with its memory, which a cut keeps
            self._row = row
        return len(row.job.prompt) + len(row.drawn) - self._read

    def read(self, limit: int) -> int:
        """Read at most so many of the row's tokens, and wait for it; how many it was."""
        part = self._unread(limit)
        self._feed(mx.array(part, dtype=mx.uint32))
        mx.eval([layer.state for layer in self._cache])
        self._read += len(part)
        return len(part)

    def propose(self, inputs: mx.array, count: int) -> mx.array:
        """So many tokens `(count,)` to follow what the row has seen and `inputs` `(1,)`, launched.

        All but the last of them are read; `settle` takes back what the row did not come to see.
        """
        assert self._row is not None
        unread = self._unread()
        fed = mx.concatenate([mx.array(unread, dtype=mx.uint32), inputs]) if unread else inputs
        sampler = Sampler([self._row.job.sampling], [len(self._row.drawn) + 1], ahead=count)
        proposals: list[mx.array] = []
        for _ in range(count):
            logits = self._feed(fed)[:, -1, : self._vocabulary]
            fed = sampler(logits).astype(mx.uint32)
            mx.async_eval(fed)  # type: ignore[no-untyped-call]  # as mlx's stubs have it
            proposals.append(fed)
        self._read += len(unread) + count
        return mx.concatenate(proposals)

    def settle(self) -> None:
        """Forget what is not in the row."""
        assert self._row is not None
        self._cut(self._read - len(self._row.job.prompt) - len(self._row.drawn))

    def _feed(self, tokens: mx.array) -> mx.array:
        """Logits `(1, n, vocabulary)` behind each of the tokens `(n,)`.

        MLX does not look whether an embedding is there, and the large model's padding may be more.
        """
        tokens = mx.minimum(tokens, self._last)
        logits: mx.array = self._model(tokens[None], cache=self._cache)
        return logits

    def _unread(self, limit: int = _MOST_UNREAD) -> list[int]:
        assert self._row is not None
        prompt, drawn = self._row.job.prompt, self._row.drawn
        part = prompt[self._read : self._read + limit]
        begin = max(self._read - len(prompt), 0)
        return [*part, *drawn[begin : begin + limit - len(part)]]

    def _cut(self, tokens: int) -> None:
        if tokens > 0:
            trim_prompt_cache(self._cache, tokens)
            self._read -= tokens


class Round(NamedTuple):
    """What came of one: tokens that the row has seen now, and its next input."""

    seen: list[int]  # the input and the proposals accepted
    following: int  # drawn behind them
    inputs: mx.array  # (1,), the same on the device
    ended: float  # by perf_counter
    broken: bool  # a token means nothing: the model computed NaN


class Speculation:
    """A draft model at work for one batch.

    Args:
        model: the model whose batch it is.
        draft: a model of mlx-lm's with the same vocabulary; there is no obstacle between them.

    Raises:
        ValueError: their vocabularies differ.
    """

    def __init__(self, model: Any, draft: Any) -> None:
        check_draft(model, draft)
        self._draft = Draft(draft, _count_vocabulary(model))
        self._gain = Gain()
        self._drafted = 0
        self._accepted = 0

    def statistics(self) -> dict[str, int]:
        return {
            "speculating": int(self._gain.on),
            "drafted": self._drafted,
            "accepted": self._accepted,
        }

    def choose(self, sub_batch: SubBatch) -> int:
        """How many tokens to propose for the only row now; 0 where a plain step is better, or the
        only way."""
        [row] = sub_batch.rows
        most = row.job.max_tokens - len(row.drawn) - 1  # the input is one of them
        if most < 1 or not _eligible(sub_batch):
            return 0
        unread = self._draft.follow(row)
        if unread > _MOST_UNREAD or not self._gain.affords(unread):
            return 0
        return self._gain.choose(most)

    def read(self, sub_batch: SubBatch, limit: int, inputs: mx.array | None) -> bool:
        """Have the draft read at most `limit` tokens more of the only row; whether it had to. Waits
        for it, and first for the `inputs` that a step under way draws."""
        if not _eligible(sub_batch):
            return False
        unread = self._draft.follow(sub_batch.rows[0])
        if unread <= _MOST_UNREAD or not self._gain.affords(unread):
            return False
        mx.eval(inputs)
        begun = perf_counter()
        read = self._draft.read(self._gain.bound(limit))
        self._gain.saw_reading(read, perf_counter() - begun)
        return True

    def run(
        self, model: Any, sub_batch: SubBatch, inputs: mx.array, count: int, last: Round | None
    ) -> Round:
        """Propose and check `count` tokens behind `inputs` `(1,)`, right after the round `last`.

        The caches have seen all of them then: `settle` cuts them back.
        """
        mx.eval(inputs)  # a plain step that is under way is not the round's to pay for
        begun = perf_counter() if last is None else last.ended
        [row] = sub_batch.rows
        fed = mx.concatenate([inputs, self._draft.propose(inputs, count)])
        first = len(row.drawn) + 1
        places = range(first, first + count + 1)
        sampler = Sampler([row.job.sampling] * len(places), places, ahead=1)
        drawn, highest = sampler.draw(sub_batch.check(model, fed))
        mx.eval(drawn, highest)
        tokens, expected = cast(list[int], fed.tolist()), cast(list[int], drawn.tolist())
        accepted = _count_equal(tokens[1:], expected)
        ended = perf_counter()
        self._drafted += count
        self._accepted += accepted
        self._gain.saw_round(count, accepted, ended - begun)
        return Round(
            tokens[: accepted + 1],
            expected[accepted],
            drawn[accepted : accepted + 1],
            ended,
            broken=not Proof((row,), highest[: accepted + 1]).holds(),
        )

    def settle(self, sub_batch: SubBatch, surplus: int) -> None:
        """Cut the caches back to what the row has seen: the model's by `surplus` tokens."""
        sub_batch.cut(surplus)
        self._draft.settle()

    def saw_step(self, sub_batch: SubBatch, seconds: float) -> None:
        """A plain step of the sub-batch's only row took so long."""
        if _eligible(sub_batch):
            self._gain.saw_step(seconds)

    def forget(self) -> None:
        """After an error: what the draft holds may be half of a pass."""
        self._draft.forget()


def check_draft(model: Any, draft: Any) -> None:
    """Raises ValueError unless the logits of both models are of one vocabulary.

    Families pad theirs differently from size to size, so a few entries more or less are none.
    """
    size, other = _count_vocabulary(model), _count_vocabulary(draft)
    if abs(size - other) > min(_MOST_PADDING, size // 100):
        raise ValueError(
            f"the draft model's vocabulary has {other} tokens, the model's {size}: "
            "a draft model must have the model's own vocabulary"
        )


def find_obstacle(model: Any, draft: Any) -> str | None:
    """Why `draft` cannot propose tokens to `model`, if so: proposals that fail must be unread."""
    for whose, each in (("the model's", model), ("the draft model's", draft)):
        if not _always_cuts(make_prompt_cache(each)):
            return f"{whose} cache cannot be cut back, so a draft model cannot be used"
    return None


def _count_vocabulary(model: Any) -> int:
    """Entries of the logits; nothing is computed for it."""
    return int(model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1])


def _eligible(sub_batch: SubBatch) -> bool:
    """Whether the sub-batch's only row can be drawn from in rounds.

    Masks, bans, penalties and log-probabilities are made for one token at a time.
    """
    [row] = sub_batch.rows
    return (
        not row.fresh
        and row.constraint is None
        and row.job.logprobs is None
        and not Penalties.wanted(row.job.sampling)
        and not Banning.wanted(row)
        and _always_cuts(sub_batch.cache)
    )


def _always_cuts(cache: Sequence[Any]) -> bool:
    """Whether the cache can be cut back at any length. One with a window can until it is full,
    which may be in the middle of a round."""
    return all(
        _always_cuts(layer.caches)
        if isinstance(layer, CacheList)
        else layer.is_trimmable()
        and not isinstance(layer, (RotatingKVCache, BatchRotatingKVCache, ChunkedKVCache))
        for layer in cache
    )


def _count_equal(proposed: Sequence[int], drawn: Sequence[int]) -> int:
    """How many tokens are the same before the first that is not."""
    pairs = zip(proposed, drawn, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(proposed))
