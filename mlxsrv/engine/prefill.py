"""Reading prompts, a slice at a time, between the decode steps of others.

- A prompt is read without its last token, which becomes the row's first input: so reading needs
  no logits (MLX is lazy: the output head is never computed), and a fresh row draws its first token
  in the same step as everybody else.
- What the prompt cache holds of a prompt is not read again.
- Short prompts are read together, right-padded. One that does not fit a slice is read alone, a
  chunk at a time, in turn with the short ones, so that neither waits for the other.
- A slice is as long as running streams can bear: see Pace.

Used on the device thread only.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from mlxsrv.engine.caches import Caches
from mlxsrv.engine.lanes import Row
from mlxsrv.engine.processors import likelihoods, read_likelihoods
from mlxsrv.engine.prompt_cache import Cache, PromptCache, Tokens, as_tokens, can_cut
from mlxsrv.events import Constraint, Event, Finished, Job, Likelihood, PromptRead, PromptScored

_ROUNDING = 0.1  # of the logits' standard deviation; bfloat16 stays well below

_LEAST_CHUNK = 16  # tokens; fewer would cost a forward pass each for next to nothing
_MOST_LOGITS = 16 * 1024 * 1024  # numbers, of the chunk of a prompt that is scored
_SMOOTHING = 0.2  # of the exponential average
_STEPS_KEPT = 64


class Pace:
    """How many prompt tokens a slice may read while streams are running.

    A stream's gap in a slice that reads is one decode step, one pass over the weights (about
    another step) and the tokens' own time. Short prompts, which are read in a slice or two, get
    what is left of `max_gap`. A long one takes many, and streams are not to crawl all that time:
    it takes turns with them, a step's time each. So do short ones where steps fill the gap.

    What tokens take is learnt from the gaps that came of them, so that what the model of a gap
    leaves out is corrected by the next slice.

    Where only other models have streams, a slice may fill their gap, `max_gap`, by itself.

    Args:
        chunk: the most tokens of a slice.
        max_gap: seconds.
    """

    def __init__(self, chunk: int, max_gap: float) -> None:
        self._chunk = chunk
        self._max_gap = max_gap
        self._steps: deque[float] = deque(maxlen=_STEPS_KEPT)  # seconds of each
        self._token: float | None = None  # seconds, beyond the two passes of a gap
        self._read = 0  # tokens since the last step

    def limit(self, *, decoding: bool, long: bool, beside: bool = False) -> int:
        """Tokens of the next slice. `decoding`: the model has streams; `beside`: others have."""
        if beside and not decoding:
            fitting = _LEAST_CHUNK if self._token is None else int(self._max_gap / self._token)
            return min(self._chunk, max(_LEAST_CHUNK, fitting))
        if not decoding or not self._steps or self._token is None:
            return self._chunk
        step = self._step
        own = step if long else max(self._max_gap - 2 * step, step)
        return min(self._chunk, max(_LEAST_CHUNK, int(own / self._token)))

    def saw_step(self, seconds: float | None) -> None:
        """Streams had a gap of so long; None where it says nothing of the next."""
        read, self._read = self._read, 0
        if seconds is None:
            return
        if read == 0:
            self._steps.append(seconds)
        elif self._steps:
            self._learn(read, seconds, passes=2)

    def saw_chunk(self, tokens: int, seconds: float, *, decoding: bool) -> None:
        """So many tokens were read; with nobody decoding, that is all that is to be seen."""
        self._read += tokens
        if not decoding:
            self._learn(tokens, seconds, passes=1)

    def _learn(self, tokens: int, seconds: float, passes: int) -> None:
        if tokens >= _LEAST_CHUNK:
            own = max(seconds - passes * self._step, 0.1 * seconds) / tokens
            known = own if self._token is None else self._token
            self._token = known + _SMOOTHING * (own - known)

    @property
    def _step(self) -> float:
        """Seconds of a plain step: the median, for some are held up by what else goes on, the
        tokenizing of the very prompt that is to be read above all."""
        return sorted(self._steps)[len(self._steps) // 2] if self._steps else 0.0


class Waiting(NamedTuple):
    """A job in the queue and the part of its prompt that is to be read, as the cache compares it:
    made once, since a long one takes milliseconds to convert."""

    job: Job
    body: Tokens
    constraint: Constraint | None

    def same_prompt(self, other: Waiting) -> bool:
        return self.body.size == other.body.size and (
            self.job.prompt is other.job.prompt or self.job.prompt == other.job.prompt
        )


class Reading:
    """Jobs with one prompt and the cache that it goes into."""

    def __init__(self, jobs: Sequence[Waiting], cache: Cache, cached: int) -> None:
        self.jobs = [waiting.job for waiting in jobs]
        self.rows = [
            Row(waiting.job, waiting.constraint) for waiting in jobs if waiting.job.max_tokens > 0
        ]
        self.job = self.jobs[0]
        self.scorer = next((Scorer(job) for job in self.jobs if job.scores is not None), None)
        self.cache = cache
        self.cached = cached  # tokens found in the prompt cache
        self.done = cached
        self.checkpoint = 0  # tokens after which to stop once, to keep the cache as it is there

    def drop(self, job_ids: set[int]) -> bool:
        """Forget these jobs; whether none is left."""
        self.jobs = [job for job in self.jobs if job.id not in job_ids]
        self.rows = [row for row in self.rows if row.job.id not in job_ids]
        if self.scorer is not None and self.scorer.job_id in job_ids:
            self.scorer = None
        return not self.jobs

    @property
    def rest(self) -> tuple[int, ...]:
        return self.job.prompt[self.done : -1]

    def read(self, model: Any, limit: int) -> int:
        """Read at most `limit` tokens, and no further than the checkpoint; how many it was."""
        end = self.done + (limit if self.scorer is None else self.scorer.bound(limit))
        if self.done < self.checkpoint < end:
            end = self.checkpoint
        part = self.job.prompt[self.done : min(end, len(self.job.prompt) - 1)]
        if part:
            logits = model(mx.array(part)[None], cache=self.cache)
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
            return min(limit, _LEAST_CHUNK)
        return min(limit, max(_LEAST_CHUNK, _MOST_LOGITS // self._vocabulary))

    def score(self, first: int, logits: mx.array) -> None:
        """Take the logits `(n, vocabulary)` at the prompt's tokens from `first` on."""
        self._vocabulary = logits.shape[-1]
        tokens = mx.array(self._job.prompt[first + 1 : first + 1 + logits.shape[0]])
        self._scores += read_likelihoods(likelihoods(logits, tokens, self._top), self._top)

    @property
    def job_id(self) -> int:
        return self._job.id

    @property
    def event(self) -> PromptScored:
        return PromptScored(self._job.id, tuple(self._scores))


