"""Vectors of texts: the passes of one model over the texts of all requests, a slice at a time.

- A slice holds texts of similar length, whoever asked for them, so that little of it is padding.
  Each starts from the longest text of the next job in turn: a job of many texts does not hold up
  one of few.
- Beside running streams a slice is as long as these can bear: see Pace. Else it takes no longer
  than a quarter of a second, for a stream may begin at any moment.
- A decoder's vectors come from its inner model, without the output head. Padding is at the right,
  where neither causal attention nor recurrent layers look; so no text sees the others.
- A decoder reads a text that does not fit a slice a chunk at a time, into a cache that is dropped
  with it. An encoder looks both ways and reads any text whole.

Used on the device thread only.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlxsrv.engine.embedding.encoders.layers import Encoder
from mlxsrv.engine.embedding.encoders.load import load_dense
from mlxsrv.engine.events import Embedded, Event, Failed
from mlxsrv.engine.faults import describe
from mlxsrv.engine.orders import Embed
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.formats.pooling import Pooling, PoolingConfig, read_pooling_config
from mlxsrv.generation import Vectors

_log = logging.getLogger("mlxsrv.engine")

_SECONDS = 0.25  # of a slice while nothing streams: what a request that comes meanwhile waits
_MOST_TOKENS = 16 * 1024  # of a slice, padding included; what the layers need grows with it
_MOST_WHOLE = 4096  # tokens of one text, for attention needs the square of it
_BESIDE = 4  # the part of other models' gaps that many slices in a row may take: one in so many
_LEAST = 16  # tokens; fewer would cost a pass each for next to nothing
_CLEAR_EVERY = 64  # slices; their shapes differ, so buffers of one seldom serve the next
_WASTE = 1.25  # padded tokens for each real one, at most
_INNER = ("language_model", "model", "transformer", "backbone")
"""What mlx-lm's models call the part of them that is nearer to the layers."""


class Runner(Protocol):
    """A model, as what its layers make of tokens."""

    reads_chunks: bool
    """Whether a text may be read a chunk at a time."""
    labels: int
    """Numbers that it judges a pair of texts by; 0: it makes vectors."""
    longest: int | None
    """Tokens that it has positions for; None: no bound of its own."""

    def run(self, tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None) -> mx.array:
        """The hidden state `(rows, length, width)` at the tokens `(rows, length)`. `mask`, of
        their shape, is false at padding; `firsts` are the tokens of each pair's first text."""

    def classify(self, hidden: mx.array, mask: mx.array) -> mx.array:
        """The logits `(rows, labels)`."""


class DecoderRunner:
    """A model of mlx-lm's."""

    reads_chunks = True
    labels = 0
    longest: int | None = None

    def __init__(self, model: Any) -> None:
        self._model = model
        self._inner: Any = None  # found when it is first wanted

    def run(self, tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None) -> mx.array:
        return self.read(tokens, None)

    def classify(self, hidden: mx.array, mask: mx.array) -> mx.array:
        raise ValueError("it is no cross-encoder")

    def make_cache(self) -> list[Any]:
        cache: list[Any] = make_prompt_cache(self._model)
        return cache

    def read(self, tokens: mx.array, cache: list[Any] | None) -> mx.array:
        """The hidden state after the final norm. Raises ValueError where it is not to be had."""
        if self._inner is None:
            self._inner = find_inner(self._model, tokens[:1])
        return cast(mx.array, self._inner(tokens, cache=cache))


def find_inner(model: Any, tokens: mx.array) -> Any:
    """The part of one of mlx-lm's models that gives the hidden state after the final norm.

    Tried with `tokens`, though nothing is computed: MLX is lazy, and shapes tell. Raises
    ValueError if there is none.
    """
    inner = model
    while deeper := next((getattr(inner, name, None) for name in _INNER if name in inner), None):
        inner = deeper
    kind = getattr(model, "model_type", type(model).__name__)
    missing = ValueError(f"mlx-lm's models of type {kind!r} do not give their hidden states")
    if inner is model:
        raise missing
    try:
        hidden = inner(tokens, cache=None)
        shape = hidden.shape
    except Exception as error:
        raise missing from error
    # Some have the output head inside: then what comes is as wide as the vocabulary.
    if len(shape) != 3 or shape[:2] != tokens.shape or shape[2] == model(tokens).shape[-1]:
        raise missing
    return inner


