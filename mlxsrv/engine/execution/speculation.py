"""Speculative decoding: a small model proposes tokens, the large one checks them in one pass.

A pass over a few tokens costs a large model little more than a pass over one, so each proposal
that holds saves a pass (Leviathan et al. 2023, Chen et al. 2023).

- Proposals do not change what is drawn. The large model's logits at each position go through the
  row's own sampler with the key of that position, and a proposal holds if it is the token so drawn.
  The text is that of plain decoding, greedy or not.
- The draft draws with the same random numbers. Where both models give similar logits, they draw the
  same tokens at any temperature; its likeliest token would miss whatever the sampler does not
  favour.
- Speculative rounds are timed against plain steps, see `scheduling/speculation_controller`.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from mlxsrv.engine.execution.launch import launch
from mlxsrv.engine.execution.sub_batches import SubBatch
from mlxsrv.engine.row import Row
from mlxsrv.engine.sampling.bans import Banning
from mlxsrv.engine.sampling.processors import Penalties, Proof
from mlxsrv.engine.sampling.sampler import Sampler
from mlxsrv.engine.scheduling.speculation_controller import (
    MOST_UNREAD,
    SpeculationController,
)

_MOST_PADDING = 128  # entries by which families pad the vocabularies of their sizes differently


class Draft:
    """The small model, and its KV cache of the row that it follows.

    Args:
        model: the small model.
        vocabulary: entries of the large model's logits, all of which may be proposed.
    """

    def __init__(self, model: Any, vocabulary: int) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._last = _count_vocabulary(model) - 1
        self.forget()

    def forget(self) -> None:
        self._cache: Cache = make_prompt_cache(self._model)
        self._row: Row | None = None
        self._read = 0  # tokens of the row's text that the cache holds

    def follow(self, row: Row) -> int:
        """Turn to `row`, keeping what its text shares with that of the last row.

        Returns:
            How many of its tokens are not read.
        """
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
        return row.length - self._read

    def read(self, limit: int) -> int:
        """Read at most `limit` of the row's tokens, and wait for it. Returns how many it was."""
        part = self._unread(limit)
        self._feed(mx.array(part, dtype=mx.uint32))
        mx.eval([layer.state for layer in self._cache])
        self._read += len(part)
        return len(part)

    def propose(self, inputs: mx.array, count: int) -> mx.array:
        """Launch the drawing of `(count,)` tokens to follow the row's text and `inputs` `(1,)`.

        The KV cache then holds all of them but the last; `settle` cuts it back to the row's text.
        """
        assert self._row is not None
        unread = self._unread()
        fed = mx.concatenate([mx.array(unread, dtype=mx.uint32), inputs]) if unread else inputs
        sampler = Sampler([self._row.job.sampling], [len(self._row.drawn) + 1], ahead=count)
        proposals: list[mx.array] = []
        for _ in range(count):
            logits = self._feed(fed)[:, -1, : self._vocabulary]
            fed = sampler(logits).astype(mx.uint32)
            launch(fed)
            proposals.append(fed)
        self._read += len(unread) + count
        return mx.concatenate(proposals)

    def settle(self) -> None:
        """Cut the KV cache back to the row's text."""
        assert self._row is not None
        self._cut(self._read - self._row.length)

    def _feed(self, tokens: mx.array) -> mx.array:
        """Logits `(1, n, vocabulary)` behind each of the tokens `(n,)`.

        MLX does not check that a token has an embedding, and the large model's vocabulary may be
        padded further.
        """
        tokens = mx.minimum(tokens, self._last)
        logits: mx.array = self._model(tokens[None], cache=self._cache)
        return logits

    def _unread(self, limit: int = MOST_UNREAD) -> list[int]:
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
    """The outcome of a speculative round: tokens to deliver, and the row's next input."""

    seen: list[int]  # the row's input and the proposals that held
    following: int  # drawn behind them
    logits: mx.array  # (proposals + 1, vocabulary), behind the input and each proposal
    inputs: mx.array  # (1,), the same on the device
    ended: float  # by perf_counter
    broken: bool  # the model computed NaN, so a token means nothing


