"""Prefill: prompts are read a slice at a time, between the decode steps of other rows.

- A prompt is read without its last token, which becomes the row's first input. So reading needs no
  logits (MLX is lazy: the output head is never computed), and a fresh row draws its first token in
  the same step as all others.
- What the prompt cache holds of a prompt is not read again.
- Short prompts are read together, right-padded. One that does not fit a slice is read alone, in
  several slices. For which prompt is next, see `prompt_queue`; for the length of a slice, see
  `scheduling/pace`.
- A prompt that is half read when its client leaves stays in the prompt cache, for a client that
  asks again.
- While activations are watched, prompts are read from their first token: the prompt cache has no
  activations, and statistics that lack those of cached tokens are biased.

Used on the device thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from mlxsrv.engine.cache.kv_caches import KVCacheFactory, merge
from mlxsrv.engine.cache.prompt_cache import Cache, PromptCache, as_tokens, can_cut
from mlxsrv.engine.events import Activations
from mlxsrv.engine.execution.prefill_stages import PartialPrompt, QueuedPrompt, SliceOutcome
from mlxsrv.engine.execution.prompt_queue import PromptQueue
from mlxsrv.engine.faults import note
from mlxsrv.engine.orders import Job
from mlxsrv.engine.row import Place, Row, RowState
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.steering.plan import SteeringPlan, forward
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.generation.parameters import Constraint

_ROUNDING = 0.1  # of the logits' standard deviation; bfloat16 stays well below


class Prefill:
    """The jobs of one model whose prompts are not read yet.

    Args:
        model: a model of mlx-lm's.
        pace: decides how long a slice is.
        cached: prompts that were read before.
        caches: makes the KV caches of rows.
        steerer: what rows are steered with.
    """

    def __init__(
        self,
        model: Any,
        *,
        pace: Pace,
        cached: PromptCache,
        caches: KVCacheFactory,
        steerer: Steerer,
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
        self._queue = PromptQueue(cached, steerer)
        self._moved = False  # a slice was read since `take_moved`

    @property
    def jobs(self) -> list[Job]:
        return [*self.half_read, *(prompt.job for prompt in self._queue.waiting)]

    @property
    def half_read(self) -> list[Job]:
        """The jobs of prompts that take more than a slice."""
        return [job for prompt in self._queue.begun for job in prompt.jobs]

    @property
    def reading(self) -> int:
        """How many rows the half-read prompts have."""
        return self._queue.rows

    @property
    def waiting(self) -> int:
        return len(self._queue.waiting)

    @property
    def asked(self) -> bool:
        """Whether there is a prompt to read."""
        return bool(self._queue.waiting or self._queue.begun)

    def submit(self, job: Job, constraint: Constraint | None = None) -> None:
        """Queue a job.

        Raises:
            ValueError: what it is to be steered with is not there.
        """
        last = self._queue.waiting[-1] if self._queue.waiting else None
        # The choices of one request share a prompt, so they share the array made of it.
        known = last is not None and last.job.prompt is job.prompt
        body = last.body if last is not None and known else as_tokens(job.prompt)[:-1]
        steering = self._steerer.prepare(job.steering)
        self._queue.add(QueuedPrompt(Row(job, constraint, steering), body))

    def cancel(self, job_ids: set[int]) -> None:
        """Forget these jobs. What was read of their prompts stays in the prompt cache."""
        for prompt in self._queue.drop(job_ids):
            if prompt.done > prompt.cached and not prompt.broken:
                # A state after exactly `done` tokens is of use even if it cannot be cut back.
                self._keep(prompt, prompt.cache)

    def clear(self) -> None:
        self._queue.clear()

    def take_moved(self) -> bool:
        """Whether a slice was read since this was last asked."""
        moved, self._moved = self._moved, False
        return moved

    def choose(self, free: int, *, decoding: bool, beside: bool) -> list[PartialPrompt]:
        """Take the prompts of the next slice; none if there is nothing to read.

        Args:
            free: rows that are free, those of half-read prompts included.
            decoding: the model has streams.
            beside: other models have streams.
        """
        free -= self.reading
        limit = self._pace.limit(decoding=decoding, long=False, beside=beside)
        chosen = self._queue.choose(free, limit)
        if chosen is None or isinstance(chosen, PartialPrompt):
            return [] if chosen is None else [chosen]
        fits = self._queue.fits(chosen, limit)
        prompt = self._take(chosen, free)
        # More may be left than was measured, if there was no memory for a copy of a kept cache.
        if fits and prompt.left <= limit:
            return self._group(prompt, free, limit)
        self._begin_long(prompt)
        return [prompt]

    def read(self, prompts: list[PartialPrompt], *, decoding: bool, beside: bool) -> SliceOutcome:
        """Read one slice of these prompts: all of several, or a part of one."""
        began, starts = perf_counter(), [prompt.done for prompt in prompts]
        plan = self._steerer.plan([prompt.steering for prompt in prompts])
        if len(prompts) > 1:
            cache = self._read_together(prompts, plan)
            activations = _look(prompts, starts, plan)
            outcome = self._complete_together(prompts, cache)
        else:
            [prompt] = prompts
            begun = prompt in self._queue.begun
            long = begun or prompt.recovering
            limit = self._pace.limit(decoding=decoding, long=long, beside=beside)
            tokens = prompt.read(self._model, limit, plan)
            if prompt.done == prompt.checkpoint > 0:
                self._keep(prompt, copy.deepcopy(prompt.cache))
            activations = _look(prompts, starts, plan)
            # A row that joins has KV caches copied in the next step, its own and the others'. So it
            # does not join in a gap that reading has filled already.
            later = decoding and tokens > 0 and begun
            incomplete = prompt.left > 0 or later
            outcome = SliceOutcome([], [], []) if incomplete else self._complete_alone(prompt)
        tokens = sum(prompt.done for prompt in prompts) - sum(starts)
        self._pace.saw_slice(tokens, perf_counter() - began, decoding=decoding)
        self._moved = True
        outcome.events[:0] = activations
        return outcome

    def resume(self, queued: QueuedPrompt) -> PartialPrompt:
        """Open the KV cache that the text of a recovering row is read into."""
        return PartialPrompt([queued], *self._open(queued))

    def abandon(self, prompts: Sequence[PartialPrompt]) -> None:
        """Forget the prompts of a slice that failed: their KV caches may be half of a pass on."""
        self._queue.begun = [prompt for prompt in self._queue.begun if prompt not in prompts]

    def put_back(self, queued: Iterable[QueuedPrompt]) -> None:
        """Have these prompts, which were being read, wait again."""
        self._queue.put_back(queued)

    def spare(self) -> None:
        """Give back the memory of what is not needed, or not yet."""
        self._cached.clear()
        self._queue.shrink()
        mx.clear_cache()

    def _begin_long(self, prompt: PartialPrompt) -> None:
        """Note that the prompt takes more than a slice."""
        prompt.checkpoint = prompt.job.checkpoint
        self._queue.begin(prompt)

    def _group(self, first: PartialPrompt, free: int, limit: int) -> list[PartialPrompt]:
        """The first prompt, and as many of the others as fit its slice."""
        longest = first.left
        group = [first]
        # A prompt with nothing to read cannot be padded beside others.
        if longest == 0 or first.queued[0].alone or not self.batched:
            return group
        free -= len(first.queued)
        for queued in self._queue.shortest(free, limit):
            left = self._queue.measure(queued)
            if free <= 0 or max(left, longest) * (len(group) + 1) > limit:
                break
            # A twin of a prompt that was begun in this loop does not wait any more.
            if self._pads_well(left, longest) and queued in self._queue.waiting:
                try:
                    prompt = self._take(queued, free)
                except Exception as error:  # it is still in the queue, so its turn comes again
                    note(error, "a KV cache could not be opened")
                    break
                if prompt.left > left:
                    self._begin_long(prompt)
                    break
                longest = max(longest, left)
                group.append(prompt)
                free -= len(prompt.queued)
        return group

    def _pads_well(self, left: int, longest: int) -> bool:
        """Whether a prompt with `left` tokens to read may be read beside one with `longest`."""
        return left > 0 and (left == longest or bool(self._pads))

    def _take(self, head: QueuedPrompt, free: int) -> PartialPrompt:
        """Take a prompt out of the queue, and with it those that have the same text: no more than
        `free` in all."""
        cache, cached = self._open(head)
        self._queue.waiting.remove(head)
        queued = [head, *self._take_twins(head, free - 1)]
        for each in queued:
            each.row.enter(RowState.PREFILLING)
        return PartialPrompt(queued, cache, cached)

    def _open(self, queued: QueuedPrompt) -> tuple[Cache, int]:
        """The KV cache that a text is read into, and how many of its tokens are there."""
        found = None
        if not self._queue.reads_anew(queued):
            try:
                found = self._cached.take(queued.body, queued.job.steering)
            except Exception as error:  # there may be no memory for a copy of the kept cache
                note(error, "a kept prompt could not be used")
                self.spare()
        return (self._caches.make(), 0) if found is None else found

    def _take_twins(self, head: QueuedPrompt, most: int) -> list[QueuedPrompt]:
        """Take at most so many waiting rows that have the same text and are not scored."""
        if not self.batched or head.alone or most <= 0:
            return []
        twins: list[QueuedPrompt] = []
        others: list[QueuedPrompt] = []
        for queued in self._queue.waiting:
            alike = queued.job.scores is None and queued.same_prompt(head)
            (twins if alike and len(twins) < most else others).append(queued)
        self._queue.waiting = others
        return twins

    def _complete_alone(self, prompt: PartialPrompt) -> SliceOutcome:
        if prompt in self._queue.begun:
            self._queue.end(prompt)
        cache = prompt.cache
        if self.batched and not prompt.broken:
            cache = merge([prompt.cache] * len(prompt.rows)) if prompt.rows else []
            # The batch has a copy, so the row's own cache may stay for prompts that begin alike.
            self._keep(prompt, prompt.cache)
        rows, events = prompt.finish()
        return SliceOutcome(rows, cache, events)

    def _complete_together(self, prompts: Sequence[PartialPrompt], cache: Cache) -> SliceOutcome:
        # Attention caches are kept when the answer ends, and cut back then. Others cannot be.
        if not can_cut(prompts[0].cache):
            for i, prompt in enumerate(prompts):
                if self._cached.wants(prompt.done):
                    self._keep(prompt, [layer.extract(i) for layer in cache])
        # Several rows may have one prompt, and one that is only echoed has none.
        owners = [i for i, prompt in enumerate(prompts) for _ in prompt.rows]
        if owners and owners != [*range(len(prompts))]:
            for layer in cache:
                layer.filter(mx.array(owners))
        outcome = SliceOutcome([], cache, [])
        for prompt in prompts:
            rows, events = prompt.finish()
            outcome.rows.extend(rows)
            outcome.events.extend(events)
        return outcome

    def _keep(self, prompt: PartialPrompt, cache: Cache) -> None:
        """Leave `cache`, which has seen the prompt as far as it is read, to the prompt cache."""
        self._cached.put(prompt.text[: prompt.done], cache, prompt.job.steering)

    def _read_together(self, prompts: Sequence[PartialPrompt], plan: SteeringPlan | None) -> Cache:
        cache = merge([prompt.cache for prompt in prompts])
        read_together(self._model, cache, [prompt.rest for prompt in prompts], plan)
        for prompt in prompts:
            prompt.done += prompt.left
        return cache


def _look(
    prompts: Sequence[PartialPrompt], starts: Sequence[int], plan: SteeringPlan | None
) -> list[Activations]:
    """The activations that were watched in a slice that began at `starts`."""
    if plan is None or plan.activations is None:
        return []
    events = plan.activations.read(
        [
            Place(tuple(job.id for job in prompt.jobs), start, prompt.done - start)
            for prompt, start in zip(prompts, starts, strict=True)
        ]
    )
    return prompts[0].find_untold(events) if len(prompts) == 1 else events


def read_together(
    model: Any, cache: Cache, prompts: Sequence[tuple[int, ...]], plan: SteeringPlan | None = None
) -> None:
    """Read one prompt into each row of a batch's KV cache, in one pass, right-padded."""
    lengths = [len(prompt) for prompt in prompts]
    padding = [max(lengths) - length for length in lengths]
    if any(padding):
        for layer in cache:
            layer.prepare(lengths=lengths, right_padding=padding)
    tokens = [prompt + (0,) * pad for prompt, pad in zip(prompts, padding, strict=True)]
    forward(model, plan, mx.array(tokens), cache)
    if any(padding):
        for layer in cache:
            layer.finalize()
    mx.eval([layer.state for layer in cache])


def masks_padding(model: Any) -> bool:
    """Whether the model reads a padded prompt as it would the prompt alone."""
    probe = try_padding(model)
    while True:
        try:
            next(probe)
        except StopIteration as stop:
            return bool(stop.value)


def try_padding(model: Any) -> Generator[None, None, bool]:
    """Find out what `masks_padding` returns, yielding between passes of the model.

    Attention layers leave padding out. A recurrent layer has to mask it, and not all of mlx-lm's
    do. So models that have one are tried: with a layer that reads padding as text, the logits are
    off by as much as they vary, else by rounding.
    """
    caches = KVCacheFactory(model)  # a model with a recurrent layer has its own kind only
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
