"""Prompts on their way through Prefill: those that wait, those being read, those that are read.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from time import perf_counter
from typing import Any, cast

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
from mlxsrv.engine.faults import NOT_A_NUMBER, Fault
from mlxsrv.engine.orders import Job
from mlxsrv.engine.row import Place, Row
from mlxsrv.engine.sampling.blocks import Blocks
from mlxsrv.engine.sampling.processors import likelihoods, read_likelihoods
from mlxsrv.engine.scheduling.pace import LEAST_CHUNK
from mlxsrv.engine.steering.plan import Plan, run

_MOST_LOGITS = 16 * 1024 * 1024  # numbers, of the chunk of a prompt that is scored


class Waiting(msgspec.Struct, eq=False):
    """A row in the queue and the part of its text that is to be read, as the cache compares it:
    made once, since a long one takes milliseconds to convert."""

    row: Row
    body: Tokens
    alone: bool = False
    """Nothing else shares its slice: it was in one that failed."""
    told: int = 0
    """The first token whose activations nobody was told."""
    number: int = -1
    """In the order of coming."""
    found: tuple[int, int] = (-1, 0)
    """The state of the prompt cache when it was last looked up, and the tokens found."""

    @property
    def job(self) -> Job:
        return self.row.job

    def shared(self, cached: PromptCache) -> int:
        """How many of its tokens the prompt cache has; looked up again when that has changed."""
        if self.found[0] != cached.changes:
            self.found = cached.changes, cached.shared(self.body, self.job.steering)
        return self.found[1]

    def same_prompt(self, other: Waiting) -> bool:
        """Whether both read the same. Not after a fault: one of them may be to blame for it."""
        if self.alone or other.alone or self.body.size != other.body.size:
            return False
        same = self.job.steering == other.job.steering
        return same and (self.job.prompt is other.job.prompt or self.job.prompt == other.job.prompt)


class Reading:
    """Rows with one text to be read, and the cache that it goes into."""

    def __init__(self, waiting: Sequence[Waiting], cache: Cache, cached: int) -> None:
        self.waiting = list(waiting)
        self.job = waiting[0].job
        self.text = waiting[0].row.seen
        self.again = waiting[0].row.told  # a row's that was decoded already
        self.steer = waiting[0].row.steer
        scored = () if self.again else (job for job in self.jobs if job.scores is not None)
        self.scorer = next(map(Scorer, scored), None)
        self.cache = cache
        self.cached = cached  # tokens found in the prompt cache
        self.done = cached
        self.begun = perf_counter()
        self.checkpoint = 0  # tokens after which to stop once, to keep the cache as it is there

    @property
    def jobs(self) -> list[Job]:
        return [waiting.job for waiting in self.waiting]

    @property
    def rows(self) -> list[Row]:
        """Those that are to be decoded."""
        return [each.row for each in self.waiting if each.job.max_tokens > 0]

    def drop(self, job_ids: set[int]) -> bool:
        """Forget these jobs; whether none is left."""
        self.waiting = [each for each in self.waiting if each.job.id not in job_ids]
        if self.scorer is not None and self.scorer.job_id in job_ids:
            self.scorer = None
        return not self.waiting

    def retry(self, fault: Fault) -> list[Waiting]:
        """What is to be read anew, each alone, after the slice under way has failed."""
        for each in self.waiting:
            each.row.faults.append(fault)
            each.alone = True
        return self.restart()

    def restart(self) -> list[Waiting]:
        """What is to be read anew, for the cache is gone."""
        for each in self.waiting:
            each.told = max(each.told, self.done)
        return self.waiting

    @property
    def number(self) -> int:
        """In the order of coming: of the first of its jobs."""
        return self.waiting[0].number

    @property
    def rest(self) -> tuple[int, ...]:
        return self.text[self.done : -1]

    @property
    def left(self) -> int:
        """How many tokens are to be read."""
        return len(self.text) - 1 - self.done

    @property
    def place(self) -> Place:
        """Where what is left of the text begins, and how much it is."""
        return Place(tuple(job.id for job in self.jobs), self.done, len(self.rest))

    def untold(self, events: Sequence[Activations]) -> list[Activations]:
        """Of these events, the ones that nobody was told."""
        if self.again:
            return []
        told = self.waiting[0].told
        return [event for event in events if event.position >= told] if told else list(events)

    def read(self, model: Any, limit: int, plan: Plan | None = None) -> int:
        """Read at most `limit` tokens, and no further than the checkpoint; how many it was."""
        end = self.done + (limit if self.scorer is None else self.scorer.bound(limit))
        if self.done < self.checkpoint < end:
            end = self.checkpoint
        part = self.text[self.done : min(end, len(self.text) - 1)]
        if part:
            logits = run(model, plan, mx.array(part)[None], self.cache)
            if self.scorer is not None:
                self.scorer.score(self.done, logits[0])
            mx.eval([layer.state for layer in self.cache])
        self.done += len(part)
        return len(part)


class Scorer:
    """The likelihoods of one prompt's tokens, gathered chunk by chunk."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._top = job.scores or 0
        self._vocabulary: int | None = None
        self._scores = [Likelihood(None)]

    def bound(self, limit: int) -> int:
        """How many of `limit` tokens to read at once: each leaves a row of logits."""
        if self._vocabulary is None:
            return min(limit, LEAST_CHUNK)
        return min(limit, max(LEAST_CHUNK, _MOST_LOGITS // self._vocabulary))

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
    """The same, with how many tokens are likelier than each of `tokens`, plus one."""
    own = mx.take_along_axis(logits, tokens[:, None], axis=-1)
    ranks = cast(list[int], ((logits > own).sum(axis=-1) + 1).tolist())
    return [
        msgspec.structs.replace(score, rank=rank) for score, rank in zip(scores, ranks, strict=True)
    ]


class Read:
    """Texts that have been read, in one batch cache (or a row's own, for unmerged models)."""

    def __init__(self, readings: Sequence[Reading], cache: Cache) -> None:
        self.rows = [row for reading in readings for row in reading.rows]
        self.cache = cache
        self.events: list[Event] = []
        for reading in readings:
            if not reading.again:
                self._tell(reading)

    def _tell(self, reading: Reading) -> None:
        if reading.scorer is not None and reading.scorer.broken:
            # Its rows are not decoded: the cache is no better than the scores.
            self.rows = [row for row in self.rows if row not in reading.rows]
            self.events += [
                Failed(job.id, NOT_A_NUMBER, clear=NOT_A_NUMBER) for job in reading.jobs
            ]
            return
        for each in reading.waiting:
            each.row.told = True
            seconds = perf_counter() - reading.begun
            self.events.append(PromptRead(each.job.id, reading.cached, seconds))
        if reading.scorer is not None:
            self.events.append(reading.scorer.event)
        self.events += [Finished(job.id) for job in reading.jobs if job.max_tokens == 0]