class Read:
    """Prompts that have been read, in one batch cache (or a row's own, for unmerged models)."""

    def __init__(self, readings: Sequence[Reading], cache: Cache) -> None:
        self.rows = [row for reading in readings for row in reading.rows]
        self.cache = cache
        self.events: list[Event] = []
        for reading in readings:
            self.events += [PromptRead(job.id, reading.cached) for job in reading.jobs]
            if reading.scorer is not None:
                self.events.append(reading.scorer.event)
            self.events += [Finished(job.id) for job in reading.jobs if job.max_tokens == 0]


class PrefillError(Exception):
    """Reading failed; `jobs` are lost, others are not concerned."""

    def __init__(self, jobs: Sequence[Job], reason: str) -> None:
        super().__init__(reason)
        self.jobs = jobs


class Prefill:
    """The jobs of one model that are not decoded yet."""

    def __init__(self, model: Any, *, pace: Pace, cached: PromptCache, caches: Caches) -> None:
        self.batched = caches.batched
        self.cuts = caches.cuts
        if caches.pads is None:
            caches.pads = self.batched and masks_padding(model)
        self._pads = caches.pads
        self._model = model
        self._caches = caches
        self._pace = pace
        self._cached = cached
        self._waiting: deque[Waiting] = deque()
        self._long: Reading | None = None
        self._long_is_next = False

    @property
    def jobs(self) -> list[Job]:
        return [
            *(self._long.jobs if self._long else []),
            *(waiting.job for waiting in self._waiting),
        ]

    @property
    def reading(self) -> int:
        return len(self._long.jobs) if self._long is not None else 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, job: Job, constraint: Constraint | None = None) -> None:
        last = self._waiting[-1] if self._waiting else None
        known = last is not None and last.job.prompt is job.prompt
        body = last.body if last is not None and known else as_tokens(job.prompt[:-1])
        self._waiting.append(Waiting(job, body, constraint))

    def cancel(self, job_ids: Iterable[int]) -> None:
        gone = set(job_ids)
        self._waiting = deque(each for each in self._waiting if each.job.id not in gone)
        if self._long is not None and self._long.drop(gone):
            self._long = None

    def clear(self) -> None:
        self._waiting.clear()
        self._long = None

    def step(self, free: int, *, decoding: bool, beside: bool = False) -> Read | None:
        """Read one slice for at most `free` more rows; prompts that it completes.

        Raises:
            PrefillError: the model failed on the prompts of this slice.
        """
        readings = self._choose(
            free - self.reading, self._pace.limit(decoding=decoding, long=False, beside=beside)
        )
        if not readings:
            return None
        begun = perf_counter()
        try:
            if len(readings) > 1:
                tokens = sum(len(reading.rest) for reading in readings)
                read: Read | None = self._complete(readings, self._read_together(readings))
            else:
                [reading] = readings
                long = reading is self._long
                limit = self._pace.limit(decoding=decoding, long=long, beside=beside)
                tokens = reading.read(self._model, limit)
                self._keep_checkpoint(reading)
                read = self._complete_alone(reading)
        except Exception as error:
            self._long = None if self._long in readings else self._long
            jobs = [job for reading in readings for job in reading.jobs]
            raise PrefillError(jobs, str(error)) from error
        self._pace.saw_chunk(tokens, perf_counter() - begun, decoding=decoding)
        return read

    def _choose(self, free: int, limit: int) -> list[Reading]:
        """What to read in this slice: short prompts together, or the long one, in turn."""
        short = [] if self._long is not None and self._long_is_next else self._group(free, limit)
        self._long_is_next = bool(short)
        if short:
            return short
        return [self._long] if self._long is not None else []

    def _group(self, free: int, limit: int) -> list[Reading]:
        """As many of the waiting prompts as fit a slice. A long one at the head of the queue
        becomes the long one, if there is none."""
        group: list[Reading] = []
        longest = 0
        while self._waiting and free > 0:
            head = self._waiting[0]
            rest = head.body.size - self._cached.shared(head.body)
            if rest > limit or head.job.scores is not None:
                if self._long is None and not group:
                    self._long = self._begin(free)
                    self._long.checkpoint = self._long.job.checkpoint
                break
            if group and not self._fits(rest, longest, len(group), limit):
                break
            longest = max(longest, rest)
            group.append(self._begin(free))
            free -= len(group[-1].jobs)
            if rest == 0 or not self.batched:  # nothing to read, so nothing to pad beside others
                break
        return group

    def _fits(self, rest: int, longest: int, rows: int, limit: int) -> bool:
        """Whether a prompt with `rest` tokens to read may be read beside `rows` others."""
        if rest == 0 or (rest != longest and not self._pads):
            return False
        return max(rest, longest) * (rows + 1) <= limit

    def _begin(self, free: int) -> Reading:
        """Take the head of the queue, and with it those behind that have the same prompt."""
        head = self._waiting.popleft()
        jobs = [head, *self._take_twins(head, free - 1)]
        found = None if head.job.scores is not None else self._cached.take(head.body)
        if found is None:
            return Reading(jobs, self._caches.make(), 0)
        return Reading(jobs, *found)

    def _take_twins(self, head: Waiting, most: int) -> list[Waiting]:
        """At most so many of the waiting jobs that read the same and are not scored themselves."""
        if not self.batched:
            return []
        twins: list[Waiting] = []
        others: deque[Waiting] = deque()
        for waiting in self._waiting:
            alike = waiting.job.scores is None and waiting.same_prompt(head)
            (twins if alike and len(twins) < most else others).append(waiting)
        self._waiting = others
        return twins

    def _complete_alone(self, reading: Reading) -> Read | None:
        if reading.rest:
            return None
        if reading is self._long:
            self._long = None
        if not self.batched:
            return Read([reading], reading.cache)
        merged = merge([reading.cache] * len(reading.rows)) if reading.rows else []
        # The batch has a copy, so the row's own can stay for prompts that begin alike.
        self._cached.put(reading.job.prompt[:-1], reading.cache)
        return Read([reading], merged)

    def _complete(self, readings: Sequence[Reading], cache: Cache) -> Read:
        # Attention caches are kept at the end of the answer and cut back then; others cannot be.
        if not can_cut(readings[0].cache):
            for i, reading in enumerate(readings):
                if self._cached.wants(len(reading.job.prompt) - 1):
                    row = [layer.extract(i) for layer in cache]
                    self._cached.put(reading.job.prompt[:-1], row)
        if any(len(reading.rows) > 1 for reading in readings):
            copies = mx.array([i for i, reading in enumerate(readings) for _ in reading.rows])
            for layer in cache:
                layer.filter(copies)
        return Read(readings, cache)

    def _keep_checkpoint(self, reading: Reading) -> None:
        if reading.done == reading.checkpoint > 0:
            self._cached.put(reading.job.prompt[: reading.done], copy.deepcopy(reading.cache))

    def _read_together(self, readings: Sequence[Reading]) -> Cache:
        cache = merge([reading.cache for reading in readings])
        read_together(self._model, cache, [reading.rest for reading in readings])
        for reading in readings:
            reading.done += len(reading.rest)
        return cache


