"""Embedding: one model makes vectors of texts, or logits of pairs, as plans say.

- A decoder's vectors come from its inner model, without the output head.
- A decoder may read a text in several slices, into a KV cache of its own.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from mlxsrv.engine.embedding.embedding_models import EmbeddingDecoder, EmbeddingModel
from mlxsrv.engine.embedding.pooling import Pooler
from mlxsrv.engine.faults import note
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import RowFailure, TextsRead
from mlxsrv.engine.plans import EmbedSlice, TextSpan
from mlxsrv.engine.ranks.rank_group import RankGroup
from mlxsrv.formats.pooling import read_pooling_config
from mlxsrv.generation.outputs import Vectors

_CLEAR_EVERY = 64  # slices; their shapes differ, so buffers of one seldom serve the next


class _EmbeddingJob:
    """One job, and the vectors that are done."""

    def __init__(self, job: Job) -> None:
        self.texts = job.texts
        self.firsts = job.firsts
        self._vectors: Vectors | None = None

    def put(self, index: int, vector: Any) -> None:
        """Keep the vector `(width,)` of one text."""
        if self._vectors is None:
            self._vectors = np.empty((len(self.texts), len(vector)), np.float32)
        self._vectors[index] = vector

    @property
    def vectors(self) -> Vectors:
        """`(texts, width)`, once all are there."""
        assert self._vectors is not None
        return self._vectors


class _LongText:
    """A text that is read in several slices."""

    def __init__(self, job: int, index: int, cache: list[Any]) -> None:
        self.job = job
        self.index = index
        self.cache = cache
        self.hidden: list[mx.array] = []  # (1, slice, width) each


class Embedder:
    """Embeds texts with one model.

    Args:
        model: reads texts.
        folder: its files, which say how vectors are pooled; read when first needed.
        name: what the model is called, for files that leave the pooling to it.
        ranks: those that each have their part of the model; None: this process is alone.
    """

    def __init__(
        self, model: EmbeddingModel, folder: Path, name: str, ranks: RankGroup | None = None
    ) -> None:
        self._model = model
        self._folder = folder
        self._name = name
        self._jobs: dict[int, _EmbeddingJob] = {}
        self._long: _LongText | None = None
        self._pooler: Pooler | None = None
        self._slices = 0
        self.facts = model.find_facts()
        if ranks is not None:
            costs = ranks.find_greatest(self.facts.kv_costs)
            self.facts = msgspec.structs.replace(self.facts, kv_costs=costs)

    def admit(self, jobs: Iterable[Job]) -> tuple[RowFailure, ...]:
        """Take the texts of these jobs. One is a failure if the model's files do not say how to
        pool: before its texts are read, for they would be read in vain."""
        failures: list[RowFailure] = []
        for job in jobs:
            try:
                if not self._model.labels:
                    self._find_pooler()
            except Exception as error:
                fault = note(error, "texts cannot be embedded")
                failures.append(RowFailure(job.id, fault.reason))
            else:
                self._jobs[job.id] = _EmbeddingJob(job)
        return tuple(failures)

    def release(self, jobs: Collection[int]) -> None:
        """Forget the texts and vectors of these jobs; others are ignored."""
        self.rewind(jobs)
        for job in jobs:
            self._jobs.pop(job, None)

    def rewind(self, jobs: Collection[int]) -> None:
        """Forget what is read of these jobs' long text: it is read anew."""
        if self._long is not None and self._long.job in jobs:
            self._long = None

    def reset(self) -> None:
        """Forget the texts and vectors of all jobs."""
        self.release(list(self._jobs))

    def embed(self, work: EmbedSlice) -> TextsRead:
        """Read a slice.

        Raises what the model raises; ValueError if it gives no hidden states.
        """
        # The plan was made before it was known which jobs cannot be admitted.
        texts = [text for text in work.texts if text.job in self._jobs]
        if not texts:
            return TextsRead(0)
        first = texts[0]
        if first.begin > 0 or first.end < len(self._tokens_of(first)):
            (part,) = texts
            tokens = self._read_part(part)
        else:
            tokens = self._read_together(texts)
        self._slices += 1
        if self._slices % _CLEAR_EVERY == 0:
            mx.clear_cache()
        complete = [job for job in work.completes if job in self._jobs]
        return TextsRead(tokens, {job: self._jobs[job].vectors for job in complete})

    def _tokens_of(self, text: TextSpan) -> tuple[int, ...]:
        return self._jobs[text.job].texts[text.index]

    def _read_together(self, texts: Sequence[TextSpan]) -> int:
        """Make the vectors of whole texts in one pass. Returns its tokens, padding included."""
        rows = [self._tokens_of(text) for text in texts]
        longest = max(map(len, rows))
        lengths = mx.array([len(row) for row in rows])
        tokens = mx.array([row + (0,) * (longest - len(row)) for row in rows])
        mask = mx.arange(longest)[None] < lengths[:, None]
        firsts = None
        if self._model.labels:
            firsts = [self._jobs[text.job].firsts[text.index] for text in texts]
        hidden = self._model.run(tokens, mask, firsts)
        self._put(texts, self._make_vectors(hidden, mask))
        return tokens.size

    def _read_part(self, part: TextSpan) -> int:
        """Read a part of a long text, and make its vector behind the last one. Returns the part's
        tokens."""
        long = self._find_long(part)
        text = self._tokens_of(part)
        assert isinstance(self._model, EmbeddingDecoder)
        tokens = mx.array(text[part.begin : part.end])[None]
        hidden = self._model.compute_hidden(tokens, long.cache)
        mx.eval(hidden, [layer.state for layer in long.cache])
        long.hidden.append(hidden)
        if part.end == len(text):
            self._long = None
            long.cache.clear()  # now, since pooling needs memory as well
            whole = mx.concatenate(long.hidden, axis=1)
            mask = mx.ones(whole.shape[:2], mx.bool_)
            self._put([part], self._make_vectors(whole, mask))
        return tokens.size

    def _find_long(self, part: TextSpan) -> _LongText:
        """The text that this is a part of, with what was read before."""
        if part.begin == 0:
            assert isinstance(self._model, EmbeddingDecoder)
            self._long = _LongText(part.job, part.index, self._model.make_cache())
        long = self._long
        if long is None or (long.job, long.index) != (part.job, part.index):
            raise RuntimeError("the text before this part was not read")
        return long

    def _make_vectors(self, hidden: mx.array, mask: mx.array) -> Vectors:
        if self._model.labels:
            made = self._model.classify(hidden, mask)
        else:
            made = self._find_pooler()(hidden, mask)
        return np.array(made.astype(mx.float32))

    def _find_pooler(self) -> Pooler:
        """Raises ValueError, or OSError, if the model's files do not say how to pool."""
        if self._pooler is None:
            decoder = self._model.reads_slices
            config = read_pooling_config(self._folder, decoder=decoder, name=self._name)
            self._pooler = Pooler(config)
        return self._pooler

    def _put(self, texts: Sequence[TextSpan], vectors: Vectors) -> None:
        for text, vector in zip(texts, vectors, strict=True):
            self._jobs[text.job].put(text.index, vector)