class EncoderRunner:
    """One of the encoders of this package."""

    reads_chunks = False

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.labels = encoder.labels
        self.longest = encoder.longest

    def run(self, tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None) -> mx.array:
        return self._encoder(tokens, mask, firsts)

    def classify(self, hidden: mx.array, mask: mx.array) -> mx.array:
        return self._encoder.classify(hidden, mask)


class Text(NamedTuple):
    """One text that waits; the order is that of lengths, then of coming."""

    length: int
    job: int  # its number in the order of coming
    place: int  # in the job


class _Job:
    """What one command asks and what of it is done."""

    def __init__(self, number: int, command: Embed) -> None:
        self.id = command.id
        self.texts = command.texts
        self.firsts = command.firsts
        self.waiting = sorted(Text(len(text), number, i) for i, text in enumerate(self.texts))
        self.missing = len(self.texts)
        self._vectors: Vectors | None = None

    def put(self, index: int, vector: Any) -> None:
        if self._vectors is None:
            self._vectors = np.empty((len(self.texts), len(vector)), np.float32)
        self._vectors[index] = vector
        self.missing -= 1

    @property
    def embedded(self) -> Embedded:
        assert self._vectors is not None
        return Embedded(self.id, self._vectors)


class _Long:
    """A text that is read a chunk at a time."""

    def __init__(self, text: Text, cache: list[Any]) -> None:
        self.text = text
        self.cache = cache
        self.done = 0
        self.hidden: list[mx.array] = []


