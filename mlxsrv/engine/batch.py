"""The continuous batch of one model.

Jobs wait, are read (prefill), then decode together until each has ended. The rules:

- A prompt is read without its last token, which becomes the row's first input: so reading needs
  no logits (MLX is lazy: the output head is never computed), and a fresh row draws its first token
  in the same step as everybody else. mlx-lm's generators do the same, and with the same cache
  classes, so greedy text is theirs token for token.
- Short prompts are read together, right-padded; one longer than a chunk is read alone, a chunk at
  a time, with a decode step of the others between two chunks.
- Decode-ahead: a step is launched before the tokens of the last one are read, so the device
  works while Python looks at tokens. A row that ends has therefore drawn one token too many; it
  is dropped with the row.
- Models whose caches cannot be merged run one row at a time through the same code, unmerged.

Everything here is called on the device thread only.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from mlxsrv.engine.sampling import Sampler
from mlxsrv.events import Event, Failed, FinishReason, Job, Started, Token

Cache = list[Any]  # mlx-lm's, one entry per layer

_log = logging.getLogger("mlxsrv.engine")

_ROUNDING = 0.1  # of the logits' standard deviation; bfloat16 stays well below

_CLEAR_EVERY = 256  # steps; buffers of outgrown caches go back to the system


class Row:
    """A job in the decode batch."""

    __slots__ = ("drawn", "fresh", "job")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.drawn = 0  # tokens delivered
        self.fresh = True  # its pending input is still the prompt's last token

    def finish(self, token: int) -> FinishReason | None:
        """Why the row ends with `token`, if it does."""
        if token in self.job.end_tokens:
            return "stop"
        return "length" if self.drawn >= self.job.max_tokens else None


class Reading:
    """A prompt on its way into a cache of its own."""

    def __init__(self, job: Job, cache: Cache) -> None:
        self.job = job
        self.cache = cache
        self.tokens = job.prompt[:-1]
        self.done = 0

    def read(self, model: Any, chunk: int) -> bool:
        """Read one chunk; true when the whole prompt is in the cache."""
        if part := self.tokens[self.done : self.done + chunk]:
            model(mx.array(part)[None], cache=self.cache)
            mx.eval([layer.state for layer in self.cache])
        self.done += len(part)
        return self.done == len(self.tokens)


class Batch:
    """Decodes all rows of one model together; rows join and leave at any step.

    Args:
        model: a model of mlx-lm's.
        max_rows: rows decoded together, those being read included.
        prefill_chunk: the most prompt tokens read in one slice, padding included.
    """

    def __init__(self, model: Any, *, max_rows: int, prefill_chunk: int) -> None:
        self._model = model
        self.batched = _mergeable(make_prompt_cache(model))
        self._max_rows = max_rows if self.batched else 1
        self._chunk = prefill_chunk
        self._pads = self.batched and masks_padding(model)
        self._waiting: deque[Job] = deque()
        self._reading: Reading | None = None
        self._rows: list[Row] = []
        self._cache: Cache = []
        self._inputs: mx.array | None = None  # (rows,), what each row is fed next
        self._sampler: Sampler | None = None  # None: rows have changed
        self._steps = 0

    @property
    def idle(self) -> bool:
        return not (self._rows or self._reading or self._waiting)

    def statistics(self) -> dict[str, int]:
        return {
            "rows": len(self._rows),
            "reading": int(self._reading is not None),
            "waiting": len(self._waiting),
        }

    def submit(self, job: Job) -> list[Event]:
        self._waiting.append(job)
        return [Started(job.id)]

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Free the rows of these jobs, at whatever stage they are."""
        gone = set(job_ids)
        self._waiting = deque(job for job in self._waiting if job.id not in gone)
        if self._reading is not None and self._reading.job.id in gone:
            self._reading = None
        self._keep([i for i, row in enumerate(self._rows) if row.job.id not in gone])

    # One slice of work is decode(), then prefill(): tokens are delivered between the two, so that
    # no stream waits for somebody else's prompt longer than it must.

    def decode(self) -> list[Event]:
        """Launch a step for all rows; return the tokens of the step before."""
        if not self._rows:
            return []
        assert self._inputs is not None
        inputs = self._inputs
        self._inputs = self._launch(inputs)
        events: list[Event] = []
        keep: list[int] = []
        for i, (row, token) in enumerate(zip(self._rows, _ids(inputs), strict=True)):
            if row.fresh:
                row.fresh = False
                keep.append(i)
                continue
            row.drawn += 1
            finish = row.finish(token)
            events.append(Token(row.job.id, token, finish))
            if finish is None:
                keep.append(i)
        self._keep(keep)
        return events

    def _launch(self, inputs: mx.array) -> mx.array:
        if self._sampler is None:
            # A row that is not fresh has one token drawn and not yet delivered: its input.
            drawn = [0 if row.fresh else row.drawn + 1 for row in self._rows]
            self._sampler = Sampler([row.job.sampling for row in self._rows], drawn)
        logits = self._model(inputs[:, None], cache=self._cache)[:, -1, :]
        tokens = self._sampler(logits)
        mx.async_eval(tokens)  # type: ignore[no-untyped-call]  # as mlx's stubs have it
        self._steps += 1
        if self._steps % _CLEAR_EVERY == 0:
            mx.clear_cache()
        return tokens

    def prefill(self) -> list[Event]:
        """Read at most one chunk of prompts. An error there fails the jobs read, no others."""
        jobs = [self._reading.job] if self._reading is not None else self._next_group()
        if not jobs:
            return []
        try:
            cache = self._read(jobs)
        except Exception as error:
            _log.exception("prefill failed")
            self._reading = None
            return [Failed(job.id, describe(error)) for job in jobs]
        if cache is not None:
            self._join(jobs, cache)
        return []

    def _read(self, jobs: Sequence[Job]) -> Cache | None:
        """One chunk of the jobs' prompts; their batch cache once it holds all they need."""
        if len(jobs) > 1:
            return read_together(self._model, [job.prompt[:-1] for job in jobs])
        if self._reading is None:
            self._reading = Reading(jobs[0], make_prompt_cache(self._model))
        reading = self._reading
        if not reading.read(self._model, self._chunk):
            return None
        self._reading = None
        return _merge([reading.cache]) if self.batched else reading.cache

    def _next_group(self) -> list[Job]:
        """The jobs to read next: as many short prompts as fit a chunk, else one long one."""
        group: list[Job] = []
        longest = 0
        free = self._max_rows - len(self._rows)
        while self._waiting and len(group) < free:
            body = len(self._waiting[0].prompt) - 1
            if group and not self._fits(body, longest, len(group)):
                break
            longest = max(longest, body)
            group.append(self._waiting.popleft())
            if body == 0:  # nothing to read, so nothing to pad beside others
                break
        return group

    def _fits(self, body: int, longest: int, rows: int) -> bool:
        """Whether a prompt of `body` tokens may be read beside `rows` others."""
        if body == 0 or (body != longest and not self._pads):
            return False
        return max(body, longest) * (rows + 1) <= self._chunk

    def _join(self, group: Sequence[Job], cache: Cache) -> None:
        inputs = mx.array([job.prompt[-1] for job in group], dtype=mx.uint32)
        joined = bool(self._rows)
        self._rows.extend(Row(job) for job in group)  # first: fail() must know them
        self._sampler = None
        if joined:
            assert self._inputs is not None
            for layer, joining in zip(self._cache, cache, strict=True):
                layer.extend(joining)
            inputs = mx.concatenate([self._inputs, inputs])
        else:
            self._cache = cache
        self._inputs = inputs

    def _keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but those at `indices`."""
        if len(indices) == len(self._rows):
            return
        self._sampler = None
        if not indices:
            self._rows, self._cache, self._inputs = [], [], None
            return
        assert self._inputs is not None
        chosen = mx.array(list(indices))
        for layer in self._cache:
            layer.filter(chosen)
        self._rows = [self._rows[i] for i in indices]
        self._inputs = self._inputs[chosen]

    def fail(self, reason: str) -> list[Event]:
        """End every job of the batch, as after an error whose row is not known."""
        jobs = [row.job for row in self._rows] + list(self._waiting)
        if self._reading is not None:
            jobs.append(self._reading.job)
        self._waiting.clear()
        self._reading = None
        self._keep([])
        return [Failed(job.id, reason) for job in jobs]


def read_together(model: Any, prompts: Sequence[tuple[int, ...]]) -> Cache:
    """A batch cache that holds `prompts`, read in one pass, right-padded to the longest."""
    lengths = [len(prompt) for prompt in prompts]
    padding = [max(lengths) - length for length in lengths]
    cache = _merge([make_prompt_cache(model) for _ in prompts])
    if any(padding):
        for layer in cache:
            layer.prepare(lengths=lengths, right_padding=padding)
    tokens = [prompt + (0,) * pad for prompt, pad in zip(prompts, padding, strict=True)]
    model(mx.array(tokens), cache=cache)
    if any(padding):
        for layer in cache:
            layer.finalize()
    mx.eval([layer.state for layer in cache])
    return cache


def masks_padding(model: Any) -> bool:
    """Whether the model reads a padded prompt as it would the prompt alone.

    Attention caches leave padding out themselves. A recurrent layer has to mask it, and not all
    of mlx-lm's do, so models that have one are tried: a layer that swallows padding is off by as
    much as its logits vary, one that does not by rounding.
    """
    if not any(_recurrent(layer) for layer in make_prompt_cache(model)):
        return True
    short, long = (1, 2, 3), (4, 5, 6, 7, 8, 9, 10, 11)
    alone = model(mx.array([[0]]), cache=read_together(model, [short]))[0, -1]
    beside = model(mx.array([[0], [0]]), cache=read_together(model, [short, long]))[0, -1]
    difference = mx.abs(alone - beside).mean()
    return bool((difference < _ROUNDING * mx.std(alone)).item())


def _recurrent(layer: Any) -> bool:
    if isinstance(layer, CacheList):
        return any(map(_recurrent, layer.caches))
    return isinstance(layer, ArraysCache)


def _merge(caches: Sequence[Cache]) -> Cache:
    """Caches of single rows as one of a batch, layer by layer."""
    return [layers[0].merge(layers) for layers in map(list, zip(*caches, strict=True))]


def _ids(tokens: mx.array) -> list[int]:
    """The ids on the host; waits for the step that draws them."""
    return cast(list[int], tokens.tolist())


def _mergeable(cache: Cache) -> bool:
    return all(
        _mergeable(list(layer.caches)) if isinstance(layer, CacheList) else hasattr(layer, "merge")
        for layer in cache
    )


def describe(error: BaseException) -> str:
    """What went wrong in one line, for a client and for the log."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"
