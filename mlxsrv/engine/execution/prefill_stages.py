"""Prompts on their way through prefill: in the queue, half read, and read.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from time import perf_counter
from typing import Any, NamedTuple, cast

import mlx.core as mx
import msgspec

from mlxsrv.engine.cache.prompt_cache import Cache, PromptCache, Tokens
from mlxsrv.engine.events import (
    Activations,
    Event,
    Failed,
    Finished,
    Likelihood,
    PromptRead,
    PromptScored,
)
from mlxsrv.engine.faults import NOT_A_NUMBER
from mlxsrv.engine.orders import Job
from mlxsrv.engine.row import Row, RowState
from mlxsrv.engine.sampling.blocks import Blocks
from mlxsrv.engine.sampling.processors import likelihoods, read_likelihoods
from mlxsrv.engine.scheduling.pace import LEAST_SLICE
from mlxsrv.engine.steering.plan import SteeringPlan, forward

_MOST_LOGITS = 16 * 1024 * 1024  # numbers, in a slice of a prompt that is scored


class QueuedPrompt(msgspec.Struct, eq=False):
    """A row whose text is to be read.

    `body` is the text but for its last token, as the prompt cache compares it. It is made once,
    since converting a long text takes milliseconds.
    """

    row: Row
    body: Tokens
    alone: bool = False
    """It shares its slice with no other prompt: it was in one that failed."""
    told: int = 0
    """The first token whose activations nobody was told."""
    number: int = -1
    """Its place in the order of coming."""
    found: tuple[int, int] = (-1, 0)
    """The state of the prompt cache when this prompt was last looked up, and the tokens found."""

    @property
    def job(self) -> Job:
        return self.row.job

    def count_cached(self, cached: PromptCache) -> int:
        """How many of its tokens the prompt cache has; looked up again when that has changed."""
        if self.found[0] != cached.changes:
            self.found = cached.changes, cached.shared(self.body, self.job.steering)
        return self.found[1]

    def same_prompt(self, other: QueuedPrompt) -> bool:
        """Whether one reading does for both. Not after a fault: one of them may have caused it."""
        if self.alone or other.alone or self.body.size != other.body.size:
            return False
        same = self.job.steering == other.job.steering
        return same and (self.job.prompt is other.job.prompt or self.job.prompt == other.job.prompt)


class PartialPrompt:
    """One text that is being read, for one row or for several that have it in common.

    Args:
        queued: these rows. Those after the first are not scored.
        cache: the KV cache that the text is read into.
        cached: tokens of the text that it holds already.
    """

    def __init__(self, queued: Sequence[QueuedPrompt], cache: Cache, cached: int) -> None:
        self.queued = list(queued)
        self.job = queued[0].job
        self.body = queued[0].body
        self.text = queued[0].row.seen
        self.steering = queued[0].row.steering
        self.recovering = queued[0].row.state is RowState.RECOVERING
        scored = [] if self.recovering else [job for job in self.jobs if job.scores is not None]
        self.scorer = PromptScorer(scored[0]) if scored else None
        self.cache = cache
        self.cached = cached
        self.done = cached
        self.began = perf_counter()
        self.checkpoint = 0  # tokens after which a slice ends, so that the cache can be kept there

    @property
    def jobs(self) -> list[Job]:
        return [each.job for each in self.queued]

    @property
    def rows(self) -> list[Row]:
        """The rows that are decoded when the text is read."""
        return [each.row for each in self.queued if each.job.max_tokens > 0]

    @property
    def number(self) -> int:
        """The place of the first of its rows in the order of coming."""
        return self.queued[0].number

    @property
    def rest(self) -> tuple[int, ...]:
        """The tokens that are to be read. A copy."""
        return self.text[self.done : -1]

    @property
    def left(self) -> int:
        """How many tokens are to be read."""
        return len(self.text) - 1 - self.done

    @property
    def broken(self) -> bool:
        """Whether the model has computed NaN, as far as scores show it."""
        return self.scorer is not None and self.scorer.broken

    def drop(self, job_ids: set[int]) -> bool:
        """Forget these jobs. Returns whether no job is left."""
        for each in self.queued:
            if each.job.id in job_ids:
                each.row.enter(RowState.ENDED)
        self.queued = [each for each in self.queued if not each.row.ended]
        if self.scorer is not None and self.scorer.job_id in job_ids:
            self.scorer = None
        return not self.queued

    def restart(self) -> list[QueuedPrompt]:
        """Give up the cache. Returns the rows, which are to be read anew."""
        for each in self.queued:
            each.told = max(each.told, self.done)
        return self.queued

    def read(self, model: Any, limit: int, plan: SteeringPlan | None = None) -> int:
        """Read at most `limit` tokens, and no further than the checkpoint; how many it was."""
        end = self.done + (limit if self.scorer is None else self.scorer.bound(limit))
        if self.done < self.checkpoint < end:
            end = self.checkpoint
        part = self.text[self.done : min(end, len(self.text) - 1)]
        if part:
            logits = forward(model, plan, mx.array(part)[None], self.cache)
            if self.scorer is not None:
                self.scorer.score(self.done, logits[0])
            mx.eval([layer.state for layer in self.cache])
        self.done += len(part)
        return len(part)

    def find_untold(self, events: Sequence[Activations]) -> list[Activations]:
        """The events of a slice but for those that were told before a fault had it read anew."""
        if self.recovering:
            return []
        told = self.queued[0].told
        return [event for event in events if event.position >= told] if told else list(events)

    def finish(self) -> tuple[list[Row], list[Event]]:
        """End prefill. Returns the rows that are to be decoded, and what their jobs are told."""
        if self.broken:
            return [], [self._break(each.row) for each in self.queued]
        for each in self.queued:
            each.row.enter(RowState.FRESH if each.job.max_tokens > 0 else RowState.ENDED)
        return self.rows, [] if self.recovering else self._tell()

    def _break(self, row: Row) -> Failed:
        row.enter(RowState.BROKEN)
        return Failed(row.job.id, NOT_A_NUMBER, clear=NOT_A_NUMBER)

    def _tell(self) -> list[Event]:
        seconds = perf_counter() - self.began
        events: list[Event] = [PromptRead(job.id, self.cached, seconds) for job in self.jobs]
        if self.scorer is not None:
            events.append(self.scorer.event)
        return events + [Finished(job.id) for job in self.jobs if job.max_tokens == 0]


class PromptScorer:
    """Gathers the likelihoods of one prompt's tokens, slice by slice."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._top = job.scores or 0
        self._vocabulary: int | None = None
        self._scores = [Likelihood(None)]

    def bound(self, limit: int) -> int:
        """How many of `limit` tokens to read at once, since each leaves a row of logits."""
        if self._vocabulary is None:
            return min(limit, LEAST_SLICE)
        return min(limit, max(LEAST_SLICE, _MOST_LOGITS // self._vocabulary))

    def score(self, first: int, logits: mx.array) -> None:
        """Take the logits `(n, vocabulary)` at the prompt's tokens from `first` on."""
        self._vocabulary = logits.shape[-1]
        tokens = mx.array(self._job.prompt[first + 1 : first + 1 + logits.shape[0]])
        found = read_likelihoods(likelihoods(Blocks(logits), tokens, self._top), self._top)
        self._scores += _ranked(found, logits, tokens) if self._job.ranks else found

    @property
    def job_id(self) -> int:
        return self._job.id

    @property
    def broken(self) -> bool:
        """Whether the model computed NaN."""
        return any(each.logprob is not None and isnan(each.logprob) for each in self._scores)

    @property
    def event(self) -> PromptScored:
        return PromptScored(self._job.id, tuple(self._scores))


def _ranked(scores: Sequence[Likelihood], logits: mx.array, tokens: mx.array) -> list[Likelihood]:
    """The scores of `tokens` `(n,)` with their ranks: 1 for the likeliest token."""
    own = mx.take_along_axis(logits, tokens[:, None], axis=-1)
    ranks = cast(list[int], ((logits > own).sum(axis=-1) + 1).tolist())
    return [
        msgspec.structs.replace(score, rank=rank) for score, rank in zip(scores, ranks, strict=True)
    ]


class SliceOutcome(NamedTuple):
    """The rows whose text a slice has finished reading, their batch cache (or a row's own, where a
    model's cannot be merged), and what jobs are told."""

    rows: list[Row]
    cache: Cache
    events: list[Event]