class Embedder:
    """The texts of one model's requests.

    Args:
        runner: the model.
        folder: its files, which say how a vector is made; read when first wanted.
        name: what the model is called, for files that leave that to it.
        pace: how long a slice may be beside streams; shared with the prompts of the same model.
        decoding: tells whether the model itself has streams.
    """

    streaming = False
    """It has no rows that decode."""

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
        self._finish: Finish | None = None
        self._came = 0
        self._jobs: dict[int, _Job] = {}  # by number
        self._turns: deque[int] = deque()  # of the jobs, by number
        self._waiting: list[Text] = []  # of all jobs, the shortest first
        self._tokens = 0  # that wait
        self._long: _Long | None = None
        self._long_is_next = False
        self._slices = 0
        self._moved = False  # a slice was run that nobody was told of yet
        self._second: float | None = None  # tokens that one takes, padding included

    @property
    def idle(self) -> bool:
        return not self._jobs

    @property
    def pending(self) -> bool:
        return bool(self._jobs)

    def statistics(self) -> dict[str, int]:
        return {"texts": len(self._waiting) + (self._long is not None)}

    def submit(self, command: Embed) -> None:
        """Take the job. Raises ValueError, or OSError, if it cannot be done."""
        self._check(command)
        job = _Job(self._came, command)
        self._jobs[self._came] = job
        self._turns.append(self._came)
        self._came += 1
        self._waiting = sorted(self._waiting + job.waiting)
        self._tokens += sum(text.length for text in job.waiting)

    def _check(self, command: Embed) -> None:
        if not command.texts or not all(command.texts):
            raise ValueError("there are no texts, or one of them has no tokens")
        # Here, for an error in a slice would fail others that have texts in it.
        most, bound = max(map(len, command.texts)), self._runner.longest
        if bound is not None and most > bound:
            raise ValueError(f"a text of {most} tokens is too long: this model reads {bound}")
        if self._runner.labels:
            if len(command.firsts) != len(command.texts):
                raise ValueError("this model judges pairs of texts and makes no vectors")
        elif command.firsts:
            raise ValueError("this model makes vectors and does not judge pairs of texts")
        elif self._finish is None:
            config = read_pooling_config(
                self._folder, decoder=self._runner.reads_chunks, name=self._name
            )
            self._finish = Finish(config)

    def cancel(self, job_ids: Iterable[int]) -> None:
        gone = set(job_ids)
        self._drop({number for number, job in self._jobs.items() if job.id in gone})

    def fail(self, reason: str) -> list[Event]:
        """End all jobs."""
        events: list[Event] = [Failed(job.id, reason) for job in self._jobs.values()]
        self._drop(set(self._jobs))
        return events

    def _drop(self, numbers: set[int]) -> None:
        if not numbers:
            return
        for number in numbers:
            del self._jobs[number]
        self._turns = deque(number for number in self._turns if number not in numbers)
        self._waiting = [text for text in self._waiting if text.job not in numbers]
        if self._long is not None and self._long.text.job in numbers:
            self._long = None
        self._tokens = sum(text.length for text in self._waiting)

    def decode(self) -> list[Event]:
        return []

    def prefill(self, *, beside: bool = False) -> list[Event]:
        """One slice, and the jobs that it completes; `beside`: other models have streams. An error
        fails the jobs whose texts were in the slice."""
        if not self._jobs:
            return []
        decoding = self._decoding()
        chunk, most = self._limit(decoding=decoding, beside=beside)
        begun = perf_counter()
        concerned: Sequence[Text] = []
        try:
            texts = self._choose(chunk, most)
            concerned = texts or [self._reading.text]
            tokens = self._run(texts) if texts else self._read_on(chunk)
        except Exception as error:
            _log.exception("embedding failed")
            # All of them, should it ever not be known: a round without progress has no end.
            numbers = {text.job for text in concerned} or set(self._jobs)
            jobs = [self._jobs[number] for number in sorted(numbers)]
            self._drop(numbers)
            return [Failed(job.id, describe(error)) for job in jobs]
        seconds = perf_counter() - begun
        self._slices += 1
        self._moved = True
        if self._slices % _CLEAR_EVERY == 0:
            mx.clear_cache()
        self._pace.saw_chunk(tokens, seconds, decoding=decoding)
        if not (decoding or beside):
            self._second = tokens / max(seconds, 1e-6)
        return self._complete({text.job for text in concerned})

    def take_progress(self) -> list[int]:
        """If a slice was run since this was last asked: the jobs that are not complete, which take
        turns."""
        moved, self._moved = self._moved, False
        return [job.id for job in self._jobs.values()] if moved else []

    @property
    def _reading(self) -> _Long:
        """The long one. Raises RuntimeError where there is none."""
        if self._long is None:
            raise RuntimeError("there is no text to read on")
        return self._long

    def _limit(self, *, decoding: bool, beside: bool) -> tuple[int, int]:
        """Tokens of a text that is read whole, and of all texts of a slice with their padding."""
        chunk = self._pace.limit(decoding=decoding, long=False, beside=beside)
        if not (decoding or beside):
            fitting = 0 if self._second is None else int(_SECONDS * self._second)
            most = max(chunk, min(fitting, _MOST_TOKENS))
            return max(chunk, min(most, _MOST_WHOLE)), most
        if self._long is not None or self._tokens > chunk:
            # It takes many slices, and streams are not to crawl all the time.
            chunk = self._pace.limit(decoding=decoding, long=True, beside=beside)
            chunk = chunk if decoding else max(_LEAST, chunk // _BESIDE)
        return chunk, chunk

    def _choose(self, chunk: int, most: int) -> list[Text]:
        """The texts of the next slice, taken from those that wait; none, if the long one goes on.

        They are neighbours in length, the longest being that of the job whose turn it is.
        """
        if self._long is not None and self._long_is_next:
            self._long_is_next = False
            return []
        self._long_is_next = True
        first = self._find_first(chunk)
        if first is None:
            return []
        if self._runner.reads_chunks and first.length > chunk:
            self._begin_long(first)
            return []
        end = bisect_right(self._waiting, first)
        start, real = end - 1, first.length
        while start > 0:
            rows = end - start + 1
            real += self._waiting[start - 1].length
            padded = rows * first.length
            if padded > most or padded > _WASTE * real:
                break
            start -= 1
        texts = self._waiting[start:end]
        del self._waiting[start:end]
        self._tokens -= sum(text.length for text in texts)
        return texts

    def _find_first(self, chunk: int) -> Text | None:
        """The longest text of the job whose turn it is, which then is the last to have one again.
        While a long one is being read, the longest that is not another."""
        for number in list(self._turns):
            waiting = self._jobs[number].waiting
            while waiting and not self._waits(waiting[-1]):
                waiting.pop()
            if not waiting:
                self._turns.remove(number)
                continue
            found = self._longest(waiting, chunk)
            if found is not None:
                self._turns.remove(number)
                self._turns.append(number)
                return found
        return None

    def _longest(self, waiting: Sequence[Text], chunk: int) -> Text | None:
        if self._long is None or not self._runner.reads_chunks:
            return waiting[-1]
        end = bisect_left(waiting, (chunk + 1,))
        return next((text for text in reversed(waiting[:end]) if self._waits(text)), None)

    def _waits(self, text: Text) -> bool:
        place = bisect_left(self._waiting, text)
        return place < len(self._waiting) and self._waiting[place] == text

    def _begin_long(self, text: Text) -> None:
        assert isinstance(self._runner, DecoderRunner)
        self._waiting.remove(text)
        self._tokens -= text.length
        self._long = _Long(text, self._runner.make_cache())
        self._long_is_next = False

    def _run(self, texts: Sequence[Text]) -> int:
        """Make the vectors of these texts together; tokens, padding included."""
        jobs = [self._jobs[text.job] for text in texts]
        rows = [job.texts[text.place] for job, text in zip(jobs, texts, strict=True)]
        longest = max(map(len, rows))
        lengths = mx.array([len(row) for row in rows])
        tokens = mx.array([row + (0,) * (longest - len(row)) for row in rows])
        mask = mx.arange(longest)[None] < lengths[:, None]
        firsts = None
        if self._runner.labels:
            firsts = [job.firsts[text.place] for job, text in zip(jobs, texts, strict=True)]
        hidden = self._runner.run(tokens, mask, firsts)
        self._put(texts, self._vectors(hidden, mask))
        return tokens.size

    def _read_on(self, chunk: int) -> int:
        """Read a chunk of the long text; tokens."""
        long = self._reading
        assert isinstance(self._runner, DecoderRunner)
        tokens = self._jobs[long.text.job].texts[long.text.place][long.done : long.done + chunk]
        hidden = self._runner.read(mx.array(tokens)[None], long.cache)
        mx.eval(hidden, [layer.state for layer in long.cache])
        long.hidden.append(hidden)
        long.done += len(tokens)
        if long.done == long.text.length:
            self._long = None
            whole = mx.concatenate(long.hidden, axis=1)
            self._put([long.text], self._vectors(whole, mx.ones(whole.shape[:2], mx.bool_)))
        return len(tokens)

    def _vectors(self, hidden: mx.array, mask: mx.array) -> Vectors:
        if self._runner.labels:
            made = self._runner.classify(hidden, mask)
        else:
            assert self._finish is not None
            made = self._finish(hidden, mask)
        return np.array(made.astype(mx.float32))

    def _put(self, texts: Sequence[Text], vectors: Vectors) -> None:
        for text, vector in zip(texts, vectors, strict=True):
            self._jobs[text.job].put(text.place, vector)

    def _complete(self, numbers: Iterable[int]) -> list[Event]:
        done = {number for number in numbers if not self._jobs[number].missing}
        events: list[Event] = [self._jobs[number].embedded for number in sorted(done)]
        self._drop(done)
        return events


class Finish:
    """From the tokens' vectors to the text's, as a PoolingConfig says.

    Raises:
        ValueError: a layer that the config names cannot be had.
    """

    def __init__(self, config: PoolingConfig) -> None:
        self._config = config
        self._dense = [load_dense(folder) for folder in config.dense]

    def __call__(self, hidden: mx.array, mask: mx.array) -> mx.array:
        """`(rows, length, width)` -> `(rows, width)`, float32."""
        vectors = pool(hidden, mask, self._config.pooling)
        for layer in self._dense:
            vectors = layer(vectors)
        if self._config.normalize:
            vectors /= mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return vectors


def pool(hidden: mx.array, mask: mx.array, pooling: Pooling) -> mx.array:
    """One vector of each row's tokens `(rows, length, width)`, in float32: `(rows, width)`.

    As sentence-transformers does it. Rows are padded at the right, where `mask` is false.
    """
    lengths = mask.sum(axis=1, keepdims=True)
    if pooling == "cls":
        return hidden[:, 0].astype(mx.float32)
    if pooling == "last":
        last = mx.take_along_axis(hidden, lengths[..., None] - 1, axis=1)
        return last[:, 0].astype(mx.float32)
    hidden = hidden.astype(mx.float32)
    if pooling == "max":
        return mx.where(mask[..., None], hidden, -mx.inf).max(axis=1)
    if pooling == "weightedmean":
        weights = mx.where(mask, mx.arange(1, mask.shape[1] + 1)[None], 0)
    else:
        weights = mask
    weights = weights.astype(mx.float32)
    # Zeroed, for nought times whatever padding has become need not be nought.
    summed = (mx.where(mask[..., None], hidden, 0) * weights[..., None]).sum(axis=1)
    count = weights.sum(axis=1, keepdims=True)
    return summed / (mx.sqrt(count) if pooling == "mean_sqrt_len" else count)
