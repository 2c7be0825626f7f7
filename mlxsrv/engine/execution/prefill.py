"""Reading prompts, a slice at a time, between the decode steps of others.

- A prompt is read without its last token, which becomes the row's first input: so reading needs
  no logits (MLX is lazy: the output head is never computed), and a fresh row draws its first token
  in the same step as everybody else.
- What the prompt cache holds of a prompt is not read again.
- Short prompts are read together, right-padded. One that does not fit a slice is read alone, a
  chunk at a time. Whose turn it is: see `turns`.
- A prompt that is half read when nobody wants it any more stays in the prompt cache, for who asks
  again.
- While somebody watches activations, prompts are read from their first token: what comes out of the
  prompt cache has none, and statistics that lack it are biased.
- A slice is as long as running streams can bear: see Pace.
- Prompts that were in a slice that failed are read again, each alone: who fails alone is to blame.
- A row whose cache is lost is read like a prompt, all that it has seen: see `faults`.

Used on the device thread only.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from mlxsrv.engine.cache.prompt_cache import Cache, PromptCache, as_tokens, can_cut
from mlxsrv.engine.cache.row_caches import Caches, merge
from mlxsrv.engine.execution.reading import Read, Reading, Waiting
from mlxsrv.engine.execution.recovery import MOST_FAULTS, blame, short
from mlxsrv.engine.execution.turns import Turns
from mlxsrv.engine.faults import Fault, note
from mlxsrv.engine.orders import Job
from mlxsrv.engine.row import Row
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.steering.plan import Plan, run
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.generation import Constraint

_ROUNDING = 0.1  # of the logits' standard deviation; bfloat16 stays well below


class Prefill:
    """The jobs of one model that are not decoded, or not decoded any more after a fault."""

    def __init__(
        self, model: Any, *, pace: Pace, cached: PromptCache, caches: Caches, steerer: Steerer
    ) -> None:
        self.batched = caches.batched
        self.cuts = caches.cuts
        if caches.pads is None:
            caches.pads = self.batched and masks_padding(model)
        self._pads = caches.pads
        self._model = model
        self._caches = caches
        self._pace = pace
        self._cached = cached
        self._steerer = steerer
        self._turns = Turns(cached, steerer)
        self._lost: deque[Waiting] = deque()  # rows of failed steps, to be tried one by one
        self._trial: Reading | None = None  # of the first of them
        self._moved = False  # a slice was read that nobody was told of yet

    @property
    def jobs(self) -> list[Job]:
        return [*self._half_read, *(waiting.job for waiting in (*self._turns.waiting, *self._lost))]

    @property
    def _half_read(self) -> list[Job]:
        trial = [] if self._trial is None else [self._trial]
        return [job for reading in (*self._turns.begun, *trial) for job in reading.jobs]

    @property
    def reading(self) -> int:
        """Rows of prompts that take more than a slice."""
        return self._turns.rows

    @property
    def waiting(self) -> int:
        return len(self._turns.waiting)

    @property
    def asked(self) -> bool:
        """Whether there is something to read."""
        turns = self._turns
        return bool(turns.waiting or turns.begun or self._lost or self._trial)

    @property
    def lost(self) -> int:
        """Rows that have lost their caches, one of them perhaps half read."""
        return len(self._lost) + (self._trial is not None)

    def submit(self, job: Job, constraint: Constraint | None = None) -> None:
        """Raises ValueError if what it is to be steered with is not there."""
        last = self._turns.waiting[-1] if self._turns.waiting else None
        known = last is not None and last.job.prompt is job.prompt
        body = last.body if last is not None and known else as_tokens(job.prompt[:-1])
        steer = self._steerer.freeze(job.steering)
        self._turns.add(Waiting(Row(job, constraint, steer), body))

    def recover(self, row: Row) -> None:
        """Read anew what the row has seen; it comes out of `step` by itself, when it may."""
        row.restart()
        self._lost.append(Waiting(row, as_tokens(row.seen[:-1]), alone=True))

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Forget these jobs. What was read of their prompts stays in the prompt cache: who asks
        again goes on from there."""
        gone = set(job_ids)
        for reading in self._turns.drop(gone):
            self._keep(reading)
        self._lost = deque(each for each in self._lost if each.job.id not in gone)
        if self._trial is not None and self._trial.drop(gone):
            self._trial = None

    def _keep(self, reading: Reading) -> None:
        """A state after exactly `done` tokens is a prefix even where it cannot be cut back."""
        broken = reading.scorer is not None and reading.scorer.broken
        if reading.done > reading.cached and not broken:
            self._cached.put(reading.text[: reading.done], reading.cache, reading.job.steering)

    def clear(self) -> None:
        self._turns.clear()
        self._lost.clear()
        self._trial = None

    def take_moved(self) -> list[int]:
        """If a slice was read since this was last asked: the jobs that go on because of it and are
        told of nothing else, for their prompts are half read, or their caches lost."""
        moved, self._moved = self._moved, False
        if not moved or not (self._turns.begun or self._lost or self._trial):
            return []
        return [job.id for job in (*self._half_read, *(each.job for each in self._lost))]

    def step(
        self, free: int, *, decoding: bool, beside: bool = False, trial: bool = False
    ) -> Read | None:
        """Read one slice for at most `free` more rows; prompts that it completes. `trial`: a row
        that has lost its cache may be read, and comes alone.

        An error ends the job that is to blame for it, as an event of what is read. Where that is
        not known yet, it has none: the jobs are read again.
        """
        readings = self._choose(
            free - self.reading,
            self._pace.limit(decoding=decoding, long=False, beside=beside),
            trial=trial,
        )
        if not readings:
            return None
        begun = perf_counter()
        try:
            tokens, read = self._read(readings, decoding=decoding, beside=beside)
        except Exception as error:
            fault = note(error, "reading prompts failed")
        else:
            self._pace.saw_chunk(tokens, perf_counter() - begun, decoding=decoding)
            self._moved = True
            return read
        return self._recover(readings, fault)

    def _read(self, readings: list[Reading], *, decoding: bool, beside: bool) -> tuple[int, Read]:
        """How many tokens were read, and what is complete."""
        plan = self._steerer.plan([reading.steer for reading in readings])
        places = [reading.place for reading in readings]
        if len(readings) > 1:
            tokens = sum(len(reading.rest) for reading in readings)
            read = self._complete(readings, self._read_together(readings, plan))
        else:
            [reading] = readings
            begun = reading in self._turns.begun
            limit = self._pace.limit(
                decoding=decoding, long=begun or reading is self._trial, beside=beside
            )
            tokens = reading.read(self._model, limit, plan)
            places = [places[0]._replace(tokens=tokens)]
            self._keep_checkpoint(reading)
            # A row that joins has caches copied, its own and the others', all in the next step: not
            # in a gap that reading has filled already.
            later = decoding and tokens > 0 and begun
            read = Read([], []) if later else self._complete_alone(reading)
        if plan is not None and plan.sight is not None:
            seen = plan.sight.read(places)
            read.events[:0] = readings[0].untold(seen) if len(readings) == 1 else seen
        return tokens, read

    def _recover(self, readings: list[Reading], fault: Fault) -> Read:
        """Who failed alone is to blame; if that is not known, all are to be read again, alone.

        Where memory was short, what can be spared is gone for the next attempt, and who is alone
        has some.
        """
        tried = self._trial in readings
        self._trial = None if tried else self._trial
        for reading in readings:
            if reading in self._turns.begun:
                self._turns.begun.remove(reading)
        if fault.memory:
            self.spare()
        again = [each for reading in readings for each in reading.retry(fault)]
        patient = fault.memory and all(short(each.row) < MOST_FAULTS for each in again)
        failed = Read([], [])
        if len(readings) == 1 and not patient:
            failed.events += [blame(each.row, fault) for each in again]
        elif tried:
            self._lost.extendleft(reversed(again))
        else:
            self._turns.put_back(again)
        return failed

    def spare(self) -> None:
        """Give back the memory that nobody needs, or not yet."""
        self._cached.clear()
        self._turns.shrink()
        mx.clear_cache()

    def _choose(self, free: int, limit: int, *, trial: bool) -> list[Reading]:
        """What to read in this slice, beginning prompts for `free` rows: a row to be tried, for its
        stream stands still; or whose turn it is, and who may share the slice."""
        if trial and self._lost and self._trial is None:
            self._trial = self._try_next()
        if self._trial is not None:
            return [self._trial]
        chosen = self._turns.choose(free, limit)
        if chosen is None or isinstance(chosen, Reading):
            return [] if chosen is None else [chosen]
        fits = self._turns.fits(chosen, limit)
        reading = self._begin(chosen, free)
        # More may be left than was measured, where no copy of what is kept could be made.
        if fits and reading.left <= limit:
            return self._group(reading, free, limit)
        self._begin_long(reading)
        return [reading]

    def _begin_long(self, reading: Reading) -> None:
        """It takes more than a slice."""
        reading.checkpoint = reading.job.checkpoint
        self._turns.begin(reading)

    def _try_next(self) -> Reading:
        opened = self._open(self._lost[0])
        return Reading([self._lost.popleft()], *opened)

    def _group(self, first: Reading, free: int, limit: int) -> list[Reading]:
        """The first, and as many of the other prompts as fit its slice."""
        longest = first.left
        group = [first]
        # With nothing to read there is nothing to pad beside others.
        if longest == 0 or first.waiting[0].alone or not self.batched:
            return group
        free -= len(first.jobs)
        for waiting in self._turns.shortest(free, limit):
            rest = self._turns.measure(waiting)
            if free <= 0 or max(rest, longest) * (len(group) + 1) > limit:
                break
            # A twin of one that was begun is no longer there.
            if self._pads_well(rest, longest) and waiting in self._turns.waiting:
                reading = self._begin(waiting, free)
                if reading.left > rest:
                    self._begin_long(reading)
                    break
                longest = max(longest, rest)
                group.append(reading)
                free -= len(reading.jobs)
        return group

    def _pads_well(self, rest: int, longest: int) -> bool:
        """Whether a prompt with `rest` tokens to read may be read beside one with more or fewer."""
        return rest > 0 and (rest == longest or bool(self._pads))

    def _begin(self, head: Waiting, free: int) -> Reading:
        """Take a prompt out of the queue, and with it those that wait and have the same."""
        opened = self._open(head)
        self._turns.waiting.remove(head)
        return Reading([head, *self._take_twins(head, free - 1)], *opened)

    def _open(self, head: Waiting) -> tuple[Cache, int]:
        """The cache that its text is to go into, and how much of it is there."""
        found = None
        if not self._turns.reads_anew(head):
            try:
                found = self._cached.take(head.body, head.job.steering)
            except Exception as error:  # a copy of a cache may be all that memory has no room for
                note(error, "a kept prompt could not be used")
                self.spare()
        return (self._caches.make(), 0) if found is None else found

    def _take_twins(self, head: Waiting, most: int) -> list[Waiting]:
        """At most so many of the waiting jobs that read the same and are not scored themselves."""
        if not self.batched or head.alone or most <= 0:
            return []
        twins: list[Waiting] = []
        others: list[Waiting] = []
        for waiting in self._turns.waiting:
            alike = waiting.job.scores is None and waiting.same_prompt(head)
            (twins if alike and len(twins) < most else others).append(waiting)
        self._turns.waiting = others
        return twins

    def _complete_alone(self, reading: Reading) -> Read:
        if reading.rest:
            return Read([], [])
        if reading in self._turns.begun:
            self._turns.end(reading)
        if reading is self._trial:
            self._trial = None
        if reading.scorer is not None and reading.scorer.broken:
            return Read([reading], [])
        if not self.batched:
            return Read([reading], reading.cache)
        merged = merge([reading.cache] * len(reading.rows)) if reading.rows else []
        # The batch has a copy, so the row's own can stay for prompts that begin alike.
        self._cached.put(reading.text[:-1], reading.cache, reading.job.steering)
        return Read([reading], merged)

    def _complete(self, readings: Sequence[Reading], cache: Cache) -> Read:
        # Attention caches are kept at the end of the answer and cut back then; others cannot be.
        if not can_cut(readings[0].cache):
            for i, reading in enumerate(readings):
                if self._cached.wants(len(reading.text) - 1):
                    row = [layer.extract(i) for layer in cache]
                    self._cached.put(reading.text[:-1], row, reading.job.steering)
        if any(len(reading.rows) > 1 for reading in readings):
            copies = mx.array([i for i, reading in enumerate(readings) for _ in reading.rows])
            for layer in cache:
                layer.filter(copies)
        return Read(readings, cache)

    def _keep_checkpoint(self, reading: Reading) -> None:
        if reading.done == reading.checkpoint > 0:
            text, cache = reading.text[: reading.done], copy.deepcopy(reading.cache)
            self._cached.put(text, cache, reading.job.steering)

    def _read_together(self, readings: Sequence[Reading], plan: Plan | None) -> Cache:
        cache = merge([reading.cache for reading in readings])
        read_together(self._model, cache, [reading.rest for reading in readings], plan)
        for reading in readings:
            reading.done += len(reading.rest)
        return cache


def read_together(
    model: Any, cache: Cache, prompts: Sequence[tuple[int, ...]], plan: Plan | None = None
) -> None:
    """Read one prompt into each row of the batch cache, in one pass, right-padded."""
    lengths = [len(prompt) for prompt in prompts]
    padding = [max(lengths) - length for length in lengths]
    if any(padding):
        for layer in cache:
            layer.prepare(lengths=lengths, right_padding=padding)
    tokens = [prompt + (0,) * pad for prompt, pad in zip(prompts, padding, strict=True)]
    run(model, plan, mx.array(tokens), cache)
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
