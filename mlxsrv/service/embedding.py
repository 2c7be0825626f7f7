"""Requests whose answer is numbers: embeddings, relevance of documents, scores of pairs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import anyio.to_thread
import numpy as np

from mlxsrv.engine.orders import Job
from mlxsrv.errors import (
    EngineFailed,
    InsufficientMemory,
    InvalidRequest,
    ServeError,
    UnsupportedParameter,
)
from mlxsrv.formats.encoders import Activation
from mlxsrv.generation.outputs import Vectors
from mlxsrv.generation.texts import EmbeddingSpec, Numbers, PairScores, PairsSpec, TextVectors
from mlxsrv.logs import log
from mlxsrv.models.pool.lease import Lease
from mlxsrv.prompts.embedding_inputs import EmbeddingInputs, plan_embedding, plan_pairs
from mlxsrv.service.lifecycle import State, TimedWork
from mlxsrv.service.resources import Resources

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer

_log = logging.getLogger("mlxsrv.service")


class EmbeddingTask:
    """One request, from its claim on a model to its answer. Its methods raise ServeError."""

    def __init__(
        self, resources: Resources, lease: Lease, work: TimedWork, request_id: str
    ) -> None:
        self._resources = resources
        self._lease = lease
        self._work = work
        self._request_id = request_id
        self._begun = asyncio.get_running_loop().time()

    async def embed(self, spec: EmbeddingSpec) -> TextVectors:
        inputs, vectors = await self._compute(partial(self._plan_texts, spec))
        if spec.dimensions is not None:
            vectors = await anyio.to_thread.run_sync(narrow, vectors, spec.dimensions)
        return TextVectors(self._lease.model.name, vectors, inputs.tokens, self._lease.load_seconds)

    async def score(self, spec: PairsSpec) -> PairScores:
        """The scores of a cross-encoder, or the cosine similarity of an embedder's vectors."""
        inputs, outputs = await self._compute(partial(self._plan_pairs, spec))
        config = self._lease.cross_encoder_config
        if isinstance(config, str):
            first = len(spec.ones)
            scores = cosines(outputs[:first], outputs[first:], spec.pairs)
        else:
            scores = judge(outputs, config.activation)
        return PairScores(self._lease.model.name, scores, inputs.tokens)

    async def _compute(
        self, plan: Callable[[Tokenizer], EmbeddingInputs]
    ) -> tuple[EmbeddingInputs, Vectors]:
        """The model's outputs for the texts that `plan` returns. It may compute texts of several
        requests together."""
        lease = self._lease
        tokenizer = await lease.tokenizer()
        self._work.enter(State.PREPARING)
        inputs = await lease.run_in_worker(plan, tokenizer)
        await lease.enter()
        self._work.enter(State.QUEUED)
        job_id = next(self._resources.job_ids)
        job = Job(
            job_id, lease.model.name, texts=inputs.texts, firsts=inputs.firsts, turn=lease.turn
        )
        lease.note_queued(job_id)
        try:
            vectors = await self._embed(job)
        finally:
            lease.note_ended(job_id)
        log(
            _log,
            logging.INFO,
            "embedded",
            request=self._request_id,
            model=lease.model.name,
            texts=len(inputs.texts),
            tokens=inputs.tokens,
            seconds=asyncio.get_running_loop().time() - self._begun,
        )
        return inputs, vectors

    async def _embed(self, job: Job) -> Vectors:
        engine = self._resources.pool.engine
        try:
            return await engine.embed(job, self._work.note_progress, self._note_started)
        except (EngineFailed, InsufficientMemory):
            raise
        except ServeError as error:
            # The reason may show internals, so it is for the log only.
            log(
                _log,
                logging.ERROR,
                "embedding failed",
                request=self._request_id,
                model=job.model,
                reason=error.message,
            )
            raise ServeError(
                "the server failed while embedding; its log says why under request id "
                f"{self._request_id}"
            ) from None

    def _note_started(self, job: int) -> None:
        self._lease.note_started(job)
        self._work.note_start()

    def _plan_texts(self, spec: EmbeddingSpec, tokenizer: Tokenizer) -> EmbeddingInputs:
        config = self._lease.pooling_config
        if isinstance(config, str):
            raise UnsupportedParameter(f"model: it makes no embeddings: {config}", param="model")
        return plan_embedding(spec, config, self._longest(config.max_length), tokenizer)

    def _plan_pairs(self, spec: PairsSpec, tokenizer: Tokenizer) -> EmbeddingInputs:
        """Pairs for a cross-encoder; for other models the texts of both sides."""
        judging, config = self._lease.cross_encoder_config, self._lease.pooling_config
        if not isinstance(judging, str):
            return plan_pairs(spec, self._longest(None), tokenizer)
        if isinstance(config, str) or not spec.compares:
            also = f"; and it makes no embeddings: {config}" if spec.compares else ""
            raise UnsupportedParameter(
                f"model: it scores no pairs of texts: {judging}{also}", param="model"
            )
        texts = EmbeddingSpec(texts=[*spec.ones, *spec.others], cut=spec.cut)
        return plan_embedding(texts, config, self._longest(config.max_length), tokenizer)

    def _longest(self, own: int | None) -> int | None:
        """Return how many tokens a text may have; `own` is the limit of the model's own files."""
        lengths = [length for length in (own, self._lease.context_length) if length is not None]
        return min(lengths, default=None)


def judge(logits: Vectors, activation: Activation) -> Numbers:
    """The relevance of each pair, from a cross-encoder's logits of shape (pairs, labels).

    With two labels it is the probability of the second, as such models are trained.
    """
    if activation == "identity":
        return logits[:, 0]
    margin = logits[:, 1] - logits[:, 0] if activation == "softmax" else logits[:, 0]
    # exp overflows for a large negative margin; its limit gives the right result.
    with np.errstate(over="ignore"):
        return cast(Numbers, 1 / (1 + np.exp(-margin)))


def cosines(vectors: Vectors, others: Vectors, pairs: Sequence[tuple[int, int]]) -> Numbers:
    """The cosine similarity of each pair, from -1 to 1; 0 if one vector has no length."""
    one, other = normalise(vectors), normalise(others)
    left, right = (np.array(column) for column in zip(*pairs, strict=True))
    return cast(Numbers, (one[left] * other[right]).sum(axis=1))


def narrow(vectors: Vectors, width: int) -> Vectors:
    """The first `width` numbers of each vector, with length 1.

    Raises:
        InvalidRequest: the vectors have fewer.
    """
    own = vectors.shape[1]
    if width > own:
        raise InvalidRequest(
            f"dimensions: {width} are asked for; this model's vectors have {own}",
            param="dimensions",
        )
    return vectors if width == own else normalise(vectors[:, :width])


def normalise(vectors: Vectors) -> Vectors:
    """The vectors with length 1; zeros stay zeros. Shape (vectors, width)."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return cast(Vectors, vectors / np.maximum(lengths, np.finfo(np.float32).tiny))