class Speculation:
    """A draft model that proposes tokens to the rows of one batch.

    Args:
        model: the model of the batch.
        draft: a model of mlx-lm's with the same vocabulary, for which `find_obstacle` finds none.

    Raises:
        ValueError: their vocabularies differ.
    """

    def __init__(self, model: Any, draft: Any) -> None:
        check_draft(model, draft)
        self._draft = Draft(draft, _count_vocabulary(model))
        self._controller = SpeculationController()
        self._drafted = 0
        self._accepted = 0

    def statistics(self) -> dict[str, int]:
        return {
            "speculating": int(self._controller.on),
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
        if unread > MOST_UNREAD or not self._controller.affords(unread):
            return 0
        return self._controller.choose(most)

    def read(self, sub_batch: SubBatch, limit: int, inputs: mx.array | None) -> bool:
        """Have the draft read at most `limit` tokens more of the only row; whether it had to. Waits
        for it, and first for the `inputs` that a step under way draws."""
        if not _eligible(sub_batch):
            return False
        unread = self._draft.follow(sub_batch.rows[0])
        if unread <= MOST_UNREAD or not self._controller.affords(unread):
            return False
        mx.eval(inputs)
        begun = perf_counter()
        read = self._draft.read(self._controller.bound(limit))
        self._controller.saw_reading(read, perf_counter() - begun)
        return True

    def run(
        self, model: Any, sub_batch: SubBatch, inputs: mx.array, count: int, last: Round | None
    ) -> Round:
        """Propose and check `count` tokens behind `inputs` `(1,)`, right after the speculative
        round `last`.

        The KV caches then hold all of them; `settle` cuts them back.
        """
        mx.eval(inputs)  # so that a plain step under way is not timed as well
        begun = perf_counter() if last is None else last.ended
        [row] = sub_batch.rows
        fed = mx.concatenate([inputs, self._draft.propose(inputs, count)])
        first = len(row.drawn) + 1
        places = range(first, first + count + 1)
        sampler = Sampler([row.job.sampling] * len(places), places, ahead=1)
        logits = sub_batch.check(model, fed)
        drawn, highest = sampler.draw(logits)
        mx.eval(drawn, highest)
        tokens, expected = cast(list[int], fed.tolist()), cast(list[int], drawn.tolist())
        accepted = _count_equal(tokens[1:], expected)
        ended = perf_counter()
        self._drafted += count
        self._accepted += accepted
        self._controller.saw_round(count, accepted, ended - begun)
        return Round(
            tokens[: accepted + 1],
            expected[accepted],
            logits,
            drawn[accepted : accepted + 1],
            ended,
            broken=not Proof((row,), highest[: accepted + 1]).holds(),
        )

    def settle(self, sub_batch: SubBatch, surplus: int) -> None:
        """Cut the KV caches back to the row's text: the model's by `surplus` tokens."""
        sub_batch.cut(surplus)
        self._draft.settle()

    def saw_step(self, sub_batch: SubBatch, seconds: float) -> None:
        """Learn from a plain step of the only row."""
        if _eligible(sub_batch):
            self._controller.saw_step(seconds)

    def forget(self) -> None:
        """Forget the draft's KV cache, which may be half of a pass on after an error."""
        self._draft.forget()


def check_draft(model: Any, draft: Any) -> None:
    """Check that the logits of both models are of one vocabulary.

    Families pad the vocabularies of their sizes differently, so a few entries more or less are
    ignored.

    Raises:
        ValueError: the vocabularies differ.
    """
    size, other = _count_vocabulary(model), _count_vocabulary(draft)
    if abs(size - other) > min(_MOST_PADDING, size // 100):
        raise ValueError(
            f"the draft model's vocabulary has {other} tokens, the model's {size}: "
            "a draft model must have the model's own vocabulary"
        )


def find_obstacle(model: Any, draft: Any) -> str | None:
    """Why `draft` cannot propose tokens to `model`; None if it can. Proposals that do not hold must
    be cut from both KV caches."""
    for whose, each in (("the model's", model), ("the draft model's", draft)):
        if not _always_cuts(make_prompt_cache(each)):
            return f"{whose} cache cannot be cut back, so a draft model cannot be used"
    return None


def _count_vocabulary(model: Any) -> int:
    """Entries of the logits. Nothing is computed: only a shape is looked at."""
    return int(model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1])


def _eligible(sub_batch: SubBatch) -> bool:
    """Whether the only row can be decoded in speculative rounds.

    Masks, bans, penalties and log-probabilities are computed for one token at a time. A dormant
    constraint has no mask; the round ends where it wakes up.
    """
    [row] = sub_batch.rows
    return (
        not row.fresh
        and (row.constraint is None or row.constraint.dormant)
        and row.job.logprobs is None
        and not Penalties.wanted(row.job.sampling)
        and not Banning.wanted(row)
        and _always_cuts(sub_batch.cache)
    )


def _always_cuts(cache: Sequence[Any]) -> bool:
    """Whether the KV cache can be cut back at any length. One with a window can be until it is
    full, which may be in the middle of a speculative round."""
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