def read_together(model: Any, cache: Cache, prompts: Sequence[tuple[int, ...]]) -> None:
    """Read one prompt into each row of the batch cache, in one pass, right-padded."""
    lengths = [len(prompt) for prompt in prompts]
    padding = [max(lengths) - length for length in lengths]
    if any(padding):
        for layer in cache:
            layer.prepare(lengths=lengths, right_padding=padding)
    tokens = [prompt + (0,) * pad for prompt, pad in zip(prompts, padding, strict=True)]
    model(mx.array(tokens), cache=cache)
    if any(padding):
        for layer in cache:
            layer.finalize()
    mx.eval([layer.state for layer in cache])


def masks_padding(model: Any) -> bool:
    """Whether the model reads a padded prompt as it would the prompt alone."""
    trial = try_padding(model)
    while True:
        try:
            next(trial)
        except StopIteration as stop:
            return bool(stop.value)


def try_padding(model: Any) -> Generator[None, None, bool]:
    """Find out what `masks_padding` tells, yielding between passes of the model.

    Attention caches leave padding out themselves. A recurrent layer has to mask it, and not all
    of mlx-lm's do, so models that have one are tried: a layer that swallows padding is off by as
    much as its logits vary, one that does not by rounding.
    """
    caches = Caches(model)  # a model with a recurrent layer has no others
    if not any(_recurrent(layer) for layer in caches.make()):
        return True
    short, long = (1, 2, 3), (4, 5, 6, 7, 8, 9, 10, 11)
    alone = merge([caches.make()])
    read_together(model, alone, [short])
    yield
    beside = merge([caches.make(), caches.make()])
    read_together(model, beside, [short, long])
    yield
    expected = model(mx.array([[0]]), cache=alone)[0, -1]
    difference = mx.abs(expected - model(mx.array([[0], [0]]), cache=beside)[0, -1]).mean()
    return bool((difference < _ROUNDING * mx.std(expected)).item())


def _recurrent(layer: Any) -> bool:
    if isinstance(layer, CacheList):
        return any(map(_recurrent, layer.caches))
    return isinstance(layer, ArraysCache)


def merge(caches: Sequence[Cache]) -> Cache:
    """Caches of single rows as one of a batch, layer by layer."""
    return [layers[0].merge(layers) for layers in map(list, zip(*caches, strict=True))]
