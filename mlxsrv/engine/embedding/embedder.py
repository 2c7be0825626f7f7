"""Embedding: one model reads the texts of all requests, a slice at a time.

- Beside running streams a slice is as long as they can bear: see Pace. Otherwise it takes at most a
  quarter of a second, for a stream may begin at any moment.
- A decoder's vectors come from its inner model, without the output head.
- A decoder reads a text that does not fit a slice in several, into a KV cache of its own. An
  encoder looks both ways and reads any text whole.

Used on the device thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from mlxsrv.engine.embedding.pooling import Pooler
from mlxsrv.engine.embedding.runners import DecoderRunner, Runner
from mlxsrv.engine.embedding.text_queue import QueuedText, TextQueue
from mlxsrv.engine.events import Event, Failed
from mlxsrv.engine.faults import describe
from mlxsrv.engine.orders import Embed
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.formats.pooling import read_pooling_config
from mlxsrv.generation.outputs import Vectors

_log = logging.getLogger("mlxsrv.engine")

_SECONDS = 0.25  # of a slice while nothing streams: how long a new request may have to wait
_MOST_TOKENS = 16 * 1024  # of a slice, padding included; the layers' memory grows with it
_MOST_WHOLE = 4096  # tokens of one text; attention's memory grows with their square
_BESIDE = 4  # many slices in a row may take one part in so many of other models' gaps
_LEAST = 16  # tokens; a slice of fewer would cost a whole pass for next to nothing
_CLEAR_EVERY = 64  # slices; their shapes differ, so buffers of one seldom serve the next


class _LongText:
    """A text that is read in several slices."""

    def __init__(self, text: QueuedText, cache: list[Any]) -> None:
        self.text = text
        self.cache = cache
        self.done = 0  # tokens
        self.hidden: list[mx.array] = []  # (1, slice, width) each


class Embedder:
    """Embeds the texts of one model's requests.

    Args:
        runner: the model.
        folder: its files, which say how vectors are pooled; read when first needed.
        name: what the model is called, for files that leave the pooling to it.
        pace: how long a slice may be beside streams; shared with the prompts of the same model.
        decoding: tells whether the model itself has streams.
    """

    def __init__(
        self,
        runner: Runner,
        folder: Path,
        name: str,
        pace: Pace,
        decoding: Callable[[], bool] = lambda: False,
    ) -> None:
        self._runner = runner
        self._folder = folder
        self._name = name
        self._pace = pace
        self._decoding = decoding
        self._queue = TextQueue(slices=runner.reads_slices)
        self._pooler: Pooler | None = None
        self._long: _LongText | None = None
        self._slices = 0
        self._moved = False  # a slice was run since `take_progress`
        self._rate: float | None = None  # tokens a second, padding included

    @property
    def idle(self) -> bool:
        return not self._queue.jobs

    @property
    def pending(self) -> bool:
        return bool(self._queue.jobs)

    def statistics(self) -> dict[str, int]:
        return {"texts": len(self._queue)}

    # Jobs.

    def submit(self, order: Embed) -> None:
        """Take the job. Raises ValueError, or OSError, if it cannot be done."""
        self._check(order)
        self._queue.add(order)

    def _check(self, order: Embed) -> None:
        if not order.texts or not all(order.texts):
            raise ValueError("there are no texts, or one of them has no tokens")
        # Now and not in a slice, where an error would fail the other jobs with texts in it.
        most, bound = max(map(len, order.texts)), self._runner.longest
        if bound is not None and most > bound:
            raise ValueError(f"a text of {most} tokens is too long: this model reads {bound}")
        if self._runner.labels:
            if len(order.firsts) != len(order.texts):
                raise ValueError("this model judges pairs of texts and makes no vectors")
        elif order.firsts:
            raise ValueError("this model makes vectors and does not judge pairs of texts")
        elif self._pooler is None:
            decoder = self._runner.reads_slices
            config = read_pooling_config(self._folder, decoder=decoder, name=self._name)
            self._pooler = Pooler(config)

    def cancel(self, job_ids: Iterable[int]) -> None:
        self._remove(self._queue.find(job_ids))

    def fail(self, reason: str) -> list[Event]:
        """End all jobs."""
        return self._fail(set(self._queue.jobs), reason)

    def _fail(self, numbers: Iterable[int], reason: str) -> list[Event]:
        events: list[Event] = [
            Failed(self._queue.jobs[number].id, reason) for number in sorted(numbers)
        ]
        self._remove(numbers)
        return events

    def _remove(self, numbers: Iterable[int]) -> None:
        self._queue.remove(numbers)
        if self._queue.long is None:
            self._long = None

    # Slices.

    def prefill(self, *, beside: bool = False) -> list[Event]:
        """Run one slice; the events of the jobs that it completes.

        `beside`: other models have streams. An error fails the jobs with texts in the slice.
        """
        if self.idle:
            return []
        decoding = self._decoding()
        limit, most = self._limit(decoding=decoding, beside=beside)
        begun = perf_counter()
        texts: Sequence[QueuedText] = []
        try:
            texts = self._queue.choose(limit, most)
            if texts:
                tokens = self._read_together(texts)
            else:
                long = self._find_long()
                texts = [long.text]
                tokens = self._read_on(long, limit)
        except Exception as error:
            _log.exception("embedding failed")
            # If it is not known whose the error is, all fail: the slice would fail for ever.
            numbers = {text.job for text in texts} or set(self._queue.jobs)
            return self._fail(numbers, describe(error))
        self._learn(tokens, perf_counter() - begun, decoding=decoding, beside=beside)
        return self._complete({text.job for text in texts})

    def take_progress(self) -> list[int]:
        """The ids of the unfinished jobs, if a slice was run since the last call. All of them:
        each slice brings each job's turn nearer."""
        moved, self._moved = self._moved, False
        return [job.id for job in self._queue.jobs.values()] if moved else []

    def _limit(self, *, decoding: bool, beside: bool) -> tuple[int, int]:
        """The most tokens of one text, and of a slice with its padding."""
        limit = self._pace.limit(decoding=decoding, long=False, beside=beside)
        if not (decoding or beside):
            fitting = 0 if self._rate is None else int(_SECONDS * self._rate)
            most = max(limit, min(fitting, _MOST_TOKENS))
            return max(limit, min(most, _MOST_WHOLE)), most
        if self._long is not None or self._queue.tokens > limit:
            # It takes many slices, and streams must not be slow all that time.
            limit = self._pace.limit(decoding=decoding, long=True, beside=beside)
            limit = limit if decoding else max(_LEAST, limit // _BESIDE)
        return limit, limit

    def _learn(self, tokens: int, seconds: float, *, decoding: bool, beside: bool) -> None:
        self._moved = True
        self._slices += 1
        if self._slices % _CLEAR_EVERY == 0:
            mx.clear_cache()
        self._pace.saw_slice(tokens, seconds, decoding=decoding)
        if not (decoding or beside):
            self._rate = tokens / max(seconds, 1e-6)

    def _find_long(self) -> _LongText:
        """The long text. Raises RuntimeError if there is none."""
        text = self._queue.long
        if text is None:
            raise RuntimeError("there is no text to read on")
        if self._long is None:
            assert isinstance(self._runner, DecoderRunner)
            self._long = _LongText(text, self._runner.make_cache())
        return self._long

    def _read_together(self, texts: Sequence[QueuedText]) -> int:
        """Make the vectors of these texts in one pass. Returns its tokens, padding included."""
        rows = [self._queue.tokens_of(text) for text in texts]
        longest = max(map(len, rows))
        lengths = mx.array([len(row) for row in rows])
        tokens = mx.array([row + (0,) * (longest - len(row)) for row in rows])
        mask = mx.arange(longest)[None] < lengths[:, None]
        firsts = None
        if self._runner.labels:
            firsts = [self._queue.jobs[text.job].firsts[text.place] for text in texts]
        hidden = self._runner.run(tokens, mask, firsts)
        self._put(texts, self._make_vectors(hidden, mask))
        return tokens.size

    def _read_on(self, long: _LongText, limit: int) -> int:
        """Read a slice of the long text. Returns its tokens."""
        assert isinstance(self._runner, DecoderRunner)
        tokens = self._queue.tokens_of(long.text)[long.done : long.done + limit]
        hidden = self._runner.read(mx.array(tokens)[None], long.cache)
        mx.eval(hidden, [layer.state for layer in long.cache])
        long.hidden.append(hidden)
        long.done += len(tokens)
        if long.done == long.text.length:
            self._long = self._queue.long = None
            whole = mx.concatenate(long.hidden, axis=1)
            mask = mx.ones(whole.shape[:2], mx.bool_)
            self._put([long.text], self._make_vectors(whole, mask))
        return len(tokens)

    def _make_vectors(self, hidden: mx.array, mask: mx.array) -> Vectors:
        if self._runner.labels:
            made = self._runner.classify(hidden, mask)
        else:
            assert self._pooler is not None
            made = self._pooler(hidden, mask)
        return np.array(made.astype(mx.float32))

    def _put(self, texts: Sequence[QueuedText], vectors: Vectors) -> None:
        for text, vector in zip(texts, vectors, strict=True):
            self._queue.jobs[text.job].put(text.place, vector)

    def _complete(self, numbers: Iterable[int]) -> list[Event]:
        jobs = self._queue.jobs
        done = sorted(number for number in numbers if not jobs[number].missing)
        events: list[Event] = [jobs[number].embedded for number in done]
        self._remove(done)
        return events
