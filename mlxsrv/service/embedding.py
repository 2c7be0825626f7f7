"""Requests whose answer is numbers: embeddings, relevance of documents, scores of pairs."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from mlxsrv.engine.orders import Embed
from mlxsrv.errors import (
    EngineFailed,
    InsufficientMemory,
    ServeError,
    UnsupportedParameter,
)
from mlxsrv.formats.encoders import CrossEncoderConfig
from mlxsrv.formats.pooling import PoolingConfig
from mlxsrv.generation.outputs import Vectors
from mlxsrv.logs import log
from mlxsrv.models.pool.lease import Lease
from mlxsrv.prompts.embedding_inputs import EmbeddingInputs, plan_embedding, plan_pairs, plan_texts
from mlxsrv.service.lifecycle import State
from mlxsrv.service.relevance import cosines, judge
from mlxsrv.service.resources import Resources
from mlxsrv.service.timed_work import TimedWork
from mlxsrv.wire.openai.embeddings import (
    EmbeddingList,
    EmbeddingRequest,
    RerankRequest,
    RerankResponse,
    ScoreList,
    ScoreRequest,
    embedding_list,
    rerank_response,
    score_list,
)

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

    async def embed(self, request: EmbeddingRequest) -> EmbeddingList:
        with self._work.run():
            inputs, vectors = await self._compute(partial(self._plan_texts, request))
        return await anyio.to_thread.run_sync(
            embedding_list, request, self._lease.model.name, vectors, inputs.tokens
        )

    async def rerank(self, request: RerankRequest) -> RerankResponse:
        with self._work.run():
            inputs, logits = await self._compute(partial(self._plan_documents, request))
        scores = judge(logits, self._cross_encoder_config().activation)
        id = f"rerank-{uuid.uuid4().hex}"
        return rerank_response(request, id, self._lease.model.name, scores, inputs.tokens)

    async def score(self, request: ScoreRequest) -> ScoreList:
        """The scores of a cross-encoder, or the cosine similarity of an embedder's vectors."""
        with self._work.run():
            inputs, outputs = await self._compute(partial(self._plan_score, request))
        if inputs.firsts:
            scores = judge(outputs, self._cross_encoder_config().activation)
        else:
            first = len(request.lists[0])
            scores = cosines(outputs[:first], outputs[first:], request.pairs)
        id = f"score-{uuid.uuid4().hex}"
        return score_list(id, self._lease.model.name, scores, inputs.tokens)

    async def _compute(
        self, plan: Callable[[Tokenizer], EmbeddingInputs]
    ) -> tuple[EmbeddingInputs, Vectors]:
        """The model's outputs for the texts that `plan` returns. It may compute texts of several
        requests together."""
        lease = self._lease
        tokenizer = await lease.tokenizer()
        self._work.enter(State.PREPARING)
        inputs = await lease.model.tokenizer_lock.run(partial(plan, tokenizer))
        await lease.enter()
        self._work.enter(State.QUEUED)
        job_id = next(self._resources.job_ids)
        order = Embed(job_id, lease.model.name, inputs.texts, inputs.firsts)
        await lease.borrow_row(self)
        try:
            vectors = await self._embed(order)
        finally:
            lease.return_row(self, inputs.tokens)
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

    async def _embed(self, order: Embed) -> Vectors:
        self._work.enter(State.SUBMITTED)
        try:
            return await self._resources.pool.engine.embed(order, self._work.note_progress)
        except (EngineFailed, InsufficientMemory):
            raise
        except ServeError as error:
            # The reason may tell of the inside, so it is for the log only.
            log(
                _log,
                logging.ERROR,
                "embedding failed",
                request=self._request_id,
                model=order.model,
                reason=error.message,
            )
            raise ServeError(
                "the server failed while embedding; its log says why under request id "
                f"{self._request_id}"
            ) from None

    def _plan_texts(self, request: EmbeddingRequest, tokenizer: Tokenizer) -> EmbeddingInputs:
        config = self._pooling_config
        return plan_embedding(request, config, self._longest(config.max_length), tokenizer)

    def _plan_documents(self, request: RerankRequest, tokenizer: Tokenizer) -> EmbeddingInputs:
        self._cross_encoder_config()
        pairs = [(request.query, text, f"documents[{i}]") for i, text in enumerate(request.texts)]
        return plan_pairs(pairs, request, self._longest(None), tokenizer)

    def _plan_score(self, request: ScoreRequest, tokenizer: Tokenizer) -> EmbeddingInputs:
        """Pairs for a cross-encoder; for other models the texts of both sides."""
        ones, others = request.lists
        judging = self._lease.cross_encoder_config
        if not isinstance(judging, str):
            pairs = [(ones[i], others[k], request.path(1, k)) for i, k in request.pairs]
            return plan_pairs(pairs, request, self._longest(None), tokenizer)
        config = self._lease.pooling_config
        if isinstance(config, str):
            raise UnsupportedParameter(
                f"model: it scores no pairs of texts: {judging}; and it makes no "
                f"embeddings: {config}",
                param="model",
            )
        texts = [
            (text, request.path(side, i))
            for side, listed in enumerate((ones, others))
            for i, text in enumerate(listed)
        ]
        return plan_texts(texts, request, config, self._longest(config.max_length), tokenizer)

    def _cross_encoder_config(self) -> CrossEncoderConfig:
        """The way in which the model scores pairs of texts. Raises UnsupportedParameter."""
        found = self._lease.cross_encoder_config
        if isinstance(found, str):
            raise UnsupportedParameter(
                f"model: it scores no pairs of texts: {found}", param="model"
            )
        return found

    @property
    def _pooling_config(self) -> PoolingConfig:
        """The way in which the model makes vectors. Raises UnsupportedParameter."""
        found = self._lease.pooling_config
        if isinstance(found, str):
            raise UnsupportedParameter(f"model: it makes no embeddings: {found}", param="model")
        return found

    def _longest(self, own: int | None) -> int | None:
        """Return how many tokens a text may have; `own` is the limit of the model's own files."""
        lengths = [length for length in (own, self._lease.context_length) if length is not None]
        return min(lengths, default=None)
